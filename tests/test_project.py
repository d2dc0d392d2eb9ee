"""The project's own files and the shape of the library: one environment in two spellings, a
Makefile that repairs, notebooks in shape; imports go one way."""

import ast
import fnmatch
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import notebook_pairs
import pytest
import yaml
from importlinter.cli import lint_imports

from codechat.core.registry import COMMANDS, PREPARATIONS
from codechat_lab.reports import notebooks

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("codechat", "codechat_lab")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("lab", "test", "test-all", "notebooks", "jupyter", "cpp", "venv", "clean", "help")
# Names under which a distribution is imported, where they differ.
IMPORTED_AS = {
    "import-linter": "importlinter",
    "ipython": "IPython",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "websocket-client": "websocket",
}
IMPORTED_AS |= {"pytest-xdist": "xdist"}
# Brought by the packages that pyproject names, in step with them.
BROUGHT_ALONG = {"grimp", "jupyter_client", "markdown_it", "markupsafe", "referencing"}
TEXT = set(".py .md .toml .yml .yaml .ipynb .json .jsonl .csv .sh .txt .cfg .html".split()) | {""}


def tracked() -> list[Path]:
    """Files that git tracks; a test that needs them is skipped in an unpacked archive."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# --- one environment
def test_conda_environment_equals_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == [*PROJECT["project"]["dependencies"], "-e .[test]"]
    assert f"python{PROJECT['project']['requires-python']}" in environment["dependencies"]


def test_every_import_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [
        *PROJECT["project"]["dependencies"],
        *(one for extra in extras for one in extra),
    ]
    distributions = [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements]
    known = {IMPORTED_AS.get(name, name).replace("-", "_") for name in distributions}
    known |= sys.stdlib_module_names | {*PACKAGES, "benchmarks"} | BROUGHT_ALONG
    known |= {p.stem for folder in ("tests", "tools") for p in (ROOT / folder).rglob("*.py")}
    unknown = {}
    for path in [
        path for folder in (*PACKAGES, "tests", "nbs_py") for path in (ROOT / folder).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            unknown |= {
                module.split(".")[0]: path.name
                for module in modules
                if module.split(".")[0] not in known
            }
    assert not unknown


@pytest.mark.parametrize("name", PACKAGES)
def test_installed_package_would_hold_every_data_file(name: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"][name]
    package = ROOT / name
    files = [
        path.relative_to(package)
        for path in tracked()
        if package in path.parents and path.suffix != ".py"
    ]

    def held(path: Path) -> bool:
        return any(fnmatch.fnmatch(f"x/{path}", f"x/{p}") or path.match(p) for p in patterns)

    assert not [path for path in files if not held(path)]


@pytest.mark.parametrize(
    "words",
    [
        "ruff check --no-cache codechat codechat_lab tests examples",
        "ruff format --check --no-cache codechat codechat_lab tests examples",
        pytest.param("mypy", marks=pytest.mark.slow),
    ],
)
def test_linters_find_nothing(words: str) -> None:
    """Their settings, and the modules with findings of mypy left, are in pyproject.toml."""
    command = [sys.executable, "-m", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# --- make
@pytest.fixture
def made(tmp_path: Path) -> Path:
    place = tmp_path / "a place"
    (place / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", place)
    (place / "pyproject.toml").touch()
    (place / ".venv" / "bin" / "python").symlink_to(sys.executable)
    pin = re.search(r"^PINNED_TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    (place / ".venv" / ".torch").write_text(f"pinned {pin}\n")
    (place / ".venv" / ".place").write_text(str(place.resolve()))
    (place / ".venv" / ".installed").touch()
    return place


def dry_run(place: Path, *arguments: str) -> str:
    """What `make venv` would do: "" for nothing, else the steps' names."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("TORCH", "SYSTEM_TORCH", "MAKEFLAGS")
    }
    ran = subprocess.run(
        ["make", "-n", "venv", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(re.findall(r"\$(\w+)", ran.stdout))


def test_makefile_has_every_target_and_help_names_it() -> None:
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in set(TARGETS) - {"help"}:
        assert re.search(rf"^make {target} ", shown, re.M), target
    assert set(TARGETS) <= set(
        re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split()
    )


@pytest.mark.parametrize(
    "lost", ["", "newer", ".torch", ".place", ".installed", "bin/python", "interrupted", "moved"]
)
def test_make_repairs_an_environment_that_is_old_lacks_a_part_or_was_moved(
    made: Path, lost: str
) -> None:
    if lost == "newer":
        at = (made / ".venv" / ".installed").stat().st_mtime + 5
        os.utime(made / "pyproject.toml", (at, at))
    elif lost == "interrupted":
        (made / ".venv" / ".unfinished").touch()
    elif lost == "moved":
        made = made.rename(made.with_name("elsewhere"))
    elif lost:
        (made / ".venv" / lost).unlink()
    steps = {"": "", "newer": "INSTALL_PROJECT", ".installed": "INSTALL_PROJECT"}
    assert dry_run(made) == steps.get(lost, "MAKE_VENV INSTALL_PROJECT")


def test_make_says_why_no_python_will_do(made: Path) -> None:
    (made / "old").write_text(
        "#!/bin/sh\necho 'is Python 3.8; 3.11 or newer is needed' >&2; exit 1\n"
    )
    (made / "old").chmod(0o755)
    (made / ".venv" / ".place").unlink()
    ran = subprocess.run(
        ["make", "venv", "PYTHON=./old no-such-python"],
        cwd=made,
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0
    for part in (
        "./old is Python 3.8; 3.11 or newer is needed",
        "no-such-python is not on the PATH",
        "PYTHON=/path",
    ):
        assert part in ran.stderr
    assert (made / ".venv" / "bin").is_dir(), (
        "the old environment goes only when a new one can be made"
    )


@pytest.mark.skipif(shutil.which("gcc") is None or os.uname().machine != "x86_64", reason="no gcc")
@pytest.mark.parametrize("source", ["int one;", "no C"])
def test_make_lab_builds_the_kernels_and_runs_without_those_that_do_not_compile(
    made: Path, source: str
) -> None:
    (made / "cpp").mkdir()
    (made / "cpp" / "numbers.h").touch()
    for name in ("product.c", "row.c", "training.c"):
        (made / "cpp" / name).write_text(source if name == "training.c" else f"int {name[:3]};")
    command = made / ".venv" / "bin" / "codechat"
    command.write_text("#!/bin/sh\necho codechat $*\n")
    command.chmod(0o755)
    outer = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the `make test` that runs this
    own = {key: value for key, value in os.environ.items() if key not in outer}
    ran = subprocess.run(
        ["make", "lab"], cwd=made, env=own, capture_output=True, text=True, timeout=120
    )
    compiles = source == "int one;"
    assert (made / "build/cpp/librow.so").exists()
    assert (made / "build/cpp/libtraining.so").exists() == compiles
    assert ("the C kernels were not built" in ran.stdout) != compiles
    assert ran.stdout.endswith("codechat run nano\n")
    assert ran.returncode == 0


def test_ci_runs_make_test_only() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert re.findall(r"\bmake [a-z-]+", re.sub(r"#.*|echo .*", "", script.read_text())) == [
        "make test"
    ]


# --- what is committed


# tests/codechat/formats/test_release.py has their limits
RELEASED = re.compile(
    r"codechat_lab/released/[\w-]+/checkpoints/step_\d+/(\w+\.safetensors|meta\.json)"
)


def test_nothing_large_is_committed() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in tracked()}
    assert not {
        path: size
        for path, size in sizes.items()
        if size > 1_000_000 and not RELEASED.fullmatch(path)
    }


def test_no_file_names_a_machine_or_a_package_index() -> None:
    foreign = re.compile(
        r"(?<![\w.])/w[o]rk/|/r[o]ot/\.|/t[m]p/[a-z0-9_]+/|p[y]pi\.org|pythonh[o]sted|download\.p[y]torch"
    )
    texts = {
        path: path.read_text(encoding="utf-8", errors="replace")
        for path in tracked()
        if path.suffix in TEXT
    }
    assert not {
        str(path): match[0] for path, text in texts.items() if (match := foreign.search(text))
    }


def test_notebooks_are_paired_fresh_and_executed() -> None:
    assert notebook_pairs.check() == []


def lines_but_imports(code: str) -> int:
    """Lines of a cell. Imports name the real modules, so they take what they take."""
    imports = [
        node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return len(code.splitlines()) - sum(node.end_lineno - node.lineno + 1 for node in imports)


def test_notebooks_have_the_agreed_shape() -> None:
    for name in notebooks.names():
        source = notebooks.source_of(name)
        report = notebooks.is_template(name)
        code = [cell.source for cell in source.cells if cell.cell_type == "code"]
        first = source.cells[0]
        assert first.cell_type == "markdown" and first.source.startswith("# "), name
        # a report's result is what its rows give
        parts = ["Question"] if report else ["Question", "Result"]
        assert all(f"**{word}" in first.source for word in parts), (
            f"{name}: Question and Result in the first cell"
        )
        assert not report or any(
            "answer" in cell.metadata.get("tags", []) for cell in source.cells
        ), name
        assert "parameters" in source.cells[1].metadata.get("tags", []), (
            f"{name}: the second cell holds the parameters"
        )
        for statement in ast.parse(source.cells[1].source).body:
            assert isinstance(statement, ast.Assign | ast.AnnAssign), (
                "literals only: papermill injects after this cell"
            )
            ast.literal_eval(statement.value)
        longest = 0 if report else max(map(lines_but_imports, code))  # a report folds its code away
        assert longest <= 15 and len(code) <= (40 if report else 30), name
        asserted = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code[-1])))
        assert report or asserted, f"{name}: the claim is not asserted"


