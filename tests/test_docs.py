"""The written documentation: links lead somewhere, functions that it names exist, its commands
are valid, and README's numbers are those of committed results."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from codechat import cli, tasks
from codechat.core import config
from codechat.core.atomic_files import read_rows
from codechat.core.registry import COMMANDS, LOOPS
from codechat.evaluation.results import harmonic_mean
from codechat.runs import paths
from codechat.runs.run import Run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "README.zh.md",
        "CONTRIBUTING.md",
        "AGENTS.md",
        "GLOSSARY.md",
        "data/README.md",
    )
]
PAGES += sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
TYPED = re.compile(r"`([^`\n]*\bcodechat [^` \n]+ [^`\n]+)`")
MENTION = re.compile(r"`([\w/]+\.py): ([\w., ]+)`")  # the label of a link: "file: name, name"


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(page: Path) -> list[tuple[str, Path, str]]:
    """(label, target, anchor) of the relative links outside code blocks."""
    found = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    parts = [(label, *link.partition("#")) for label, link in found if "://" not in link]
    return [
        (label, page.parent / path if path else page, anchor) for label, path, _, anchor in parts
    ]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings as GitHub makes them, and ""."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {
        "",
        *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings),
    }


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        targets = [(target, anchor) for _, target, anchor in links(page)]
        assert not [str(target) for target, _ in targets if not target.exists()], page
        headed = [(target, anchor) for target, anchor in targets if target.suffix == ".md"]
        assert not [
            f"{target}#{anchor}" for target, anchor in headed if anchor not in anchors(target)
        ], page


def test_the_table_of_flags_is_that_of_the_code() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "flag_table.py"))
    assert tool["BLOCK"].findall((DOCS / "coming-from.md").read_text()) == [tool["table"]()]


def test_flags_in_tables_of_other_projects_are_accepted_or_named() -> None:
    known = {name for entry in LOOPS.values() for name in config.leaves_of(entry.config_class)}
    known |= config.ALIASES.keys() | config.ELSEWHERE.keys()
    cells = [
        re.findall(r"^\| (`--[^|]*)\|", page.read_text(), re.M)
        for page in DOCS.glob("coming-from-*.md")
    ]
    flags = {flag for cell in sum(cells, []) for flag in re.findall(r"--(\w+)", cell)}
    assert len(flags) > 20
    assert not {flag for flag in flags if not {flag, flag.removeprefix("no_")} & known}


def test_every_page_and_every_command_is_listed() -> None:
    listed = {target.name for _, target, _ in links(DOCS / "index.md")}
    assert listed >= {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`{name}`" not in text]


def defined(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return found


def test_the_walk_names_functions_that_exist() -> None:
    labels = [
        link
        for name in ("a-step-and-a-request", "coming-from-cs336")
        for link in links(DOCS / f"{name}.md")
    ]
    mentions = [
        (*found.groups(), target)
        for label, target, _ in labels
        if (found := MENTION.fullmatch(label))
    ]
    assert len(mentions) > 60, "the labels have another form than `file: function`"
    for file, names, target in mentions:
        assert target.resolve() in (ROOT / "codechat" / file, ROOT / "codechat_lab" / file), (
            f"{file} links to {target}"
        )
        missing = set(names.split(", ")) - defined(target)
        assert not missing, f"{file} does not define {missing}"


class Parsed(Exception):
    """A command has read its words and would begin."""


def shell_lines(page: Path) -> list[list[str]]:
    """The words of each line of the page's shell blocks, continuation lines joined and comments
    removed."""
    text = page.read_text(encoding="utf-8")
    blocks = (
        [text] if page.suffix == ".txt" else re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    )
    lines = "\n".join(blocks).replace("\\\n", " ").replace("-m codechat.", "codechat ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(page: Path) -> list[list[str]]:
    """The words after `codechat`, also in tables, two at least. What follows a lone -- are
    settings of the loop
    that is launched: one more command."""
    rows = re.findall(
        r"^\|.*", page.read_text(encoding="utf-8") if "experiments" not in page.parts else "", re.M
    )
    found = [
        words[at + 1 :]
        for words in (*shell_lines(page), *map(shlex.split, TYPED.findall("\n".join(rows))))
        if (
            at := next(
                (i for i, word in enumerate(words) if re.fullmatch(r"(.*/)?codechat", word)), None
            )
        )
        is not None
    ]
    return found + [[words[1], *words[words.index("--") + 1 :]] for words in found if "--" in words]


SHEETS = sorted((ROOT / "codechat_lab/recipes").glob("*.txt"))  # command lines to copy


@pytest.mark.parametrize("page", [page for page in [*PAGES, *SHEETS] if commands(page)], ids=title)
def test_commands_are_valid(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has flags and values that exist and fit together, up to where it would begin. Files
    are not looked for."""
    parse = config.parse

    def parse_only(cls: type, *args: Any, **options: Any) -> None:
        fields = config.fields_of(cls)
        written: dict[str, object] = {"task": "toy"} if "task" in fields else {}
        if "endpoint" in fields:  # an evaluation
            written["ckpt"] = ["released/nano"]
        monkeypatch.setattr(config, "_read_file", lambda path: written)  # --config FILE
        parse(cls, *args, **options)
        raise Parsed

    monkeypatch.setattr(config, "parse", parse_only)
    for words in commands(page):
        try:
            code = cli.main(words)
        except Parsed:
            continue
        raise AssertionError(
            f"codechat {shlex.join(words)}: exit code {code}, {capsys.readouterr().err}"
        )


