"""What only one loop does, one's own data, and preferences. What all do is in test_contracts;
losses by hand are in tests/codechat/rl/test_losses."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import contracts
import jsonl
import pandas as pd
import pytest
import torch
from contracts import (
    PAIRS,
    SINGLES,
    TINY,
    assert_same_runs,
    curve,
    small,
    train,
    weights,
    write_corpus,
    write_rows,
)
from raising import raising
from random_models import randomise
from shapes import preset

from codechat import cli, grpo, sft, tasks
from codechat.core import config, registry
from codechat.core.config import parse
from codechat.core.errors import ConfigError, DataError, RunError
from codechat.evaluation import held_out
from codechat.models import generate, loading
from codechat.models.config import GPTConfig
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import advantages, rollout
from codechat.rl.rollout import RolloutBatch
from codechat.runs import checkpoint, paths, run
from codechat.tasks import base, toy
from codechat.tasks.custom import RowsTask
from codechat.text import chat, tokenizer, tool_lists
from codechat.training import preferences, trends
from codechat.training.rl_settings import TOY_RUN
from codechat_lab.serve import parsing, protocol, terminal
from codechat_lab.serve.settings import ToolsConfig
from codechat_lab.tasks import natural
from codechat_lab.tasks.toolbox import prepare
from codechat_lab.tasks.toolbox.catalogue import TOOLS

STEP_TOKENS = 8 * 8 * 1024  # of eight ranks with 8 rows each


def dialled(words: str, ranks: int = 1) -> Any:
    """The settings of a pretraining by these words."""
    return registry.LOOPS["pretrain"].parse(words.split(), ranks)


def test_depth_12_is_nanochats_rule_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    weights = 12 * 12 * 768**2 + 50304 * 768
    expected = replace(
        dialled("--preset d12"),
        grad_accum=2**19 // STEP_TOKENS,
        max_steps=round(12 * weights / 2**19),
    )
    assert dialled("--depth 12", ranks=8) == expected
    assert "depth 12: width 768" in capsys.readouterr().err


def test_depth_32_is_nanochats_rule_by_hand() -> None:
    d32 = dialled("--depth 32 --device-batch-size 4")
    assert d32.lr == 3e-3 * (2048 / 768) ** -0.5
    assert d32.model.n_embd == 2048
    assert d32.grad_accum * 4 * 2048 == 2**20


def test_named_sizes_are_points_of_the_rule() -> None:
    assert dialled("--depth 20").model == preset("d20")
    assert dialled("--depth 4").model == GPTConfig()


def test_widths_are_multiples_of_a_head() -> None:
    odd = dialled("--depth 13").model
    assert odd.n_embd == 896
    assert odd.head_dim == 128


def test_ranks_change_the_accumulation_only() -> None:
    eight = dialled("--depth 12", ranks=8)
    assert replace(dialled("--depth 12"), grad_accum=eight.grad_accum) == eight


def test_what_is_set_beside_a_depth_wins() -> None:
    given = dialled("--depth 12 --lr 1 --grad-accum 3 --model.mlp-width 768", ranks=8)
    weights = 12 * 6 * 768**2 + 50304 * 768
    assert given.lr == 1
    assert given.model.mlp_width == 768
    assert given.max_steps == round(12 * weights / (3 * STEP_TOKENS))


def test_a_plan_follows_the_same_rule() -> None:
    d12 = dialled("--depth 12", ranks=8)
    plan = registry.find("plan", registry.COMMANDS).parse("--depth 12 --gpus 8".split())
    assert (plan.model, plan.grad_accum, plan.max_steps) == (
        d12.model,
        d12.grad_accum,
        d12.max_steps,
    )


@pytest.mark.parametrize("words", ["--depth 0", "--depth big", "--depth 12 --preset d12"])
def test_a_depth_that_cannot_be_is_refused(words: str) -> None:
    with raising(ConfigError, words, "no --preset beside"):
        dialled(words)


def test_the_vocabulary_of_a_dialled_pretraining_is_that_of_its_corpus(home: Path) -> None:
    words = (
        f"--depth 1 --data-dir {write_corpus(home)} --max-steps 2 --grad-accum 1 --no-compile "
        "--run-name dial"
    )
    assert cli.main(["pretrain", *words.split()]) == 0
    found = run.Run.open("dial").config
    assert found["model"]["vocab_size"] == 257
    assert found["model"]["n_embd"] == 64
    assert found["max_steps"] == 2


def test_a_loss_that_rises_three_times_is_named_and_interrupts_nothing(
    home: Path, monkeypatch: Any, capsys: Any
) -> None:
    rising = iter(range(1, 100))

    def measured(*_: object) -> dict[str, float]:
        at = next(rising)
        if at == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return {"heldout_loss/code": float(at)}

    monkeypatch.setattr(held_out, "held_out_losses", measured)
    found = train(small("sft", home, max_steps=50))
    assert "heldout_loss/code rose" in capsys.readouterr().err
    assert found.status["status"] == "stopped"
    assert "heldout_loss" not in found.status["reason"]


RISING = {
    "step": range(4),
    "heldout_loss/code": (1.0, 1.1, 1.2, 1.3),
    "heldout_loss/calls": (1.3, 1.2, 1.1, 1.0),
}


def test_the_loss_that_rose_three_times_is_named() -> None:
    (line,) = trends.warnings(pd.DataFrame(RISING))
    assert line.split()[0] == "heldout_loss/code"


def test_a_loss_that_rose_twice_or_fell_between_is_not_named() -> None:
    assert not trends.warnings(pd.DataFrame(RISING)[:3])
    assert not trends.warnings(pd.DataFrame(RISING | {"heldout_loss/code": (1.0, 1.1, 1.05, 1.2)}))


@pytest.mark.parametrize(
    "paid_and_right, n_warnings",
    [
        ([(0.1, 0.3), (0.2, 0.4), (0.4, 0.1)], 1),
        ([(0.1, 0.3), (0.4, 0.25)], 0),
        ([(0.15, 0.3), (0.2, 0.1)], 0),
        ([(0.4, 0.3), (0.1, 0.1)], 0),
    ],
    ids=str,
)
def test_a_reward_that_rises_while_fewer_answers_are_right_is_named(
    paid_and_right: list[tuple[float, float]], n_warnings: int
) -> None:
    """Where both have left their intervals."""
    names = ["reward_mean", "pass@1"]
    rows = pd.DataFrame(paid_and_right, columns=names).assign(step=range(len(paid_and_right)))
    for name in names:
        rows[f"{name}/lo"] = rows[name] - 0.05
        rows[f"{name}/hi"] = rows[name] + 0.05
    assert len(trends.warnings(rows)) == n_warnings


def test_a_row_of_sft_has_room_for_its_longest_conversation(home: Path) -> None:
    found = train(small("sft", home, max_steps=1, model=replace(TINY, block_size=512)))
    assert found.config["seq_len"] == 128


PROGRAM = (
    "import sys, pathlib; from codechat import cli; from codechat.runs import paths; "
    "paths.ROOT = pathlib.Path(sys.argv.pop(1)); sys.exit(cli.main(sys.argv[1:]))"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_killed_process_continues_where_its_checkpoint_is(
    number: signal.Signals, home: Path
) -> None:
    """The real command, killed for real; then the real command with --resume gives the same
    weights as an uninterrupted run."""
    flags = (
        "--model.depth 2 --model.n-embd 32 --model.n-head 2 --model.block-size 64 --seq-len 32 "
        "--device-batch-size 4 --max-steps 600 --eval-every 0 --eval-tokens 512 --save-every 20 "
        "--log-every 1 --no-compile --run-name"
    )
    words = [
        sys.executable,
        "-c",
        PROGRAM,
        str(home),
        "pretrain",
        "--data-dir",
        write_corpus(home),
        *flags.split(),
    ]
    process = subprocess.Popen(
        [*words, "killed"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.time() + 600
    while (
        not (paths.exists("killed") and run.Run.open("killed").checkpoints())
        and time.time() < deadline
    ):
        time.sleep(0.02)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=600)
    state = run.Run.open("killed").status["status"]
    assert state == ("killed" if number == signal.SIGKILL else "stopped"), err.decode()[-2000:]
    assert process.returncode != 0
    for more in (["killed", "--resume"], ["whole"]):
        done = subprocess.run([*words, *more], capture_output=True, timeout=900)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert_same_runs(run.Run.open("killed"), run.Run.open("whole"))


KILLED_IN_THE_LAST_EVALUATION = """
import os, signal
from codechat.training.session import Session
evaluate = Session._evaluate
def die(session):
    if session.step == session.max_steps:
        os.kill(os.getpid(), signal.SIGKILL)
    evaluate(session)
