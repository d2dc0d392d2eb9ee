"""Planning: what fake tensors predict is what real ranks hold; time and cost by hand; what
fits, and what to turn where it does not."""

import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from codechat import cli
from codechat.core.errors import ConfigError
from codechat.data import corpus_writer
from codechat.distributed import gpu_specs
from codechat.expert_iteration import ExpertConfig
from codechat.models import lora
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.fast import head
from codechat.models.gpt import GPT
from codechat.pretrain import PretrainConfig
from codechat.reinforce import ReinforceConfig
from codechat.sft import SFTConfig
from codechat.text import tokenizer
from codechat_lab.instruments import planner, step_memory
from codechat_lab.instruments.plan_settings import GIB, PlanConfig
from codechat_lab.instruments.step_memory import Peaks, Tape, measure
from codechat_lab.launch import launcher
from codechat_lab.launch.launcher import Machines

TINY = GPTConfig(depth=3, n_embd=64, n_head=2, block_size=128, vocab_size=257)
LINEAR = dict(batch_gib=5.0, fixed_gib=20.0)


def plan_of(**settings: object) -> PlanConfig:
    """A tiny step on GPUs of which `over` share a copy of the weights."""
    over = settings.pop("over", 1)
    usual = dict(
        model=TINY,
        gpus=1,
        device_batch_size=2,
        optimizer="adamw",
        shard=over > 1,
        shard_over=over,
    )
    return PlanConfig(**usual | settings)


def total(cfg: PlanConfig, **how: object) -> int:
    return sum(measure(cfg, cpu=True, **how).training.values())


def test_a_tape_counts_each_storage_once_while_it_lives() -> None:
    with Tape() as tape:
        a = torch.zeros(1000)  # 4000 bytes
        b = a.view(10, 100)[2:]
        c = a + 1
        assert tape.now == 8000
        del a, c
        assert tape.now == 4000, "a view keeps its storage"
        del b
        assert tape.now == 0
        assert tape.peak == 8000


