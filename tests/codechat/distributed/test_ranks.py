"""One process and N ranks compute the same: whole and sharded weights, every loop, sampling,
evaluation, in the same global batch."""

import hashlib
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import small, train
from raising import Bomb, raising
from ranks import on_ranks, train_on_ranks, written

from codechat.core import config, registry
from codechat.core.errors import CheckpointError, ConfigError, RunError
from codechat.distributed import dist, sharding
from codechat.evaluation import evaluate
from codechat.formats import exchange, hf_format
from codechat.models import loading, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths, run
from codechat.tasks import toy

TINY = GPTConfig(
    depth=2,
    n_embd=40,
    n_head=2,
    block_size=64,
    vocab_size=257,
    mlp="swiglu",
    qk_norm=True,
)


def configs(home: Path, batch: int, **changes: object) -> dict[str, object]:
    """A configuration of each loop whose global batch is `batch` rows or problems."""
    how = dict(device_batch_size=batch, warmup_steps=2, eval_every=2) | changes
    more = {
        "pretrain": dict(model=TINY),
        "sft": dict(model=TINY),
        "reinforce": dict(group_size=4, eval_examples=5),
    }
    return {loop: small(loop, home, how | own) for loop, own in more.items()}


LOSS = ("train_loss", "grad_norm")
COLUMNS = {"pretrain": LOSS, "sft": LOSS, "reinforce": ("reward_mean", "grad_norm")}


def losses(name: str, *columns: str) -> list[list[float]]:
    frame = run.Run.open(name).metrics().sort_values("step")
    return frame[list(columns)].values.tolist()


def numbers(name: str) -> list[list[float]]:
    return run.Run.open(name).evals().drop(columns="time").select_dtypes("number").values.tolist()


def assert_same_curves(
    one: str, many: str, *columns: str, steps: int = 4, norm: float = 1e-5
) -> None:
    """Losses, the gradient's norm (rounding, through the steps of Muon) and evaluations."""
    rows = losses(one, *columns)
    assert len(rows) == steps
    for a, b in zip(rows, losses(many, *columns), strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6, abs=1e-6), many
        assert a[1] == pytest.approx(b[1], rel=norm, abs=1e-7), many
    assert numbers(one) == [pytest.approx(row, abs=1e-6) for row in numbers(many)]


