"""The steps of `python -m benchmarks gpu`, each a function that writes what it measured into a `Result`.

    python -m benchmarks.gpu_steps 5 result.json

On a machine without CUDA a step proves on small models what does not need one, and lists the rest under `not_run`.

Left out: several GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as td
from sync_count import META, SyncCount, on_meta
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.utils import parameters_to_vector

from benchmarks import ahead, peers
from codechat.core.atomic_files import read_rows, write_json
from codechat.core.errors import MissingFile
from codechat.data import conversations
from codechat.data.prefetch import Prefetched
from codechat.distributed import dist, hardware, sharding
from codechat.inference import engine as batching
from codechat.models import fp8, generate, optim, packed_attention, sampling_memory
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.runs import checkpoint, paths
from codechat.text import tokenizer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NO_GPU = "no CUDA device"
TINY = GPTConfig(depth=2, n_embd=64, n_head=2, block_size=256, vocab_size=500)
MATRIX, TRIALS = 8192, 10  # of the measured peak: the best of these products
MFU_AT_LEAST = {"d12": 0.40, "d20": 0.45, "2b": 0.50}
TOKENS_PER_STEP = {"d12": 32 * 1024, "d20": 16 * 2048, "2b": 8 * 2048}  # of a microbatch: the most that is tried
MICROBATCHES = {
    "2b": 4
}  # of a step, else 1: recipes at 2b have 65,536 tokens a step, and one Muon step takes half the FLOPs of 16,384


@dataclass
class Result:
    """checks: what, value, threshold ("" = only measured), ok. not_run: what this machine cannot run. figures: numbers behind them."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, what: str, value: str, threshold: str, ok: bool) -> None:
        self.checks.append({"what": what, "value": value, "threshold": threshold, "ok": bool(ok)})

    def measured(self, what: str, value: str) -> None:
        self.check(what, value, "", True)

    def most(self, what: str, value: float, limit: float) -> None:
        self.check(what, f"{value:.4g}", f"<= {limit:g}", value <= limit)

    def least(self, what: str, value: float, limit: float) -> None:
        self.check(what, f"{value:.4g}", f">= {limit:g}", value >= limit)


# ---- what steps share


def shape(name: str, **changed: Any) -> GPTConfig:
    return replace(GPTConfig(**PRESETS[name]), **changed)


def random_ids(cfg: GPTConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(cfg.vocab_size, (rows, length), generator=rng).to(DEVICE)


def randomized(model: GPT) -> GPT:
    """Every matrix random: at initialisation the blocks add nothing, and gradients behind them are 0."""
    for name, p in model.named_parameters():
        if p.ndim == 2 and name.startswith(("blocks.", "wte")):
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=torch.Generator(p.device).manual_seed(p.numel()))
    return model


def fresh(cfg: GPTConfig, device: torch.device = DEVICE) -> GPT:
    """A model with random matrices, made where it lies: a host draws those of 2b for half a minute."""
    if device.type == "meta":  # where nothing is drawn
        return GPT(cfg).to(device)
    with torch.device("meta"):
        model = GPT(cfg)
    model.to_empty(device=device)
    for p in model.parameters():
        torch.nn.init.ones_(p)
    return randomized(model)


