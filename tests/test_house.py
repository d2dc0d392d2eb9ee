"""The gates of the two packages: content, density, reach. A number here may only fall; its target stands beside it."""

from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parents[1]
LAB = "codechat_lab"

# what is measured: (ceiling today, target)
CONTENT = {"codechat": (87_950, 66_000), "both": (160_400, 135_000)}
DENSITY = {"codechat": (5.90, 5.0), LAB: (6.19, 5.5), "tests": (6.50, 5.5)}
PACKED_TUPLES = {"codechat": (1, 1), LAB: (1, 1)}
WALRUS = {"codechat": (3, 3), LAB: (3.8, 3)}
SPLATS = {"codechat": (5.8, 3), LAB: (9.1, 3)}
WIDE_LINES = {"codechat": (13, 0), LAB: (20, 0), "tests": (56, 0)}
REACH = {"pretrain": (39, 36), "sft": (45, 36)}


@pytest.fixture(scope="module")
def weights() -> dict[str, house.Weight]:
    return {package: house.weigh(sorted((ROOT / package).rglob("*.py"))) for package in house.PACKAGES}


def test_the_content_of_the_packages_does_not_grow_past_its_gate(weights: dict[str, house.Weight]) -> None:
    library = weights["codechat"].expressions
    assert library <= CONTENT["codechat"][0]
    assert library + weights[LAB].expressions <= CONTENT["both"][0]


@pytest.mark.parametrize("package", DENSITY)
def test_code_lines_hold_no_more_expressions_than_their_gate(package: str, weights: dict[str, house.Weight]) -> None:
    assert weights[package].density <= DENSITY[package][0]


@pytest.mark.parametrize("package", PACKED_TUPLES)
def test_assignments_say_one_thing(package: str, weights: dict[str, house.Weight]) -> None:
    weight = weights[package]
    assert weight.per_thousand(weight.packed_tuples) <= PACKED_TUPLES[package][0]
    assert weight.per_thousand(weight.walrus) <= WALRUS[package][0]
    assert weight.per_thousand(weight.splats) <= SPLATS[package][0]


@pytest.mark.parametrize("package", WIDE_LINES)
def test_lines_fit_their_columns(package: str, weights: dict[str, house.Weight]) -> None:
    assert weights[package].wide_lines <= WIDE_LINES[package][0]


@pytest.mark.parametrize("loop", REACH)
def test_supervised_loops_reach_few_modules(loop: str) -> None:
    assert len(house.reach(ROOT, f"codechat.{loop}")) <= REACH[loop][0]


def test_the_library_imports_nothing_of_the_laboratory() -> None:
    assert house.crossing(ROOT) == []
