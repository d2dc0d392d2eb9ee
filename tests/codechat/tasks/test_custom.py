"""Custom tasks: a file, an object, the template; what their rewards may and may not do."""

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonl import write
from raising import raising

from codechat import tasks
from codechat.core.config import config_hash
from codechat.core.errors import ConfigError, DataError, MissingFile, UserError
from codechat.core.registry import COMMANDS
from codechat.grpo import GRPOConfig
from codechat.tasks.base import Problem
from codechat.tasks.custom import RowsTask

ROWS = [{"prompt": f"Double {n}.", "gold": str(2 * n), "level": n % 3} for n in range(40)]
FILE = f"""
from codechat.tasks import RowsTask

def exact(completion, problem):
    return float(completion == problem.gold)

def form(completion, problem):
    return {{"digits": completion.isdigit(), "short": len(completion) < 4}}

class Doubles(RowsTask):
    rows = {ROWS!r}
    rewards = {{exact: 3.0, form: 1.0}}

    def __init__(self, source=None, add: int = 0):
        super().__init__(source)
        self.add = add
"""


def exact(completion: str, problem: Problem) -> float:
    return float(completion == problem.gold)


def length(completion: str, problem: Problem) -> float:
    return min(len(completion), 10) / 10


class Doubles(RowsTask):
    rows = ROWS
    rewards = {exact: 1.0, length: 0.0}  # noqa: RUF012


def task_of(
    rewards: Any, rows: Sequence[dict[str, Any]] = ROWS, name: str | None = None
) -> RowsTask:
    """A task of a class Mine; rewards: a list of functions or a table of their weights."""
    fields = {"rows": rows, "rewards": rewards}
    if name:
        fields["name"] = name
    return type("Mine", (RowsTask,), fields)()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "doubles.py"
    path.write_text(FILE)
    return path


def test_a_file_gives_a_task_with_its_options(file: Path) -> None:
    task = tasks.load(f"{file}:Doubles:add=3")
    assert task.name == "doubles"
    assert task.add == 3
    assert task.max_reward == 1.0


def test_a_file_with_one_task_needs_no_class(file: Path) -> None:
    assert isinstance(tasks.load(str(file)), tasks.Task)


def test_reference_solutions_of_a_file_are_right(file: Path) -> None:
    task = tasks.load(str(file))
    problems = task.problems("train")
    assert tasks.check_reference_solutions(task, problems).require().passed == len(problems)


# an answer to "Double 7.", and 3 * exact + 1 * form of 4
@pytest.mark.parametrize(
    "answer, reward, tier", [("14", 1.0, "full"), ("15", 0.25, "some"), ("a long text", 0, "none")]
)
def test_a_score_is_the_weighted_mean_of_its_rewards(
    answer: str, reward: float, tier: str, file: Path
) -> None:
    task = tasks.load(str(file))
    problem = next(p for p in task.rows if p.gold == "14")
    score = task.score(problem, answer)
    assert score.reward == reward
    assert score.tier == tier
    assert score.correct == (tier == "full")


def test_a_score_holds_every_reward_by_its_name(file: Path) -> None:
    task = tasks.load(str(file))
    problem = next(p for p in task.rows if p.gold == "14")
    terms = {"exact": 0.0, "form_digits": 1.0, "form_short": 1.0}
    assert task.score(problem, "15").terms == terms


def test_the_splits_share_no_prompt_and_none_is_empty() -> None:
    parts = [{p.id for p in Doubles().problems(split)} for split in ("train", "select", "test")]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert len(parts[0]) >= 28


def test_a_seed_draws_the_same_problems_again() -> None:
    first = Doubles().problems("train", 5, seed=1)
    again = Doubles().problems("train", 5, seed=1)
    assert [problem.id for problem in again] == [problem.id for problem in first]


def test_other_columns_of_a_row_are_its_problems_meta() -> None:
    assert all(problem.meta.keys() == {"level"} for problem in Doubles().problems("train"))


@pytest.mark.parametrize("answer, shown", [("", 0), ("x" * 10, 1)])
def test_a_reward_of_weight_0_is_logged_and_not_trained(answer: str, shown: float) -> None:
    task = Doubles()
    score = task.score(task.problems("train")[0], answer)
    assert score.reward == 0
    assert score.terms["length"] == shown


@pytest.fixture
def tested(tmp_path: Path) -> Doubles:
    """The task of three rows of a file, all of split test and with a reference."""
    rows = [row | {"split": "test", "reference": "x"} for row in ROWS[:3]]
    return Doubles(source=str(write(tmp_path / "rows.jsonl", rows)))