def apply_diff(number: int, folder: Path) -> None:
    """Apply a diff of extending.md below a folder, as `patch -p1` does, without guessing."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    diff = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[number]
    command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"]
    done = subprocess.run(
        command, cwd=folder, input=diff, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def command_with(part: str) -> list[str]:
    """The words after `codechat` of the one command in the text of extending.md that has `part`."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    (typed,) = (line for line in TYPED.findall(text) if part in line and "new task" not in line)
    return shlex.split(typed)[1:]


SMALL = "--max-steps 1 --diagnose-groups 8 --eval-every 0 --group-size 4 --max-new-tokens 4".split()


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch on this machine")
def test_the_reward_of_extending_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert cli.main(["new", "task", "backwards"]) == 0
    apply_diff(0, tmp_path)
    task = tasks.load("backwards.py:Backwards")
    check = tasks.check_reference_solutions(task, task.problems("train")).require()
    assert check.passed > 10
    assert cli.main([*command_with("backwards.py:Backwards"), *SMALL]) == 0
    assert "reward/letters" in Run.open("grpo").metrics()


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch on this machine")
def test_the_loss_of_extending_trains(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "codechat", tmp_path / "codechat")
    apply_diff(1, tmp_path)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "codechat", *command_with("dual_clip"), *SMALL],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch on this machine")
