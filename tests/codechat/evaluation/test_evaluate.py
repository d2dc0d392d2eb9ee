"""Scores that can be believed: unbiased pass@k, intervals, paired differences, choosing a
checkpoint."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import contracts
import numpy as np
import pytest
import torch
from contracts import write_rows
from imported import both
from raising import raising
from shapes import toy as toy_shape

from codechat import tasks
from codechat.core import registry
from codechat.core.atomic_files import read_json, read_rows, write_json
from codechat.core.config import parse
from codechat.core.errors import ConfigError, DataError, EngineLost, RunError, UserError
from codechat.core.registry import COMMANDS
from codechat.data import conversations
from codechat.evaluation import evaluate, held_out, results, scoring
from codechat.models import generate, loading
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.tasks.base import Problem, Score
from codechat.tasks.toy import COMPLETION_LENGTH, ToyTask
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat_lab.serve.call_grammar import prompt_grammar
from codechat_lab.tasks.funcall import NAMED
from codechat_lab.tasks.toolbox import catalogue, forms, problems

Policy = tuple[GPT, tokenizer.Tokenizer]
FEW = ["--max-new-tokens", "8", "--limit", "8"]
TOY = ["--task", "toy", "--n", "4", "--ks", "1", "4", *FEW]


@pytest.fixture(scope="module")
def policy() -> Policy:
    tok = tokenizer.load("bytes")
    return GPT(toy_shape(tok.n_vocab), seed=0), tok


def toy_result(policy: Policy, count: int = 8, seed: int = 5) -> results.TaskResult:
    task = tasks.load("toy")
    return scoring.evaluate_task(
        *policy,
        "reserved",
        task,
        task.problems("select", limit=count),
        n=4,
        ks=(1, 4),
        max_new_tokens=COMPLETION_LENGTH,
        seed=seed,
    )


def test_evaluation_counts_what_the_task_scores(policy: Policy) -> None:
    whole = toy_result(policy)
    assert (whole.N, whole.n, whole.tiers.total()) == (8, 4, 32)
    row = whole.row()
    assert sum(row[f"tier/{t}"] for t in whole.task.tiers) == pytest.approx(1)
    # all 32 are kept
    assert row["reward_mean"] == pytest.approx(np.mean([s["reward"] for s in whole.samples]))
    assert row["reward_mean/lo"] < row["reward_mean"] < row["reward_mean/hi"]


def test_no_pass_at_k_is_printed_without_its_settings(policy: Policy) -> None:
    for part in ("pass@1 = ", "pass@4 = ", "n=4", "N=8", "temperature=1"):
        assert part in str(toy_result(policy))


def test_draws_depend_on_the_seed_but_not_on_the_other_problems_or_the_batch(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = toy_result(policy)
    assert toy_result(policy, seed=6).counts != whole.counts
    monkeypatch.setattr(scoring, "CHUNK_ROWS", 3)
    assert toy_result(policy, count=2).counts == whole.counts[:2]


def test_no_problems_are_no_evaluation(policy: Policy) -> None:
    with pytest.raises(DataError, match="toy"):
        toy_result(policy, count=0)


def test_completions_are_counted_by_group_and_class(policy: Policy) -> None:
    requests = problems.draw("test", 8, shares={"call": 1, "unfitting": 1})
    result = scoring.evaluate_task(
        *policy,
        "reserved",
        tasks.load("funcall"),
        requests,
        n=2,
        max_new_tokens=8,
    )
    shares = result.class_shares()
    row = result.row()
    assert list(shares) == ["call", "unfitting"]
    assert list(shares["call"]) == list(NAMED)
    for name in shares:
        mine = [e for e in result.examples if f"-{name}-" in e["problem"]]
        assert len(mine) == 8
        assert sum(shares[name].values()) == pytest.approx(1)
        for c in NAMED:
            assert (
                shares[name][c]
                == sum(e["parts"]["named"] == c for e in mine) / 8
                == row[f"{name}/named_{c}"]
            )
    assert len(result.report("x").splitlines()) == 6


def test_groups_without_classes_print_none(policy: Policy) -> None:
    several = list(forms.draw_problems("test", 0, {"at_once": 2}))
    one = problems.draw("test", 2, shares={"call": 1})
    result = scoring.evaluate_task(
        *policy,
        "reserved",
        tasks.load("funcall"),
        [*one, *several],
        n=1,
        max_new_tokens=8,
    )
    assert list(result.class_shares()) == ["call"]
    lines = result.report("x").splitlines()
    assert [line for line in lines if "no_call" in line] == [
        line for line in lines if "stratum call" in line
    ]


@pytest.mark.parametrize("texts, few", [(["No."] * 9, True), (["No."] * 10, False)])
def test_an_interval_over_few_problems_is_said_to_say_little(texts: list[str], few: bool) -> None:
    assert ("few problems" in native_result(texts).report("x")) is few


class Echo:
    """An environment that pays for any answer, silence included."""

    def reset(self, problem: Problem, seed: int) -> list[dict[str, str]]:
        return problem.messages

    def step(self, message: Any) -> tuple[list[Any], float, bool]:
        return [], 1.0, True

    def state_diff(self) -> list[Any]:
        return []

    def score(self) -> Score:
        return Score(1.0, "full", {}, True)


class Episodes(ToyTask):
    tiers = ("none", "full")
    max_turns = 2
    environment = Echo
    no_stop = True


def native_result(texts: list[str]) -> results.TaskResult:
    """Of a model whose own chat template lists tools, one answer for each problem."""
    template = (
        Path(__file__).parents[3] / "tests/codechat/text/templates/tools_hermes.jinja"
    ).read_text()
    tok, _ = both("bytes", template, eos_token="<|im_end|>")
    task = ToyTask()
    some = task.problems("select", limit=len(texts))

    def collect(*_: Any, keys: list[str], **how: Any) -> rollout.RolloutBatch:
        answers = [
            generate.Completion(
                [*tok.encode_inside(text), *chat.layout(tok, "native").stop], [], "stop"
            )
            for text in texts
        ]
        return rollout.judged(
            task, rollout.RolloutBatch(some, [[]] * len(some), answers, texts, [], 1)
        )

    return scoring.evaluate_task(None, tok, "native", task, some, n=1, collect=collect)


def test_a_server_is_asked_few_problems_between_two_writes() -> None:
    task = ToyTask()
    some = task.problems("select", limit=130)
    asked = []
    kept: list[int] = []

    def collect(_: Any, task: Any, problems: list[Any], *__: Any, **how: Any) -> Any:
        count = len(problems)
        asked.append(count)
        answers = [generate.Completion([1], [], "stop")] * count
        texts = ["a"] * count
        prompts = [[]] * count
        batch = rollout.RolloutBatch(problems, prompts, answers, texts, [], 1)
        return rollout.judged(task, batch)

    def keep(rows: Any) -> None:
        kept.append(len(rows))

    scoring.evaluate_task(
        None,
        None,
        None,
        task,
        some,
        n=1,
        collect=collect,
        keep=keep,
    )
    assert asked == [64, 64, 2]
    assert kept == asked


CALL = '{"name": "f", "arguments": {}}'


def test_an_evaluation_counts_how_calls_are_written() -> None:
    texts = [f"```json\n{CALL}\n```", f"<tool_call>\n{CALL}\n</tool_call>", "No.", f"[{CALL}]"]
    result = native_result([*texts, texts[0]])
    row = result.row()
    shares = {name: share for name, share in row.items() if name.startswith("surface/")}
    assert shares == {
        "surface/fenced": 0.4,
        "surface/tagged": 0.2,
        "surface/none": 0.2,
        "surface/bare_list": 0.2,
    }
    assert "calls were written: fenced 2, tagged 1, none 1, bare list 1" in result.report("x")
    assert [e["surface"] for e in result.examples][:2] == ["fenced", "tagged"]


def test_without_a_call_nothing_is_said_about_how_calls_are_written() -> None:
    result = native_result(["No.", "print(1)"])
    assert "calls were written" not in result.report("x")
    assert not [name for name in result.row() if name.startswith("surface")]


def test_calls_in_our_own_form_are_not_counted(policy: Policy) -> None:
    assert not toy_result(policy).surfaces


def test_an_episode_whose_prompt_fills_the_block_fails(policy: Policy) -> None:
    gold = tasks.load("toy").problems("test", 1)[0].gold
    block = policy[0].cfg.block_size
    problems = [
        Problem(str(n), [{"role": "user", "content": "x" * n}], gold, "test")
        for n in (1, 2 * block)
    ]
    result = scoring.evaluate_task(*policy, "reserved", Episodes(), problems, n=2)
    assert [(p["c"], p["reward_mean"]) for p in result.counts] == [(2, 1.0), (0, 0.0)]
    assert [e["tokens"] > 0 for e in result.examples] == [True, True, False, False]
    assert [len(e["turns"]) for e in result.examples] == [1] * 4


def test_probes_need_the_package_that_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "INSTRUMENTS", {})
    assert held_out.read_probes(tmp_path, "select", 2) is None, "there are none"
    write_rows(tmp_path / "probes.select.jsonl", [{"asked": "code"}])
    with pytest.raises(ConfigError, match="set --probe-examples 0"):
        held_out.read_probes(tmp_path, "select", 2)


def test_command_writes_a_row_for_each_checkpoint_and_split(
    toy_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    COMMANDS["evaluate"].run(
        [*TOY, "--ckpt", "toy@1", "toy", "--split", "select", "test", "--run-name", "scores"]
    )
    run = Run.open("scores")
    rows = run.evals()
    cells = [("toy@1", "select"), ("toy@1", "test"), ("toy@2", "select"), ("toy@2", "test")]
    assert list(zip(rows["checkpoint"], rows["split"])) == cells
    assert set(rows["n_samples"]) == {4}
    assert set(rows["n_problems"]) == {8}
    assert set(rows["temperature"]) == {1.0}
    per_problem = results.read_per_problem(run)
    keys = ("checkpoint", "split", "sampling", "id", "n", "c", "reward_mean", "tiers")
    assert len(per_problem) == 32
    assert {tuple(r) for r in per_problem} == {keys}
    assert run.status["status"] == "finished"
    assert len(run.status["summary"]) == 2
    out = capsys.readouterr().out
    assert "n=4, N=8, temperature=1" in out
    assert "toy@2 minus toy@1 on test" in out


def test_an_evaluation_is_repeated_under_a_name_of_its_own(
    toy_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        COMMANDS["evaluate"].run([*TOY, "--ckpt", "toy@1"])
    lines = capsys.readouterr().out.splitlines()
    ends = [line for line in lines if line.startswith("the results lie in")]
    names = ("evaluate", "evaluate-2", "evaluate-3")
    assert ends == [f"the results lie in {paths.runs_dir() / name}" for name in names]
    assert [Run.open(name).config["run_name"] for name in names] == list(names)
    with raising(RunError, "set --run-name evaluate-3-2"):
        COMMANDS["evaluate"].run([*TOY, "--ckpt", "toy@1", "--run-name", "evaluate-3"])


def test_other_temperatures_a_given_call_tag_and_masks_have_rows_of_their_own(toy_run: Run) -> None:
    words = [
        "--ckpt",
        "toy@1",
        "toy@2",
        "--temperatures",
        "0",
        "0.5",
        "--forced-call",
        "true",
        "--run-name",
        "ways",
    ]
    COMMANDS["evaluate"].run([*TOY, *words, "--constrain", "true"])
    run = Run.open("ways")
    free = ["T=1", "greedy", "T=0.5"]
    ways = [*free, "T=1, call given", *(f"{way}, constrained" for way in free)]
    rows = run.evals()
    assert list(zip(rows["checkpoint"], rows["sampling"])) == [
        (c, w) for c in ("toy@1", "toy@2") for w in ways
    ]
    assert list(rows["temperature"][:4]) == [1, 0, 0.5, 1]
    assert list(rows["n_samples"][:4]) == [4, 1, 4, 4]
    assert set(run.status["summary"]) == {
        f"test{w}: toy@2 - toy@1" for w in ("", *(f", {way}" for way in ways[1:]))
    }
    greedy = ["--task", "toy", *FEW, "--temperature", "0", "--n", "1", "--ks", "1"]
    COMMANDS["evaluate"].run([*greedy, "--ckpt", "toy@1", "--run-name", "greedy"])
    alone = [r["c"] for r in results.read_per_problem(Run.open("greedy"))]
    ours = [
        r
        for r in results.read_per_problem(run)
        if (r["checkpoint"], r["sampling"]) == ("toy@1", "greedy")
    ]
    assert [r["c"] for r in ours] == alone
    for example in read_rows(run.path / "examples.jsonl"):
        if example["sampling"] in ("T=1", "T=1, call given"):
            assert example["completion"].startswith("<functioncall>") == (
                "given" in example["sampling"]
            )


class Calls(ToyTask):
    """Offers functions; a completion is correct where its calls can be read and one is offered."""

    name = "calls"

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        kit = [catalogue.TOOLS[name].schema for name in ("square", "days_between")]
        return [
            {"role": "system", "content": tool_lists.tools_prompt(kit, "described")},
            *super().prompt(problem),
        ]

    def score(self, problem: Problem, completion: str) -> Score:
        calls = tool_calls.parse_calls(completion)
        right = all(c.form == "object" and c.name in ("square", "days_between") for c in calls)
        return Score(float(right), self.tiers[-1 if right else 0], {}, right)


def test_constrained_calls_are_readable() -> None:
    """A random model that is given the call tag often: free, its calls are noise; constrained,
    each is readable."""
    tok = tokenizer.load("bytes")
    model = GPT(
        GPTConfig(depth=1, n_embd=32, n_head=2, block_size=512, vocab_size=tok.n_vocab), seed=0
    )
    with torch.no_grad():
        model.wte.weight[chat.layout(tok, "reserved").call] *= 60  # of a tied head
    problems = Calls().problems("test", limit=4)
    sampled = partial(
        scoring.evaluate_task,
        model,
        tok,
        "reserved",
        n=3,
        ks=(1,),
        max_new_tokens=120,
        seed=0,
    )
    free, held = (
        sampled(Calls(), problems, constrain=constrain) for constrain in (None, prompt_grammar)
    )
    tagged = [
        sum(tool_calls.CALL_TAG in e["completion"] for e in result.examples)
        for result in (free, held)
    ]
    assert min(tagged) > 0
    assert free.pass_at[1].value < held.pass_at[1].value == 1.0
    with pytest.raises(ConfigError, match="constrain"):
        sampled(Episodes(), problems, constrain=prompt_grammar)


def test_all_checkpoints_chooses_and_writes_best(toy_run: Run) -> None:
    COMMANDS["evaluate"].run(
        [*TOY, "--ckpt", "toy", "--split", "select", "--all-checkpoints", "--run-name", "choice"]
    )
    run = Run.open("choice")
    rows = run.evals()
    assert list(rows["checkpoint"]) == ["toy@1", "toy@2"]
    best = rows.sort_values(["pass@1", "pass@4", "step"], ascending=[False, False, True])[
        "step"
    ].iloc[0]
    assert (
        checkpoint.load("toy@best").step
        == best
        == int(run.status["summary"]["best"].rpartition("@")[2])
    )


@pytest.mark.parametrize(
    "passes, chosen",
    [
        (((0.3, 0.9), (0.4, 0.5), (0.4, 0.6)), 2),  # pass@1, then pass@8
        (((0.4, 0.6), (0.4, 0.6)), 0),
    ],
)
def test_the_best_checkpoint_has_the_largest_pass_at_1_then_k_then_is_the_earlier(
    passes: tuple[tuple[float, float], ...], chosen: int
) -> None:
    scores = {Path(f"step_{i:06d}"): {"pass@1": a, "pass@8": b} for i, (a, b) in enumerate(passes)}
    assert evaluate.choose(scores, 8) == Path(f"step_{chosen:06d}")


@pytest.mark.parametrize(
    "words",
    ["--split test --all-checkpoints", "--n 4", "--ks 8", "--split prompt", "--temperature 0"],
)
def test_settings_that_contradict_each_other_are_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        parse(evaluate.EvaluateConfig, ["--ckpt", "toy", *words.split()])


def test_held_out_loss_per_domain_stands_beside_the_scores(toy_run: Run, tmp_path: Path) -> None:
    for domain, answer in (("calls", "7"), ("code", "x = 1")):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        write_rows(tmp_path / f"{domain}.test.jsonl", [{"messages": messages}] * 5)
    loaded = loading.load_model("toy")
    losses = evaluate.losses_of_checkpoint(loaded, tmp_path, "test", 3)
    rendered = chat.render(messages, loaded.tokenizer, tags="reserved")
    ids = torch.tensor([rendered.ids])
    targets = ids[:, 1:].masked_fill(torch.tensor([rendered.loss_mask])[:, 1:] == 0, -100)
    nats = loaded.model.loss(ids[:, :-1], targets, reduction="sum").item()
    assert losses["heldout_nats/code"] == pytest.approx(nats, rel=1e-5)
    assert losses["heldout_loss/code"] == pytest.approx(nats / int((targets >= 0).sum()), rel=1e-5)
    assert set(losses) == {
        f"heldout_{kind}/{d}" for kind in ("loss", "nats") for d in ("calls", "code")
    }
    kept = conversations.load_domains(tmp_path, "test", loaded.tokenizer, "reserved", 64, limit=3)
    assert {d: len(e) for d, e in kept.items()} == {"calls": 3, "code": 3}
    assert not loaded.model.training
    with pytest.raises(UserError, match="heldout_examples"):
        COMMANDS["evaluate"].run(["--ckpt", "toy", "--task", "toy", "--heldout-examples", "3"])


class Broken(ToyTask):
    """Some of its own reference solutions fail."""

    failing = ("toy-test-1", "toy-test-3")

    def gold(self, problem: Problem) -> str:
        return "" if problem.id in self.failing else super().gold(problem)


def test_failing_reference_solutions_stop_an_evaluation_or_are_left_out_by_name(
    toy_run: Run, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(tasks.TASKS, "broken", Broken)
    words = [
        "--task",
        "broken",
        *TOY[2:],
        "--ckpt",
        "toy",
        "--split",
        "test",
        "--run-name",
        "scores",
    ]
    with pytest.raises(DataError, match="2 of 8 .*--skip-failing-references"):
        COMMANDS["evaluate"].run(words)
    COMMANDS["evaluate"].run([*words, "--skip-failing-references"])
    run = Run.open("scores")
    assert run.status["summary"]["left_out"] == {"test": list(Broken.failing)}
    assert {r["id"] for r in results.read_per_problem(run)} == {
        f"toy-test-{i}" for i in (0, 2, 4, 5, 6, 7)
    }
    assert all(name in capsys.readouterr().out for name in Broken.failing[:1])
    monkeypatch.setattr(Broken, "failing", tuple(f"toy-test-{i}" for i in range(8)))
    with pytest.raises(DataError, match="8 of 8"):
        COMMANDS["evaluate"].run([*words, "--skip-failing-references", "--overwrite"])


# ---------------------------------------------------------------- an id that occurs twice
class Repeated(ToyTask):
    """The toy task with its first validation problem three times."""

    name = "repeated"

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        found = super().problems(split, limit, seed)
        return [*found, found[0], found[0]]


class Shared(ToyTask):
    """The toy task with two problems of one id."""

    name = "shared"

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        first, second, *others = super().problems(split, limit, seed)
        return [first, replace(second, id=first.id), *others]


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that a test registers are forgotten after it."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))


@pytest.mark.usefixtures("own_tasks")
def test_a_problem_that_is_repeated_counts_once_and_is_named(
    toy_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"--ckpt toy@1 toy@2 --task {tasks.name_of(Repeated)} "
        "--n 1 --ks 1 --limit 4 --max-new-tokens 2"
    )
    evaluated = COMMANDS["evaluate"].run(
        [*words.split(), "--no-contamination", "--run-name", "once"]
    )
    assert evaluated.evals()["n_problems"].tolist() == [4, 4]
    assert (
        "task repeated, split test: 2 problems are repeated, such as 'toy-test-"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("own_tasks")
def test_two_problems_with_one_id_are_refused_before_anything_is_sampled(toy_run: Run) -> None:
    words = f"--ckpt toy@1 --task {tasks.name_of(Shared)} --n 1 --ks 1 --run-name never"
    with raising(DataError, "split test", "'toy-test-", "its own"):
        COMMANDS["evaluate"].run(words.split())
    assert not paths.exists("never")


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.parametrize("loop", ["grpo", "sft", "preference"])
def test_loops_evaluate_each_problem_once_and_refuse_two_with_one_id(loop: str, home: Path) -> None:
    name = "eval_task" if loop == "sft" else "task"
    for task, found in ((Repeated, 4), (Shared, None)):
        how = {name: tasks.name_of(task), "eval_examples": 4, "max_steps": 1}
        cfg = contracts.small(loop, home, how, run_name=f"{loop}-{task.name}")
        if found:
            assert set(contracts.train(cfg).evals()["n_problems"]) == {found}
        else:
            with raising(DataError, "split select", "its own"):
                contracts.train(cfg)


def test_problems_that_share_an_id_are_no_evaluation(policy: Policy) -> None:
    task = Repeated()
    with raising(DataError, "'toy-select-", "3 times"):
        scoring.evaluate_task(*policy, "reserved", task, task.problems("select", limit=4), n=1)


def test_a_checkpoint_that_is_named_twice_is_evaluated_once(
    toy_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--ckpt toy@2 toy@1 toy --task toy --n 1 --ks 1 --limit "
        "4 --max-new-tokens 2 --no-contamination"
    )
    evaluated = COMMANDS["evaluate"].run([*words.split(), "--run-name", "named-twice"])
    assert evaluated.evals()["checkpoint"].tolist() == ["toy@2", "toy@1"]
    assert "names twice" in capsys.readouterr().err


def test_runs_of_one_name_in_two_places_have_two_rows(toy_run: Run, tmp_path: Path) -> None:
    """Outside of runs/ the name of a run says nothing."""
    copies = [tmp_path / place / "toy" for place in ("here", "there")]
    for copy in copies:
        shutil.copytree(toy_run.path, copy)
    words = (
        "--task toy --n 1 --ks 1 --limit 4 --max-new-tokens 2 --no-contamination "
        "--run-name two-places --ckpt"
    )
    evaluated = COMMANDS["evaluate"].run([*words.split(), *map(str, copies)])
    steps = [str(copy / "checkpoints" / "step_000002") for copy in copies]
    assert evaluated.evals()["checkpoint"].tolist() == steps


def _cut_off(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C once so many chunks of two problems are drawn."""
    drawn = []
    collect = rollout.collect

    def interrupted(model: Any, task: Any, problems: Any, *args: Any, **settings: Any) -> Any:
        drawn.append(problems)
        if len(drawn) > after:
            raise KeyboardInterrupt
        return collect(model, task, problems, *args, **settings)

    monkeypatch.setattr(scoring, "CHUNK_ROWS", 8)
    monkeypatch.setattr(rollout, "collect", interrupted)