def test_rows_come_from_a_file_and_name_their_reference(tested: Doubles) -> None:
    assert len(tested.problems("test")) == 3
    assert tested.gold(tested.problems("test")[0]) == "x"


def test_a_split_that_no_row_names_is_an_error(tested: Doubles) -> None:
    with pytest.raises(DataError):
        tested.problems("train")


@pytest.fixture
def repeated() -> RowsTask:
    """Every prompt with three answers; and three rows that repeat others.

    The rewards of TRL's users often read other columns than the prompt."""
    others = [row | {"gold": "other", "reference": "way 0"} for row in ROWS]
    thirds = [row | {"gold": "other", "reference": "way 1"} for row in ROWS]
    return task_of([exact], rows=[*ROWS, *others, *thirds, *ROWS[:3]])


def test_rows_with_one_prompt_and_other_answers_are_all_kept(repeated: RowsTask) -> None:
    assert len(repeated.rows) == 3 * len(ROWS)
    assert len({problem.id for problem in repeated.rows}) == 3 * len(ROWS)


def test_the_id_of_a_row_does_not_depend_on_the_other_rows(repeated: RowsTask) -> None:
    ids = {problem.id.replace("mine", "doubles") for problem in repeated.rows[: len(ROWS)]}
    assert {problem.id for problem in Doubles().rows} == ids


def test_rows_with_one_prompt_are_in_one_split(repeated: RowsTask) -> None:
    splits: dict[str, set[str]] = {}
    for problem in repeated.rows:
        splits.setdefault(problem.messages[0]["content"], set()).add(problem.split)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) >= {"train", "select", "test"}


def test_references_of_rows_with_one_prompt_are_scored(repeated: RowsTask) -> None:
    tiers = {repeated.score(problem, repeated.gold(problem)).tier for problem in repeated.rows}
    assert tiers <= {"full", "none"}


def test_rows_that_repeat_another_are_left_out_and_counted(capsys: pytest.CaptureFixture) -> None:
    assert len(task_of([exact], rows=[*ROWS, *ROWS[:3]]).rows) == len(ROWS)
    assert capsys.readouterr().err == "task mine: 3 rows repeat another one and are left out\n"


def test_prompts_that_rows_put_into_several_splits_are_counted(
    capsys: pytest.CaptureFixture,
) -> None:
    train = [row | {"split": "train"} for row in ROWS[:5]]
    test = [row | {"split": "test", "gold": "x"} for row in ROWS[:5]]
    task = task_of([exact], rows=train + test)
    assert len(task.problems("train")) == len(task.problems("test")) == 5
    assert capsys.readouterr().err == "task mine: 5 prompts are in several splits\n"


@pytest.mark.parametrize(
    "row",
    [
        {"gold": 1},
        {"prompt": "x"},
        {"prompt": "x", "gold": 1, "split": "dev"},
        {"prompt": [], "gold": 1},
    ],
    ids=["no prompt", "no gold", "split", "empty prompt"],
)
def test_a_row_that_makes_no_problem_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="row 1"):
        task_of([exact], rows=[row])


@pytest.mark.parametrize(
    "rewards",
    [{}, {exact: 0.0}, {exact: -1.0, length: 2.0}, {exact: float("nan")}],
    ids=["none", "zero", "negative", "nan"],
)
def test_weights_that_make_no_reward_are_refused(rewards: dict[Any, float]) -> None:
    with pytest.raises(ConfigError):
        task_of(rewards)


def divides(completion: str, problem: Problem) -> float:
    return 1 / len(completion)


def names_nothing(completion: str, problem: Problem) -> dict[str, float]:
    return {completion[:1]: 1.0}


@pytest.mark.parametrize("function", [divides, names_nothing])
def test_a_reward_function_that_fails_is_a_tier(function: Callable) -> None:
    task = task_of([function])
    score = task.score(task.problems("train")[0], "")
    assert score.reward == 0.0
    assert score.tier == "error"
    assert not score.correct


@pytest.mark.parametrize("function", [divides, names_nothing])
def test_a_reward_function_that_fails_stops_before_training(function: Callable) -> None:
    task = task_of([function])
    with pytest.raises(DataError, match="task mine"):
        tasks.check_reward(task, task.problems("train"))


class Near:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completion: str, problem: Problem) -> np.float32:
        return np.float32(completion == problem.gold) * self.scale


def within(completion: str, problem: Problem, most: int) -> np.bool_:
    return np.bool_(len(completion) <= most)


