"""What has to hold on a GPU before it is used: `pytest -m gpu tests/codechat/gpu`. On a CPU the
same tests prove what needs none.

Rates are measured by the benchmarks, such as `python -m benchmarks train --preset 2b`. Tokens
are random, nothing is
downloaded. Left out: several GPUs."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td
from on_gpu import (
    CFG,
    CUDA,
    DEVICE,
    Trainer,
    as_on_a_gpu,
    deep,
    packed_docs,
    random_ids,
    randomized,
)
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from codechat.distributed import hardware, numerics, sharding
from codechat.models import generate, optim
from codechat.models.fast import attention
from codechat.models.gpt import GPT
from codechat.models.masks import Documents
from codechat.runs import checkpoint
from codechat.training.session import Prefetched

pytestmark = pytest.mark.gpu if CUDA else pytest.mark.slow
KINDS = ("pretrain", "sft", "rl")


@pytest.fixture(autouse=True)
def in_a_gpus_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    if CUDA:  # other tests compute in float32, for which there is no flash kernel
        monkeypatch.setenv("CODECHAT_DTYPE", "bfloat16")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        how: dict[str, Any] = dict(device_id=torch.device("cuda", 0)) if CUDA else {}
        store = td.FileStore(file.name, 1)
        td.init_process_group(
            "cpu:gloo,cuda:nccl" if CUDA else "gloo",
            store=store,
            rank=0,
            world_size=1,
            **how,
        )
        try:
            yield
        finally:
            td.destroy_process_group()


def test_a_sharded_save_beside_training_reads_back_bitwise(tmp_path: Path) -> None:
    def made() -> tuple[GPT, list[Any]]:
        model = sharding.shard(GPT(CFG).to(DEVICE), sharding.mesh(1))
        return model, optim.build(model, lr=1e-3)

    def learn(model: GPT, optimizers: list[Any], seed: int) -> list[Tensor]:
        ids = random_ids(CFG, 2, 64, seed)
        with numerics.autocast(DEVICE):
            loss = model.loss(ids, ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [sharding.local(p).detach().clone() for p in model.parameters()]

    with one_rank():
        model, optimizers = made()
        learn(model, optimizers, 0)
        held = learn(model, optimizers, 1)
        checkpoint.save(tmp_path, 2, model=model, optimizers=optimizers, wait=False)
        went_on = learn(model, optimizers, 2)  # while the thread writes
        checkpoint.settle()
        other, states = made()
        saved = checkpoint.load(tmp_path / "checkpoints" / "step_000002")
        checkpoint.restore(saved, other)
        checkpoint.restore_optimizers(saved, other, states)
        assert all(
            torch.equal(sharding.local(p), q) for p, q in zip(other.parameters(), held, strict=True)
        )
        again = learn(other, states, 2)
    if not CUDA:  # a GPU adds some gradients in no fixed order
        assert all(torch.equal(p, q) for p, q in zip(again, went_on, strict=True))


def test_bfloat16_gives_the_loss_and_gradient_of_float32() -> None:
    ids = random_ids(CFG, 2, 256).cpu()

    def measure(
        model: GPT, device: torch.device, dtype: torch.dtype
    ) -> tuple[float, Tensor, float]:
        x = ids.to(device)
        model.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model.loss(x, x.roll(-1, 1))
            with torch.no_grad():
                entropy = float(model.token_logprobs(x, x)[1].mean())
        loss.backward()
        return (
            float(loss.detach()),
            parameters_to_vector([p.grad for p in model.parameters()]).double().cpu(),
            entropy,
        )

    want = measure(randomized(GPT(CFG)), torch.device("cpu"), torch.float32)
    found = measure(randomized(GPT(CFG)), DEVICE, torch.bfloat16)
    assert found[0] == pytest.approx(want[0], rel=1e-2)
    assert float(torch.cosine_similarity(found[1], want[1], dim=0)) > 0.999
    assert found[2] == pytest.approx(want[2], rel=1e-3)


def test_no_step_and_no_prefill_asks_for_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only flash kernels are allowed."""
    F = torch.nn.functional
    sdpa = torch.nn.functional.scaled_dot_product_attention
    masks = []

    def recorded(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any
    ) -> Tensor:
        masks.append(attn_mask is not None)
        return sdpa(q, k, v, attn_mask=attn_mask, **how)

    trainer = Trainer(CFG, 2, CFG.block_size)
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with torch.nn.attention.sdpa_kernel(flash) if CUDA else contextlib.nullcontext(), as_on_a_gpu():
        for kind in KINDS:
            trainer.step(kind)
        with numerics.autocast(DEVICE):
            generate.sample(
                trainer.model,
                [[1, 2, 3], [4] * 20, [5]],
                max_new_tokens=2,
                samples_per_prompt=2,
            )
    assert masks
    assert not any(masks)


