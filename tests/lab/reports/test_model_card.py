"""A released model's card: its figures are those of its evaluation, and an evaluation of
another model is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import model_card
import pytest

from codechat import cli
from codechat.core.errors import ConfigError
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
    lineage = [{"run": "own/sft", "kind": "sft", "data_dir": "data/own", "step": 1}]
    make_run("own/sft", "gpt2:400", lineage=lineage)
    cli.main(["export", "--ckpt", "own/sft", "--out", str(tmp_path / "given"), "--format", "run"])
    return str(tmp_path / "given")


def test_the_card_has_the_figures_of_the_evaluation_and_names_what_fails(given: str) -> None:
    both = [
        dict(
            split="test",
            sampling=sampling,
            **share("call/pass@1", value),
            **{"call/n": 20, "call/named_not_offered": 0.0},
        )
        | share("tool/pass@1", value / 4)
        | {"tool/n": 10}
        for sampling, value in (("T=1", 0.625), ("greedy", 0.875))
    ]
    evaluation = evaluated("judged", given, both)
    answers: dict[str, float] = {}
    for place, (name, (_, n)) in enumerate(model_card.NATURAL.items()):
        answers |= share(name, 0.2 + 0.15 * place) | {n: 20}
    natural = evaluated("asked", given, [answers])
    words = ["--ckpt", given, "--evaluation", evaluation, "--natural", natural]
    model_card.main(words)
    lines = (Path(given) / "README.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    rows = {first: more for first, *more in cells}
    assert rows["known tools, new values"] == ["20", "0.62 [0.53, 0.72]", "0.88 [0.78, 0.97]"]
    assert rows["own/sft"] == ["sft", "1", "`data/own`"]
    lacking = [line for line in lines if line.startswith("- ") and "% right" in line]
    assert len(lacking) == 3
    assert any("unseen tools: 22%" in line for line in lacking)
    assert json.loads((Path(given) / "status.json").read_text())["status"] == "finished"


def test_an_evaluation_of_another_model_is_refused(given: str) -> None:
    other = evaluated("judged", "own/sft", [dict(split="test", sampling="greedy")])
    with pytest.raises(ConfigError, match="own/sft"):
        model_card.card(model_card.CardConfig(ckpt=given, evaluation=other, natural=other))
