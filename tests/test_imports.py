"""The shape of the library: imports go one way, no exception is swallowed whole, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "codechat"

FOUNDATION = """schema config registry files link processes provenance metrics planned rundirs lockstep dist sharding run background checkpoint_files checkpoint_shards
    checkpoint imported_tokenizer tokenizer calls template chat kv_cache layers latent_attention head gpt generate optim gpus hardware sources shards corpus dialogues
    glaive questions conversions executors sandbox
    tensor_files hub_tokenizer hub export python_vocabulary lora engines"""
RL = """estimates probes results episodes rollout advantages dense denoise losses preference_losses preference_data alignment exercises microscope diagnose token_view xray lineage_texts contamination heldout evaluate
    passk filter anatomy swaps supervision"""
LOOPS = "pretrain sft reinforce grpo ppo preference expert_iteration chars".split()
EDGES = """data_files data_appworld data_apps data_code data_reasoning data defects recipe_nano recipe_versions recipe_scaling scaling recipe_anatomy style reward_plots plots report_plots memory_tape step_memory plan job_scripts follow launch recipe_8b recipes notebooks pages admission report comparisons frozen
    remote talk appworld tool_talk serving serve runs original import_weights download bench cli __main__"""
ORDER = [*FOUNDATION.split(), "tasks", *RL.split(), *LOOPS, *EDGES.split()]

# A function may import what lies later only here, with the reason.
LATER = {
    ("checkpoint", "gpt"): "load_model is where weights become a model",
    ("checkpoint", "tokenizer"): "load_model",
    ("kv_cache", "gpt"): "an annotation only, under TYPE_CHECKING",
    ("layers", "gpt"): "an annotation only, under TYPE_CHECKING",
    ("latent_attention", "gpt"): "an annotation only, under TYPE_CHECKING",
}
# A handler may take anything only here.
ANYTHING = {
    "tool_talk.py": "what a user's function raises is its answer in the conversation",
    "sandbox/child.py": "what an untrusted program raises is its answer to the judge",
    "sandbox/judge.py": "whatever a test raises is the reason why it failed",
}
MAX_LINES = 400


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def place(name: str) -> int:
    assert name in ORDER, (
        f"codechat/{name}.py has no place in the import order; add it to ORDER in {__file__}"
    )
    return ORDER.index(name)


def body_without_entry(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but those under `if __name__ == "__main__"`, where a module calls the command line."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            yield from ast.walk(node)


def imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names below `codechat` that a module imports, at any depth of its code."""
    for node in body_without_entry(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("codechat."))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module == "codechat":
            yield from (a.name for a in node.names if not a.name.startswith("__"))
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").startswith("codechat.")
        ):
            yield node.module.split(".")[1]


def wrong_imports(module: str, text: str) -> list[str]:
    found = []
    for name in imported(ast.parse(text)):
        same_package = name == module and (PACKAGE / name).is_dir()
        if name in LOOPS and module != "bench":  # what it times is the loop itself
            found.append(f"{module} imports the loop {name}; name it as a string")
        elif place(name) >= place(module) and not same_package and (module, name) not in LATER:
            found.append(f"{module} imports {name}, which comes later")
    return found


@pytest.mark.parametrize("path", sources(), ids=label)
def test_imports_go_up(path: Path) -> None:
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module != "__init__":
        assert not wrong_imports(module, path.read_text())


def test_the_import_test_sees_what_it_forbids() -> None:
    assert wrong_imports("chat", "from codechat.sft import train") == [
        "chat imports the loop sft; name it as a string"
    ]
    assert wrong_imports("config", "def f():\n    from codechat import run") == [
        "config imports run, which comes later"
    ]
    assert wrong_imports("dialogues", "import codechat.tasks.base") == [
        "dialogues imports tasks, which comes later"
    ]
    assert not wrong_imports("sft", "if __name__ == '__main__':\n    from codechat.cli import run_main")
    with pytest.raises(AssertionError, match="no place"):
        wrong_imports("unheard_of", "from codechat import config")


def swallowed(text: str) -> list[int]:
    """Lines of handlers that take any exception and do not raise it again."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kinds = (
                {"BaseException"}
                if node.type is None
                else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            )
            if kinds & {"Exception", "BaseException"} and not isinstance(node.body[-1], ast.Raise):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sources(), ids=label)
def test_no_exception_is_swallowed_whole(path: Path) -> None:
    assert len(swallowed(path.read_text())) <= (label(path) in ANYTHING)


def test_the_exception_test_sees_what_it_forbids() -> None:
    assert swallowed("try:\n    f()\nexcept Exception:\n    pass") == [3]
    assert swallowed("try:\n    f()\nexcept:\n    pass") == [3]
    assert swallowed("try:\n    f()\nexcept (OSError, Exception) as e:\n    print(e)") == [3]
    assert not swallowed("try:\n    f()\nexcept BaseException:\n    clean()\n    raise")
    assert not swallowed("try:\n    f()\nexcept ValueError:\n    pass")


@pytest.mark.parametrize("path", sources(), ids=label)
def test_files_stay_small_and_named_for_what_they_hold(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES, "split it by what it does"
    assert path.stem not in {"utils", "common", "helpers", "misc"}


def test_reading_configurations_and_runs_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys, codechat.config, codechat.run; print({'torch', 'pandas', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "set()"
