"""Tasks of the package reasoning-gym: options, splits, and scorers that must not be believed. A
stand-in has what its scorers were seen to do; the package itself is tried where it is installed."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError

NAMES = ("sums", "any_text", "raises", "nan", "over", "breaks")


@dataclass
class Config:
    size: int = 500
    seed: int = 0
    terms: int = 2
    inner: "Config | None" = None


class Dataset:
    """Item i depends on seed + i alone, as in reasoning-gym."""

    def __init__(
        self, name: str, size: int, seed: int, terms: int = 2, inner: Config | None = None
    ) -> None:
        if terms < 1:
            raise AssertionError("terms must be positive")
        self.name, self.size, self.seed, self.terms = name, size, seed, terms
        self.inner = inner

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self.name == "breaks":
            raise IndexError("pop from empty list")
        number = self.seed + i
        return {"question": f"{number} + {self.terms}?", "answer": str(number + self.terms)}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if self.name == "raises":
            return float(int(answer) == int(entry["answer"]))
        right = answer == entry["answer"]
        wrong = {"any_text": 1.0, "nan": float("nan"), "over": 0.25}.get(self.name, 0.0)
        return (1.0000000000000002 if self.name == "over" else 1.0) if right else wrong


class Curriculum:
    level = 0

    def increment_global_level(self) -> bool:
        self.level += 1
        return self.level <= 2

    def generate_configuration(self) -> Config:
        return Config(terms=10 + self.level, inner=Config())


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("reasoning_gym")
    package.factory = SimpleNamespace(
        DATASETS=dict.fromkeys(NAMES),
        CURRICULA={"sums": None},
        create_dataset=lambda name, **options: Dataset(name, **options),
        create_curriculum=lambda name: Curriculum(),
    )
    package.utils = SimpleNamespace(
        extract_answer=lambda text: (
            text.split("<answer>")[1].split("</")[0] if "<answer>" in text else None
        )
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)


def loaded(words: str) -> Any:
    return tasks.load(f"reasoning_gym:{words}")


def ids(task: Any, split: str) -> set[str]:
    return {problem.id for problem in task.problems(split)}


def test_no_question_is_in_two_splits_whatever_the_seed(gym: None) -> None:
    one, other = loaded("sums,size=300,seed=42"), loaded("sums,size=300,seed=43")
    assert len(ids(one, "train") & ids(other, "train")) > 200
    for split in ("select", "test"):
        assert ids(one, split)
        assert not ids(one, split) & ids(other, "train")


def test_options_and_levels_of_a_curriculum_reach_the_dataset(gym: None) -> None:
    assert loaded("sums,terms=5").made.terms == 5
    made = loaded("sums,level=0").made
    assert made.terms == 10
    assert made.inner == Config(), "a configuration in it stays one"
    assert loaded("sums,level=2").made.terms == 12


@pytest.mark.parametrize(
    "words, named",
    [
        ("sum", "'sums'"),
        ("", "dataset of reasoning_gym"),
        ("sums,term=3", "term"),
        ("sums,terms=0", "terms must be positive"),
        ("sums,level=7", "ends at 2"),
        ("over,level=1", "no curriculum"),
        ("sums,size=2.5", "got size 2.5; expected a whole number from 1"),
        ("sums,seed=x", "got seed 'x'; expected a whole number"),
        ("sums,level=-1", "got level -1; expected a whole number from 0"),
    ],
)
def test_what_the_package_does_not_have_is_named(gym: None, words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        loaded(words)


def test_a_question_that_the_package_cannot_make_is_named(gym: None) -> None:
    with pytest.raises(ConfigError, match="breaks cannot make question 0 .IndexError: pop from"):
        loaded("breaks").problems("train")


def test_a_scorer_that_pays_for_any_text_is_refused_by_name(gym: None) -> None:
    with pytest.raises(ConfigError, match="any_text gives the full reward to any text"):
        loaded("any_text").problems("train")


@pytest.mark.parametrize("name", ["raises", "nan"])
def test_a_scorer_that_fails_counts_as_error_and_is_said_once(
    gym: None, name: str, capsys: pytest.CaptureFixture
) -> None:
    task = loaded(name)
    problem = task.problems("train")[0]
    for _ in range(2):
        score = task.score(problem, "many")
        assert (score.reward, score.tier) == (0.0, "error")
    assert capsys.readouterr().err.count("\n") == 1


def test_scores_are_rounded_to_full_and_read_from_the_tags_or_the_whole_text(gym: None) -> None:
    task = loaded("over")
    problem = task.problems("train")[0]
    for text in (problem.gold, f" {problem.gold}\n", f"so <answer> {problem.gold} </answer> it is"):
        assert task.score(problem, text) == tasks.Score(1.0, "full", {}, True)
    assert task.score(problem, "x").reward == 0.25
    assert task.score(problem, "NaN").reward == 0


def test_reference_solutions_of_the_package_score_the_maximum() -> None:
    pytest.importorskip("reasoning_gym")
    task = loaded("chain_sum,size=20")
    assert tasks.check_reference_solutions(task, task.problems("train")).require().n > 10


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install 'codechat"):
        loaded("sums")