def test_a_package_of_extending_has_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_diff(2, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    project = tomllib.loads((tmp_path / "my_package/pyproject.toml").read_text())
    task = tasks.load(project["project"]["entry-points"]["codechat.tasks"]["count"])
    assert tasks.check_reference_solutions(task, task.problems("train")).require().passed
    typed = "grpo --init-from released/nano --task my_package.count:CountTask"
    assert f"`python -m codechat {typed}`" in (DOCS / "extending.md").read_text(encoding="utf-8")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert cli.main([*typed.split(), *SMALL]) == 0


@pytest.mark.slow
def test_the_first_hour_runs_as_it_is_written(tmp_path: Path) -> None:
    """Every command of the page in its order, in an empty folder with the examples; reinforce
    may find no gradient (exit code 2)."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = {}
    for words in shell_lines(DOCS / "first-hour.md"):
        if words[0] in ("make", "."):
            continue
        words = [
            sys.executable,
            *(["-m"] if words[0] == "codechat" else []),
            *words[words[0] == "python" :],
        ]
        if "serve" in words:
            with subprocess.Popen(
                [*words, "--port", "0"],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as server:
                printed["serve"] = next(line for line in server.stdout if "http://" in line)
                server.terminate()
            continue
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        expected = (0, 2) if "reinforce" in words else (0,)
        assert done.returncode in expected, f"{shlex.join(words)}: {done.stdout[-3000:]}"
        printed[shlex.join(words[1:])] = done.stdout
    programs = {
        "sum_digits": "f(123) == 6",
        "double_all": "f([1, 2]) == [2, 4]",
    }
    for name, holds in programs.items():
        (said,) = (text for command, text in printed.items() if name in command)
        exec(said[said.index("def ") :], made := {})
        assert eval(holds, {"f": made[name]}), said
    weather = next(
        text for command, text in printed.items() if "Beijing" in command and "my-tools" in command
    )
    assert '{"name": "get_weather", "arguments": {"city": "Beijing"}}' in weather
    assert "serve" in printed
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {
        "my-tools",
        "my-tools-test",
        "backwards-signal",
    }


def test_make_targets_exist() -> None:
    used = {words[1] for page in PAGES for words in shell_lines(page) if words[0] == "make"}
    assert used
    assert used <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def calls_and_silence(public: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of BFCL where a call is right, those where none is, and the mean of both shares."""
    parts: list[dict[str, int]] = []
    for silent in (False, True):
        rows = [
            row
            for name, row in public.items()
            if name.startswith("BFCL") and name.endswith("irrelevance") == silent
        ]
        parts.append({key: sum(row[key] for row in rows) for key in ("n", "base", "sft", "rl")})
    calls, silence = parts
    both: dict[str, Any] = {"n": calls["n"] + silence["n"]}
    for key in ("base", "sft", "rl"):
        both[key] = f"{harmonic_mean([part[key] / part['n'] for part in parts]):.2f}"
    return {
        "BFCL, a call is right": calls,
        "BFCL, no call is right": silence,
        "BFCL, harmonic mean of both shares": both,
    }


def test_the_tests_that_documents_name_exist() -> None:
    """A name may be cut short, as in `::test_neutral_values...`."""
    names = []
    for source in (ROOT / "tests").rglob("test_*.py"):
        code = source.read_text(encoding="utf-8")
        names += re.findall(r"def (test_\w+)", code)
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for told in re.findall(r"::(test_\w+)", text):
            meant = [name for name in names if name.startswith(told)]
            assert meant, f"{path.name}: {told}"


LARGER = ("released/smollm2-tools@232", "qwen-coder", "released/coder-tools@128")
VERDICTS = {"toolbox": "right", "unfitting": "declined", "code": "passes all tests"}


def frozen(name: str, **wanted: str) -> list[dict]:
    """Rows of reports/frozen with these values."""
    rows = read_rows(ROOT / "reports" / "frozen" / f"{name}.jsonl")
    return [row for row in rows if wanted.items() <= row.items()]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_numbers_of_the_larger_base_are_those_of_committed_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    head = text.index("| N | SmolLM2")
    table = text[head : text.index("\n\n", head)]
    told = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", table, re.M)
    expected = []
    for kind, verdict in VERDICTS.items():
        cells = []
        for model in LARGER:
            found = [
                row["verdict"] for row in frozen("everyday/pretrained", kind=kind, checkpoint=model)
            ]
            cells.append(found.count(verdict))
        expected.append([len(found), *cells])
    # without quicksort, which rows teach and all three solve
    expected[-1] = [n - 1 for n in expected[-1]]
    (small,) = frozen("pretrained_benchmarks", benchmark="HumanEval")
    (larger,) = frozen("pretrained_coder", benchmark="HumanEval")
    expected.append([larger["n"], small["sft"], larger["untuned"], larger["sft"]])
    assert [[int(cell) for cell in cells] for cells in told] == expected
    behind = re.findall(r"\d+", text[head + len(table) :].strip().partition("\n\n")[0])
    for right_is in ("a call is right", "no call is right"):
        (found,) = frozen("pretrained_coder", benchmark=f"BFCL, {right_is}")
        told = [str(found[name]) for name in ("untuned", "sft", "n")]
        assert told == behind[:3]
        behind = behind[3:]
    (unseen,) = frozen("pretrained", checkpoint=LARGER[-1], stratum="tool")
    assert f"{unseen['right']:.2f}" in text[head - 1200 : head]


def test_numbers_of_the_readme_are_those_of_committed_results() -> None:
    nano, staircase, specialist = (
        json.loads((ROOT / "reports" / name / "data" / "headline.json").read_text())
        for name in ("nano", "staircase", "specialist")
    )
    natural = (ROOT / "reports" / "natural" / "natural.md").read_text()
    ours, mini = re.search(
        r"toolbox: tool and arguments right \| (\d+) of 60.*?\| (\d+) of 60", natural
    ).groups()
    programs = re.search(
        r"code, not trained on: passes all hidden tests \|.*\| (\d+ of \d+)", natural
    )[1]
    points = "{:+.1f} [{:+.1f}, {:+.1f}] points"
    expected = {
        **{
            question: "{:.2f} [{:.2f}, {:.2f}]".format(
                *(nano[f"sft_{key}{end}"] for end in ("", "_lo", "_hi"))
            )
            for question, key in (
                ("trained on", "call"),
                ("never seen", "tool"),
                ("decline", "unfitting"),
            )
        },
        "RL": points.format(*(nano[f"test_greedy{end}"] for end in ("", "_lo", "_hi"))),
        "graded": points.format(*(staircase[f"weak_{end}"] for end in ("gain", "lo", "hi"))),
        "wording": f"60 natural requests mini gets {mini} right, nano {ours}",
        "program": f"{programs} new programs",
        "alone": f"{specialist['calls_v5']:.0f} of {specialist['asked_v5']:.0f} prompts",
    }
    rows, chinese = (
        re.findall(rf"^\| (.*{mark}) \| (.*) \|$", (ROOT / name).read_text(encoding="utf-8"), re.M)
        for name, mark in (("README.md", r"\?"), ("README.zh.md", "？"))
    )
    told, again = (
        [sorted(re.findall(r"\d+", answer)) for _, answer in table] for table in (rows, chinese)
    )
    assert len(rows) == len(expected)
    assert told == again
    kept = [
        read_rows(ROOT / "reports" / "frozen" / f"pretrained{part}.jsonl")
        for part in ("", "_natural")
    ]
    tuned, asked = (
        [r for r in part if r["checkpoint"] == "released/smollm2-tools@232"] for part in kept
    )
    (unseen,) = [r["right"] for r in tuned if r["stratum"] == "tool"]
    wanted = rf"smollm2-real`[\s\S]{{0,80}}{unseen:.2f}[\s\S]{{0,60}}{sum(r['verdict'] == 'right' for r in asked)}\b"
    assert all(
        re.search(wanted, (ROOT / name).read_text(encoding="utf-8"))
        for name in ("README.md", "README.zh.md")
    )
    public = {
        row["benchmark"]: row
        for row in read_rows(ROOT / "reports" / "frozen" / "pretrained_benchmarks.jsonl")
    }
    public |= calls_and_silence(public)
    for name in ("README.md", "README.zh.md"):
        shown = re.findall(
            r"^\| ((?:BFCL|MBPP|HumanEval|GSM8K)[^|]*) \| (.*) \|$",
            (ROOT / name).read_text("utf-8"),
            re.M,
        )
        assert len(shown) == 6
        for benchmark, cells in shown:
            found = [public[benchmark][key] for key in ("n", "base", "sft", "rl")]
            assert cells.split(" | ") == ["-" if value is None else str(value) for value in found]
    for (asked, answer), (word, numbers) in zip(rows, expected.items()):
        assert word in asked
        assert numbers in answer
        assert re.findall(r"\d+", answer) == re.findall(r"\d+", numbers), (
            f"another number: {answer}"
        )