# ---------------------------------------------------------------- the shape of the library

PACKAGE = Path(__file__).resolve().parents[1] / "codechat"

# A handler may take anything only here.
ANYTHING = {
    "codechat/text/tool_worlds.py": "what a user's function raises is its answer in the conversation",
    "codechat_lab/tasks/bfcl/systems.py": "what a call of a system raises is the text of its result",
    "codechat_lab/tasks/reasoning_gym.py": "what a scorer of another package raises is a tier of the score",
    "codechat_lab/sandbox/functions.py": "what an untrusted process sends may be anything",
    "codechat_lab/sandbox/zygote.py": "what an untrusted program raises is its answer to the judge",
    "codechat_lab/sandbox/handles.py": (
        "what a function of a test raises goes to the program that called it"
    ),
    "codechat_lab/sandbox/judge.py": "whatever a test raises is the reason why it failed",
    "codechat_lab/tasks/repair/loader.py": (
        "what a broken module of a repository raises fails the tests that use it"
    ),
    "codechat/tasks/base.py": "what a user's reward raises is the finding",
    "codechat/tasks/custom.py": "what a user's reward function raises is a tier of the score",
}


def test_rooms_import_downwards() -> None:
    assert lint_imports(no_cache=True) == 0


def takes_anything(handler: ast.ExceptHandler) -> bool:
    names = (
        {getattr(node, "id", "") for node in ast.walk(handler.type)}
        if handler.type
        else {"BaseException"}
    )
    return bool(names & {"Exception", "BaseException"})