# With what each of them does among ranks: a reference model, resampling, old log-probabilities
# of the trainer, minibatches, KTO's mean.
DAPO = dict(variant="dapo", kl_coef=0.05, old_logprobs="trainer", minibatches=2, diagnose_groups=0)
OTHER_LOOPS = {
    "grpo": (DAPO, "policy_loss"),
    "expert_iteration": (dict(minibatches=2, inner_epochs=2, diagnose_groups=0), "train_loss"),
    "ppo": (dict(kl_coef=0.05, grad_clip=0.05, diagnose_groups=0), "policy_loss"),
    "preference": (dict(loss="kto", sample_groups=16), "preference_loss"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_loops_learn_on_shards_what_one_process_does(home: Path) -> None:
    ones = {}
    twos = []
    for kind, (more, _) in OTHER_LOOPS.items():
        entry = registry.LOOPS[kind]
        how = dict(run_name=f"{kind}-one", max_steps=3, eval_every=2, save_every=2)
        ones[kind] = config.resolve(
            entry.config_class, "toy", overrides=how | more, presets=entry.presets
        )
        half = ones[kind].device_batch_size // 2
        twos.append(replace(ones[kind], run_name=f"{kind}-two", device_batch_size=half, shard=True))
    train_on_ranks(2, home, *twos)
    for kind, (_, loss) in OTHER_LOOPS.items():
        train(ones[kind])
        assert_same_curves(f"{kind}-one", f"{kind}-two", loss, "grad_norm", steps=3)
        assert checkpoint.read_meta(f"{kind}-two")["sharded"]
    # PPO's value head and its optimizer lie beside the shards of the policy
    rewound("ppo-two", "ppo-back", 2)
    train(replace(ones["ppo"], run_name="ppo-back", resume=True))
    assert losses("ppo-back", "value_loss")[2] == pytest.approx(
        losses("ppo-one", "value_loss")[2], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_latent_attention_learns_on_shards_what_one_process_does(home: Path) -> None:
    latent = GPTConfig(
        depth=2,
        n_embd=40,
        n_head=2,
        block_size=64,
        vocab_size=257,
        attention="mla",
        q_rank=12,
    )
    one, two = (replace(configs(home, batch)["pretrain"], model=latent) for batch in (8, 4))
    train_on_ranks(2, home, replace(two, run_name="latent-two", shard=True))
    train(replace(one, run_name="latent-one"))
    assert_same_curves("latent-one", "latent-two", *LOSS)


def rewound(source: str, name: str, step: int) -> None:
    """A copy of a run as it was when its checkpoint `step` was the last."""
    old = paths.runs_dir() / source
    new = paths.runs_dir() / name
    shutil.copytree(old, new)
    for other in paths.checkpoint_paths(new):
        if other > step:
            shutil.rmtree(new / "checkpoints" / f"step_{other:06d}")
    (new / "checkpoints" / "latest").write_text(f"step_{step:06d}\n")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_continues_on_any_number_of_ranks_whole_or_sharded(
    home: Path, tmp_path: Path
) -> None:
    """Saved by one process, by 2 shards; continued by one, by 2 shards, by a 2 x 2 hybrid: the
    curve of the run that was never cut, Muon on the block matrices included."""
    for kind, cfg in configs(home, 8, keep_last=0).items():
        train(replace(cfg, run_name=f"{kind}-one"))
    two = {kind: replace(cfg, shard=True) for kind, cfg in configs(home, 4, keep_last=0).items()}
    train_on_ranks(2, home, *[replace(cfg, run_name=f"{kind}-two") for kind, cfg in two.items()])
    for kind in COLUMNS:
        for source, name in (("two", "two-one"), ("two", "two-four"), ("one", "one-two")):
            rewound(f"{kind}-{source}", f"{kind}-{name}", 2)
    train_on_ranks(
        2,
        home,
        *[replace(cfg, run_name=f"{kind}-one-two", resume=True) for kind, cfg in two.items()],
    )
    four = {
        kind: replace(cfg, shard=True, shard_over=2)
        for kind, cfg in configs(home, 2, keep_last=0).items()
    }
    train_on_ranks(
        4,
        home,
        *[replace(cfg, run_name=f"{kind}-two-four", resume=True) for kind, cfg in four.items()],
    )
    for kind, cfg in configs(home, 8, keep_last=0).items():
        train(replace(cfg, run_name=f"{kind}-two-one", resume=True))
        for name in ("two", "two-one", "two-four", "one-two"):
            assert_same_curves(f"{kind}-one", f"{kind}-{name}", *COLUMNS[kind])
    with pytest.raises(RunError, match="device_batch_size x grad_accum x ranks 8 -> 4"):
        train(replace(two["sft"], run_name="sft-two", resume=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_checkpoint_is_read_whole_exported_and_verified(
    home: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (
        replace(configs(home, batch)["pretrain"], max_steps=2, eval_every=0) for batch in (8, 4)
    )
    train(replace(one, run_name="pretrain-one"))
    train_on_ranks(2, home, replace(two, shard=True, run_name="pretrain-two"))
    path = paths.find_checkpoint("pretrain-two")
    assert {p.name for p in (path / "shards").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    ours, theirs = (loading.load_model(f"pretrain-{n}").model.state_dict() for n in ("one", "two"))
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=2e-5), name
    exchange.export(
        exchange.ExportConfig(ckpt="pretrain-two", out=tmp_path / "hf", dtype="float32")
    )
    exported = hf_format.read_weights(tmp_path / "hf")
    assert torch.equal(exported["model.embed_tokens.weight"], theirs["wte.weight"])
    with pytest.raises(CheckpointError, match="blocks.0.attn.k_norm.weight"):
        checkpoint.restore(checkpoint.load(path), GPT(replace(TINY, qk_norm=False)))
    model = GPT(TINY)
    with pytest.raises(CheckpointError, match="no optimizer states.*--init-from"):
        checkpoint.restore_optimizers(checkpoint.load(path), model, optim.build(model, lr=1.0))

    # damage
    shard = path / "shards" / "__1_0.distcp"
    raw = shard.read_bytes()
    for damage in (
        shard.unlink,
        lambda: shard.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]),
    ):
        damage()
        with pytest.raises(CheckpointError, match="__1_0.distcp"):
            checkpoint.load(path)
    shard.write_bytes(raw)
    table = pickle.dumps(Bomb())
    (path / "shards" / ".metadata").write_bytes(table)
    meta = json.loads((path / "meta.json").read_text())
    meta["files"]["shards/.metadata"] = {
        "bytes": len(table),
        "sha256": hashlib.sha256(table).hexdigest(),
    }
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="metadata.*posix.mkdir"):
        checkpoint.load(path)
    assert not Path("exploded").exists()


EVALUATE = """
import pathlib, sys
from codechat.evaluation import evaluate
from codechat.core import config
from codechat.runs import paths
paths.ROOT = pathlib.Path(sys.argv[1])
evaluate.run_evaluation(config.resolve(evaluate.EvaluateConfig, file=sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evaluation_on_ranks_is_that_of_one_process(home: Path) -> None:
    """Five problems on two ranks: the same completions, so the same counts, intervals and
    samples, in the same order."""
    train(replace(configs(home, 4)["reinforce"], run_name="policy", max_steps=1, eval_every=0))
    cfg = evaluate.EvaluateConfig(
        ckpt=("policy",),
        task="toy",
        limit=5,
        n=3,
        ks=(1, 3),
        max_new_tokens=toy.COMPLETION_LENGTH,
        run_name="one",
    )
    evaluate.run_evaluation(cfg)
    out = on_ranks(2, EVALUATE, home, str(home), written(home, replace(cfg, run_name="two")))
    assert out.count("on toy test") == 1, "one rank speaks"
    one = run.Run.open("one")
    two = run.Run.open("two")
    assert one.evals().drop(columns="time").equals(two.evals().drop(columns="time"))
    assert (one.path / "per_problem.jsonl").read_text() == (
        two.path / "per_problem.jsonl"
    ).read_text()
    samples = [
        [{k: v for k, v in row.items() if k != "time"} for row in found.samples()]
        for found in (one, two)
    ]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 15


def test_where_a_model_is_sharded_and_over_which_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    built = sharding.build(lambda: GPT(TINY), seed=5)
    plain = GPT(TINY, seed=5)
    assert not sharding.is_sharded(built), "one process never shards"
    assert all(
        torch.equal(a, b) for a, b in zip(built.parameters(), plain.parameters(), strict=True)
    )
    need = sharding.BYTES_PER_WEIGHT * TINY.n_params / sharding.SHARE_FOR_WEIGHTS
    assert sharding.fits(TINY.n_params, need)
    assert not sharding.fits(TINY.n_params, need - 1)
    # no gradients and moments beside adapters
    frozen = (4 * TINY.n_params + 18 * 1000) / sharding.SHARE_FOR_WEIGHTS
    assert sharding.fits(TINY.n_params, frozen + 1, 1000)
    assert not sharding.fits(TINY.n_params, frozen - 1, 1000)
    monkeypatch.setattr(dist, "world_size", lambda: 6)
    for over in (4, 12):
        with raising(ConfigError, over, 6, "--shard-over"):
            sharding.mesh(over)