@pytest.mark.skipif(not CUDA, reason="tests/codechat/models compares both on a CPU")
def test_flex_attention_equals_the_dense_mask() -> None:
    model = randomized(GPT(CFG).to(DEVICE))
    ids = random_ids(CFG, 2, 1024)
    docs = packed_docs(2, 1024).to(DEVICE)
    with torch.no_grad(), numerics.autocast(DEVICE):
        flex, dense = (
            model.hidden(ids, mask=m) for m in (attention.flex_mask(docs), Documents(docs).mask)
        )
    real = docs >= 0
    assert float((flex - dense)[real].norm() / dense[real].norm()) < 2e-2


def counted(name: str) -> tuple[list[int], Callable[..., Any]]:
    """(sizes of the graphs that it is given, the backend of torch.compile that notes them)."""
    from torch._dynamo.backends.registry import lookup_backend

    plain = lookup_backend(name)
    sizes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **how: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return plain(graph, inputs, **how)

    return sizes, backend


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_are_one_graph_and_nothing_is_compiled_after_step_two(kind: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    trainer = Trainer(deep(12), 2, CFG.block_size if CUDA else 64)
    graphs = []
    blocks, backend = counted("inductor" if CUDA else "aot_eager")
    # as `hardware.compile_blocks`, which has the default backend
    for block in trainer.model.blocks:
        block.compile(backend=backend)
    with as_on_a_gpu():
        for shift in range(5):
            trainer.docs = trainer.docs.roll(shift, 1)  # another mask for each batch
            trainer.step(kind)
            graphs.append(counters["stats"]["unique_graphs"])
    assert (len(blocks), sum(counters["graph_break"].values())) == (1, 0)
    assert graphs[-1] == graphs[1]
    if CUDA:  # tests/codechat/loops counts them without one
        assert cuda_waits(lambda: trainer.step(kind)) <= 2


def cuda_waits(run: Callable[[], Any]) -> int:
    """Synchronising calls that CUDA itself reports."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in seen)


@pytest.mark.gpu
def test_a_batch_prepared_ahead_waits_for_nothing() -> None:
    def windows() -> tuple[Tensor, Tensor]:
        return tuple(torch.randint(CFG.vocab_size, (2, 1024)) for _ in range(2))

    batches = Prefetched(SimpleNamespace(next=windows, state=lambda: 0, load_state=None), DEVICE)
    batches.next()
    assert cuda_waits(lambda: [x.to(DEVICE, non_blocking=True) for x in batches.next()]) == 0


@pytest.mark.gpu
def test_the_planner_meets_the_reserved_memory_of_2b() -> None:
    from codechat.models.config import PRESETS, GPTConfig
    from codechat_lab.instruments import planner, step_memory

    cfg = GPTConfig(**PRESETS["2b"])
    dtype = str(numerics.compute_dtype(DEVICE)).removeprefix("torch.")
    asked = planner.PlanConfig(model=cfg, device_batch_size=2, gpus=1, optimizer="adamw")
    plan = step_memory.measure(asked, dtype=dtype, cpu=True)
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(cfg, 2, cfg.block_size, optimizer="adamw")
    hardware.compile_blocks(trainer.model)
    for _ in range(3):
        trainer.step()
    want = (
        planner.gib_with_reserve(sum(plan.training.values())) - planner.CONTEXT_GIB
    ) * planner.GIB
    assert torch.cuda.max_memory_reserved() == pytest.approx(want, rel=0.08)


def test_static_shapes_draw_the_same_tokens_as_rows_one_at_a_time() -> None:
    model = randomized(GPT(CFG).to(DEVICE)).eval()
    prompts = random_ids(CFG, 3, 20).tolist()
    how = dict(max_new_tokens=40, samples_per_prompt=3, seed=0, stop=((5,), (7, 8)))
    plain, static = (generate.sample(model, prompts, graph=graph, **how) for graph in (False, True))
    assert [c.ids for c in plain] == [c.ids for c in static]


def test_the_trainers_logprobs_are_the_samplers_up_to_rounding() -> None:
    model = randomized(GPT(CFG).to(DEVICE)).eval()
    prompts = random_ids(CFG, 8, 32).tolist()
    gaps = []
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        drawn = generate.sample(
            model, prompts, max_new_tokens=64, samples_per_prompt=4, seed=0, graph=True
        )
        for i, completion in enumerate(drawn):
            ids = torch.tensor([prompts[i // 4] + completion.ids], device=DEVICE)
            trainer = model.token_logprobs(ids[:, :-1], ids[:, 1:])[0][0, 31:]
            gaps.append((trainer.cpu() - torch.tensor(completion.logprobs)).abs())
    assert float(torch.cat(gaps).mean()) < 0.02