def free() -> None:
    """Give back the memory of what is no longer used. A compiled block refers to itself, so only the collector finds it."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def packed_docs(rows: int, length: int) -> Tensor:
    """Three documents a row, then padding."""
    ends = torch.tensor([length // 4, length // 2, length - length // 16])
    docs = torch.bucketize(torch.arange(length), ends, right=True)
    return docs.where(docs < 3, -1).expand(rows, length).contiguous().to(DEVICE)


class Trainer:
    """A model and its optimizers, and steps of pretraining, SFT and RL on random tokens, which are on the device before the step begins."""

    def __init__(
        self,
        cfg: GPTConfig,
        rows: int,
        length: int,
        *,
        compiled: bool,
        optimizer: str = "muon",
        change: Callable[[GPT], GPT] | None = None,
        device: torch.device = DEVICE,
        microbatches: int = 1,
    ) -> None:
        self.cfg, self.rows, self.length, self.device, self.microbatches = cfg, rows, length, device, microbatches
        self.batches: dict[str, dict[str, Tensor]] = {}
        made = fresh(cfg, device)
        self.model = change(made) if change else made
        self.optimizers = optim.build(self.model, lr=1e-4, optimizer=optimizer)
        if compiled:
            hardware.compile_blocks(self.model)

    def batch(self, kind: str) -> dict[str, Tensor]:
        """ids, targets, positions, docs, branches (B, T); and in places where the targets are."""
        if kind not in self.batches:
            ids = random_ids(self.cfg, self.rows, self.length).cpu()
            docs, at = packed_docs(self.rows, self.length).cpu(), torch.arange(self.length).expand_as(ids)
            made = dict(ids=ids, docs=docs, positions=at, branches=(at % 97 > 30).long())
            made["targets"] = ids if kind == "pretrain" else ids.masked_fill(docs != 1, -100)
            made["places"] = (made["targets"] >= 0).flatten().nonzero()[:, 0]
            self.batches[kind] = {name: dist.send(x.contiguous(), self.device) for name, x in made.items()}
        return self.batches[kind]

    def loss(self, kind: str) -> Tensor:
        batch = self.batch(kind)
        ids, targets, docs = batch["ids"], batch["targets"], batch["docs"]
        if kind == "pretrain":
            return self.model.loss(ids, ids, reduction="sum", every=True)
        where = dict(positions=batch["positions"], places=batch["places"])
        if kind == "sft":
            return self.model.loss(ids, targets, reduction="sum", mask=conversations.packed_mask(docs), **where)
        kind = packed_attention.Documents if packed_attention.dense(self.device) else packed_attention.flex_mask
        mask = kind(docs, batch["branches"])
        return -self.model.token_logprobs(ids, targets, mask=mask, **where)[0].sum()

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length * self.microbatches

    def step(self, kind: str = "pretrain") -> None:
        for _ in range(self.microbatches):
            with dist.autocast(self.device):
                loss = self.loss(kind)
            (loss / self.tokens).backward()
        dist.clip_gradients(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The path of a GPU also on a CPU. Flex attention has a backward pass there too, written out, but refuses it."""
    if CUDA:
        yield
        return
    with (
        mock.patch.object(packed_attention, "DENSE", ()),
        mock.patch.object(packed_attention, "_flex", lambda: flex_attention.flex_attention),
        mock.patch.object(flex_attention, "_validate_device", lambda *_: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any]) -> float:
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def fitting(make: Callable[[int], Trainer], rows: int) -> Trainer:
    """The trainer with the most rows, halved from `rows`, whose step fits into memory; two steps have been run."""
    while True:
        made: Trainer | None = None  # what did not fit goes before the next one is made
        free()
        try:
            made = make(rows)
            made.step()
            return made
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2


