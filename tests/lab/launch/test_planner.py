"""Planning: what fake tensors predict is what real ranks hold; time and cost by hand; what
fits, and what to turn where it does not."""

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from shapes import preset

from codechat import cli
from codechat.core.errors import ConfigError
from codechat.data import corpus_writer
from codechat.distributed import gpu_specs
from codechat.expert_iteration import ExpertConfig
from codechat.models import lora
from codechat.models.config import GPTConfig
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

EIGHT_B = preset("8b")
TINY = GPTConfig(depth=3, n_embd=64, n_head=2, block_size=128, vocab_size=257)
# A step on one GPU.
ALONE = PlanConfig(
    model=TINY, gpus=1, device_batch_size=2, optimizer="adamw", shard=False, shard_over=1
)


def sharing(over: int, cfg: PlanConfig = ALONE, gpus: int | None = None) -> PlanConfig:
    """The step on GPUs of which `over` share a copy of the weights."""
    return replace(cfg, gpus=gpus or over, shard=over > 1, shard_over=over)


def total(cfg: PlanConfig, dtype: str = "bfloat16") -> int:
    """Bytes at the peak of a step as a CPU computes it."""
    return sum(measure(cfg, dtype=dtype, cpu=True).training.values())


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


def real_peak(make: Callable[[], GPT], cfg: PlanConfig) -> int:
    """Bytes at the peak of the second of two real steps on this process."""
    gc.collect()
    with Tape() as tape:
        model = make()
        optimizers = step_memory.optim.build(model, lr=1e-3)
        for _ in range(2):
            tape.peak = tape.now
            step_memory._loss(model, cfg, torch.float32).backward()
            step_memory.sharding.clip_gradients(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return tape.peak


def test_a_fake_step_equals_the_real_one_on_one_process() -> None:
    planned = total(ALONE, "float32")
    assert real_peak(lambda: GPT(TINY), ALONE) == planned


DEEP = replace(ALONE, model=replace(TINY, depth=12))
DEEP_PLANS = {
    "accumulating": (replace(DEEP, loop="sft", grad_accum=2, optimizer="muon"), "bfloat16"),
    "sharded": (
        sharing(2, replace(DEEP, device_batch_size=4, seq_len=64, optimizer="muon"), gpus=4),
        "float32",
    ),
    "recomputing": (
        sharing(
            2,
            replace(DEEP, model=replace(DEEP.model, recompute="blocks"), device_batch_size=4),
        ),
        "bfloat16",
    ),
    # the end of the backward pass holds most in a shallow model, its beginning in a deep one
    "8b": (
        sharing(
            8,
            replace(ALONE, model=replace(EIGHT_B, depth=10), seq_len=512, optimizer="muon"),
        ),
        "bfloat16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP_PLANS)
def test_a_deep_model_is_planned_from_two_shallow_ones(name: str) -> None:
    cfg, dtype = DEEP_PLANS[name]
    planned = measure(cfg, whole=False, dtype=dtype, cpu=True)
    whole = measure(cfg, whole=True, dtype=dtype, cpu=True)
    for few, all in zip(planned, whole, strict=True):
        assert sum(few.values()) == pytest.approx(sum(all.values()), rel=2e-3)


# trains and writes the peak of each step
REAL = Path(__file__).with_name("held_on_ranks.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "over, cfg",
    [
        (2, replace(ALONE, optimizer="muon")),
        (2, replace(ALONE, grad_accum=2)),
        (1, replace(ALONE, optimizer="muon")),
        (2, replace(ALONE, optimizer="muon", model=replace(TINY, recompute="blocks"))),
    ],
    ids=["sharded", "adamw-accumulating", "replicated", "recomputing"],
)
def test_pretraining_on_two_gloo_ranks_holds_what_is_planned(
    over: int, cfg: PlanConfig, tmp_path: Path
) -> None:
    texts = ["the quick brown fox jumps over the lazy dog. " * 400] * 3
    corpus_writer.write_corpus(texts, tmp_path / "corpus", tokenizer.load("bytes"))
    run = {
        "run_name": "real",
        "data_dir": str(tmp_path / "corpus"),
        "model": asdict(cfg.model),
        "optimizer": cfg.optimizer,
        "grad_accum": cfg.grad_accum,
        "max_steps": 5,
        "log_every": 1,
        "eval_every": 0,
        "save_every": 0,
        "compile": False,
        "eval_tokens": 64,
        "device_batch_size": 2,
        "shard": over > 1,
        "shard_over": over if over > 1 else None,
    }
    on_ranks(2, REAL, tmp_path, str(tmp_path), json.dumps(run), CODECHAT_DTYPE="bfloat16")
    # FSDP's threads may free a buffer later
    real = min(json.loads((tmp_path / "peaks.json").read_text())[1:])
    assert total(sharing(over, cfg, gpus=2)) == pytest.approx(real, rel=0.03)


ADAPTED = replace(ALONE, lora_rank=16, lora_targets=("qkv", "out"))


def test_a_fake_step_with_adapters_equals_the_real_one() -> None:
    planned = total(ADAPTED, "float32")
    assert real_peak(lambda: lora.attach(GPT(TINY), 16), ADAPTED) == planned


@pytest.mark.parametrize(
    "targets", [("qkv", "out"), ("up", "down"), ("qkv", "out", "gate", "up", "down")]
)
@pytest.mark.parametrize(
    "model",
    [TINY, replace(TINY, n_kv_head=1, mlp="swiglu"), replace(TINY, attention="mla")],
    ids=["tiny", "gated", "latent"],
)
def test_frozen_weights_have_neither_gradients_nor_moments(
    model: GPTConfig, targets: tuple[str, ...]
) -> None:
    """By hand: 2 bytes of each weight of a matrix and of the tied head, 4 of the others; of each
    adapter 4, two moments, and a gradient in the backward pass."""
    plan = replace(ALONE, model=model, loop="sft", lora_rank=8, lora_targets=targets)
    attached = lora.attach(GPT(model), 8, targets=targets)
    adapters = sum(p.numel() for p in attached.parameters() if p.requires_grad)
    assert plan.adapters == adapters
    held = measure(plan).training
    matrices = model.depth * model.block_matmul_params
    head = model.padded_vocab * model.n_embd
    assert held["weights"] == 4 * (model.n_params + adapters) - 2 * matrices + 2 * head
    assert held["optimizer states"] == pytest.approx(8 * adapters, rel=0.01)
    assert held["gradients"] in (0, 4 * adapters)
    full = measure(replace(plan, lora_rank=0)).training
    assert full["weights"] == 4 * model.n_params
    assert full["optimizer states"] == pytest.approx(8 * model.n_params, rel=0.01)
    assert sum(held.values()) < sum(full.values())


@pytest.fixture(scope="module")
def adapted_8b() -> planner.Plan:
    """Preset 8b with adapters on one H200."""
    cfg = PlanConfig(
        loop="sft",
        model=EIGHT_B,
        gpus=1,
        gpu="h200-141gb",
        device_batch_size=1,
        optimizer="adamw",
        lora_rank=16,
        lora_targets=("qkv", "out"),
    )
    return planner.make(cfg)


@pytest.fixture(scope="module")
def trained_8b(adapted_8b: planner.Plan) -> planner.Plan:
    """The same with all weights trained."""
    return planner.make(replace(adapted_8b.cfg, lora_rank=0))


@pytest.mark.slow
def test_8b_fits_one_h200_with_adapters_alone(
    adapted_8b: planner.Plan, trained_8b: planner.Plan
) -> None:
    assert adapted_8b.fits
    assert not trained_8b.fits
    assert "frozen, and 15,728,640 in LoRA adapters" in str(adapted_8b)


def gradients_and_states(plan: planner.Plan) -> int:
    held = plan.peaks.training
    return held["gradients"] + held["optimizer states"]


@pytest.mark.slow
def test_a_frozen_weight_takes_12_bytes_less(
    adapted_8b: planner.Plan, trained_8b: planner.Plan
) -> None:
    """92 GiB of gradients and moments."""
    saved = (gradients_and_states(trained_8b) - gradients_and_states(adapted_8b)) / GIB
    assert saved == pytest.approx(12 * EIGHT_B.n_params / GIB, rel=0.01)
    assert saved == pytest.approx(92.3, rel=0.01)


@pytest.mark.slow
def test_frozen_matrices_of_8b_take_2_bytes_a_weight(adapted_8b: planner.Plan) -> None:
    halved = EIGHT_B.depth * EIGHT_B.block_matmul_params
    # a head of its own is rounded, a tied one has a rounded copy
    head = EIGHT_B.padded_vocab * EIGHT_B.n_embd
    weights = 4 * EIGHT_B.n_params - 2 * halved + (2 if EIGHT_B.tied else -2) * head
    assert adapted_8b.memory["weights"] == pytest.approx(weights / GIB, rel=0.01)


@pytest.mark.slow
def test_frozen_weights_need_4_of_6_flops(
    adapted_8b: planner.Plan, trained_8b: planner.Plan
) -> None:
    """No gradients of their matrices."""
    assert 1.4 < adapted_8b.tokens_per_s / trained_8b.tokens_per_s < 1.6


def test_a_model_with_adapters_is_not_sharded() -> None:
    eight = PlanConfig(
        model=EIGHT_B, gpus=8, gpu="h200-141gb", lora_rank=16, lora_targets=("qkv", "out")
    )
    assert eight.over == 1
    assert replace(eight, lora_rank=0, gpu="a800-80gb").over == 8


def test_a_plan_that_shards_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match="set --no-shard"):
        replace(ADAPTED, gpus=2, shard=True, shard_over=None)


@pytest.mark.parametrize("targets", [("gate",), ()], ids=["absent", "none"])
def test_a_plan_of_adapters_of_no_matrix_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="required are matrices of this model"):
        replace(ADAPTED, lora_targets=targets)


def test_a_plan_with_adapters_that_does_not_fit_is_not_told_to_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_measure(monkeypatch)
    small = replace(BIG, gpu="l4-24gb", device_batch_size=4, shard=None)
    plan = planner.make(replace(small, lora_rank=16, lora_targets=("qkv", "out")))
    assert not plan.fits
    assert "--shard" not in plan.knobs


def test_a_written_run_with_adapters_is_planned_with_them() -> None:
    cfg = SFTConfig(
        run_name="x",
        model=replace(TINY, block_size=512),
        lora_rank=4,
        lora_targets=("up",),
    )
    planned = planner.from_settings(cfg, gpus=1, gpu="l4-24gb")
    assert planned.lora_rank == 4
    assert planned.lora_targets == ("up",)
    assert planned.adapters == 3 * 4 * (64 + 256)


@pytest.mark.parametrize("over", [1, 2, 4])
def test_sharding_divides_weights(over: int) -> None:
    plan = measure(sharing(over, gpus=4 if over > 1 else 1)).training
    assert plan["weights"] == 4 * TINY.n_params // over


def test_sharding_divides_optimizer_states_and_needs_less() -> None:
    alone = measure(ALONE).training
    shared = measure(sharing(4)).training
    assert 2 * shared["weights"] <= shared["optimizer states"] < 2.01 * shared["weights"]
    assert sum(shared.values()) < sum(alone.values())


FOUR_ROWS = replace(ALONE, device_batch_size=4)


def test_recomputed_blocks_need_less() -> None:
    recomputing = replace(FOUR_ROWS, model=replace(TINY, recompute="blocks"))
    assert total(recomputing) < 0.7 * total(FOUR_ROWS)


def test_shorter_and_fewer_rows_need_less() -> None:
    shorter = replace(FOUR_ROWS, seq_len=64)
    more = replace(FOUR_ROWS, device_batch_size=5)
    assert total(shorter) < total(FOUR_ROWS) < total(more)


def test_accumulated_gradients_need_no_less() -> None:
    assert total(replace(FOUR_ROWS, grad_accum=2)) >= total(FOUR_ROWS)


def test_packed_rows_of_sft_have_no_dense_mask() -> None:
    assert total(FOUR_ROWS) <= total(replace(FOUR_ROWS, loop="sft")) < 1.02 * total(FOUR_ROWS)


WIDE = PlanConfig(
    model=GPTConfig(depth=1, n_embd=64, n_head=1, vocab_size=50257, block_size=1024),
    gpus=1,
    device_batch_size=8,
    optimizer="adamw",
    shard=False,
    shard_over=1,
    loop="sft",
    gpu="l4-24gb",
)


def test_chunks_of_logits_follow_the_memory_of_the_gpu() -> None:
    """A GPU takes 1/64 of its memory for the logits of a chunk; a CPU 128 MiB."""
    small = measure(WIDE).total
    large = measure(replace(WIDE, gpu="a800-80gb")).total
    assert large - small > 0.5 * GIB  # chunks of 0.35 and 1.25 GiB


def test_kept_logits_follow_the_memory_of_the_gpu() -> None:
    """RL keeps all logits that fit into 1/16; a CPU 1 GiB."""
    rl = replace(WIDE, loop="rl", rows=8, row_tokens=1024)
    logits = rl.batch * rl.length * rl.model.padded_vocab * 4  # 1.5 GiB in float32
    on_gpu = measure(replace(rl, gpu="a800-80gb")).total
    # kept in bfloat16
    assert on_gpu - measure(rl, cpu=True).total > 0.4 * logits


def test_blocks_for_a_cpus_cache_need_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = step_memory._run(WIDE, "bfloat16", True)
    monkeypatch.setattr(head, "BLOCK_BYTES", 1)  # a row at a time
    assert step_memory._run(WIDE, "bfloat16", True) == held


def test_planning_leaves_no_process_group() -> None:
    measure(sharing(2))
    assert not torch.distributed.is_initialized()


FIXED_GIB = 20.0  # that all weights and states take in a fake step
BATCH_GIB = 5.0  # that a row takes


def fake_measure(monkeypatch: pytest.MonkeyPatch, batch_gib: float = BATCH_GIB) -> Counter:
    """Stand in for the step: bytes linear in the batch, less where blocks are recomputed,
    divided where weights are shared. Returns how often each plan was measured."""
    calls = Counter()

    def stand_in(cfg: PlanConfig) -> Peaks:
        calls[cfg] += 1
        rows = cfg.batch * cfg.length / 2048
        kept = 0.1 if cfg.model.recompute == "blocks" else 1
        training = {
            "weights": int(FIXED_GIB * GIB / cfg.over),
            "activations": int(rows * kept * batch_gib * GIB),
        }
        return Peaks(training, {"weights": 5})

    monkeypatch.setattr(planner.step_memory, "measure", stand_in)
    return calls


BIG = PlanConfig(
    model=EIGHT_B,
    device_batch_size=1,
    max_steps=30000,
    grad_accum=8,
    mfu=0.479,
)


def test_the_time_is_that_of_the_published_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """8b on 8 A800: 131,072 tokens a step, 3.93 billion in 48.9 hours at 22.3 thousand tokens
    per second (published)."""
    fake_measure(monkeypatch)
    plan = planner.make(BIG)
    assert BIG.tokens_per_step == 131072
    assert BIG.over == 8
    assert plan.tokens_per_s == pytest.approx(22_300, rel=0.01)
    assert plan.hours == pytest.approx(48.9, rel=0.01)
    assert plan.gpu_hours == 8 * plan.hours


def test_the_cost_is_told_where_there_is_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measure(monkeypatch)
    plan = planner.make(replace(BIG, price=1.5))
    assert f"cost {1.5 * plan.gpu_hours:,.0f}" in plan.verdict
    assert "cost" not in planner.make(BIG).verdict


def test_the_usual_share_of_flops_is_the_lower_of_the_published_runs() -> None:
    two_b = preset("2b")
    of_8b = 22_300 / 8 * BIG.model.flops_per_token(2048) / 312e12
    of_2b = 7_900 * two_b.flops_per_token(2048) / 312e12
    assert planner.MFU <= min(of_8b, of_2b) < planner.MFU + 0.01


@pytest.mark.parametrize(
    "gpu, share",
    [("a800-80gb", 0.45), ("h100-80gb", 0.36), ("h200-141gb", 0.36), ("l4-24gb", 0.45)],
)
def test_a_gpu_has_its_usual_share_of_flops_unless_another_is_given(gpu: str, share: float) -> None:
    assert replace(BIG, mfu=None, gpu=gpu).share == share
    assert replace(BIG, mfu=0.5, gpu=gpu).share == 0.5


@pytest.mark.parametrize("batch", [1, 40])
def test_the_largest_microbatch_is_found_in_a_few_steps(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_measure(monkeypatch)
    plan = planner.make(replace(BIG, device_batch_size=batch), search=True)
    rows = [FIXED_GIB / 8 + n * BATCH_GIB for n in range(1, 100)]
    truth = sum(planner.gib_with_reserve(gib * GIB) <= plan.cfg.room_gib for gib in rows)
    assert plan.largest_batch == truth == 12
    assert plan.fits == (batch <= truth)
    assert len(calls) <= 10


def test_a_share_of_the_memory_stays_free() -> None:
    """On 80 GB, 79.2 usable: 92 % of it, less what gathers ahead of use hold."""
    # the next block twice in bf16, gradients in float32
    buffers = (2 * 2 + 4) * BIG.model.block_matmul_params / GIB
    assert BIG.buffers_gib == buffers == pytest.approx(1.5)
    assert BIG.room_gib == pytest.approx(0.92 * 79.2 - buffers)
    assert replace(BIG, gpus=1, shard=False).buffers_gib == 0


def test_a_step_that_needs_the_free_share_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row adds 5 GiB, of which 5 % fragments."""
    fake_measure(monkeypatch)
    plan = planner.make(replace(BIG, device_batch_size=13))
    assert plan.cfg.room_gib < plan.total_gib < plan.cfg.usable_gib
    assert not plan.fits
    assert planner.make(replace(BIG, device_batch_size=12)).fits


@pytest.fixture(scope="module")
def rl_plan() -> planner.Plan:
    """RL of 2b on one H200."""
    cfg = PlanConfig(
        loop="rl",
        model=replace(preset("2b"), recompute="blocks"),
        gpus=1,
        gpu="h200-141gb",
        optimizer="adamw",
        device_batch_size=64,
        group_size=16,
        max_new_tokens=512,
        rows=4,
        row_tokens=1024,
    )
    return planner.make(cfg)


def test_while_rl_samples_weights_and_states_stay_and_a_copy_of_matrices_comes(
    rl_plan: planner.Plan,
) -> None:
    weights = rl_plan.cfg.model.n_params / GIB
    phase = rl_plan.sampling
    assert phase.held == pytest.approx(12 * weights, rel=0.01)
    assert phase.copy == pytest.approx(2 * weights, rel=0.01)  # in bf16


def test_rows_that_rl_samples_fill_what_is_left(rl_plan: planner.Plan) -> None:
    phase = rl_plan.sampling
    assert phase.needed == 1024
    assert phase.rows < 1024
    assert phase.batches == -(-1024 // phase.rows)
    assert phase.held + phase.copy + phase.kept < 0.95 * rl_plan.cfg.usable_gib
    longer = replace(rl_plan, cfg=replace(rl_plan.cfg, max_new_tokens=1024))
    assert longer.sampling.rows < phase.rows


def test_a_plan_of_rl_tells_how_many_rows_are_sampled_at_a_time(rl_plan: planner.Plan) -> None:
    assert rl_plan.fits
    assert f"samples {rl_plan.sampling.rows:,} rows at a time" in rl_plan.verdict
    assert "keys and values" in str(rl_plan)


def test_rl_whose_sampling_does_not_fit_does_not_fit(rl_plan: planner.Plan) -> None:
    small = replace(rl_plan, cfg=replace(rl_plan.cfg, gpu="a100-40gb"))
    assert not small.fits
    assert "does not fit" in small.verdict


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


SMALL = replace(BIG, gpu="l4-24gb", device_batch_size=4)


@pytest.mark.parametrize(
    "cfg, batch_gib, largest, advice",
    [
        (SMALL, 5.0, 2, "set --device-batch-size 2 --grad-accum 16 ("),
        (SMALL, 30.0, 0, "set --model.recompute blocks ("),
        (replace(SMALL, device_batch_size=1), 3000.0, 0, "no single setting"),
        (replace(SMALL, device_batch_size=1, shard=False), 5.0, 0, "set --shard ("),
    ],
    ids=["batch", "recompute", "none", "shard"],
)
def test_where_it_does_not_fit_a_setting_that_helps_is_named(
    cfg: PlanConfig,
    batch_gib: float,
    largest: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_measure(monkeypatch, batch_gib)
    plan = planner.make(cfg)
    assert not plan.fits
    assert plan.largest_batch == largest
    assert advice in plan.verdict
    assert all(f"{flags} " in str(plan) for flags in plan.knobs)


def test_a_replica_stays_where_it_fits() -> None:
    d12 = PlanConfig(model=preset("d12"))
    assert d12.over == 1
    assert replace(d12, shard=True).over == 8


def test_weights_are_shared_within_a_node_of_eight() -> None:
    assert replace(BIG, gpus=1, shard=True).over == 1
    assert replace(BIG, gpus=16).over == 8


@pytest.mark.parametrize(
    "impossible",
    [
        lambda: replace(BIG, gpu="a900"),
        lambda: replace(BIG, gpus=0),
        lambda: replace(BIG, gpus=12, shard=True),
        lambda: replace(BIG, seq_len=4096),
    ],
    ids=["gpu", "no gpus", "shares", "longer rows"],
)
def test_an_impossible_plan_is_rejected(impossible: Callable[[], PlanConfig]) -> None:
    with pytest.raises(ConfigError):
        impossible()


@pytest.mark.parametrize("name", gpu_specs.GPUS)
def test_every_gpu_has_a_source_and_its_memory_in_its_name(name: str) -> None:
    gpu = gpu_specs.GPUS[name]
    assert gpu.source
    assert gpu.bf16_flops > 1e14
    assert name.endswith(f"-{gpu.memory_gib:g}gb")


@pytest.mark.parametrize(
    "device, tflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
    ],
)
def test_a_device_has_the_stated_peak_of_its_name(device: str, tflops: int) -> None:
    assert gpu_specs.stated_peak(device) == tflops * 1e12


def test_a_device_that_is_not_known_has_no_stated_peak() -> None:
    assert gpu_specs.stated_peak("NVIDIA TITAN V") is None


def test_the_usable_memory_of_an_a800_is_the_published_one() -> None:
    assert gpu_specs.find("a800-80gb").usable_gib == pytest.approx(79.33, rel=0.01)


def plan(words: str) -> int:
    return cli.main(["plan", *words.split()])


def test_the_command_plans_rl_with_both_phases(capsys: pytest.CaptureFixture) -> None:
    model = "--model.depth 3 --model.n-embd 64 --model.n-head 2"
    batch = "--device-batch-size 3 --group-size 4 --rows 2 --row-tokens 64"
    assert plan(f"rl {model} {batch} --gpus 1 --gpu l4-24gb") == 0
    text = capsys.readouterr().out
    for word in ("fits: ", "weights", "activations", "reserve", "peak per GPU", "batches of"):
        assert word in text


def test_the_command_tells_speed_cost_and_room(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_measure(monkeypatch)
    assert plan("sft --preset 8b --device-batch-size 1 --price 2") == 0
    text = capsys.readouterr().out
    for word in ("weights", "tokens per second", "cost", "room for --device-batch-size 12"):
        assert word in text


def test_the_command_ends_with_1_where_the_plan_does_not_fit(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_measure(monkeypatch)
    assert plan("--preset 8b --device-batch-size 13") == 1
    assert "set --device-batch-size 12" in capsys.readouterr().out


def test_the_command_names_the_gpus_that_it_knows(capsys: pytest.CaptureFixture) -> None:
    assert plan("--gpu nothing") == 2
    assert "a100-40gb" in capsys.readouterr().err


A800 = Machines(gpu="a800-80gb")


def test_a_written_run_has_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measure(monkeypatch)
    written = launcher.write(SFTConfig(run_name="x"), Machines(nproc=2, gpu="a800-80gb"))
    assert written.verdict.startswith("fits: ")
    assert "2 x a800-80gb" in str(written)


def test_a_written_run_of_rl_has_its_batches_of_samples() -> None:
    cfg = ReinforceConfig(
        task="toy",
        run_name="y",
        model=TINY,
        group_size=4,
        device_batch_size=3,
        rows=2,
        row_tokens=64,
    )
    assert "samples 12 rows at a time, 1 batches" in launcher.write(cfg, A800).verdict


def test_a_loop_that_cannot_be_planned_says_so() -> None:
    cfg = ExpertConfig(task="toy", run_name="z")
    assert "none for expert" in launcher.write(cfg, A800).verdict
    with pytest.raises(ConfigError):
        planner.from_settings(cfg, gpus=1, gpu="a800-80gb")


def test_pretraining_is_planned_from_its_settings() -> None:
    assert planner.from_settings(PretrainConfig(), gpus=1, gpu="a800-80gb").loop == "pretrain"