Session._evaluate = die
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["pretrain", "sft", "preference", "grpo", "chars"])
def test_kill_9_during_the_last_evaluation_loses_no_step(loop: str, home: Path) -> None:
    """In a process of its own, killed for real. The kernel frees the lock of the run, so
    --resume takes it over."""
    cfg = small(loop, home, run_name="killed", save_every=0)
    whole = train(replace(cfg, run_name="whole"))
    (home / "killed.json").write_text(json.dumps(config.plain(cfg)))
    words = [str(home), loop.replace("_", "-"), "--config", str(home / "killed.json")]
    first = subprocess.run(
        [sys.executable, "-c", KILLED_IN_THE_LAST_EVALUATION + PROGRAM, *words], capture_output=True
    )
    assert first.returncode == -signal.SIGKILL, first.stderr.decode()[-2000:]
    assert run.Run.open("killed").status["status"] == "killed"
    assert run.Run.open("killed").checkpoints() == [4]
    assert_same_runs(train(replace(cfg, resume=True)), whole)


def test_reinforce_logs_the_behaviour_probes_beside_its_scores(home: Path) -> None:
    flags = (
        "--max-examples 8 --problems 6 --copies 0 --eval-examples 4 --probes "
        "2 --mix.unfitting 0 --mix.no-tools 0 --mix.small-talk 0"
    )
    jsonl.prepare("calls", home / "calls", *flags.split())
    calls = {
        "model.depth": 1,
        "model.n_embd": 16,
        "model.n_head": 1,
        "model.block_size": 512,
        "task": "funcall",
        "data_dir": str(home / "calls"),
        "max_steps": 1,
        "group_size": 2,
        "device_batch_size": 2,
        "max_new_tokens": 4,
    }
    plain = train(small("reinforce", home, calls, run_name="plain")).evals()
    probed = train(small("reinforce", home, calls, run_name="probed", probe_examples=2)).evals()
    assert not [c for c in plain if c.startswith("probe/")]
    assert list(probed["probe/code_with_tools/n"]) == [2]
    assert probed["reward_mean"].equals(plain["reward_mean"])


