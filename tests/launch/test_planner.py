"""Planning: what fake tensors predict is what real ranks hold; time and cost by hand; what fits, and what to turn where it does not."""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from codechat import cli
from codechat.core.errors import ConfigError
from codechat.data import corpus
from codechat.distributed import gpu_specs
from codechat.expert_iteration import ExpertConfig
from codechat.launch import launcher, planner, step_memory
from codechat.launch.planner import GIB, PlanConfig
from codechat.launch.step_memory import Peaks, Step, Tape, measure
from codechat.models import head
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.pretrain import PretrainConfig
from codechat.reinforce import ReinforceConfig
from codechat.runs import paths
from codechat.sft import SFTConfig
from codechat.text import tokenizer

TINY = GPTConfig(depth=3, n_embd=64, n_head=2, block_size=128, vocab_size=257)
LINEAR = dict(batch_gib=5.0, fixed_gib=20.0)


# ---- fake against real


def total(step: Step) -> int:
    return sum(measure(step).training.values())


def test_a_tape_counts_each_storage_once_while_it_lives() -> None:
    with Tape() as tape:
        a = torch.zeros(1000)  # 4000 bytes
        b = a.view(10, 100)[2:]
        c = a + 1
        assert tape.now == 8000
        del a, c
        assert tape.now == 4000, "a view keeps its storage"
        del b
        assert tape.now == 0 and tape.peak == 8000


def test_a_fake_step_equals_the_real_one_on_one_process() -> None:
    step = Step(model=TINY, batch=2, length=128, dtype="float32")
    planned = total(step)
    gc.collect()
    with Tape() as tape:
        model = GPT(TINY)
        optimizers = step_memory.optim.build(model, lr=1e-3)
        for _ in range(2):
            tape.peak = tape.now
            loss = step_memory._loss(model, step) / (2 * 128)
            loss.backward()
            del loss
            step_memory.dist.clip_gradients(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        assert tape.peak == planned


DEEP = replace(TINY, depth=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        Step(model=DEEP, batch=2, length=128, optimizer="muon"),
        Step(model=DEEP, batch=2, length=128, grad_accum=2, packed=True),
        Step(model=DEEP, batch=4, length=64, ranks=4, over=2, optimizer="muon", dtype="float32"),
        Step(model=replace(DEEP, recompute="blocks"), batch=4, length=128, ranks=2, over=2),
        # the end of the backward pass holds most in a shallow model, its beginning in a deep one
        Step(model=GPTConfig(**PRESETS["8b"] | {"depth": 10}), batch=2, length=512, ranks=8, over=8, optimizer="muon"),
    ],
)
def test_a_deep_model_is_planned_from_two_shallow_ones(step: Step) -> None:
    quick, whole = measure(step), measure(step, whole=True)
    for few, all in ((quick.training, whole.training), (quick.evaluation, whole.evaluation)):
        assert few.keys() == all.keys() and sum(few.values()) == pytest.approx(sum(all.values()), rel=2e-3)


