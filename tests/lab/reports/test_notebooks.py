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
    notebook = json.loads((root / "notebooks" / "01_adds.ipynb").read_text())
    return "".join(
        "".join(output["text"]) for cell in notebook["cells"] for output in cell.get("outputs", [])
    )


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_built_notebook_names_no_machine_and_ran_in_an_empty_folder(built: Path) -> None:
    text = text_outputs(built)
    assert text.startswith(". [] ")
    assert "<object object at 0x...>" in text
    assert "<cell>:" in text
    assert not re.search(
        rf"{re.escape(sys.prefix)}|{re.escape(str(Path.home()))}/|0x[0-9a-f]{{6}}", text
    )


@pytest.mark.slow
def test_a_second_build_changes_no_byte_and_jupytext_finds_nothing_to_sync(project: Path) -> None:
    pair = [project / "nbs_py/01_adds.py", project / "notebooks/01_adds.ipynb"]
    before = [path.read_bytes() for path in pair]
    pairs.build("01_adds")
    assert [path.read_bytes() for path in pair] == before
    for newer in pair:
        os.utime(newer, (4e9, 4e9))
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


def test_nothing_is_written_over_code_edited_in_the_notebook_nor_prose_beside_other_code(
    project: Path,
) -> None:
    source = project / "nbs_py" / "01_adds.py"
    path = project / "notebooks" / "01_adds.ipynb"
    replace(source, "2 + one == 3", "1 + one + 1 == 3")
    before = path.read_bytes()
    with pytest.raises(DataError, match="01_adds"):
        pairs.rewrite_prose("01_adds")
    assert path.read_bytes() == before
    edit(path, lambda notebook: notebook["cells"][1].update(source="one = 7"))
    before = path.read_bytes()
    with pytest.raises(DataError, match="01_adds"):
        pairs.build("01_adds")
    assert path.read_bytes() == before


def test_a_report_template_is_stamped_but_not_executed(project: Path) -> None:
    (project / "nbs_py" / "91_report.py").write_text(
        ADDS.replace("import os\n", "raise SystemExit\n")
    )
    pairs.build("91_report")
    assert pairs.check(["91_report"]) == []
    edit(
        project / "notebooks" / "91_report.ipynb",
        lambda nb: nb["cells"][1].update(execution_count=1),
    )
    assert "stripped" in pairs.check(["91_report"])[0]


def test_new_prose_and_links_to_a_new_neighbour_keep_the_outputs(project: Path) -> None:
    outputs = text_outputs(project)
    replace(project / "nbs_py" / "01_adds.py", "Is it?", "Is it so?")
    (project / "nbs_py" / "02_other.py").write_text(OTHER)
    pairs.build("02_other")
    problems = pairs.check()
    assert len(problems) == 2
    assert "links" in problems[0]
    assert "cells" in problems[1]
    pairs.rewrite_prose("01_adds")
    assert pairs.check() == []
    assert text_outputs(project) == outputs
    texts = [(project / "notebooks" / f"{name}.ipynb").read_text() for name in notebooks.names()]
    assert "Is it so?" in texts[0]
    assert [re.findall(r"\((\w+)\.ipynb\)", text) for text in texts] == [["02_other"], ["01_adds"]]


def swap_counts(notebook: dict) -> None:
    notebook["cells"][1]["execution_count"], notebook["cells"][2]["execution_count"] = 2, 1


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


def test_check_finds_outputs_older_than_their_code_and_a_lonely_half(project: Path) -> None:
    source = project / "nbs_py" / "01_adds.py"
    replace(source, "one: int = 1", "one: int = 2")
    problems = pairs.check()
    assert len(problems) == 2
    assert "cells" in problems[0]
    assert "executed" in problems[1]
    source.rename(project / "nbs_py" / "02_moved.py")
    problems = "\n".join(pairs.check())
    assert "notebooks/02_moved.ipynb" in problems
    assert "notebooks/01_adds.ipynb" in problems


def test_copies_say_which_claims_held(
    project: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    for name, source in (("02_reads", "mine"), ("03_reads", "frozen")):
        (project / "nbs_py" / f"{name}.py").write_text(READS.format(source))
    monkeypatch.setattr(paths, "ROOT", project.parent)
    notebooks.run_copies(CopiesConfig(out="copies", source="mine"))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("02_reads: It reads runs: held")
    assert last.startswith("1 of 2 claims held")
    assert "03_reads" in second
    assert "FAILED: code cell 3 of 3" in second
    assert second.endswith("AssertionError: mine")
    assert {path.name for path in (project.parent / "copies").iterdir()} == {
        "02_reads.ipynb",
        "03_reads.ipynb",
    }


WALKS = [name for name in notebooks.names() if not notebooks.is_template(name)]


def become_commands(text: str) -> list[str]:
    """Lines of a source (py:percent) that jupytext changes on the way to a notebook: comments
    that Jupyter would run as commands."""
    config = load_jupytext_config(str(ROOT))
    read = jupytext.reads(text, "py:percent", config=config)
    kept = jupytext.reads(
        text, dict(extension=".py", format_name="percent", comment_magics=False), config=config
    )
    pairs_of_cells = zip(read.cells, kept.cells, strict=True)
    lines = [
        zip(a.source.splitlines(), b.source.splitlines(), strict=True) for a, b in pairs_of_cells
    ]
    return [was for cell in lines for became, was in cell if became != was]


SOURCES = sorted(path.name for path in (ROOT / "nbs_py").glob("*.py"))


@pytest.mark.parametrize("name", SOURCES)
def test_every_comment_of_a_source_is_a_comment_in_its_notebook_and_back(name: str) -> None:
    """jupytext takes `# rm -r runs` for an escaped command, and the notebook would run it."""
    text = (ROOT / "nbs_py" / name).read_text()
    assert become_commands(text) == []
    notebook = jupytext.reads(text, "py:percent", config=load_jupytext_config(str(ROOT)))
    again = jupytext.reads(jupytext.writes(notebook, "py:percent"), "py:percent")
    assert [(cell.cell_type, cell.source) for cell in again.cells] == [
        (c.cell_type, c.source) for c in notebook.cells
    ]


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


def test_links_lead_somewhere_and_outputs_hold_no_warnings_and_alternative_text_for_pictures() -> (
    None
):
    link = re.compile(r"\]\(((?!https?:)[^)#\s]+)")
    # which a recipe executes on its runs
    reading = set(filter(notebooks.reads_runs, notebooks.names()))
    assert {"04_pretraining", "08_did_it_learn"} <= reading <= set(WALKS)
    for name in WALKS:
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))[
            "cells"
        ]
        targets = link.findall(
            "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        )
        assert not [target for target in targets if not (ROOT / "notebooks" / target).exists()], (
            name
        )
        for output in (output for cell in cells for output in cell.get("outputs", ())):
            assert output.get("name") != "stderr"
            assert not re.search(r"\b\w*Warning: ", "".join(output.get("text", "")))
            images = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
            assert all(len(output["metadata"].get(kind, {}).get("alt", "")) > 10 for kind in images)
            assert "<img" not in "".join(output.get("data", {}).get("text/html", ""))


# They train whole policies in front of their reader: three minutes instead of 90 seconds, twice
# that beside other work.
TRAINS_LIVE = {"00_rl_in_two_minutes": 360, "29_a_reward_with_a_leak": 360}
# Executed by `make test`, the others by `make test-all`.
ALWAYS = ("01_tokens_and_masks", "17_losses_by_hand")


@pytest.mark.parametrize(
    "name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in WALKS]
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