def swallowed(path: Path) -> int:
    handlers = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
    ]
    return sum(
        takes_anything(handler) and not isinstance(handler.body[-1], ast.Raise)
        for handler in handlers
    )


def test_no_exception_is_swallowed_whole_and_files_are_named_for_what_they_hold() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): swallowed(path) for path in paths}
    assert {name: n for name, n in found.items() if n > (name in ANYTHING)} == {}
    assert not {Path(name).stem for name in found} & {"utils", "common", "helpers", "misc"}


def test_nothing_but_tests_replaces_parts_of_modules() -> None:
    """A plan of another machine is told its numerics (`numerics.planning`); nothing is patched."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not [
        path for path in paths if re.search(r"unittest(\.| import.*\b)mock\b", path.read_text())
    ]


# What the help of a command may import besides the standard library. Each takes less than 0.1 s.
QUICK = {"numpy", "regex", "rich", "tiktoken", "tiktoken_ext", "tqdm"}
FOREIGN = (
    "print(*{m.partition('.')[0] for m in sys.modules} - before - {'codechat', "
    "'codechat_lab'} - sys.stdlib_module_names, file=sys.stderr)"
)


def foreign(program: str, *words: str) -> tuple[set[str], str]:
    """(packages that a program imports besides the standard library and ours, its output)."""
    source = (
        f"import sys; before = {{m.partition('.')[0] for m in sys.modules}}\n{program}\n{FOREIGN}"
    )
    argv = [sys.executable, "-c", source, *words]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=900)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split()), done.stdout


HELPS = ["", *COMMANDS, *(f"data {id.removeprefix('data.')}" for id in PREPARATIONS)]
EVERY_HELP = """
from codechat import cli
quick = set(sys.argv[1].split()) | before | {'codechat', 'codechat_lab'} | sys.stdlib_module_names
for command in sys.argv[2:]:
    print('@', command)
    try: cli.main([*command.split(), '--help'])
    except SystemExit: pass
    slow = {m.partition('.')[0] for m in sys.modules} - quick
    assert not slow, f'codechat {command} --help imports {slow}'
"""


def test_help_of_every_command_imports_only_what_is_quick() -> None:
    """All in one process: the first command that imports anything else is named."""
    pages = foreign(EVERY_HELP, " ".join(QUICK), *HELPS)[1].split("@ ")[1:]
    assert len(pages) == len(HELPS)
    assert all("usage: codechat" in page for page in pages)


def test_chatting_imports_torch_without_its_compiler_and_sharding() -> None:
    """Together they take longer than torch."""
    heavy = [
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
    ]
    program = (
        "from codechat_lab.serve import terminal; from codechat.models import "
        "generate, loading; loading.load_model('released/nano'); "
    )
    program += f"print([m for m in {heavy} if m in sys.modules])"
    assert foreign(program)[1].strip() == "[]"


def test_importing_codechat_and_reading_runs_imports_no_other_package() -> None:
    assert foreign("import codechat") == (set(), "")
    assert (
        not {"torch", "pandas", "numpy"}
        & foreign("import codechat.core.config, codechat.runs.run")[0]
    )


def test_no_file_is_in_a_circle_of_imports() -> None:
    """Also within a room, where the contract of the layers does not look; imports within
    functions count."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    left = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while done := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in done:
            del left[name]
    assert not left, f"in a circle, or importing one: {sorted(left)}"