REAL = """
import json, os, pathlib, sys
from codechat import pretrain
from codechat.core import config
import torch
from torch.distributed.tensor import DTensor
from codechat.launch.step_memory import Tape
from codechat.models import optim
from codechat.runs import paths
from codechat.runs.run import Run

class OfShards(Tape):
    # also storages that FSDP empties and fills again
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it first becomes operators on local tensors
        return super().__torch_dispatch__(func, types, args, kwargs)

def resize(storage, size, resize=torch.UntypedStorage.resize_):
    out = resize(storage, size)
    if (before := tape._sizes.get(storage._cdata)) is not None:
        tape._sizes[storage._cdata] = storage.nbytes()
        tape.add(storage.nbytes() - before)
    return out

torch.UntypedStorage.resize_ = resize
paths.ROOT = root = pathlib.Path(sys.argv[1])
cfg = config.from_dict(pretrain.PretrainConfig, json.loads(sys.argv[2]))
tape, seen, set_lr, log = OfShards(), [], optim.set_lr, Run.log
def begin(*a, **k):
    set_lr(*a, **k)
    tape.peak = tape.now
def end(self, *a, **k):
    seen.append(tape.peak)
    log(self, *a, **k)
optim.set_lr, Run.log = begin, end
with tape:
    pretrain.train(cfg)
if os.environ["RANK"] == "0":
    (root / "peaks.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "settings"),
    [(2, {}), (2, {"optimizer": "adamw", "grad_accum": 2}), (1, {}), (2, {"model": {"recompute": "blocks"}})],
    ids=["sharded", "adamw-accumulating", "replicated", "recomputing"],
)
def test_the_pretraining_loop_on_two_gloo_ranks_holds_what_is_planned(
    over: int, settings: dict, tmp_path: Path
) -> None:
    corpus.write_corpus(
        ["the quick brown fox jumps over the lazy dog. " * 400] * 3, tmp_path / "corpus", tokenizer.load("bytes")
    )
    model = dict(depth=3, n_embd=64, n_head=2, block_size=128, vocab_size=257) | settings.get("model", {})
    run = dict(run_name="real", data_dir=str(tmp_path / "corpus"), max_steps=5, log_every=1, eval_every=0, save_every=0, compile=False,
               eval_tokens=64, device_batch_size=2, shard=over > 1, shard_over=over if over > 1 else None) | settings | {"model": model}  # fmt: skip
    on_ranks(2, REAL, tmp_path, str(tmp_path), json.dumps(run), CODECHAT_DTYPE="bfloat16")
    real = min(json.loads((tmp_path / "peaks.json").read_text())[1:])  # FSDP's threads may free a buffer later
    step = Step(
        model=GPTConfig(**model),
        batch=2,
        length=128,
        ranks=2,
        over=over,
        optimizer=settings.get("optimizer", "muon"),
        grad_accum=settings.get("grad_accum", 1),
    )
    assert total(step) == pytest.approx(real, rel=0.03)


def test_sharding_divides_weights_and_states() -> None:
    step = Step(model=TINY, batch=1, length=128, optimizer="adamw", ranks=4, over=4)
    alone, shared = measure(replace(step, ranks=1, over=1)).training, measure(step).training
    n_bytes = 4 * TINY.n_params
    assert alone["weights"] == n_bytes and shared["weights"] == n_bytes // 4
    assert 2 * shared["weights"] <= shared["optimizer states"] < 2.01 * shared["weights"]
    assert sum(shared.values()) < sum(alone.values())
    assert measure(replace(step, over=2)).training["weights"] == n_bytes // 2


@pytest.mark.slow
def test_recomputing_blocks_and_shorter_rows_need_less_and_packed_rows_no_mask() -> None:
    step = Step(model=replace(TINY, depth=8), batch=4, length=128)

    def held(**changed: object) -> int:
        return total(replace(step, **changed))

    assert held(model=replace(step.model, recompute="blocks")) < 0.5 * held()
    assert held(length=64) < held() < held(batch=5)
    assert held() <= held(packed=True) < 1.02 * held(), "no dense mask"
    assert held(grad_accum=4) == held(grad_accum=2) >= held()


def test_a_plan_takes_whole_chunks_of_logits_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for a CPU's cache would hold less than a GPU does, and make a plan of 8b three times as long."""
    step = Step(model=replace(TINY, vocab_size=5000), batch=4, length=128)
    held = step_memory._run(step)
    monkeypatch.setattr(head, "BLOCK_BYTES", 1)  # a row at a time
    assert step_memory._run(step) == held
    assert not torch.distributed.is_initialized()


# ---- the numbers


def fake_measure(monkeypatch: pytest.MonkeyPatch, **faked: float) -> Counter:
    """Stand in for the step: bytes linear in the batch, less where blocks are recomputed, divided where weights are shared."""
    calls: Counter = Counter()

    def stand_in(step: Step) -> Peaks:
        calls[step] += 1
        rows = step.batch * step.length / 2048 * LINEAR["batch_gib"] * (0.1 if step.model.recompute == "blocks" else 1)
        return Peaks(
            {"weights": int(LINEAR["fixed_gib"] * GIB / step.over), "activations": int(rows * GIB)}, {"weights": 5}
        )

    monkeypatch.setattr(planner.step_memory, "measure", stand_in)
    return calls


BIG = PlanConfig(model=GPTConfig(**PRESETS["8b"]), device_batch_size=1, max_steps=30000, grad_accum=8, mfu=0.479)


def test_time_and_cost_reproduce_the_published_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """8b on 8 A800: 131,072 tokens a step, 3.93 billion in 48.9 hours at 22.3 thousand tokens per second (published)."""
    fake_measure(monkeypatch)
    found = planner.make(replace(BIG, search=False, price=1.5))
    assert BIG.tokens_per_step == 131072 and BIG.sharded and BIG.over == 8
    assert found.tokens_per_s == pytest.approx(22_300, rel=0.01) and found.hours == pytest.approx(48.9, rel=0.01)
    assert found.gpu_hours == 8 * found.hours and found.cost == 1.5 * found.gpu_hours
    assert planner.make(replace(BIG, search=False)).cost is None
    per_token = BIG.model.flops_per_token(2048)
    assert (
        planner.MFU
        <= min(22_300 * per_token / (8 * 312e12), 7_900 * GPTConfig(**PRESETS["2b"]).flops_per_token(2048) / 312e12)
        < planner.MFU + 0.01
    )