def test_a_fake_step_equals_the_real_one_on_one_process() -> None:
    planned = total(plan_of(), dtype="float32")
    gc.collect()
    with Tape() as tape:
        model = GPT(TINY)
        optimizers = step_memory.optim.build(model, lr=1e-3)
        for _ in range(2):
            tape.peak = tape.now
            loss = step_memory._loss(model, plan_of(), torch.float32)
            loss.backward()
            del loss
            step_memory.sharding.clip_gradients(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        assert tape.peak == planned


@pytest.mark.slow
def test_a_deep_model_is_planned_from_two_shallow_ones() -> None:
    deep = replace(TINY, depth=12)
    for cfg, dtype in (
        (plan_of(model=deep, loop="sft", grad_accum=2, optimizer="muon"), "bfloat16"),
        (
            plan_of(model=deep, device_batch_size=4, seq_len=64, gpus=4, over=2, optimizer="muon"),
            "float32",
        ),
        (
            plan_of(model=replace(deep, recompute="blocks"), device_batch_size=4, gpus=2, over=2),
            "bfloat16",
        ),
        # the end of the backward pass holds most in a shallow model, its beginning in a deep one
        (
            plan_of(
                model=GPTConfig(**PRESETS["8b"] | {"depth": 10}),
                seq_len=512,
                gpus=8,
                over=8,
                optimizer="muon",
            ),
            "bfloat16",
        ),
    ):
        for few, all in zip(measure(cfg, False, dtype, True), measure(cfg, True, dtype, True)):
            assert sum(few.values()) == pytest.approx(sum(all.values()), rel=2e-3)


# trains and writes the peak of each step
REAL = Path(__file__).with_name("held_on_ranks.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "settings"),
    [
        (2, {}),
        (2, {"optimizer": "adamw", "grad_accum": 2}),
        (1, {}),
        (2, {"model": {"recompute": "blocks"}}),
    ],
    ids=["sharded", "adamw-accumulating", "replicated", "recomputing"],
)
def test_pretraining_on_two_gloo_ranks_holds_what_is_planned(
    over: int, settings: dict, tmp_path: Path
) -> None:
    texts = ["the quick brown fox jumps over the lazy dog. " * 400] * 3
    corpus_writer.write_corpus(texts, tmp_path / "corpus", tokenizer.load("bytes"))
    model = dict(depth=3, n_embd=64, n_head=2, block_size=128, vocab_size=257) | settings.get(
        "model", {}
    )
    run = (
        dict(
            run_name="real",
            data_dir=str(tmp_path / "corpus"),
            max_steps=5,
            log_every=1,
            eval_every=0,
            save_every=0,
            compile=False,
            eval_tokens=64,
            device_batch_size=2,
            shard=over > 1,
            shard_over=over if over > 1 else None,
        )
        | settings
        | {"model": model}
    )
    on_ranks(2, REAL, tmp_path, str(tmp_path), json.dumps(run), CODECHAT_DTYPE="bfloat16")
    # FSDP's threads may free a buffer later
    real = min(json.loads((tmp_path / "peaks.json").read_text())[1:])
    planned = plan_of(
        gpus=2, over=over, **{"optimizer": "muon"} | settings | {"model": GPTConfig(**model)}
    )
    assert total(planned) == pytest.approx(real, rel=0.03)


LORA = dict(lora_rank=16, lora_targets=("qkv", "out"))


def test_a_fake_step_with_adapters_equals_the_real_one() -> None:
    cfg = plan_of(**LORA)
    planned = total(cfg, dtype="float32")
    gc.collect()
    with Tape() as tape:
        model = lora.attach(GPT(TINY), 16)
        optimizers = step_memory.optim.build(model, lr=1e-3)
        for _ in range(2):
            tape.peak = tape.now
            step_memory._loss(model, cfg, torch.float32).backward()
            step_memory.sharding.clip_gradients(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        assert tape.peak == planned


@pytest.mark.parametrize(
    "targets", [("qkv", "out"), ("up", "down"), ("qkv", "out", "gate", "up", "down")]
)
@pytest.mark.parametrize(
    "model", [TINY, replace(TINY, n_kv_head=1, mlp="swiglu"), replace(TINY, attention="mla")]
)
def test_frozen_weights_have_neither_gradients_nor_moments(
    model: GPTConfig, targets: tuple[str, ...]
) -> None:
    """By hand: 2 bytes of each weight of a matrix, 4 of the others; of each adapter 4, two
    moments, and a gradient in the backward pass."""
    plan = plan_of(model=model, loop="sft", lora_rank=8, lora_targets=targets)
    attached = lora.attach(GPT(model), 8, targets=targets)
    adapters = sum(p.numel() for p in attached.parameters() if p.requires_grad)
    assert plan.adapters == adapters
    held = measure(plan).training
    full = measure(replace(plan, lora_rank=0)).training
    matrices = model.depth * model.block_matmul_params
    assert held["weights"] == 4 * (model.n_params + adapters) - 2 * matrices
    assert full["weights"] == 4 * model.n_params
    assert held["optimizer states"] == pytest.approx(8 * adapters, rel=0.01)
    assert full["optimizer states"] == pytest.approx(8 * model.n_params, rel=0.01)
    assert held["gradients"] in (0, 4 * adapters)
    assert sum(held.values()) < sum(full.values())


@pytest.mark.slow
def test_8b_with_adapters_fits_one_h200_and_is_not_sharded() -> None:
    """12 bytes for each frozen weight less than with all weights trained: 92 GiB of gradients
    and moments."""
    model = GPTConfig(**PRESETS["8b"])
    cfg = PlanConfig(
        loop="sft",
        model=model,
        gpus=1,
        gpu="h200-141gb",
        device_batch_size=1,
        optimizer="adamw",
        **LORA,
    )
    plan = planner.make(cfg)
    full = planner.make(replace(cfg, lora_rank=0))
    states = [
        sum(p.peaks.training[name] for name in ("gradients", "optimizer states"))
        for p in (plan, full)
    ]
    assert (
        (states[1] - states[0]) / GIB
        == pytest.approx(12 * model.n_params / GIB, rel=0.01)
        == pytest.approx(92.3, rel=0.01)
    )
    assert plan.fits
    assert not full.fits
    halved = model.depth * model.block_matmul_params
    if not model.tied:
        halved += model.padded_vocab * model.n_embd
    weights = 4 * model.n_params - 2 * halved
    assert plan.memory["weights"] == pytest.approx(weights / GIB, rel=0.01)
    assert "frozen, and 15,728,640 of low-rank updates" in str(plan)
    eight = replace(cfg, gpus=8)
    assert eight.over == 1
    assert replace(eight, lora_rank=0, gpu="a800-80gb").over == 8
    assert 1.4 < plan.tokens_per_s / full.tokens_per_s < 1.6, (
        "no gradients of frozen matrices: 4 of 6 FLOPs"
    )


def test_what_cannot_be_trained_with_adapters_is_refused_in_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for settings, named in (
        (dict(gpus=2, shard=True), "set --no-shard"),
        (dict(lora_targets=("gate",)), "required are matrices of this model"),
        (dict(lora_targets=()), "required are matrices of this model"),
    ):
        with pytest.raises(ConfigError, match=named):
            PlanConfig(**dict(model=TINY, gpus=1) | LORA | settings)
    fake_measure(monkeypatch)
    plan = planner.make(replace(BIG, gpu="l4-24gb", device_batch_size=4, shard=None, **LORA))
    assert not plan.fits and "--shard" not in plan.knobs, "frozen weights are not sharded"


def test_a_written_run_with_adapters_is_planned_with_them() -> None:
    cfg = SFTConfig(
        run_name="x",
        model=replace(TINY, block_size=512),
        lora_rank=4,
        lora_targets=("up",),
    )
    planned = planner.from_settings(cfg, gpus=1, gpu="l4-24gb")
    assert (planned.lora_rank, planned.lora_targets, planned.adapters) == (
        4,
        ("up",),
        3 * 4 * (64 + 256),
    )


def test_sharding_divides_weights_and_states_and_less_of_a_row_needs_less() -> None:
    alone, half, shared = (
        measure(plan_of(gpus=4 if over > 1 else 1, over=over)).training for over in (1, 2, 4)
    )
    n_bytes = 4 * TINY.n_params
    assert [plan["weights"] for plan in (alone, half, shared)] == [
        n_bytes,
        n_bytes // 2,
        n_bytes // 4,
    ]
    assert 2 * shared["weights"] <= shared["optimizer states"] < 2.01 * shared["weights"]
    assert sum(shared.values()) < sum(alone.values())

    def held(**changed: object) -> int:
        return total(plan_of(**{"device_batch_size": 4} | changed))

    assert held(model=replace(TINY, recompute="blocks")) < 0.7 * held()
    assert held(seq_len=64) < held() < held(device_batch_size=5)
    assert held(grad_accum=2) >= held()
    assert held() <= held(loop="sft") < 1.02 * held(), "no dense mask"


def test_chunks_and_kept_logits_follow_the_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU takes 1/64 of its memory for the logits of a chunk, and RL keeps all logits that
    fit into 1/16; a CPU 128 MiB and 1 GiB."""
    model = GPTConfig(depth=1, n_embd=64, n_head=1, vocab_size=50257, block_size=1024)
    sft = plan_of(model=model, device_batch_size=8, loop="sft", gpu="l4-24gb")
    rl = replace(sft, loop="rl", rows=8, row_tokens=1024)
    small, large = (measure(replace(sft, gpu=gpu)).total for gpu in ("l4-24gb", "a800-80gb"))
    assert large - small > 0.5 * GIB  # chunks of 0.35 and 1.25 GiB
    logits = rl.batch * rl.length * model.padded_vocab * 4  # 1.5 GiB in float32
    # kept in bfloat16
    assert measure(replace(rl, gpu="a800-80gb")).total - measure(rl, cpu=True).total > 0.4 * logits
    held = step_memory._run(sft, "bfloat16", True)
    monkeypatch.setattr(head, "BLOCK_BYTES", 1)  # blocks for a CPU's cache, a row at a time
    assert step_memory._run(sft, "bfloat16", True) == held
    assert not torch.distributed.is_initialized()


def fake_measure(monkeypatch: pytest.MonkeyPatch, **faked: float) -> Counter:
    """Stand in for the step: bytes linear in the batch, less where blocks are recomputed,
    divided where weights are shared."""
    calls = Counter()
    gib = LINEAR | faked

    def stand_in(cfg: PlanConfig) -> Peaks:
        calls[cfg] += 1
        rows = (
            cfg.batch
            * cfg.length
            / 2048
            * gib["batch_gib"]
            * (0.1 if cfg.model.recompute == "blocks" else 1)
        )
        training = {
            "weights": int(gib["fixed_gib"] * GIB / cfg.over),
            "activations": int(rows * GIB),
        }
        return Peaks(training, {"weights": 5})

    monkeypatch.setattr(planner.step_memory, "measure", stand_in)
    return calls


BIG = PlanConfig(
    model=GPTConfig(**PRESETS["8b"]),
    device_batch_size=1,
    max_steps=30000,
    grad_accum=8,
    mfu=0.479,
)


def test_time_and_cost_reproduce_the_published_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """8b on 8 A800: 131,072 tokens a step, 3.93 billion in 48.9 hours at 22.3 thousand tokens
    per second (published)."""
    fake_measure(monkeypatch)
    plan = planner.make(replace(BIG, price=1.5))
    assert BIG.tokens_per_step == 131072
    assert BIG.over == 8
    assert plan.tokens_per_s == pytest.approx(22_300, rel=0.01)
    assert plan.hours == pytest.approx(48.9, rel=0.01)
    assert plan.gpu_hours == 8 * plan.hours
    assert f"cost {1.5 * plan.gpu_hours:,.0f}" in plan.verdict
    assert "cost" not in planner.make(BIG).verdict
    rates = ((22_300 / 8, BIG.model), (7_900, GPTConfig(**PRESETS["2b"])))
    lower = min(rate * model.flops_per_token(2048) / 312e12 for rate, model in rates)
    assert planner.MFU <= lower < planner.MFU + 0.01
    for gpu, share in {
        "a800-80gb": 0.45,
        "h100-80gb": 0.36,
        "h200-141gb": 0.36,
        "l4-24gb": 0.45,
    }.items():
        assert replace(BIG, mfu=None, gpu=gpu).share == share
        assert replace(BIG, mfu=0.5, gpu=gpu).share == 0.5


def test_the_largest_microbatch_is_found_in_a_few_steps_and_a_share_stays_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for batch in (1, 40):
        calls = fake_measure(monkeypatch)
        plan = planner.make(replace(BIG, device_batch_size=batch), search=True)
        rows = [LINEAR["fixed_gib"] / 8 + b * LINEAR["batch_gib"] for b in range(1, 100)]
        truth = sum(planner.gib_with_reserve(gib * GIB) <= plan.cfg.room_gib for gib in rows)
        assert plan.largest_batch == truth == 12
        assert plan.fits == (batch <= truth)
        assert len(calls) <= 10
    # on 80 GB, 79.2 usable: 92 % of it, less what gathers ahead of use hold; a row adds 5 GiB,
    # of which 5 % fragments
    # the next block twice in bf16, gradients in float32
    buffers = (2 * 2 + 4) * BIG.model.block_matmul_params / GIB
    plan = planner.make(replace(BIG, device_batch_size=13))
    assert plan.cfg.buffers_gib == buffers == pytest.approx(1.5)
    assert plan.cfg.room_gib == pytest.approx(0.92 * 79.2 - buffers)
    assert plan.cfg.room_gib < plan.total_gib < plan.cfg.usable_gib
    assert not plan.fits
    assert planner.make(replace(BIG, device_batch_size=12)).fits
    assert replace(BIG, gpus=1, shard=False).buffers_gib == 0


def test_both_phases_of_rl_are_planned() -> None:
    """2b on one H200: while it samples, weights and states stay, a bf16 copy of matrices and
    head comes, and rows fill what is left."""
    model = GPTConfig(**PRESETS["2b"], recompute="blocks")
    cfg = PlanConfig(
        loop="rl",
        model=model,
        gpus=1,
        gpu="h200-141gb",
        optimizer="adamw",
        device_batch_size=64,
        group_size=16,
        max_new_tokens=512,
        rows=4,
        row_tokens=1024,
    )
    plan = planner.make(cfg)
    phase = plan.sampling
    weights = model.n_params / GIB
    assert phase.held == pytest.approx(12 * weights, rel=0.01)
    assert phase.copy == pytest.approx(2 * weights, rel=0.01)
    assert phase.needed == 1024
    assert phase.rows < 1024
    assert phase.batches == -(-1024 // phase.rows)
    assert plan.fits
    assert phase.held + phase.copy + phase.kept < 0.95 * plan.cfg.usable_gib
    assert replace(plan, cfg=replace(cfg, max_new_tokens=1024)).sampling.rows < phase.rows
    small = replace(plan, cfg=replace(cfg, gpu="a100-40gb"))
    assert not small.fits
    assert "does not fit" in small.verdict
    assert f"samples {phase.rows:,} rows at a time" in plan.verdict
    assert "keys and values" in str(plan)


@pytest.mark.parametrize("over", [1, 4])
def test_a_reference_stays_through_both_phases_of_rl(over: int) -> None:
    cfg = PlanConfig(
        loop="rl",
        model=GPTConfig(depth=2, n_embd=512, n_head=4, vocab_size=4096),
        gpus=4,
        gpu="l4-24gb",
        shard=over > 1,
        shard_over=over if over > 1 else None,
        device_batch_size=64,
        rows=2,
        row_tokens=128,
    )
    without = planner.make(cfg)
    plan = planner.make(replace(cfg, reference=True))
    one = 4 * cfg.model.n_params // over
    assert plan.peaks.total - without.peaks.total == one
    assert plan.memory["reference"] == one / GIB
    assert plan.sampling.held - without.sampling.held == pytest.approx(one / GIB)


def test_where_it_does_not_fit_a_setting_that_helps_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(BIG, gpu="l4-24gb", device_batch_size=4)
    for cfg, batch_gib, largest, advice in (
        (small, 5.0, 2, "set --device-batch-size 2 --grad-accum 16 ("),
        (small, 30.0, 0, "set --model.recompute blocks ("),
        (replace(small, device_batch_size=1), 3000.0, 0, "no single setting"),
        (replace(small, device_batch_size=1, shard=False), 5.0, 0, "set --shard ("),
    ):
        fake_measure(monkeypatch, batch_gib=batch_gib)
        plan = planner.make(cfg)
        assert not plan.fits
        assert plan.largest_batch == largest
        assert advice in plan.verdict
        assert all(f"{flags} " in str(plan) for flags in plan.knobs)


def test_a_replica_stays_where_it_fits_impossible_plans_are_rejected_and_every_gpu_has_a_source() -> (
    None
):
    d12 = PlanConfig(model=GPTConfig(**PRESETS["d12"]))
    assert d12.over == 1
    assert replace(d12, shard=True).over == 8
    assert replace(BIG, gpus=1, shard=True).over == 1
    assert replace(BIG, gpus=16).over == 8, "hybrid over nodes of eight"
    for changed in (dict(gpu="a900"), dict(gpus=0), dict(gpus=12, shard=True), dict(seq_len=4096)):
        with pytest.raises(ConfigError):
            replace(BIG, **changed)
    for name, gpu in gpu_specs.GPUS.items():
        assert gpu.source
        assert gpu.bf16_flops > 1e14
        assert name.endswith(f"-{gpu.memory_gib:g}gb")
    for device, tflops in {
        "NVIDIA H200": 989,
        "NVIDIA H20": 148,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835,
    }.items():
        assert gpu_specs.stated_peak(device) == tflops * 1e12
    assert gpu_specs.stated_peak("NVIDIA TITAN V") is None
    assert gpu_specs.find("a800-80gb").usable_gib == pytest.approx(79.33, rel=0.01)  # published


def test_the_command_plans_settings_and_a_written_run(
    capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    rl = ReinforceConfig(
        task="toy",
        run_name="y",
        model=TINY,
        group_size=4,
        device_batch_size=3,
        rows=2,
        row_tokens=64,
    )
    assert (
        "samples 12 rows at a time, 1 batches"
        in launcher.write(rl, Machines(gpu="a800-80gb")).verdict
    )
    small = (
        "--model.depth 3 --model.n-embd 64 --model.n-head 2 --device-batch-size 3 --group-size 4"
    )
    assert cli.main(f"plan rl {small} --rows 2 --row-tokens 64 --gpus 1 --gpu l4-24gb".split()) == 0
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in ("fits: ", "weights", "activations", "reserve", "peak per GPU", "batches of")
    )
    fake_measure(monkeypatch)
    assert (
        cli.main(["plan", "sft", "--preset", "8b", "--device-batch-size", "1", "--price", "2"]) == 0
    )
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in ("weights", "tokens per second", "cost", "room for --device-batch-size 12")
    )
    assert cli.main(["plan", "--preset", "8b", "--device-batch-size", "13"]) == 1
    assert "set --device-batch-size 12" in capsys.readouterr().out
    assert cli.main(["plan", "--gpu", "nothing"]) == 2
    assert "a100-40gb" in capsys.readouterr().err
    written = launcher.write(SFTConfig(run_name="x"), Machines(nproc=2, gpu="a800-80gb"))
    assert written.verdict.startswith("fits: ")
    assert "2 x a800-80gb" in str(written)
    assert (
        "none for expert"
        in launcher.write(ExpertConfig(task="toy", run_name="z"), Machines(gpu="a800-80gb")).verdict
    )
    with pytest.raises(ConfigError):
        planner.from_settings(ExpertConfig(task="toy"), gpus=1, gpu="a800-80gb")
    assert planner.from_settings(PretrainConfig(), gpus=1, gpu="a800-80gb").loop == "pretrain"