def matrix_peak() -> float:
    """FLOP/s of the best of TRIALS products in bfloat16."""
    a, b = (torch.randn(MATRIX, MATRIX, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / min(seconds(lambda: a @ b) for _ in range(TRIALS))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        store = td.FileStore(file.name, 1)
        device = DEVICE if not CUDA else torch.device("cuda", 0)
        how = dict(device_id=device) if CUDA else {}
        td.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", store=store, rank=0, world_size=1, **how)
        try:
            yield
        finally:
            td.destroy_process_group()


# ---- the steps


def step_checkpoint(out: Result) -> None:
    cfg = shape("d12") if CUDA else TINY
    with one_rank(), tempfile.TemporaryDirectory() as folder:

        def made() -> tuple[GPT, list[Any]]:
            model = sharding.shard(GPT(cfg).to(DEVICE), sharding.mesh(1))
            return model, optim.build(model, lr=1e-3)

        def learn(model: GPT, optimizers: list[Any], seed: int) -> None:
            ids = random_ids(cfg, 2, 64, seed)
            with dist.autocast(DEVICE):
                loss = model.loss(ids, ids)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        model, optimizers = made()
        for seed in range(2):
            learn(model, optimizers, seed)
        held = [dist.local(p).detach().clone() for p in model.parameters()]
        returned = seconds(lambda: checkpoint.save(folder, 2, model=model, optimizers=optimizers, wait=False))
        learn(model, optimizers, 2)  # while the thread writes
        went_on = [dist.local(p).detach().clone() for p in model.parameters()]
        written = seconds(checkpoint.settle)
        other, states = made()
        checkpoint.restore(checkpoint.load(Path(folder) / "checkpoints" / "step_000002"), other, states)
        same = all(torch.equal(dist.local(p), q) for p, q in zip(other.parameters(), held))
        learn(other, states, 2)
        again = all(torch.equal(dist.local(p), q) for p, q in zip(other.parameters(), went_on))
    out.check("weights read back from a sharded save beside training", "bitwise" if same else "differ", "bitwise", same)
    # a GPU adds some gradients in no fixed order
    out.check(
        "the next step after reading back", "bitwise" if again else "differs", "" if CUDA else "bitwise", again or CUDA
    )
    out.measured("the save returned after, s; was written after, s", f"{returned:.2f}; {written:.2f}")


def step_numbers(out: Result) -> None:
    cfg = shape("d12") if CUDA else TINY
    model = randomized(GPT(cfg))
    ids = random_ids(cfg, 2, 256).cpu()

    def measure(device: torch.device, dtype: torch.dtype, model: GPT = model) -> tuple[float, Tensor, float]:
        model.to(device).zero_grad()
        x = ids.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model.loss(x, x.roll(-1, 1))
            with torch.no_grad():
                entropy = model.token_logprobs(x, x)[1].mean()
        loss.backward()
        return (
            float(loss.detach()),
            parameters_to_vector([p.grad for p in model.parameters()]).float().cpu(),
            float(entropy),
        )

    want = measure(torch.device("cpu"), torch.float32)
    found = measure(DEVICE, torch.bfloat16)
    out.most("loss in bfloat16, relative difference", abs(found[0] / want[0] - 1), 1e-2)
    cosine = torch.cosine_similarity(found[1].double(), want[1].double(), dim=0)
    out.least("gradient, cosine", float(cosine), 0.999)
    out.most("mean entropy, relative difference", abs(found[2] / want[2] - 1), 1e-3)
    narrow = measure(DEVICE, torch.bfloat16, randomized(GPT(replace(cfg, bf16_residual=True))))
    out.most("with bf16_residual: loss, relative difference", abs(narrow[0] / want[0] - 1), 1e-2)
    cosine = torch.cosine_similarity(narrow[1].double(), want[1].double(), dim=0)
    out.least("with bf16_residual: gradient, cosine", float(cosine), 0.99)


def step_flash(out: Result) -> None:
    """On a GPU only flash kernels are allowed; on a CPU what a GPU would be asked for is recorded."""
    F, sdpa, masks = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention, []

    def recorded(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        masks.append(attn_mask is not None)
        return sdpa(q, k, v, attn_mask=attn_mask, **how)

    cfg = shape("d12") if CUDA else TINY
    length = 1024 if CUDA else 256
    trainer = Trainer(cfg, 2, length, compiled=False)
    if not CUDA:
        out.not_run.append(f"flash kernels themselves: {NO_GPU}")
    only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION) if CUDA else contextlib.nullcontext()  # fmt: skip
    F.scaled_dot_product_attention = recorded
    try:
        with only, as_on_a_gpu():
            for kind in ("pretrain", "sft", "rl"):
                masks.clear()
                trainer.step(kind)
                out.check(f"{kind}: dense masks", str(sum(masks)), "0", not any(masks))
            masks.clear()
            with dist.autocast(DEVICE):
                generate.sample(trainer.model, [[1, 2, 3], [4] * 20, [5]], max_new_tokens=2, samples_per_prompt=2)
            out.check(
                "prefill of prompts of three lengths: dense masks", str(sum(masks)), "0", masks and not any(masks)
            )
    finally:
        F.scaled_dot_product_attention = sdpa
    if CUDA:
        model, ids, docs = randomized(trainer.model), random_ids(cfg, 2, length), packed_docs(2, length)
        with torch.no_grad(), dist.autocast(DEVICE):
            flex, dense = (model.hidden(ids, mask=mask(docs)) for mask in (packed_attention.flex_mask, packed_attention.Documents))  # fmt: skip
        real = docs >= 0
        out.most(
            "packed rows, flex against dense, relative", float((flex - dense)[real].norm() / dense[real].norm()), 2e-2
        )


def step_compiled(out: Result) -> None:
    from torch._dynamo.utils import counters

    cfg, length = (shape("d12"), 1024) if CUDA else (replace(TINY, depth=12), 64)
    for kind in ("pretrain", "sft", "rl"):
        torch._dynamo.reset()
        counters.clear()
        trainer, graphs = Trainer(cfg, 2, length, compiled=False), []
        blocks, backend = counted("inductor" if CUDA else "aot_eager")
        hardware.compile_blocks(trainer.model, backend=backend)
        with as_on_a_gpu():
            for _ in range(5):
                trainer.step(kind)
                graphs.append(counters["stats"]["unique_graphs"])
        broken = sum(counters["graph_break"].values())
        out.check(
            f"{kind}: graphs of {cfg.depth} blocks; breaks",
            f"{len(blocks)}; {broken}",
            "1; 0",
            (len(blocks), broken) == (1, 0),
        )
        out.check(f"{kind}: recompilations after step 2", str(graphs[-1] - graphs[1]), "0", graphs[-1] == graphs[1])
        if CUDA:
            trainer.batch(kind)
            waits = _cuda_waits(lambda t=trainer, k=kind: t.step(k))
            out.check(f"{kind}: waits per step", str(waits), "<= 2", waits <= 2)
            if kind == "pretrain":
                batches = Prefetched(Windows(cfg, length), DEVICE)
                batches.next()
                waits = _cuda_waits(lambda b=batches: [x.to(DEVICE, non_blocking=True) for x in b.next()])
                out.check("a batch prepared ahead: waits", str(waits), "0", waits == 0)
        else:
            with on_meta(), SyncCount(META.type) as syncs:
                plain = Trainer(replace(cfg, depth=2), 2, length, compiled=False, device=META)
                plain.step(kind)  # the first step makes the states of the optimizer
                waits = -syncs.total
                plain.step(kind)
                waits += syncs.total
            out.check(f"{kind}: waits per step, counted on the meta device", str(waits), "<= 2", waits <= 2)


def counted(name: str) -> tuple[list[int], Callable[..., Any]]:
    """(sizes of the graphs that it is given, the backend of torch.compile that notes them). The head's body, compiled on a GPU, is none of them."""
    from torch._dynamo.backends.registry import lookup_backend

    plain, sizes = lookup_backend(name), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **how: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return plain(graph, inputs, **how)

    return sizes, backend


class Windows:
    """A loader of random windows."""

    def __init__(self, cfg: GPTConfig, length: int) -> None:
        self.cfg, self.length, self.made = cfg, length, 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.made += 1
        return tuple(torch.randint(self.cfg.vocab_size, (2, self.length)) for _ in range(2))

    def state(self) -> int:
        return self.made


def _cuda_waits(run: Callable[[], Any]) -> int:
    """Synchronising calls that CUDA itself reports."""
    wait()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in seen)


def step_mfu(out: Result) -> None:
    if not CUDA:
        out.not_run.append(f"MFU, matrix peak, time to the first step: {NO_GPU}")
        return
    peak = matrix_peak()
    out.measured(f"best of {TRIALS} products of {MATRIX} x {MATRIX}, TFLOP/s", f"{peak / 1e12:.0f}")
    out.figures["matrix_peak"] = peak
    for name, limit in MFU_AT_LEAST.items():
        cfg = shape(name)
        times = MICROBATCHES.get(name, 1)
        rows, rate, first = _own_rate(cfg, TOKENS_PER_STEP[name] // cfg.block_size, microbatches=times)
        mfu = rate * cfg.flops_per_token(cfg.block_size) / peak
        out.figures[name] = dict(tokens_per_s=rate, mfu=mfu, rows=rows, microbatches=times, first_step_s=first)
        what = f"{name}: MFU, {times} x {rows} x {cfg.block_size} tokens, {rate:,.0f} tokens/s"
        out.check(what, f"{mfu:.1%}", f">= {limit:.0%}", mfu >= limit)
        out.most(f"{name}: first step, s", first, 120)
        _peer_rate(out, name, cfg, rows, rate)
    _option_rates(out)


def _option_rates(out: Result) -> None:
    """Tokens per second of d12 with each option of memory and precision, beside those without."""
    cfg, plain = shape("d12"), out.figures["d12"]["tokens_per_s"]
    options: dict[str, tuple[GPTConfig, Callable[[GPT], GPT] | None]] = {
        "elementwise": (replace(cfg, recompute="elementwise"), None),
        "bf16_residual": (replace(cfg, bf16_residual=True), None),
        "fp8": (cfg, fp8.convert),
    }
    if importlib.util.find_spec("torchao") is None:
        del options["fp8"]
        out.not_run.append("fp8: torchao is not installed")
    for name, (changed, change) in options.items():
        torch._dynamo.reset()
        rows, rate, _ = _own_rate(changed, TOKENS_PER_STEP["d12"] // cfg.block_size, change)
        out.figures[f"d12/{name}"] = dict(tokens_per_s=rate, rows=rows)
        out.measured(f"d12 with {name}: tokens/s; of those without", f"{rate:,.0f}; {rate / plain:.2f}")


def _own_rate(cfg: GPTConfig, rows: int, change: Callable[[GPT], GPT] | None = None, microbatches: int = 1) -> tuple[int, float, float]:  # fmt: skip
    """(rows that fit, tokens per second, seconds to the end of the first step)."""
    began, how = time.perf_counter(), dict(compiled=True, change=change, microbatches=microbatches)
    trainer = fitting(lambda n: Trainer(cfg, n, cfg.block_size, **how), rows)
    wait()
    first = time.perf_counter() - began
    trainer.step()
    took = statistics.median(seconds(trainer.step) for _ in range(8))
    return trainer.rows, trainer.tokens / took, first


def _peer_rate(out: Result, name: str, cfg: GPTConfig, rows: int, own: float) -> None:
    """Transformers' model of this shape with our rows, or with the most that fit. That of 2b is compiled block by block, as ours is: one graph of its
    blocks takes longer to compile than the step may take."""
    how = "compiled by block" if name == "2b" else "compiled"
    while rows:
        free()
        try:
            rate = _compiled_peer_rate(cfg, rows, by_block=name == "2b")
        except MissingFile:
            out.not_run.append(f"{name} beside transformers: not installed")
            break
        except torch.OutOfMemoryError:
            rows //= 2
            torch._dynamo.reset()
        else:
            what = f"{name}: transformers {how}, {rows} x {cfg.block_size} tokens, tokens/s"
            out.check(what, f"{rate:,.0f}", "<= ours", rate <= own)
            break
    else:
        out.not_run.append(f"{name} beside transformers: not one row of its step fits here")
    torch._dynamo.reset()


def _compiled_peer_rate(cfg: GPTConfig, rows: int, by_block: bool = False) -> float:
    """Tokens per second of transformers' model of this shape, compiled, with AdamW."""
    model = peers.huggingface("arcee", cfg).to(DEVICE).train()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = random_ids(cfg, rows, cfg.block_size)

    def loss_of(x: Tensor) -> Tensor:
        return model(input_ids=x, labels=x, use_cache=False).loss

    if by_block:
        for block in model.model.layers:
            block.compile()
    else:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        with dist.autocast(DEVICE):
            loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    return rows * cfg.block_size / statistics.median(seconds(step) for _ in range(6))


def step_memory(out: Result) -> None:
    from codechat.launch import planner
    from codechat.launch import step_memory as fake
    from codechat.launch.memory_tape import Tape

    _held(out)
    cfg, rows = (shape("2b"), 2) if CUDA else (TINY, 4)
    dtype = str(dist.compute_dtype(DEVICE)).removeprefix("torch.")
    plan = fake.measure(fake.Step(model=cfg, batch=rows, length=cfg.block_size, optimizer="adamw", dtype=dtype))
    predicted = sum(plan.training.values())
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(cfg, rows, cfg.block_size, compiled=True, optimizer="adamw")
        for _ in range(3):
            trainer.step()
        reserved = torch.cuda.max_memory_reserved()
        want = (planner.gib_with_reserve(predicted) - planner.CONTEXT_GIB) * planner.GIB
        out.measured(
            "2b: allocated at the peak, GiB; predicted",
            f"{torch.cuda.max_memory_allocated() / planner.GIB:.2f}; {predicted / planner.GIB:.2f}",
        )
        out.check(
            "2b: reserved over planned", f"{reserved / want - 1:+.1%}", "within 8 %", abs(reserved / want - 1) <= 0.08
        )
        return
    with Tape() as tape:
        trainer = Trainer(cfg, rows, cfg.block_size, compiled=False, optimizer="adamw")
        for _ in range(2):
            tape.reset_peak()
            trainer.step()
        found = sum(tape.peak().values())
    out.check(
        "peak of real tensors over that of fake ones, small model",
        f"{found / predicted - 1:+.1%}",
        "within 8 %",
        abs(found / predicted - 1) <= 0.08,
    )
    out.not_run.append(f"reserved memory of 2b: {NO_GPU}")


def _held(out: Result) -> None:
    """What waits for the backward pass: everything, products only, inputs of blocks only."""
    from codechat.launch.memory_tape import Tape

    cfg = shape("d12") if CUDA else replace(TINY, depth=4)

    def held(**changed: bool) -> int:
        trainer = Trainer(replace(cfg, **changed), 2, cfg.block_size, compiled=False)
        with contextlib.nullcontext() if CUDA else Tape() as tape, dist.autocast(DEVICE):
            before = torch.cuda.memory_allocated() if CUDA else 0
            loss = trainer.loss("pretrain")
            found = torch.cuda.memory_allocated() - before if CUDA else sum(tape.now.values())
        del loss
        return found

    everything, blocks = held(), held(recompute="blocks")
    products = held(recompute="elementwise")
    sizes = "; ".join(f"{n / 2**20:.1f}" for n in (everything, products, blocks))
    out.check(
        "held for the backward pass, MiB: all; products; inputs of blocks",
        sizes,
        "falling",
        everything > products > blocks,
    )


def _sampled(model: GPT, rows: int, prompt: int, new: int, **how: Any) -> float:
    """New tokens per second of so many rows, each of its own prompt for one row in eight."""
    prompts = random_ids(model.cfg, max(1, rows // 8), prompt).tolist()
    sampling = dict(max_new_tokens=new, samples_per_prompt=rows // len(prompts), seed=0, batch_size=rows, **how)
    with dist.autocast(DEVICE):
        generate.sample(model, prompts, **sampling)
        took = seconds(lambda: generate.sample(model, prompts, **sampling))
    return rows * new / took


def step_sampling(out: Result) -> None:
    if not CUDA:
        model = randomized(GPT(TINY))
        how = dict(max_new_tokens=40, samples_per_prompt=3, seed=0, stop=((5,), (7, 8)))
        prompts = random_ids(TINY, 3, 20).tolist()
        plain, static = (generate.sample(model, prompts, graph=graph, **how) for graph in (False, True))
        same = [c.ids for c in plain] == [c.ids for c in static]
        out.check(
            "static shapes draw the same tokens as rows one at a time", "equal" if same else "differ", "equal", same
        )
        served = []
        for graph in (False, True):
            with _engine(model, 2, graph=graph) as engine:
                served.append(_served(engine, prompts, 40))
        same = served[0] == served[1]
        out.check("the server's rows draw the same tokens with static shapes", "equal" if same else "differ", "equal", same)  # fmt: skip
        out.not_run.append(
            f"tokens per second of d12 and 2b, with and without graphs, beside transformers and vLLM: {NO_GPU}"
        )
        return
    for name in ("d12", "2b"):
        cfg = shape(name)
        model = fresh(cfg).eval().requires_grad_(False)
        fits = sampling_memory.rows(cfg, generate.free_memory(DEVICE), 2, prompt_tokens=128, new_tokens=256, samples=8)
        out.measured(f"{name}: rows of 128 + 256 tokens that fit", f"{fits:,}")
        for rows in (1, 16, 128, 512):
            if rows > fits:
                out.not_run.append(f"{name} at {rows} rows: {fits} fit")
                continue
            graph = _sampled(model, rows, 128, 256, graph=True)
            out.figures[f"{name}/{rows}/graph"] = graph
            limited = name == "2b" and rows == 128
            out.check(
                f"{name}: {rows} rows, graph, tokens/s",
                f"{graph:,.0f}",
                ">= 15,000" if limited else "",
                not limited or graph >= 15_000,
            )
            plain = _sampled(model, rows, 128, 64, graph=False)
            out.figures[f"{name}/{rows}/plain"] = plain
            out.measured(f"{name}: {rows} rows, one operator at a time, tokens/s", f"{plain:,.0f}")
            if rows in (16, 128):
                _serving(out, name, model, rows)
        del model
        free()
        _peer_sampling(out, name, cfg, 16)
        free()
        _vllm_sampling(out, name, cfg, 128)


def _engine(model: GPT, rows: int, **how: Any) -> batching.Engine:
    """What `codechat serve` samples with."""
    loaded = LoadedModel(model, tokenizer.load("bytes"), "reserved", {"run": "random"}, Path())
    return batching.Engine(loaded, max_rows=rows, **how)


def _served(engine: batching.Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """One completion of each prompt, all at once."""
    jobs = engine.submit(
        [batching.Request(prompt=p, max_new_tokens=new, draws=generate.row_key(0, i, 0)) for i, p in enumerate(prompts)]
    )
    for job in jobs:
        job.wait()
    return [job.ids for job in jobs]


def _serving(out: Result, name: str, model: GPT, rows: int) -> None:
    """The engine of `codechat serve`, which asks for every token: measured behind its start."""
    prompts = random_ids(model.cfg, rows, 128).tolist()
    with _engine(model, rows) as engine:
        _served(engine, prompts, 256)
        rate = rows * 256 / seconds(lambda: _served(engine, prompts, 256))
    out.figures[f"{name}/{rows}/engine"] = rate
    share = rate / out.figures[f"{name}/{rows}/graph"]
    out.measured(f"{name}: {rows} rows, the server's engine, tokens/s; of sampling's", f"{rate:,.0f}; {share:.0%}")


def _vllm_sampling(out: Result, name: str, cfg: GPTConfig, rows: int) -> None:
    """vLLM's own sampling of the same shape with random weights, as `_sampled` asks ours: 128 + 256 tokens."""
    own = out.figures.get(f"{name}/{rows}/graph")
    if importlib.util.find_spec("vllm") is None or own is None:
        out.not_run.append(f"{name} beside vLLM: {'not installed' if own else f'{rows} rows do not fit here'}")
        return
    try:
        rate = _vllm_rate(cfg, rows)
    except Exception as error:  # a peer's failure costs none of our own figures
        out.not_run.append(f"{name} beside vLLM: {type(error).__name__}: {str(error)[:200]}")
        return
    out.check(f"{name}: {rows} rows, vLLM, tokens/s", f"{rate:,.0f}", "<= ours", rate <= own)


def _vllm_rate(cfg: GPTConfig, rows: int) -> float:
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        with DEVICE:
            peers.huggingface("arcee", cfg).to(torch.bfloat16).save_pretrained(folder)
        torch.cuda.empty_cache()
        engine = vllm.LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.6)  # fmt: skip
        prompts = random_ids(cfg, rows // 8, 128).tolist()
        how = vllm.SamplingParams(temperature=1.0, max_tokens=256, ignore_eos=True, detokenize=False, n=8)
        wanted = [{"prompt_token_ids": ids} for ids in prompts]
        engine.generate(wanted, how, use_tqdm=False)
        return rows * 256 / seconds(lambda: engine.generate(wanted, how, use_tqdm=False))


def _peer_sampling(out: Result, name: str, cfg: GPTConfig, rows: int) -> None:
    own = out.figures.get(f"{name}/{rows}/graph")
    if own is None:
        out.not_run.append(f"{name} beside transformers' generate: {rows} rows do not fit here")
        return
    try:
        rate = _generate_rate(cfg, rows)
    except MissingFile:
        out.not_run.append(f"{name} beside transformers' generate: not installed")
    except torch.OutOfMemoryError:
        out.not_run.append(f"{name} beside transformers' generate: {rows} rows do not fit here")
    else:
        out.check(f"{name}: {rows} rows, transformers' generate, tokens/s", f"{rate:,.0f}", "<= ours", rate <= own)


def _generate_rate(cfg: GPTConfig, rows: int) -> float:
    """New tokens per second of transformers' generate, weights in bfloat16."""
    with DEVICE:  # where random weights are made in no time
        model = peers.huggingface("arcee", cfg).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = random_ids(cfg, rows, 128)
    how = dict(attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, max_new_tokens=64, min_new_tokens=64)  # fmt: skip
    with torch.no_grad():
        model.generate(ids, **how)
        return rows * 64 / seconds(lambda: model.generate(ids, **how))


def step_mismatch(out: Result) -> None:
    cfg = shape("d12") if CUDA else TINY
    model = randomized(GPT(cfg).to(DEVICE)).eval()
    prompts = random_ids(cfg, 8, 32).tolist()
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = generate.sample(model, prompts, max_new_tokens=64, samples_per_prompt=4, seed=0, graph=True)
        gaps = []
        for i, completion in enumerate(found):
            ids = torch.tensor([prompts[i // 4] + completion.ids], device=DEVICE)
            trainer = model.token_logprobs(ids[:, :-1], ids[:, 1:])[0][0, 31:]
            gaps.append((trainer.cpu() - torch.tensor(completion.logprobs)).abs())
    out.most("sampler against trainer, mean |difference| in nats per token", float(torch.cat(gaps).mean()), 0.02)
    out.measured("largest", f"{float(torch.cat(gaps).max()):.3f}")


def step_rl(out: Result) -> None:
    """Toy runs of a dozen steps in a directory of their own; one is killed after its first checkpoint and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        for loop in ("reinforce", "grpo"):
            words = f"--preset toy --max-steps 12 --save-every 4 --diagnose-groups 0 --group-size 8 --run-name {loop}".split()
            whole, cut = Path(folder) / "whole", Path(folder) / "cut"
            code = _loop(loop, words, whole)
            out.check(f"{loop}: 12 steps", f"code {code}", "code 0", code == 0)
            killed = _loop(loop, words, cut, kill_after=cut / "runs" / loop / "checkpoints" / "latest")
            code = _loop(loop, [*words, "--resume"], cut)
            out.check(f"{loop}: killed (code {killed}), resumed", f"code {code}", "code 0", code == 0)
            rows = [list(read_rows(f / "runs" / loop / "metrics.jsonl")) for f in (whole, cut)]
            steps = [row["step"] for row in rows[1]]
            out.check(f"{loop}: steps after both", f"{steps[0]} to {steps[-1]}", "1 to 12", steps == list(range(1, 13)))
            gap = max(abs(a["reward_mean"] - b["reward_mean"]) for a, b in zip(*rows))
            out.check(
                f"{loop}: largest difference of rewards to a run that was not killed",
                f"{gap:.3g}",
                "" if CUDA else "0",
                CUDA or gap == 0,
            )

        _rl_ahead(out, Path(folder))


def _rl_ahead(out: Result, folder: Path) -> None:
    """REINFORCE with a server on the same device: weights through memory, the next batch sampled while this one is learned from."""
    if importlib.util.find_spec("uvicorn") is None:
        out.not_run.append("a server beside the trainer: the extra `serve` is not installed")
        return
    with ahead.server(folder, rows=64) as there:
        words = f"--preset toy --max-steps 8 --save-every 0 --diagnose-groups 0 --group-size 8 --run-name ahead {there} {ahead.MODES['ahead']}"
        code = _loop("reinforce", words.split(), folder / "ahead")
    out.check("sampling ahead, weights through memory: 8 steps", f"code {code}", "code 0", code == 0)
    rows = list(read_rows(folder / "ahead" / "runs" / "ahead" / "metrics.jsonl")) if code == 0 else []
    stale = [int(row["off_policy_steps"]) for row in rows]
    out.check("its batches were older than the policy by", str(stale), "0, then 1", stale == [0] + [1] * 7)


def _loop(loop: str, words: list[str], root: Path, kill_after: Path | None = None) -> int:
    (root / "runs").mkdir(parents=True, exist_ok=True)
    run = "import sys; from pathlib import Path; from codechat.runs import paths; paths.ROOT = Path(sys.argv.pop(1)); from codechat import cli; sys.exit(cli.main(sys.argv[1:]))"  # fmt: skip
    with open(root / f"{loop}.log", "a") as log:
        process = subprocess.Popen([sys.executable, "-c", run, str(root), loop, *words], stdout=log, stderr=log)
        while kill_after is not None and process.poll() is None:
            if kill_after.exists():
                process.send_signal(signal.SIGKILL)
            time.sleep(0.02)
        return process.wait(timeout=300)


def step_busy(out: Result) -> None:
    if not CUDA:
        out.not_run.append(f"share of time in which the GPU works: {NO_GPU}")
        return
    out.least("d20, training: GPU busy", _busy_training(out), 0.95)
    free()
    model = fresh(shape("2b")).eval().requires_grad_(False)
    prompts = random_ids(model.cfg, 16, 128).tolist()

    def decode() -> None:
        with dist.autocast(DEVICE):
            generate.sample(model, prompts, max_new_tokens=256, samples_per_prompt=8, seed=0, graph=True)

    decode()
    out.least("2b, decoding 128 rows: GPU busy", _busy(out, "decoding", decode), 0.80)


def _busy_training(out: Result) -> float:
    cfg = shape("d20")
    trainer = fitting(lambda rows: Trainer(cfg, rows, cfg.block_size, compiled=True), 16)
    trainer.step()
    return _busy(out, "training", lambda: [trainer.step() for _ in range(4)])


def _busy(out: Result, what: str, run: Callable[[], Any]) -> float:
    """Share of wall time in which at least one kernel runs. The kernels that take longest go to the figures."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        took = seconds(run)
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in kernels]
    out.figures[f"{what}/kernels"] = longest([(e.name, e.time_range.end - e.time_range.start) for e in kernels])
    return covered(spans) / 1e6 / took


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def longest(kernels: list[tuple[str, float]], rows: int = 20) -> list[dict[str, Any]]:
    """The profiler's table: calls, milliseconds and share of each name, by time."""
    calls, us = Counter(name for name, _ in kernels), Counter[str]()
    for name, took in kernels:
        us.update({name: took})
    whole = sum(us.values()) or 1
    return [dict(kernel=name, calls=calls[name], ms=t / 1e3, share=t / whole) for name, t in us.most_common(rows)]


def step_recipe(out: Result) -> None:
    if not CUDA:
        out.not_run.append(f"the nano recipe and d12 in a time limit: {NO_GPU}; `codechat run nano` runs here as it is")
        return
    command = [sys.executable, "-m", "codechat.cli"]
    took = seconds(lambda: subprocess.run([*command, "run", "nano", "--yes"], check=True, timeout=2400))
    out.measured("codechat run nano, s", f"{took:.0f}")
    data = "data/bench-gpu/corpus"
    subprocess.run([*command, "data", "corpus", "--source", "embedded", "--out", data], check=True)
    words = f"pretrain --preset d12 --data-dir {data} --run-name bench/d12 --overwrite --max-steps 100000 --eval-every 100 --save-every 0 --schedule constant"
    process = subprocess.Popen([*command, *words.split()])
    try:
        process.wait(timeout=600)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    rows = list(read_rows(paths.runs_dir() / "bench/d12/eval.jsonl"))
    out.figures["d12"] = rows
    out.measured("d12, ten minutes: bits per byte, step", f"{rows[-1]['val_bpb']:.3f}, {rows[-1]['step']}")


ALL = (
    step_checkpoint, step_numbers, step_flash, step_compiled, step_mfu, step_memory,
    step_sampling, step_mismatch, step_rl, step_busy, step_recipe,
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Run step argv[0] and write its result to argv[1]."""
    number, path = int(argv[0]), Path(argv[1])
    out = Result()
    ALL[number - 1](out)
    write_json(path, {"checks": out.checks, "not_run": out.not_run, "figures": out.figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