def test_the_largest_microbatch_is_found_from_any_side_in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (1, 2, 3, 5, 40):
        calls = fake_measure(monkeypatch)
        found = planner.make(replace(BIG, device_batch_size=batch))
        rows = [LINEAR["fixed_gib"] / 8 + b * LINEAR["batch_gib"] for b in range(1, 100)]
        truth = sum(planner.gib_with_reserve(gib * GIB) <= found.room_gib for gib in rows)
        assert found.largest_batch == truth == 12 and found.fits == (batch <= truth) and len(calls) <= 10


def test_a_share_of_memory_stays_free_or_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 GB, 79.2 usable: 92 % of it less what gathers ahead of their use hold. One row adds 5 GiB, of which 5 % fragments; 1.5 are the context."""
    fake_measure(monkeypatch)
    buffers = (
        (2 * 2 + 4) * BIG.model.block_matmul_params / GIB
    )  # the next block twice in bf16, gradients of one in float32
    found = planner.make(replace(BIG, device_batch_size=13, search=False))
    assert found.buffers_gib == buffers == pytest.approx(1.5) and found.room_gib == pytest.approx(0.92 * 79.2 - buffers)
    assert found.room_gib < found.total_gib < found.cfg.usable / GIB and not found.fits
    assert planner.make(replace(BIG, device_batch_size=12, search=False)).fits
    assert planner.make(replace(BIG, gpus=1, shard=False, device_batch_size=1, search=False)).buffers_gib == 0
    assert "does not fit: " in found.verdict and ("left free", "at least 8%") in found.rows()


def test_the_share_of_the_peak_is_that_of_the_gpu() -> None:
    for gpu, share in {"a800-80gb": 0.45, "h100-80gb": 0.36, "h200-141gb": 0.36, "l4-24gb": 0.45}.items():
        assert replace(BIG, mfu=None, gpu=gpu).share == share and replace(BIG, mfu=0.5, gpu=gpu).share == 0.5


def test_both_phases_of_rl_are_planned() -> None:
    """2b on one H200: while it samples, weights and states stay, a bf16 copy of matrices and head comes, and rows fill what is left."""
    model = GPTConfig(**PRESETS["2b"], recompute="blocks")
    cfg = PlanConfig(loop="rl", model=model, gpus=1, gpu="h200-141gb", optimizer="adamw", device_batch_size=64, group_size=16,
                     max_new_tokens=512, rows=4, row_tokens=1024)  # fmt: skip
    found = planner.make(cfg)
    phase = found.sampling
    assert phase.held == pytest.approx(12 * model.n_params / GIB, rel=0.01) and phase.copy == pytest.approx(
        2 * model.n_params / GIB, rel=0.01
    )
    assert phase.wanted == 1024 and phase.rows < 1024 and phase.batches == -(-1024 // phase.rows) and found.fits
    assert phase.held + phase.copy + phase.kept < 0.95 * found.cfg.usable / GIB
    assert replace(found, cfg=replace(cfg, max_new_tokens=1024)).sampling.rows < phase.rows
    small = replace(found, cfg=replace(cfg, gpu="a100-40gb"))
    assert not small.fits and "does not fit" in small.verdict
    assert f"samples {phase.rows:,} rows at a time" in found.verdict and any(
        "keys and values" in name for name, _ in found.rows()
    )


@pytest.mark.parametrize("over", [1, 4])
def test_a_reference_stays_through_both_phases_of_rl(over: int) -> None:
    """In float32, shared by the ranks that share the weights; a plan that left it out of the learning phase let runs fit that do not."""
    cfg = PlanConfig(loop="rl", model=GPTConfig(depth=2, n_embd=512, n_head=4, vocab_size=4096), gpus=4, gpu="l4-24gb", shard=over > 1,
                     shard_over=over if over > 1 else None, device_batch_size=64, rows=2, row_tokens=128)  # fmt: skip
    without, found = planner.make(cfg), planner.make(replace(cfg, reference=True))
    one = 4 * cfg.model.n_params // over
    assert found.peaks.total - without.peaks.total == one and found.memory["reference"] == one / GIB
    assert found.sampling.held - without.sampling.held == pytest.approx(one / GIB)


def test_chunks_and_kept_logits_follow_the_memory_of_the_gpu() -> None:
    """A GPU takes 1/64 of its memory for the logits of a chunk, and RL keeps all logits that fit into 1/16; a CPU 128 MiB and 1 GiB."""
    model = GPTConfig(depth=1, n_embd=64, n_head=1, vocab_size=50257, block_size=1024)
    step = Step(model=model, batch=8, length=1024, packed=True)
    logits = step.batch * step.length * model.padded_vocab * 4  # 1.5 GiB in float32
    small, large, rl, rl_large = (
        planner.step_memory.measure(replace(step, gpu_bytes=gib * GIB, logprobs=of_rl)).total
        for gib, of_rl in ((16, False), (80, False), (1, True), (80, True))
    )
    assert large - small > 0.5 * GIB  # chunks of 0.25 and 1.25 GiB
    assert rl_large - rl > 0.4 * logits  # kept in bfloat16


def test_nothing_fits_is_said_and_the_knob_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measure(monkeypatch)
    small = replace(BIG, gpu="l4-24gb", device_batch_size=4)
    found = planner.make(small)
    assert not found.fits and found.largest_batch == 2
    assert (
        list(found.knobs) == ["--device-batch-size 2 --grad-accum 16"]
        and "set --device-batch-size 2 --grad-accum 16 (" in found.verdict
    )
    monkeypatch.setitem(LINEAR, "batch_gib", 30.0)
    found = planner.make(small)
    assert found.largest_batch == 0 and "set --model.recompute blocks (" in found.verdict
    monkeypatch.setitem(LINEAR, "batch_gib", 3000.0)
    found = planner.make(replace(small, device_batch_size=1))
    assert "no single setting" in found.verdict and len(found.knobs) == 2
    monkeypatch.setitem(LINEAR, "batch_gib", 5.0)
    found = planner.make(replace(small, shard=False, device_batch_size=1))
    assert "set --shard (" in found.verdict or "--model.recompute blocks" in found.verdict


def test_a_replica_is_kept_where_it_fits_as_the_loops_decide() -> None:
    d12 = PlanConfig(model=GPTConfig(**PRESETS["d12"]))
    assert not d12.sharded and d12.over == 1 and replace(d12, shard=True).over == 8
    assert not replace(BIG, gpus=1, shard=True).sharded
    assert replace(BIG, gpus=16).over == 8, "hybrid over nodes of eight"


def test_impossible_plans_are_rejected() -> None:
    for changed, named in (
        (dict(gpu="a900"), "a100-40gb"),
        (dict(gpus=0), "gpus"),
        (dict(mfu=1.4), "mfu"),
        (dict(gpus=12, shard=True), "shard_over 8 .* 12"),
        (dict(seq_len=4096), "block_size"),
        (dict(shard=True, shard_over=-2), "shard_over"),
    ):
        with pytest.raises(ConfigError, match=named):
            replace(BIG, **changed)


def test_every_gpu_has_a_source_and_devices_are_told_apart() -> None:
    for name, gpu in gpu_specs.GPUS.items():
        assert gpu.source and gpu.bf16_flops > 1e14 and name.endswith(f"-{gpu.memory_gib:g}gb")
    for device, tflops in {
        "NVIDIA H200": 989, "NVIDIA H20": 148, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
    }.items():  # fmt: skip
        assert gpu_specs.stated_peak(device) == tflops * 1e12
    assert gpu_specs.stated_peak("NVIDIA TITAN V") is None
    assert gpu_specs.find("A800_80GB").usable_gib == pytest.approx(79.33, rel=0.01)  # published


def test_the_command_plans_a_configuration_a_preset_and_a_written_run(
    runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model.depth 2 --model.n-embd 64 --model.n-head 2 --model.block-size 128 --gpus 2 --device-batch-size 2".split()
    assert cli.main(["plan", "pretrain", *words, "--gpu", "a800-80gb", "--price", "2", "--no-search"]) == 0
    text = capsys.readouterr().out
    shown = ("weights", "activations", "reserve", "peak per GPU", "tokens per second", "cost", "MFU")
    assert all(word in text for word in shown)
    cfg = SFTConfig(run_name="x", model=replace(TINY, block_size=128), max_steps=7)
    written = launcher.write(cfg, nproc=2, gpu="a800-80gb")
    assert written.verdict.startswith("fits: ") and "2 x a800-80gb" in str(written)
    assert cli.main(["plan", "--run", "x", "--gpus", "2", "--gpu", "a800-80gb", "--no-search"]) == 0
    assert "7 steps" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["plan", "--list"]) == 0 and "h100-80gb" in capsys.readouterr().out
    assert cli.main(["plan", "--gpu", "nothing"]) == 2 and "a100-40gb" in capsys.readouterr().err
    rl = ReinforceConfig(run_name="y", model=TINY, group_size=4, device_batch_size=3, rows=2, row_tokens=64)
    assert "samples 12 rows at a time, 1 batches" in launcher.write(rl, gpu="a800-80gb").verdict
    assert "none for expert" in launcher.write(ExpertConfig(run_name="z"), gpu="a800-80gb").verdict
    with pytest.raises(ConfigError, match="ExpertConfig"):
        planner.of(ExpertConfig(), gpus=1, gpu="a800-80gb")
    assert paths.exists("x") and planner.of(PretrainConfig(), gpus=1, gpu="a800-80gb").loop == "pretrain"
