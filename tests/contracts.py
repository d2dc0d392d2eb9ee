"""What every loop keeps, whatever it learns: killed and resumed it ends as if nobody had
stopped it, two ranks learn what one does, and a task without signal is rejected. Each loop's
tests call these with settings of their own and add what only that loop does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonl
import pandas as pd
import pytest
import torch
from raising import raising
from random_models import randomise
from ranks import train_on_ranks

from codechat.core import config, registry
from codechat.core.errors import RunError
from codechat.data import corpus_writer
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths, run
from codechat.tasks import toy
from codechat.text import tokenizer
from codechat.training.session import Session
from codechat_lab.launch import recipes, runner

# what another process measures differently
TIMED = {"time", "mfu"} | {
    name for name, unit in run.METRICS.items() if unit in ("s", "tokens/s", "MB")
}


TINY = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257)
PAIRS = [
    {"prompt": f"say {i % 3}", "chosen": "yes" * (1 + i % 2), "rejected": "no" * (1 + i % 3)}
    for i in range(12)
]
SIDES = ("chosen", "rejected")
SINGLES = [
    dict(prompt=row["prompt"], completion=row[side], label=side == "chosen")
    for row in PAIRS
    for side in SIDES
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """The folder of a jsonl file."""
    path.parent.mkdir(exist_ok=True)
    return str(jsonl.write(path, rows).parent)


def write_corpus(home: Path) -> str:
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(120)]
    if not (home / "corpus").exists():
        corpus_writer.write_corpus(texts, home / "corpus", tokenizer.load("bytes"))
    return str(home / "corpus")


def write_conversations(home: Path) -> str:
    def row(domain: str, i: int) -> dict[str, Any]:
        answer = str(i % 7) * (1 + i % 5)
        talk = [
            dict(role="user", content=f"{domain} {i % 7}"),
            dict(role="assistant", content=answer),
        ]
        return dict(id=f"{domain}{i}", domain=domain, meta={}, messages=talk)

    for domain in ("calls", "code"):
        for split, n in (("train", 60), ("select", 7)):  # seven do not divide over ranks
            write_rows(
                home / "dialogues" / f"{domain}.{split}.jsonl", [row(domain, i) for i in range(n)]
            )
    return str(home / "dialogues")


def write_pairs(home: Path) -> str:
    write_rows(home / "pairs" / "preferences.select.jsonl", PAIRS)
    return write_rows(home / "pairs" / "preferences.train.jsonl", PAIRS)


def write_teacher() -> Path:
    """A checkpoint of a random model, as a teacher of the toy task's policies."""
    if not paths.exists("teacher"):
        meta = dict(tokenizer=tokenizer.load("bytes").to_dict(), tags="reserved", lineage=[])
        with run.Run.create("teacher", {}, kind="sft") as started:
            checkpoint.save(started.path, 0, model=randomise(GPT(TINY)), meta=meta)
    return paths.runs_dir() / "teacher"


def small(loop: str, home: Path, case: Mapping[str, Any] | None = None, /, **changes: Any) -> Any:
    """Settings of four short steps of a loop, with a checkpoint after each two. case: changes
    from a table of cases, before those that stand in the call."""
    entry = registry.LOOPS[loop]
    how: dict[str, Any] = dict(
        run_name=loop, max_steps=4, save_every=2, device_batch_size=4, warmup_steps=1
    )
    if loop == "pretrain":
        how |= dict(data_dir=write_corpus(home), model=TINY, seq_len=32, eval_tokens=2048)
    elif loop == "sft":
        how |= dict(
            data_dir=write_conversations(home), model=TINY, tokenizer="bytes", probe_examples=0
        )
    elif loop == "chars":
        (home / "verse").write_text("the cat sat on the mat and the dog ran to the door\n" * 40)
        how |= dict(source=str(home / "verse"), horizon=8)
        how |= {"model.depth": 1, "model.n_embd": 16, "model.n_head": 2, "model.block_size": 16}
        how |= dict(
            group_size=4, max_tokens=8 * 4 * 4, feed="text", kl_coef=0.01, log_every=1, samples=2
        )
        del how["max_steps"]
    elif loop == "preference":
        how |= dict(data_dir=write_pairs(home), task=None)
    else:
        how |= dict(diagnose_groups=0, group_size=8)
    if loop == "distill":
        how |= dict(teacher=str(write_teacher()))
    if loop in ("pretrain", "sft"):
        how |= dict(log_every=1, eval_every=2, compile=False)
    preset = "toy" if "toy" in entry.presets else None
    return config.resolve(
        entry.config_class,
        preset,
        overrides=how | dict(case or {}) | changes,
        presets=entry.presets,
    )


