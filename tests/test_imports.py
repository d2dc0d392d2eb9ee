"""The shape of the library: imports go one way, no exception is swallowed whole, files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
from importlinter.cli import lint_imports

from codechat.core.registry import COMMANDS, PREPARATIONS

PACKAGE = Path(__file__).resolve().parents[1] / "codechat"

# A handler may take anything only here.
ANYTHING = {
    "inference/terminal.py": "what a user's function raises is its answer in the conversation",
    "sandbox/zygote.py": "what an untrusted program raises is its answer to the judge",
    "sandbox/judge.py": "whatever a test raises is the reason why it failed",
    "tasks/base.py": "what a user's reward raises is the finding",
    "tasks/custom.py": "what a user's reward function raises is a tier of the score",
}


def test_rooms_import_downwards() -> None:
    """The contract is in pyproject.toml."""
    assert lint_imports(no_cache=True) == 0


def takes_anything(handler: ast.ExceptHandler) -> bool:
    names = {getattr(node, "id", "") for node in ast.walk(handler.type)} if handler.type else {"BaseException"}
    return bool(names & {"Exception", "BaseException"})


def swallowed(path: Path) -> int:
    """Handlers that take any exception and do not raise it again."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    return sum(takes_anything(handler) and not isinstance(handler.body[-1], ast.Raise) for handler in handlers)


def test_no_exception_is_swallowed_whole_and_files_are_named_for_what_they_hold() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): swallowed(path) for path in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in found.items() if n > (name in ANYTHING)} == {}
    assert not {Path(name).stem for name in found} & {"utils", "common", "helpers", "misc"}


# What the help of a command may import besides the standard library. Each takes less than 0.1 s.
QUICK = {"numpy", "regex", "rich", "tiktoken", "tiktoken_ext", "tqdm"}
FOREIGN = "print(*{m.partition('.')[0] for m in sys.modules} - before - {'codechat'} - sys.stdlib_module_names, file=sys.stderr)"


def foreign(program: str, *words: str) -> tuple[set[str], str]:
    """(packages that a program imports besides the standard library and ours, its output)."""
    source = f"import sys; before = {{m.partition('.')[0] for m in sys.modules}}\n{program}\n{FOREIGN}"
    argv = [sys.executable, "-c", source, *words]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=900)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split()), done.stdout


HELPS = ["", *COMMANDS, *(f"data {id.removeprefix('data.')}" for id in PREPARATIONS)]


EVERY_HELP = """
from codechat import cli
quick = set(sys.argv[1].split()) | before | {'codechat'} | sys.stdlib_module_names
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
    assert len(pages) == len(HELPS) and all("usage: codechat" in page for page in pages)


def test_chatting_imports_torch_without_its_compiler_and_sharding() -> None:
    """Together they take longer than torch."""
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"]
    program = f"from codechat.inference import terminal; from codechat.models import generate, loading; print([m for m in {heavy} if m in sys.modules])"
    assert foreign(program)[1].strip() == "[]"


def test_importing_codechat_and_reading_runs_imports_no_other_package() -> None:
    assert foreign("import codechat") == (set(), "")
    assert not {"torch", "pandas", "numpy"} & foreign("import codechat.core.config, codechat.runs.run")[0]


def test_no_file_is_in_a_circle_of_imports() -> None:
    """Also within a room, where the contract of the layers does not look; imports within functions count."""
    graph = grimp.build_graph("codechat", exclude_type_checking_imports=True, cache_dir=None)
    left = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while done := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in done:
            del left[name]
    assert not left, f"in a circle, or importing one: {sorted(left)}"