def parts(completion: str, problem: Problem) -> dict[str, Any]:
    return {
        "a": np.float64(1),
        "b": torch.ones(1),
        "c": Fraction(1, 2),
        "d": torch.tensor(completion == problem.gold),
    }


def trl(
    prompts: list[str], completions: list[str], level: list[int], **columns: list[str]
) -> list[float | None]:
    assert prompts[0].startswith("Double")
    assert level[0] in (0, 1, 2)
    return [
        None if len(text) > 9 else float(text == gold)
        for text, gold in zip(completions, columns["gold"])
    ]


def trl_plain(completions: list[str], gold: list[str]) -> np.ndarray:
    return np.array([text == answer for text, answer in zip(completions, gold)])


@pytest.fixture
def of_all_kinds() -> RowsTask:
    """An object, partials, a function of several rewards, and two with TRL's arguments."""
    least = partial(within, most=3)
    return task_of([Near(1), least, partial(within, most=5), parts, trl, trl_plain])


def test_rewards_may_be_any_callable_and_any_number(of_all_kinds: RowsTask) -> None:
    problem = of_all_kinds.problems("train")[0]
    right = of_all_kinds.score(problem, problem.gold)
    assert right.terms == {
        "Near": 1,
        "within": 1,
        "within_3": 1,
        "parts_a": 1,
        "parts_b": 1,
        "parts_c": 0.5,
        "parts_d": 1,
        "trl": 1,
        "trl_plain": 1,
    }
    assert all(type(value) is float for value in right.terms.values())
    assert right.tier == "some", right.parts


def test_a_function_of_several_rewards_counts_as_their_mean(of_all_kinds: RowsTask) -> None:
    problem = of_all_kinds.problems("train")[0]
    right = of_all_kinds.score(problem, problem.gold)
    assert right.reward == pytest.approx((5 + 3.5 / 4) / 6)


def test_rewards_of_all_kinds_tell_a_wrong_answer(of_all_kinds: RowsTask) -> None:
    wrong = of_all_kinds.score(of_all_kinds.problems("train")[0], "abcd")
    earned = [name for name, value in wrong.terms.items() if value]
    assert earned == ["within_3", "parts_a", "parts_b", "parts_c"]
    assert wrong.tier == "some", wrong.parts


def test_no_reward_of_a_function_of_trl_counts_as_0(of_all_kinds: RowsTask) -> None:
    problem = of_all_kinds.problems("train")[0]
    assert of_all_kinds.score(problem, "a long text").terms["trl"] == 0


def test_rewards_of_all_kinds_may_be_trained(of_all_kinds: RowsTask) -> None:
    tasks.check_reward(of_all_kinds, of_all_kinds.problems("train"))


def least_level(completions: list[str], level: int, gold: list[str]) -> list[float]:
    return [float(len(text) >= level) for text in completions]


def test_an_argument_of_a_partial_is_not_the_rows_column() -> None:
    task = task_of([exact, partial(least_level, level=2)])
    problem = next(p for p in task.problems("train") if len(p.gold) == 1 and p.meta["level"] < 2)
    score = task.score(problem, problem.gold)
    assert score.terms == {"exact": 1.0, "least_level": 0.0}
    assert score.reward == 0.5


def test_the_numbers_of_a_score_are_plain() -> None:
    given = tasks.Score(np.float32(0.5), "some", {}, np.bool_(True), {"a": torch.tensor(1)})
    assert type(given.reward) is float
    assert type(given.correct) is bool
    assert type(given.terms["a"]) is float


GREETING = [{"role": "user", "content": "Hi"}]


def greets(prompts: list[Any], completions: list[Any], gold: list[str], **_: object) -> list[float]:
    assert prompts == [GREETING]
    (answer,) = completions[0]
    return [float(answer == {"role": "assistant", "content": gold[0]})]


@pytest.mark.parametrize("answer, reward", [("yes", 1), ("no", 0)])
def test_a_function_of_trl_gets_conversations_where_the_prompt_is_one(
    answer: str, reward: float
) -> None:
    task = task_of([greets], rows=[{"prompt": GREETING, "gold": "yes", "split": "train"}])
    assert task.score(task.problems("train")[0], answer).reward == reward


NO_REWARD = ["0.5", None, float("nan"), 1.5, np.float32(-1), [0.5], torch.ones(2), 1j]
SAYS = [{"prompt": f"Say {n}.", "gold": str(n), "split": "train"} for n in (3, 9, 19)]


def wrong_at_nine(given: Any) -> RowsTask:
    """A task whose reward is `given` for two of its three rows."""

    def mine(completion: str, problem: Problem) -> Any:
        return given if "9" in problem.gold else 1.0

    return task_of([mine], rows=SAYS)