def train(cfg: Any) -> run.Run:
    loop = registry.entry_of(cfg)
    return loop.load(loop.function)(cfg)


def curve(found: run.Run, *columns: str) -> list[tuple[float, ...]]:
    frame = found.metrics().sort_values("step")
    return list(frame[["step", *columns]].itertuples(index=False, name=None))


def weights(found: run.Run) -> dict[str, torch.Tensor]:
    return checkpoint.load(found.path).model_state


def assert_same_weights(a: run.Run, b: run.Run) -> None:
    one = weights(a)
    other = weights(b)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_close_curves(
    a: run.Run,
    b: run.Run,
    *columns: str,
    rel: float = 2e-3,
    abs: float = 2e-5,
) -> None:
    """Another order of summation, and what AdamW makes of it: it divides by gradients that may
    be near 0."""
    for one, other in zip(curve(a, *columns), curve(b, *columns), strict=True):
        assert one == pytest.approx(other, rel=rel, abs=abs), a.name


class Killed(Exception):
    pass


@contextmanager
def killed_after(step: int | None = None) -> Iterator[None]:
    """The block must die as soon as the checkpoint of `step`, or any, is saved; it may still be
    on its way to the disk."""
    saved = checkpoint.save

    def save_then_die(path: Path, at: int, **what: Any) -> None:
        saved(path, at, **what)
        if step in (None, at):
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "save", save_then_die)
        yield


@contextmanager
def failing_in(method: str, step: int) -> Iterator[None]:
    """The block must end in an error that is raised where a session's method begins at `step`."""
    own = getattr(Session, method)

    def fail(session: Session) -> None:
        if session.step == step:
            raise Killed
        own(session)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Session, method, fail)
        yield


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of steps, without times and what is derived from them."""
    return (
        frame.drop(columns=TIMED & set(frame))
        .sort_values("step", kind="stable")
        .reset_index(drop=True)
    )


def assert_same_runs(a: run.Run, b: run.Run) -> None:
    for one, other in ((a.metrics(), b.metrics()), (a.evals(), b.evals())):
        pd.testing.assert_frame_equal(
            untimed(one), untimed(other), check_exact=True, check_like=True
        )
    assert_same_weights(a, b)


def resume_contract(cfg: Any, step: int) -> None:
    """The runs `whole`, and `cut`: killed after its checkpoint of `step` and resumed as by a
    recipe. Same weights, metrics and evaluations, bit by bit."""
    whole = train(replace(cfg, run_name="whole"))
    cut = replace(cfg, run_name="cut")
    with killed_after(step):
        train(cut)
    before = run.Run.open("cut").metrics().query("step <= @step")
    resumed = train(
        runner._resume_or_replace(
            recipes.Bound(None, "cut", cut, train, ""), again=False, overwrite=False
        )
    )
    assert before["step"].max() == step < whole.metrics()["step"].max()
    after = resumed.metrics().query("step <= @step")
    assert after["time"].tolist() == before["time"].tolist(), (
        "steps before the checkpoint are not trained again"
    )
    assert_same_runs(resumed, whole)


def train_one_and_two(home: Path, *cfgs: Any) -> list[tuple[run.Run, run.Run]]:
    """Runs of each configuration: of one process, and of two gloo ranks with half its batch
    each, NAME and NAME-two."""
    halves = [
        replace(c, run_name=f"{c.run_name}-two", device_batch_size=c.device_batch_size // 2)
        for c in cfgs
    ]
    train_on_ranks(2, home, *halves)
    return [(train(one), run.Run.open(two.run_name)) for one, two in zip(cfgs, halves)]


def all_or_nothing(self: toy.ToyTask, problem: toy.Problem, text: str) -> toy.Score:
    """A reward of the toy task that an untrained policy never earns."""
    right = text == self.gold(problem)
    return toy.Score(float(right), "all" if right else "none", {}, right)


def dead_task_contract(cfg: Any) -> run.Run:
    """The toy task without signal is rejected before anything is written; with --allow-dead the
    run ends after
    --dead-patience steps."""
    cfg = replace(cfg, diagnose_groups=8, dead_patience=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.ToyTask, "score", all_or_nothing)
        with raising(RunError, "DEAD", "--allow-dead"):
            train(cfg)
        assert not paths.exists(cfg.run_name)
        found = train(replace(cfg, allow_dead=True))
    assert found.status["status"] == "stopped"
    assert "DEAD" in found.status["reason"]
    assert len(found.metrics()) == 5
    return found
