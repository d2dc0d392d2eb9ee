"""The output head in chunks: the same numbers as the formulas written out, whatever the chunk
length."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.fast import device, head
from codechat_lab.instruments.step_memory import Tape

N, D, V, OWNED = 37, 16, 128, 120


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=rng, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=rng, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(OWNED, (N,), generator=rng)


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def slopes(values: Sequence[Tensor], up: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients of log-probabilities and entropies, each weighed by its row of `up`."""
    logprobs, entropies = values
    return gradients((up[0] * logprobs).sum() + (up[1] * entropies).sum(), hidden, weight)


def random_slopes() -> Tensor:
    return torch.randn(2, N, generator=torch.Generator().manual_seed(1))


def assert_all_close(
    found: Sequence[Tensor], expected: Sequence[Tensor], atol: float, rtol: float
) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=rtol)


def everything(mixed: bool) -> list[Tensor]:
    """Losses, log-probabilities, entropies and gradients; one row has no target."""
    hidden, weight, targets = inputs(torch.float32)
    holes = targets.masked_fill(torch.arange(N) == 3, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = head.cross_entropy(hidden, weight, holes)
        logprobs, entropies = head.logprobs(
            hidden, weight, targets, n_ids=OWNED, temperature=0.6, entropy_grad=True
        )
    up = random_slopes()
    objective = loss + (up[0] * logprobs).sum() + (up[1] * entropies).sum()
    return [loss, logprobs, entropies, *gradients(objective, hidden, weight)]


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
    found = gradients(mine, hidden, weight)
    expected = gradients(written_out, hidden, weight)
    assert_all_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_row_without_a_target_has_no_slope(chunked: int) -> None:
    hidden, weight, targets = inputs(torch.float32)
    targets[3] = targets[20] = -100
    (slope,) = gradients(head.cross_entropy(hidden, weight, targets), hidden)
    assert not slope[3].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logprobs_are_the_formula_in_value_and_gradient(
    chunked: int, temperature: float, entropy_grad: bool
) -> None:
    hidden, weight, targets = inputs(torch.float32)
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
    if not entropy_grad:
        entropy = entropy.detach()
    written_out = (every.gather(1, targets[:, None])[:, 0], entropy)
    up = random_slopes()
    assert_all_close(found, written_out, atol=1e-5, rtol=1e-5)
    mine = slopes(found, up, hidden, weight)
    theirs = slopes(written_out, up, hidden, weight)
    assert_all_close(mine, theirs, atol=2e-5, rtol=1e-4)


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
    written_out = (every.gather(1, targets[:, None])[:, 0], entropy)
    assert_all_close(found, written_out, atol=1e-5, rtol=1e-5)
    mine = slopes(found, up, hidden, weight)
    theirs = slopes(written_out, up, hidden, weight)
    assert_all_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_under_bfloat16_autocast_entropy_and_its_gradient_are_float32(chunked: int) -> None:
    """Only the logits and the last products are bfloat16: the expected logit was summed in it,
    0.03 nats off."""
    rng = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(64, 32, generator=rng)).requires_grad_()
    weight = torch.randn(2048, 32, generator=rng).requires_grad_()
    targets = torch.randint(2048, (64,), generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = head.logprobs(hidden, weight, targets, n_ids=2048, entropy_grad=True)
    narrow = weight.detach().bfloat16()
    logits = (hidden.detach().bfloat16() @ narrow.mT).double().requires_grad_()
    every = logits.log_softmax(-1)
    expected = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(entropy, expected.float(), atol=1e-4, rtol=1e-5)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    exact = (slope @ narrow.double()).float()
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
    assert_all_close(everything(mixed=True), expected, atol=1e-5, rtol=1e-4)
    assert 3 <= first <= 6
    assert len(graphs) == first


@pytest.mark.parametrize("rows", [5, 1000])
@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_within_a_chunk_change_no_bit(
    mixed: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done to logits is done to each row alone, so where rows are cut decides about
    speed only."""
    monkeypatch.setattr(head, "BLOCK_BYTES", V * 4)  # of one row
    expected = everything(mixed)
    monkeypatch.setattr(head, "BLOCK_BYTES", rows * V * 4)
    assert all(map(torch.equal, everything(mixed), expected))


@pytest.mark.parametrize("learns", [True, False])
def test_the_loss_never_holds_all_logits(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 rows only chunks of 16 at a time."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 16 * 4096 * 4)
    hidden = torch.randn(256, 8, requires_grad=learns)
    weight = torch.randn(4096, 8)
    with Tape() as tape:
        loss = head.cross_entropy(hidden, weight, torch.arange(256))
        if learns:
            loss.backward()
    assert tape.peak < 256 * 4096 * 4 / 4
