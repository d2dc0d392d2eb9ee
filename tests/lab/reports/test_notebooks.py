"""Notebooks: on a small project what a build writes, what a check finds, what a copy claims;
and the project's own."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupytext
import notebook_pairs as pairs
import pytest
from jupytext.config import load_jupytext_config

from codechat.core.errors import DataError
from codechat.runs import paths
from codechat_lab.reports import notebooks
from codechat_lab.reports.notebooks import NotebookError
from codechat_lab.reports.settings import CopiesConfig

ROOT = Path(__file__).resolve().parents[3]
ADDS = Path(__file__).with_name("adds.txt").read_text()
READS = """# %% [markdown]
# # It reads runs

# %% tags=["parameters"]
source = "frozen"

# %%
assert source == {!r}, source
"""
OTHER = ADDS.replace("one: int = 1\n", "other = 5\n").replace("2 + one == 3", "other == 5")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one built notebook."""
    root = tmp_path_factory.mktemp("project")
    (root / "nbs_py").mkdir()
    shutil.copy(ROOT / "jupytext.toml", root)
    (root / "nbs_py" / "01_adds.py").write_text(ADDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "SHIPPED", root)
        pairs.build("01_adds")
        assert pairs.check() == []
    return root


@pytest.fixture
def project(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the built project that a test may change."""
    copy = Path(shutil.copytree(built, tmp_path / "project"))
    monkeypatch.setattr(paths, "SHIPPED", copy)
    return copy


def edit(path: Path, change: Callable[[dict], object]) -> None:
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def text_outputs(root: Path) -> str:
    """All that the cells of the first notebook print."""
    notebook = json.loads((root / "notebooks" / "01_adds.ipynb").read_text())
    printed = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            printed += output["text"]
    return "".join(printed)


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_built_notebook_ran_in_an_empty_folder(built: Path) -> None:
    assert text_outputs(built).startswith(". [] ")


def test_a_built_notebook_names_no_machine(built: Path) -> None:
    text = text_outputs(built)
    assert "<object object at 0x...>" in text
    assert "<cell>:" in text
    assert sys.prefix not in text
    assert f"{Path.home()}/" not in text
    assert not re.search("0x[0-9a-f]{6}", text)


def pair_of(project: Path) -> list[Path]:
    return [project / "nbs_py/01_adds.py", project / "notebooks/01_adds.ipynb"]


@pytest.mark.slow
def test_a_second_build_changes_no_byte(project: Path) -> None:
    before = [path.read_bytes() for path in pair_of(project)]
    pairs.build("01_adds")
    assert [path.read_bytes() for path in pair_of(project)] == before


@pytest.mark.slow
@pytest.mark.parametrize("newer", [0, 1], ids=["source", "notebook"])
def test_jupytext_finds_nothing_to_sync_whichever_half_is_newer(project: Path, newer: int) -> None:
    pair = pair_of(project)
    before = [path.read_bytes() for path in pair]
    os.utime(pair[newer], (4e9, 4e9))
    command = [sys.executable, "-m", "jupytext", "--sync", str(pair[0])]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    assert [path.read_bytes() for path in pair] == before


@pytest.mark.parametrize(
    "code, reason", [("1 / 0", "ZeroDivisionError"), ("import time; time.sleep(60)", "did not end")]
)
def test_a_cell_that_fails_or_does_not_end_leaves_the_committed_notebook(
    project: Path, code: str, reason: str
) -> None:
    source = project / "nbs_py" / "01_adds.py"
    path = project / "notebooks" / "01_adds.ipynb"
    before = path.read_bytes()
    replace(source, "import warnings\n", f"import warnings\n{code}\n")
    with pytest.raises(NotebookError, match=f"2 of 3.*{reason}"):
        pairs.build("01_adds", timeout_s=5)
    assert path.read_bytes() == before


def test_new_prose_is_not_written_beside_other_code(project: Path) -> None:
    path = project / "notebooks" / "01_adds.ipynb"
    before = path.read_bytes()
    replace(project / "nbs_py" / "01_adds.py", "2 + one == 3", "1 + one + 1 == 3")
    with pytest.raises(DataError, match="01_adds"):
        pairs.rewrite_prose("01_adds")
    assert path.read_bytes() == before


def test_nothing_is_written_over_code_edited_in_the_notebook(project: Path) -> None:
    path = project / "notebooks" / "01_adds.ipynb"
    edit(path, lambda notebook: notebook["cells"][1].update(source="one = 7"))
    before = path.read_bytes()
    with pytest.raises(DataError, match="01_adds"):
        pairs.build("01_adds")
    assert path.read_bytes() == before


@pytest.fixture
def template(project: Path) -> Path:
    """The built notebook of a template that would fail if it were executed."""
    source = ADDS.replace("import os\n", "raise SystemExit\n")
    (project / "nbs_py" / "91_report.py").write_text(source)
    pairs.build("91_report")
    return project / "notebooks" / "91_report.ipynb"


def test_a_report_template_is_stamped_but_not_executed(template: Path) -> None:
    assert pairs.check(["91_report"]) == []


def test_a_report_template_with_outputs_is_found(template: Path) -> None:
    edit(template, lambda notebook: notebook["cells"][1].update(execution_count=1))
    assert "stripped" in pairs.check(["91_report"])[0]


@pytest.fixture
def reworded(project: Path) -> Path:
    """The project with other prose in its notebook's source, and a new neighbour."""
    replace(project / "nbs_py" / "01_adds.py", "Is it?", "Is it so?")
    (project / "nbs_py" / "02_other.py").write_text(OTHER)
    pairs.build("02_other")
    return project


def test_check_finds_new_prose_and_a_new_neighbour(reworded: Path) -> None:
    problems = pairs.check()
    assert len(problems) == 2
    assert "links" in problems[0]
    assert "cells" in problems[1]


def test_new_prose_and_links_to_a_new_neighbour_keep_the_outputs(reworded: Path) -> None:
    outputs = text_outputs(reworded)
    pairs.rewrite_prose("01_adds")
    assert pairs.check() == []
    assert text_outputs(reworded) == outputs
    first = (reworded / "notebooks" / "01_adds.ipynb").read_text()
    second = (reworded / "notebooks" / "02_other.ipynb").read_text()
    assert "Is it so?" in first
    assert re.findall(r"\((\w+)\.ipynb\)", first) == ["02_other"]
    assert re.findall(r"\((\w+)\.ipynb\)", second) == ["01_adds"]


def swap_counts(notebook: dict) -> None:
    notebook["cells"][1]["execution_count"] = 2
    notebook["cells"][2]["execution_count"] = 1


LARGE = dict(output_type="stream", name="stdout", text="x" * 300_000)


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda nb: nb["metadata"].pop("codechat"), "executed"),
        (lambda nb: nb["cells"][0].update(source="# Another claim"), "cells"),
        (lambda nb: nb["cells"][1]["metadata"].pop("tags"), "cells"),
        (swap_counts, "executed"),
        (lambda nb: nb["cells"][2]["outputs"].append(LARGE), "300000"),
    ],
)
def test_check_finds_a_notebook_that_is_not_its_source_executed(
    project: Path, change: Callable, found: str
) -> None:
    edit(project / "notebooks" / "01_adds.ipynb", change)
    problems = pairs.check()
    assert len(problems) == 1
    assert found in problems[0]