@pytest.mark.parametrize("loop, more", [("reinforce", {}), ("ppo", dict(kl_coef=0.05))])
def test_prompts_that_fill_the_block_leave_empty_completions_and_go_on(
    loop: str, more: dict[str, Any], home: Path
) -> None:
    first = toy.ToyTask().prompt(toy.ToyTask().problems("train")[0])
    full = len(chat.prompt(first, tokenizer.load("bytes"), "reserved"))
    rows = train(small(loop, home, more | {"model.block_size": full}, max_steps=2)).metrics()
    assert len(rows) == 2
    assert (rows["completion_tokens_mean"] == 0).all()


def varied_but_wrong(self: toy.ToyTask, problem: toy.Problem, text: str) -> toy.Score:
    """Rewards that differ in nearly every group, of answers of which none is right."""
    return toy.Score(len(set(text)) / 20, "some", {}, False)


@pytest.mark.parametrize(
    "loop, more, cause, remedy",
    [
        (
            "grpo",
            dict(mask_truncated=True, max_new_tokens=4),
            "--mask-truncated",
            "--max-new-tokens",
        ),
        ("expert_iteration", dict(keep="correct"), "--keep correct", "--keep best"),
    ],
    ids=["grpo", "expert_iteration"],
)
def test_steps_that_learn_nothing_are_reported_and_end_the_run(
    loop: str,
    more: dict[str, Any],
    cause: str,
    remedy: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rewards differ, but no completion that may be learned from has an advantage:
    everything is cut off, or wrong."""
    monkeypatch.setattr(toy.ToyTask, "score", varied_but_wrong)
    found = train(
        small(loop, home, more, max_steps=30, dead_patience=5, eval_every=0, save_every=0)
    )
    rows = found.metrics()
    assert (rows["grad_norm"] == 0).all()
    assert (rows["frac_zero_std_groups"] < 0.5).all()
    assert rows["dead_steps"].tolist() == [1, 2, 3, 4, 5]
    assert found.status["status"] == "stopped"
    for word in ("DEAD", "5 steps in a row", "nothing was learned", cause, remedy):
        assert word in found.status["reason"]
    said = [line for line in capsys.readouterr().err.splitlines() if "learned nothing" in line]
    assert len(said) == 1
    assert "step 1 " in said[0]
    assert cause in said[0]


def test_rl_says_before_the_first_step_that_no_sample_is_right(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toy.ToyTask.score

    def score(self: toy.ToyTask, problem: toy.Problem, text: str) -> toy.Score:
        if text == self.gold(problem):
            return real(self, problem, text)
        return varied_but_wrong(self, problem, text)

    monkeypatch.setattr(toy.ToyTask, "score", score)
    train(small("grpo", home, diagnose_groups=8, max_steps=1, eval_every=0, save_every=0))
    assert "diagnose says PARTIAL on toy: live on partial credit only" in capsys.readouterr().out


def test_everything_cut_off_under_mask_truncated_is_refused_before_the_first_step(
    home: Path,
) -> None:
    cut = small("grpo", home, mask_truncated=True, max_new_tokens=4, diagnose_groups=8)
    with raising(
        RunError, "DEAD", "cut off", "--max-new-tokens 4", "--mask-truncated", "--allow-dead"
    ):
        train(cut)
    assert not paths.exists("grpo")
    assert train(replace(cut, mask_truncated=False, max_steps=1)).status["status"] == "finished"


def test_ppo_pays_the_last_token_of_each_completion_and_none_where_it_is_empty(home: Path) -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    lengths = (1, 0, 3, 4)
    said = [Completion([0] * n, [-1.0] * n, "stop" if n else "context") for n in lengths]
    scores = [base.Score(r, "", {}, False) for r in rewards.flatten().tolist()]
    batch = RolloutBatch(toy.ToyTask().problems("train")[:2], [[1], [1]], said, [""] * 4, scores, 2)
    found = advantages.token_rewards(small("ppo", home), batch, batch.logprobs(), None)
    assert found.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0.25]]


def test_kept_completions_by_hand() -> None:
    class Batch:
        rewards = torch.tensor([[0.2, 0.9, 0.9], [0.5, 0.5, 0.5], [1.0, 0.0, 0.3]])
        correct = rewards == 1

    best = advantages.kept_completions(Batch, "best")  # type: ignore[arg-type]
    assert best.tolist() == [[False, True, True], [False] * 3, [True, False, False]]
    assert advantages.kept_completions(Batch, "correct").sum() == 1  # type: ignore[arg-type]


def distance(a: run.Run, b: run.Run) -> float:
    """Mean absolute difference of the weights. Not the largest: Adam makes a whole step of a
    gradient that is rounding only."""
    one = weights(a)
    other = weights(b)
    return float(torch.cat([(one[n] - other[n]).abs().flatten() for n in one]).mean())


def three_steps(loop: str, home: Path, name: str, more: dict[str, Any]) -> run.Run:
    cfg = small(
        loop,
        home,
        more,
        run_name=name,
        max_steps=3,
        save_every=0,
        device_batch_size=8,
        group_size=32,
        lr=4e-3,
    )
    return train(cfg)


def assert_same_path(one: run.Run, two: run.Run) -> None:
    assert curve(one, "reward_mean") == curve(two, "reward_mean")
    norms = one.metrics()["grad_norm"].tolist()
    others = two.metrics()["grad_norm"].tolist()
    assert norms == pytest.approx(others, rel=1e-4)
    assert distance(one, two) < 1e-6


# one update per batch keeps the ratio at 1
OF_REINFORCE = dict(loss_aggregation="token", minibatches=1, baseline="mean")


def test_with_reinforces_baseline_and_aggregation_grpo_walks_its_path(home: Path) -> None:
    plain = three_steps("reinforce", home, "plain", dict(baseline="mean"))
    ours = three_steps("grpo", home, "ours", OF_REINFORCE)
    assert_same_path(plain, ours)
    assert ours.metrics()["clip_frac"].max() == 0
    assert ours.metrics()["ratio_max"].max() == pytest.approx(1, abs=1e-4)


def test_with_another_baseline_grpo_walks_another_path(home: Path) -> None:
    plain = three_steps("reinforce", home, "plain", dict(baseline="mean"))
    other = three_steps("grpo", home, "other", OF_REINFORCE | dict(baseline="zscore"))
    assert distance(plain, other) > 1e-4


STILL = dict(value_coef=0.0, inner_epochs=1, minibatches=1)  # the value stays at 0


def test_ppo_with_lambda_one_and_no_value_is_reinforce_without_a_baseline(home: Path) -> None:
    """Its advantage is the reward itself."""
    without = three_steps("reinforce", home, "without", dict(baseline="none"))
    monte_carlo = three_steps("ppo", home, "mc", STILL | dict(lam=1.0))
    assert_same_path(without, monte_carlo)
    first = monte_carlo.metrics().iloc[0]
    assert first["adv_abs_mean"] == pytest.approx(first["reward_mean"], rel=1e-5)
    assert first["explained_variance"] <= 0


def test_a_smaller_lambda_shortens_ppos_gradient(home: Path) -> None:
    monte_carlo = three_steps("ppo", home, "mc", STILL | dict(lam=1.0))
    short = three_steps("ppo", home, "short", STILL | dict(lam=0.5))
    longest = monte_carlo.metrics()["grad_norm"].iloc[0]
    assert short.metrics()["grad_norm"].iloc[0] < 0.9 * longest


def test_groups_without_variance_are_replaced_by_further_problems(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`upper` never has variance here: every group of it is exchanged, and the batch that is
    learned from has none."""
    score = toy.ToyTask.score
    pack = rollout.pack
    nothing = toy.Score(0.0, "none", {}, False)
    taken: list[RolloutBatch] = []

    def nothing_for_upper(self: toy.ToyTask, problem: toy.Problem, text: str) -> toy.Score:
        return nothing if problem.gold == "upper" else score(self, problem, text)

    def noted(batch: RolloutBatch, *args: Any, **others: Any) -> Any:
        taken.append(batch)
        return pack(batch, *args, **others)

    monkeypatch.setattr(toy.ToyTask, "score", nothing_for_upper)
    monkeypatch.setattr(rollout, "pack", noted)
    frame = train(
        small("grpo", home, device_batch_size=8, group_size=32, resample_rounds=8)
    ).metrics()
    assert frame["effective_groups"].tolist() == [8.0] * 4
    assert frame["frac_zero_std_groups"].tolist() == [0.0] * 4
    assert frame["resampled_groups"].min() >= 1
    assert taken
    assert all(p.gold != "upper" for batch in taken for p in batch.problems)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(home: Path) -> None:
    """Another student has."""
    train(small("distill", home, run_name="start", max_steps=1, lr=0.0))
    itself = train(small("distill", home, init_from="start", teacher="start", lr=0.0)).metrics()
    assert itself["teacher_kl"].abs().max() < 1e-5
    assert itself["grad_norm"].max() < 1e-5
    other = train(small("distill", home, run_name="other", seed=1)).metrics()
    assert other["teacher_kl"].min() > 0.01
    assert other["grad_norm"].min() > 0.01


def test_a_student_with_another_tokenizer_than_its_teacher_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        train(small("distill", home, run_name="refused", tokenizer="gpt2:400"))


# tokens of a prompt and its completion
LONGEST = 8 + max(
    len(chat.prompt(p.messages, tokenizer.load("bytes"), "reserved"))
    for p in toy.ToyTask().problems("train")
)


def save_teacher(name: str, block_size: int) -> None:
    meta = dict(tokenizer=tokenizer.load("bytes").to_dict(), tags="reserved", lineage=[])
    model = randomise(GPT(replace(TINY, block_size=block_size)))
    with run.Run.create(name, {}, kind="sft") as made:
        checkpoint.save(made.path, 0, model=model, meta=meta)


@pytest.mark.parametrize("samples", ["student", "teacher"])
def test_a_teacher_whose_block_is_too_short_is_refused_before_the_run(
    samples: str, home: Path
) -> None:
    """It would score positions that it has never seen."""
    save_teacher("short", LONGEST - 1)
    cfg = small("distill", home, teacher="short", samples=samples, max_new_tokens=8, max_steps=1)
    with raising(ConfigError, "teacher short", LONGEST - 1, LONGEST, "--max-new-tokens"):
        train(cfg)
    assert not paths.exists("distill")


@pytest.mark.parametrize("samples", ["student", "teacher"])
def test_a_teachers_block_that_holds_prompts_and_completions_is_enough(
    samples: str, home: Path
) -> None:
    """Though the student's is longer."""
    save_teacher("enough", LONGEST)
    cfg = small("distill", home, teacher="enough", samples=samples, max_new_tokens=8, max_steps=1)
    assert cfg.model.block_size > LONGEST
    assert train(cfg).status["status"] == "finished"


@pytest.mark.parametrize(
    "loop, more",
    [
        ("ppo", {}),
        ("expert_iteration", dict(keep="correct")),
        ("reinforce", dict(baseline="none")),
    ],
)
def test_one_completion_per_problem_is_enough_where_no_group_is_needed(
    loop: str, more: dict[str, Any], home: Path
) -> None:
    found = train(small(loop, home, more, group_size=1, max_steps=2))
    assert found.status["status"] == "finished"


# ---------------------------------------------------------------- training on one's own
# files and tasks
def test_fine_tuning_needs_no_probes_and_no_validation_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder = write_rows(
        home / "mine" / "calls.train.jsonl", [{"id": "1", "domain": "calls", "messages": messages}]
    )
    cfg = sft.SFTConfig(
        data_dir=folder,
        model=TINY,
        tokenizer="bytes",
        max_steps=2,
        device_batch_size=1,
        log_every=1,
        compile=False,
    )
    found = sft.train(cfg)
    assert found.status["status"] == "finished"
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no ")]
    assert [note.partition(":")[0] for note in notes] == ["no held-out loss", "no behaviour probes"]
    assert not [name for name in found.evals() if name.startswith(("heldout_loss/", "probe/"))]


TOOL = {
    "name": "get_time",
    "description": "Time of a city",
    "parameters": {"properties": {"city": {}}},
}


@pytest.fixture
def tuned(home: Path) -> None:
    """The runs `first`, of conversations with described tools, and `then`, of compact ones."""
    words = (
        "--tokenizer bytes --max-examples 4 --copies 0 --problems 4 --eval-examples 4 --probes 1"
    ).split()
    for style in ("described", "compact"):
        here = ["--out", str(home / style), "--tools-style", style]
        prepare.prepare_calls(parse(prepare.CallsConfig, [*words, *here]))
    first = sft.SFTConfig(
        data_dir=str(home / "described"),
        model=replace(TINY, block_size=2048, n_embd=16),
        run_name="first",
        tokenizer="bytes",
        max_steps=1,
        device_batch_size=1,
        compile=False,
        probe_examples=0,
        eval_examples=1,
    )
    sft.train(first)
    sft.train(replace(first, data_dir=str(home / "compact"), run_name="then", init_from="first"))


def test_a_checkpoint_lists_tools_as_its_conversations_did(home: Path, tuned: None) -> None:
    """In a server's prompts, in tasks and in the terminal; also after RL."""
    for name, style in (("first", "described"), ("then", "compact")):
        loaded = loading.load_model(name)
        assert loaded.tools_style == style
        offer = {"role": "system", "content": tool_lists.tools_prompt([TOOL], style)}
        request = {"role": "user", "content": "now"}
        ids = parsing.prompt_of([protocol.Message(**request)], [TOOL], loaded)
        assert ids == chat.prompt([offer, request], loaded.tokenizer, loaded.tags)
        task = natural.NaturalTask()
        task.tools_style = style
        asked = task.problems()[0]
        offered = tool_lists.tools_prompt([TOOLS[n].schema for n in asked.meta["tools"]], style)
        assert task.prompt(asked)[0]["content"] == offered
    first = loading.load_model("first")
    after_rl = [*first.meta["lineage"], {"kind": "grpo"}]
    assert replace(first, meta={"lineage": after_rl}).tools_style == "described"
    (home / "tools.json").write_text(json.dumps([TOOL]))
    cfg = ToolsConfig(ckpt="first", tools=(str(home / "tools.json"),), run=False)
    opening = terminal.ToolChat(cfg).opening()[0]["content"]
    assert opening == tool_lists.tools_prompt([TOOL], "described")


def share_of_a(completion, problem):
    return completion.count("a") / max(8, len(completion))


def length(completion, problem):
    return min(len(completion), 8) / 8


class Letters(RowsTask):
    rows = [{"prompt": f"p{i}", "gold": "aaaaaaaa"} for i in range(20)]
    rewards = {share_of_a: 1.0, length: 0.0}
    no_stop = True


def test_an_object_is_trained_on_and_its_unweighted_reward_is_logged(home: Path) -> None:
    letters = dict(
        model=GPTConfig(**TOY_RUN["model"]),
        max_steps=2,
        device_batch_size=2,
        group_size=16,
        task=Letters(),
        run_name="letters",
        allow_dead=True,
    )
    found = grpo.train(grpo.GRPOConfig(**TOY_RUN | letters))
    assert found.status["status"] == "finished"
    assert found.config["task"] == "letters"
    rows = found.metrics()
    assert list(rows["reward/share_of_a"]) == pytest.approx(list(rows["reward_mean"]))
    assert max(rows["reward/length"]) > max(rows["reward_mean"])
    tasks.TASKS.pop("letters")


# ---------------------------------------------------------------- preferences as data, and
# what only their loop does
def read(home: Path, rows: list[dict], block: int = 64) -> Any:
    folder = write_rows(home / "read" / "preferences.train.jsonl", rows)
    return preferences.read_preferences(folder, "train", tokenizer.load("bytes"), "reserved", block)


def test_kto_mismatches_take_the_next_prompts_completions(home: Path) -> None:
    batch = read(home, PAIRS)
    other = preferences.mismatched(batch, 64)
    shifted = batch.completions[2:] + batch.completions[:2]
    assert [c.ids for c in other.completions] == [c.ids for c in shifted]
    assert other.prompts == batch.prompts
    tight = preferences.mismatched(batch, len(batch.prompts[0]) + 1)
    assert all(len(c.ids) <= 1 for c in tight.completions)


@pytest.mark.parametrize(
    "prompts", ["aaabbbcccddd", "abababab", "abcabca", "aaaaaab", "baaaaaa", "aabbbbaa", "ab"]
)
def test_kto_mismatches_never_take_the_prompts_own_completions(prompts: str, home: Path) -> None:
    rows = [
        dict(prompt=x * 3, completion=f"answer {i} to {x}", label=i % 2 == 0)
        for i, x in enumerate(prompts)
    ]
    batch = read(home, rows)
    whose = {tuple(c.ids): p for c, p in zip(batch.completions, prompts, strict=True)}
    taken = [tuple(c.ids) for c in preferences.mismatched(batch, 64).completions]
    assert all(whose[ids] != p for ids, p in zip(taken, prompts, strict=True))
    if prompts == "aaabbbcccddd":
        assert len({*taken}) == len(prompts)


ONE_PROMPT = [row | dict(prompt="say") for row in SINGLES]


@pytest.mark.parametrize(
    "train_rows, held_out_rows",
    [(ONE_PROMPT, SINGLES), (SINGLES, ONE_PROMPT)],
    ids=["training rows", "held-out rows"],
)
def test_kto_needs_two_prompts(
    train_rows: list[dict[str, Any]], held_out_rows: list[dict[str, Any]], home: Path
) -> None:
    cfg = small("preference", home, loss="kto")
    write_rows(home / "pairs" / "preferences.train.jsonl", train_rows)
    write_rows(home / "pairs" / "preferences.select.jsonl", held_out_rows)
    with raising(DataError, "kto", "rows", "one prompt"):
        train(cfg)
    assert not paths.exists("preference")


def last_evaluation_of_kto(
    home: Path, name: str, batch_size: int = 4, held_out_rows: list[dict[str, Any]] = PAIRS
) -> Any:
    cfg = small(
        "preference",
        home,
        run_name=name,
        loss="kto",
        lr=1e-2,
        max_steps=2,
        eval_every=0,
        eval_examples=24,
        device_batch_size=batch_size,
        grad_accum=4 // batch_size,
    )
    write_rows(home / "pairs" / "preferences.select.jsonl", held_out_rows)
    return train(cfg).evals().iloc[-1]


def test_the_held_out_loss_of_kto_does_not_depend_on_the_batch_size(home: Path) -> None:
    one = last_evaluation_of_kto(home, "of-1", batch_size=1)["heldout_preference_loss"]
    four = last_evaluation_of_kto(home, "of-4", batch_size=4)["heldout_preference_loss"]
    assert one == pytest.approx(four, rel=1e-4)


def test_held_out_singles_are_averaged_as_the_same_pairs_are(home: Path) -> None:
    """Whatever form the training file has: each label's rewards over its own held-out
    completions."""
    pairs = last_evaluation_of_kto(home, "pairs", held_out_rows=PAIRS)
    singles = last_evaluation_of_kto(home, "singles", held_out_rows=SINGLES)
    for name in ("heldout_chosen_reward", "heldout_rejected_reward", "heldout_preference_margin"):
        assert pairs[name] == pytest.approx(singles[name], rel=1e-3)
        assert abs(pairs[name]) > 1e-4


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_rows_of_one_shape_learn_alike(
    loss: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose blocks are compiled: every pass, with gradients or without, has the
    shape that the longest pairs need."""
    passes = []
    own = GPT.token_logprobs

    def counted(model: GPT, ids: torch.Tensor, *args: Any, **others: Any) -> Any:
        passes.append(tuple(ids.shape))
        return own(model, ids, *args, **others)

    monkeypatch.setattr(GPT, "token_logprobs", counted)
    three = dict(loss=loss, max_steps=3, row_tokens=32, eval_every=0)
    plain = train(small("preference", home, three, run_name="plain"))
    assert len(set(passes)) > 1
    passes.clear()

    def one_shape(batch: RolloutBatch, row_tokens: int, rows: int, device: Any) -> dict[str, Any]:
        length = max(row_tokens, batch.longest_row)
        return dict(row_tokens=length, rows=rows, multiple=length, fixed=True)

    monkeypatch.setattr(rollout, "row_shapes", one_shape)
    fixed = train(small("preference", home, three, run_name="fixed"))
    contracts.assert_close_curves(plain, fixed, "preference_loss", "preference_margin", "grad_norm")
    assert len(set(passes)) == 1
    assert 1 < passes[0][0] <= 4
    assert len(passes) >= 6


LATENT = replace(
    TINY,
    attention="mla",
    qk_norm=False,
    n_kv_head=None,
    kv_rank=12,
    q_rank=10,
    rope_width=4,
)


def test_latent_attention_is_pretrained_and_sampled_with_its_cache_as_without(home: Path) -> None:
    """Greedy tokens are the likeliest ones of the full forward pass, and the last loss is below
    the first."""
    trained = train(small("pretrain", home, model=LATENT, max_steps=20, lr=3e-3, run_name="latent"))
    losses = trained.metrics()["train_loss"].dropna().tolist()
    assert losses[-1] < losses[0] - 0.5
    model = loading.load_model("latent").model
    prompt = [*b"the cat"]
    (answer,) = generate.sample(model, [prompt], max_new_tokens=12, temperature=0)
    whole = torch.tensor([prompt + answer.ids])
    with torch.no_grad():
        logits = model(whole)
    likeliest = logits[0, len(prompt) - 1 : -1, : model.cfg.n_ids].argmax(-1)
    assert likeliest.tolist() == answer.ids


def test_latent_attention_is_tuned_with_adapters(home: Path) -> None:
    cfg = small(
        "sft",
        home,
        model=LATENT,
        lora_rank=2,
        lora_targets=("qkv", "out"),
        run_name="latent",
        max_steps=3,
    )
    train(cfg)
    factors = checkpoint.load("latent").adapters
    assert {name.split(".")[3] for name in factors} == {"q_a", "q_b", "kv_a", "kv_b", "out"}
    assert loading.load_model("latent").model.cfg.attention == "mla"
