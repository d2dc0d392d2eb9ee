"""The output head in chunks: the same numbers as the formulas written out, whatever the chunk
length."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.fast import device, head

N, D, V, OWNED = 37, 16, 128, 120


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=rng, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=rng, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(OWNED, (N,), generator=rng)


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, of))


def everything(mixed: bool) -> list[Tensor]:
    """Losses, log-probabilities, entropies and gradients; one row has no target."""
    hidden, weight, targets = inputs(torch.float32)
    holes = targets.masked_fill(torch.arange(N) == 3, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = head.cross_entropy(hidden, weight, holes)
        found = head.logprobs(
            hidden, weight, targets, n_ids=OWNED, temperature=0.6, entropy_grad=True
        )
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    return [
        loss,
        *found,
        *gradients(loss + (up[0] * found[0]).sum() + (up[1] * found[1]).sum(), hidden, weight),
    ]


@pytest.fixture(
    params=[(5, False), (16, False), (1000, False), (5, True), (1000, True)],
    ids="rows, kept={}".format,
)
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    rows, kept = request.param
    monkeypatch.setattr(head, "CHUNK_BYTES", rows * V * 4)
    monkeypatch.setattr(head, "KEEP_BYTES", 1 << 30 if kept else 0)
    return rows


def test_cross_entropy_is_the_formula_in_value_and_gradient(chunked: int) -> None:
    hidden, weight, targets = inputs(torch.float32)
    targets[3] = targets[20] = -100
    mine = 0.7 * head.cross_entropy(hidden, weight, targets)
    written_out = 0.7 * F.cross_entropy(
        hidden @ weight.T, targets, ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(mine, written_out)
    for a, b in zip(gradients(mine, hidden, weight), gradients(written_out, hidden, weight)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert not gradients(head.cross_entropy(hidden, weight, targets), hidden)[0][3].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logprobs_are_the_formula_in_value_and_gradient(
    chunked: int, temperature: float, entropy_grad: bool
) -> None:
    hidden, weight, targets = inputs(torch.float32)
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    found = head.logprobs(
        hidden,
        weight,
        targets,
        n_ids=OWNED,
        temperature=temperature,
        entropy_grad=entropy_grad,
    )
    every = ((hidden @ weight.T)[:, :OWNED] / temperature).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    written_out = (
        every.gather(1, targets[:, None])[:, 0],
        entropy if entropy_grad else entropy.detach(),
    )
    for a, b in zip(found, written_out):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    mine = ((u * x).sum() for u, x in zip(up, found))
    theirs = ((u * x).sum() for u, x in zip(up, written_out))
    for a, b in zip(gradients(sum(mine), hidden, weight), gradients(sum(theirs), hidden, weight)):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_among_kept_ids_are_the_formula_in_value_and_gradient(
    chunked: int, temperature: float
) -> None:
    """Of a row whose ids are fewer than the columns, too."""
    hidden, weight, targets = inputs(torch.float32)
    rng = torch.Generator().manual_seed(2)
    up = torch.randn(2, N, generator=rng)
    others = torch.stack([torch.randperm(OWNED, generator=rng)[:6] for _ in range(N)])
    kept = torch.where(others == targets[:, None], -1, others)
    kept[torch.arange(N), torch.arange(N) % 6] = targets
    kept[3, 4:] = -1
    found = head.logprobs(
        hidden,
        weight,
        targets,
        n_ids=OWNED,
        temperature=temperature,
        entropy_grad=True,
        kept=kept.int(),
    )
    among = torch.zeros(N, OWNED, dtype=torch.bool)
    for row, ids in enumerate(kept.tolist()):
        among[row, [i for i in ids if i >= 0]] = True
    logits = ((hidden @ weight.T)[:, :OWNED] / temperature).masked_fill(~among, -torch.inf)
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every.masked_fill(~among, 0.0)).sum(-1)
    written_out = every.gather(1, targets[:, None])[:, 0], entropy
    for a, b in zip(found, written_out):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    mine = ((u * x).sum() for u, x in zip(up, found))
    theirs = ((u * x).sum() for u, x in zip(up, written_out))
    for a, b in zip(gradients(sum(mine), hidden, weight), gradients(sum(theirs), hidden, weight)):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_under_bfloat16_autocast_entropy_and_its_gradient_are_float32(chunked: int) -> None:
    """Only the logits and the last products are bfloat16: the expected logit was summed in it,
    0.03 nats off."""
    rng = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(64, 32, generator=rng)).requires_grad_()
    weight = torch.randn(2048, 32, generator=rng).requires_grad_()
    targets = torch.randint(2048, (64,), generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = head.logprobs(hidden, weight, targets, n_ids=2048, entropy_grad=True)
    h, w = (x.detach().bfloat16() for x in (hidden, weight))
    logits = (h @ w.mT).double().requires_grad_()
    every = logits.log_softmax(-1)
    expected = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(entropy, expected.float(), atol=1e-4, rtol=1e-5)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    exact = (slope @ w.double()).float()
    assert (found - exact).norm() < 0.01 * exact.norm()


def test_a_target_of_vanishing_probability_keeps_its_loss() -> None:
    """exp(-200) is 0 in float32; its logarithm must not be."""
    hidden = torch.eye(2)[:1] * 200
    weight = torch.eye(2)
    assert head.cross_entropy(hidden, weight, torch.tensor([1])).item() == 200
    assert head.logprobs(hidden, weight, torch.tensor([1]), n_ids=2)[0].item() == -200


def test_a_gpu_compiles_what_is_done_to_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, log-probabilities, entropies and slopes, with the figures of a CPU; a second step
    compiles nothing. The chunks are of two lengths."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    @cache
    def body(fn: Any, device: torch.device) -> Any:
        return torch.compile(fn, backend=noted, fullgraph=True)

    monkeypatch.setattr(head, "CHUNK_BYTES", V * 4 * (N // 2 + 1))
    expected = everything(mixed=True)
    monkeypatch.setattr(head, "_body", body)
    monkeypatch.setattr(device, "CPU_KINDS", ())
    everything(mixed=True)
    first = len(graphs)
    for a, b in zip(everything(mixed=True), expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert 3 <= len(graphs) == first <= 6


def test_blocks_within_a_chunk_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done to logits is done to each row alone, so where rows are cut decides about
    speed only."""
    for mixed in (False, True):
        values = []
        for rows in (1, 5, 1000):
            monkeypatch.setattr(head, "BLOCK_BYTES", rows * V * 4)
            values.append(everything(mixed))
        for other in values[1:]:
            assert all(torch.equal(a, b) for a, b in zip(values[0], other))