def test_check_finds_outputs_older_than_their_code(project: Path) -> None:
    replace(project / "nbs_py" / "01_adds.py", "one: int = 1", "one: int = 2")
    problems = pairs.check()
    assert len(problems) == 2
    assert "cells" in problems[0]
    assert "executed" in problems[1]


def test_check_finds_a_half_without_its_other(project: Path) -> None:
    (project / "nbs_py" / "01_adds.py").rename(project / "nbs_py" / "02_moved.py")
    problems = "\n".join(pairs.check())
    assert "notebooks/02_moved.ipynb" in problems
    assert "notebooks/01_adds.ipynb" in problems


def test_copies_say_which_claims_held(
    project: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    (project / "nbs_py" / "02_reads.py").write_text(READS.format("mine"))
    (project / "nbs_py" / "03_reads.py").write_text(READS.format("frozen"))
    monkeypatch.setattr(paths, "ROOT", project.parent)
    notebooks.run_copies(CopiesConfig(out="copies", source="mine"))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("02_reads: It reads runs: held")
    assert "03_reads" in second
    assert "FAILED: code cell 3 of 3" in second
    assert second.endswith("AssertionError: mine")
    assert last.startswith("1 of 2 claims held")
    copies = {path.name for path in (project.parent / "copies").iterdir()}
    assert copies == {"02_reads.ipynb", "03_reads.ipynb"}


WALKS = [name for name in notebooks.names() if not notebooks.is_template(name)]


CONFIG = load_jupytext_config(str(ROOT))


def become_commands(text: str) -> list[str]:
    """Lines of a source (py:percent) that jupytext changes on the way to a notebook: comments
    that Jupyter would run as commands."""
    as_it_is = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    read = jupytext.reads(text, "py:percent", config=CONFIG)
    kept = jupytext.reads(text, as_it_is, config=CONFIG)
    changed = []
    for cell, cell_as_it_is in zip(read.cells, kept.cells, strict=True):
        lines = zip(cell.source.splitlines(), cell_as_it_is.source.splitlines(), strict=True)
        changed += [was for became, was in lines if became != was]
    return changed


SOURCES = sorted(path.name for path in (ROOT / "nbs_py").glob("*.py"))


@pytest.mark.parametrize("name", SOURCES)
def test_every_comment_of_a_source_is_a_comment_in_its_notebook(name: str) -> None:
    """jupytext takes `# rm -r runs` for an escaped command, and the notebook would run it."""
    assert become_commands((ROOT / "nbs_py" / name).read_text()) == []


def cells_of(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_written_from_its_notebook_is_the_same(name: str) -> None:
    text = (ROOT / "nbs_py" / name).read_text()
    notebook = jupytext.reads(text, "py:percent", config=CONFIG)
    again = jupytext.reads(jupytext.writes(notebook, "py:percent"), "py:percent")
    assert cells_of(again) == cells_of(notebook)


@pytest.mark.parametrize(
    "line",
    [
        "# rm -r runs",
        "#rm -r runs",
        "# # rm -r runs",
        "# ls",
        "# cat notes",
        "# cd ..",
        "# !rm -r runs",
        "#!pip install x",
        "    # !ls",
        "# ? print",
        "# %time f()",
        "# %%bash",
        "# x = !ls",
        "# x = %pwd",
        "# echo done",
        "# mkdir out",
    ],
)
def test_a_comment_that_jupytext_takes_for_a_command_is_found(line: str) -> None:
    source = f"# %% [markdown]\n# # Title\n# ls of a folder\n\n# %%\nif True:\n    a = 1\n{line}\n"
    assert become_commands(source) == [line]
    assert become_commands(source.replace(line, "# the command is: rm -r runs, or 3 % 2")) == []


def committed(name: str) -> list[dict[str, Any]]:
    """The cells of the project's own notebook."""
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    return json.loads(text)["cells"]


def outputs_of(name: str) -> list[dict[str, Any]]:
    outputs = []
    for cell in committed(name):
        outputs += cell.get("outputs", ())
    return outputs


def test_the_notebooks_that_a_recipe_executes_on_its_runs_are_walk_throughs() -> None:
    reading = set(filter(notebooks.reads_runs, notebooks.names()))
    assert {"04_pretraining", "08_did_it_learn"} <= reading <= set(WALKS)


@pytest.mark.parametrize("name", WALKS)
def test_links_of_a_notebook_lead_somewhere(name: str) -> None:
    prose = ["".join(c["source"]) for c in committed(name) if c["cell_type"] == "markdown"]
    targets = re.findall(r"\]\(((?!https?:)[^)#\s]+)", "\n".join(prose))
    assert not [target for target in targets if not (ROOT / "notebooks" / target).exists()]


@pytest.mark.parametrize("name", WALKS)
def test_outputs_of_a_notebook_hold_no_warnings(name: str) -> None:
    for output in outputs_of(name):
        assert output.get("name") != "stderr"
        assert not re.search(r"\b\w*Warning: ", "".join(output.get("text", "")))


@pytest.mark.parametrize("name", WALKS)
def test_pictures_of_a_notebook_are_described(name: str) -> None:
    for output in outputs_of(name):
        for kind in output.get("data", {}):
            if kind.startswith("image/"):
                assert len(output["metadata"].get(kind, {}).get("alt", "")) > 10
        assert "<img" not in "".join(output.get("data", {}).get("text/html", ""))


# They train whole policies in front of their reader: three minutes instead of 90 seconds, twice
# that beside other work.
TRAINS_LIVE = {"00_rl_in_two_minutes": 360, "29_a_reward_with_a_leak": 360}
# Executed by `make test`, the others by `make test-all`.
ALWAYS = ("01_tokens_and_masks", "17_losses_by_hand")


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in WALKS],
)
def test_every_walk_through_executes_and_its_claim_holds(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(paths, "ROOT", paths.SHIPPED)  # whose committed rows it reads
    begin = time.perf_counter()
    limit = TRAINS_LIVE.get(name, 180)
    notebooks.execute_copy(name, tmp_path / f"{name}.ipynb", {})
    assert time.perf_counter() - begin < limit, (
        f"a walk-through takes under {limit // 2} s on two free cores"
    )