@pytest.mark.parametrize("given", NO_REWARD)
def test_what_is_no_reward_is_an_error(given: Any) -> None:
    task = wrong_at_nine(given)
    with pytest.raises(DataError, match="mine"):
        tasks.check_reference_solutions(task, task.problems("train")).require()


@pytest.mark.parametrize("given", NO_REWARD)
def test_what_is_no_reward_is_shown_once_with_its_row(
    given: Any, capsys: pytest.CaptureFixture
) -> None:
    task = wrong_at_nine(given)
    tasks.check_reference_solutions(task, task.problems("train"))
    shown = capsys.readouterr().err
    assert shown.count("task mine") == 1
    assert "Say 9." in shown or "Say 19." in shown
    for problem in task.rows:
        assert task.score(problem, "3").tier in ("full", "error")
    assert not capsys.readouterr().err


def shortcuts(task: tasks.Task) -> set[str]:
    """Texts that are no answer and are rewarded as one."""
    return set(tasks.check_reward(task, task.problems("train", 8)))


def holds_the_answer(completion: str, problem: Problem) -> bool:
    return problem.gold in completion


def always(completion: str, problem: Problem) -> float:
    return 1.0


def test_a_reward_for_a_text_with_every_answer_is_reported() -> None:
    assert shortcuts(task_of([holds_the_answer])) == {"all answers"}


def test_a_reward_for_everything_is_reported() -> None:
    assert len(shortcuts(task_of([always]))) >= 12


def test_a_reward_for_the_answer_alone_has_no_shortcut() -> None:
    assert not shortcuts(task_of([exact]))


@pytest.mark.parametrize("name", ["toy", "reasoning", "repair"])
def test_tasks_of_the_package_have_no_shortcut(name: str) -> None:
    assert not shortcuts(tasks.load(name))


@pytest.fixture
def doubles() -> Iterator[Doubles]:
    """A task as an object; what settings make known of it is forgotten."""
    yield Doubles()
    tasks.TASKS.pop("doubles", None)


def test_a_class_is_a_setting(doubles: Doubles) -> None:
    assert GRPOConfig(task=Doubles).task == "doubles"
    assert tasks.load("doubles").name == "doubles"


def test_an_object_is_a_setting_and_is_what_is_trained_on(doubles: Doubles) -> None:
    assert GRPOConfig(task=doubles).task == "doubles"
    assert tasks.load("doubles") is doubles


def test_settings_with_an_object_are_those_with_its_name(doubles: Doubles) -> None:
    of_object = GRPOConfig(task=doubles)
    assert config_hash(of_object) == config_hash(GRPOConfig(task="doubles"))


def test_a_file_that_fails_is_an_error_with_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("class X:\n    name = 'x'\n\nx = 1 / 0\n")
    with pytest.raises(DataError, match="line 4: ZeroDivisionError"):
        tasks.load(f"{bad}:X")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        tasks.load(str(tmp_path / "absent.py:X"))


def test_a_class_that_a_file_lacks_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError):
        tasks.load(f"{file}:Double")


def test_an_option_that_a_task_lacks_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError):
        tasks.load(f"{file}:Doubles:level=1")


def test_a_number_is_no_task() -> None:
    with pytest.raises(ConfigError):
        GRPOConfig(task=3)


def test_a_task_cannot_have_the_name_of_another() -> None:
    with pytest.raises(ConfigError):
        tasks.name_of(task_of([exact], name="toy"))


FILES = {"my_words.py", "test_my_words.py", "my_words.jsonl"}


def new(what: str, name: str, folder: Path) -> None:
    COMMANDS["new"].run([what, name, "--out", str(folder)])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_a_new_task_is_three_files(tmp_path: Path) -> None:
    new("task", "my_words", tmp_path)
    assert names_in(tmp_path) == FILES


def test_a_new_package_is_a_folder_with_a_pyproject(tmp_path: Path) -> None:
    new("package", "my_words", tmp_path)
    assert names_in(tmp_path / "my_words") == FILES | {"pyproject.toml"}