def _drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the problems that are drawn from now on."""
    ids: list[str] = []
    collect = rollout.collect

    def noted(model: Any, task: Any, problems: Any, *args: Any, **settings: Any) -> Any:
        ids.extend(problem.id for problem in problems)
        return collect(model, task, problems, *args, **settings)

    monkeypatch.setattr(rollout, "collect", noted)
    return ids


def _rows_of(run: Run, file: str) -> list[str]:
    rows = [{**row, "time": 0} for row in read_rows(run.path / file)]
    return sorted(json.dumps(row) for row in rows)


def test_an_evaluation_that_was_cut_off_goes_on_behind_its_answers(
    toy_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TOY, "--ckpt", "toy@1", "toy@2", "--temperatures", "0", "--run-name"]
    whole = COMMANDS["evaluate"].run([*words, "whole"])
    with monkeypatch.context() as patched:
        # of toy@1 four chunks, and a greedy one of all 8 problems; then one of toy@2
        _cut_off(patched, after=6)
        with pytest.raises(KeyboardInterrupt, match="--resume"):
            COMMANDS["evaluate"].run([*words, "cut"])
    cut = Run.open("cut")
    assert cut.status["status"] == "stopped"
    rows = (cut.path / "examples.jsonl").read_text().splitlines(keepends=True)
    assert len(rows) == 4 * 8 + 8 + 4 * 2, "both samplings of toy@1, two problems of toy@2"
    # a row that the disk has half, and a problem that lacks one of its four
    (cut.path / "examples.jsonl").write_text("".join(rows[:-1]) + rows[-1][:20])
    again = _drawn(monkeypatch)
    COMMANDS["evaluate"].run([*words, "cut", "--resume"])
    assert len(again) == 7 + 8, "toy@2 lacks seven problems, and all of the greedy ones"
    for file in ("eval.jsonl", "per_problem.jsonl", "examples.jsonl", "samples.jsonl"):
        assert _rows_of(cut, file) == _rows_of(whole, file), file
    assert cut.status["summary"] == whole.status["summary"]
    assert "dropped" not in capsys.readouterr().err


def test_an_evaluation_whose_server_is_lost_says_how_to_go_on(
    toy_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any, **settings: Any) -> Any:
        raise EngineLost("no server answers")

    monkeypatch.setattr(rollout, "collect", lost)
    with raising(EngineLost, "no server answers", "codechat evaluate --config", "--resume goes on"):
        COMMANDS["evaluate"].run([*TOY, "--ckpt", "toy@1", "--run-name", "lost"])
    assert "--resume" in Run.open("lost").status["reason"]


def test_the_command_that_goes_on_works_behind_overwrite(
    toy_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TOY, "--ckpt", "toy@1", "--run-name", "replaced"]
    COMMANDS["evaluate"].run(words)
    with monkeypatch.context() as patched:
        _cut_off(patched, after=2)
        with pytest.raises(KeyboardInterrupt) as stopped:
            COMMANDS["evaluate"].run([*words, "--overwrite"])
    _, name, *options = str(stopped.value).removesuffix(" goes on").split()
    again = _drawn(monkeypatch)
    COMMANDS[name].run(options)
    assert len(again) == 4, "of eight problems two chunks of two were answered"


def _cut_and_resumed(words: list[str], name: str, change: Callable[[Run], object]) -> Run:
    """A run of half its answers that goes on after a change."""
    with pytest.MonkeyPatch.context() as patched:
        _cut_off(patched, after=2)
        with pytest.raises(KeyboardInterrupt):
            COMMANDS["evaluate"].run([*words, "--run-name", name])
    change(Run.open(name))
    return COMMANDS["evaluate"].run([*words, "--run-name", name, "--resume"])


@pytest.mark.parametrize(("what", "answered"), [("weights", 0), ("code", 0), ("test", 3)])
def test_answers_of_other_weights_code_or_problems_are_drawn_again(
    what: str,
    answered: int,
    toy_run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TOY, "--ckpt", "toy@1"]
    whole = COMMANDS["evaluate"].run([*words, "--run-name", f"whole-{what}"])

    def other(run: Run) -> None:
        inputs = read_json(run.path / "inputs.json")
        inputs[what][next(iter(inputs[what]))] = "another hash"
        write_json(run.path / "inputs.json", inputs)

    again = _drawn(monkeypatch)
    run = _cut_and_resumed(words, f"other-{what}", other)
    assert len(again) == 4 + 8 - answered, "of four that were answered"
    assert _rows_of(run, "examples.jsonl") == _rows_of(whole, "examples.jsonl")
    assert f"{4 * (4 - answered)} completions of other weights" in capsys.readouterr().err


def test_answers_under_a_task_that_was_changed_are_scored_by_the_new_one(
    toy_run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from codechat.tasks.base import Score\n"
        "from codechat.tasks.toy import ToyTask\n"
        "class Mine(ToyTask):\n"
        "    def score(self, problem, text):\n"
        "        right = False or text == self.gold(problem)\n"
        "        return Score(float(right), 'all' if right else 'none', {}, right)\n"
    )
    words = ["--task", f"{file}:Mine", "--n", "4", "--ks", "1", *FEW, "--ckpt", "toy@1"]
    better = file.read_text().replace("False", "True")
    run = _cut_and_resumed(words, "mine", lambda _: file.write_text(better))
    assert run.evals()["pass@1"].tolist() == [1.0]


def test_a_finished_evaluation_stays_as_it_is(
    toy_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TOY, "--ckpt", "toy@1", "--run-name", "stays", "--resume"]
    run = COMMANDS["evaluate"].run(words[:-1])
    before = {file: file.read_bytes() for file in run.path.glob("*.json*")}
    COMMANDS["evaluate"].run(words)
    assert "run stays is finished" in capsys.readouterr().out
    with raising(RunError, "other settings", "seed"):
        COMMANDS["evaluate"].run([*words, "--seed", "1"])
    inputs = read_json(run.path / "inputs.json")
    write_json(run.path / "inputs.json", inputs | {"weights": {}})
    with raising(RunError, "other weights", "--overwrite"):
        COMMANDS["evaluate"].run(words)
    write_json(run.path / "inputs.json", inputs)
    assert {file: file.read_bytes() for file in run.path.glob("*.json*")} == before


def test_a_disk_that_is_full_ends_an_evaluation_with_the_way_on(
    toy_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = [*TOY, "--ckpt", "toy@1", "--run-name", "full"]
    with monkeypatch.context() as patched:
        patched.setattr("codechat.runs.run.append_rows", full)
        with raising(RunError, "examples.jsonl", "No space left", "--resume"):
            COMMANDS["evaluate"].run(words)
    assert COMMANDS["evaluate"].run([*words, "--resume"]).status["status"] == "finished"