def test_the_template_passes_its_own_tests(tmp_path: Path) -> None:
    new("task", "my_words", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_words.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(
    "name", ["My-Task", "json", "torch", "codechat", "class", "none", "my_words"]
)
def test_a_name_of_a_module_a_keyword_or_a_file_is_refused(name: str, tmp_path: Path) -> None:
    new("task", "my_words", tmp_path)
    with pytest.raises(ConfigError):
        new("task", name, tmp_path)
    assert names_in(tmp_path) == FILES


@pytest.mark.parametrize("words", [["tusk", "x"], ["task"]], ids=["kind", "no name"])
def test_a_new_thing_of_an_unknown_kind_or_without_a_name_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        COMMANDS["new"].run(words)


def test_a_new_task_does_not_replace_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the folder that Python imports from, where the file is a module too."""
    (tmp_path / "my_words.py").write_text("mine = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"got .*my_words\.py, which exists; expected a new file; choose another name",
    ):
        new("task", "my_words", tmp_path)
    assert [path.name for path in tmp_path.glob("*my_words*")] == ["my_words.py"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What pip would write of `codechat new package`, whose pyproject.toml declares the class;
    with a clash, and classes that cannot be had."""
    new("package", "my_words", tmp_path)
    project = tomllib.loads((tmp_path / "my_words" / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    points |= {
        "toy": "my_words.my_words:MyWords",
        "gone": "my_words.nowhere:MyWords",
        "loose": "my_words.my_words:exact",
    }
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    about = tmp_path / "my_words-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: my-words\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_words"]:
        del sys.modules[module]
    tasks.TASKS.pop("my_words", None)


def test_an_installed_package_adds_a_task(installed: None) -> None:
    assert len(tasks.load("my_words").problems("train")) == 17


def test_an_installed_package_never_replaces_a_task(installed: None) -> None:
    with raising(ConfigError, "toy", "my-words"):
        tasks.load("toy")


@pytest.mark.parametrize("name", ["gone", "loose"])
def test_a_class_that_an_installed_package_lacks_is_an_error_with_its_name(
    name: str, installed: None
) -> None:
    with raising(DataError, name, "my-words"):
        tasks.load(name)


def test_a_misspelt_task_of_an_installed_package_is_told_its_name(installed: None) -> None:
    with raising(ConfigError, "my_word", "my_words"):
        tasks.load("my_word")


VERIFIERS = f"{Path(__file__).parents[3] / 'examples' / 'verifiers_task.py'}:Verifiers"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A file with an environment of verifiers."""
    pytest.importorskip("verifiers")
    path = tmp_path / "environment.py"
    path.write_text(Path(__file__).with_name("verifiers_env.txt").read_text())
    return path


@pytest.fixture
def of_verifiers(environment: Path) -> RowsTask:
    return tasks.load(f"{VERIFIERS}:env={environment},n=30", reference="{answer}")


def test_an_environment_of_verifiers_gives_its_rows(of_verifiers: RowsTask) -> None:
    sizes = [len(of_verifiers.problems(split)) for split in ("train", "select", "test")]
    assert sizes == [24, 3, 3]
    problem = next(p for p in of_verifiers.rows if p.gold == "14")
    said = [message["content"] for message in problem.messages]
    assert said == ["Answer with a number.", "Double 7."]


def test_reference_solutions_of_an_environment_of_verifiers_are_right(
    of_verifiers: RowsTask,
) -> None:
    problems = of_verifiers.problems("train")
    tasks.check_reference_solutions(of_verifiers, problems).require()
    assert tasks.check_reward(of_verifiers, problems) == {}


def test_an_environment_of_verifiers_gives_its_weights_and_awaited_rewards(
    of_verifiers: RowsTask,
) -> None:
    problem = next(p for p in of_verifiers.rows if p.gold == "14")
    answers = ["14", "15", "fourteen"]
    right, wrong, words = tasks.score_all(of_verifiers, [problem] * 3, answers)
    assert right.reward == pytest.approx(1)
    assert right.tier == "full"
    assert right.correct
    assert wrong.reward == pytest.approx(0.2 / 0.8)
    assert wrong.tier == "some"
    assert not wrong.correct
    assert wrong.terms["exact"] == 0
    assert wrong.terms["digits"] == 1
    assert words.reward == 0
    assert words.tier == "none"
    assert not words.correct


@pytest.mark.parametrize(
    "option, named", [("k=3", "k"), ("max_turns=2", "turns")], ids=["argument", "turns"]
)
def test_an_environment_of_verifiers_that_cannot_be_made_is_a_user_error(
    option: str, named: str, environment: Path
) -> None:
    with raising(UserError, named):
        tasks.load(f"{VERIFIERS}:env={environment},{option}")


@pytest.mark.parametrize("name", ["nowhere", "json"])
def test_a_module_without_an_environment_of_verifiers_is_a_user_error(name: str) -> None:
    pytest.importorskip("verifiers")
    with raising(UserError, name):
        tasks.load(f"{VERIFIERS}:env={name}")
