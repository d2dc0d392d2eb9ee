"""What all tests share: the threads of a process, skips with a reason, the folder of real
samples."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for the processes that tests start: a test run leaves the
# machine usable. Models this small only wait for a second thread, and wait long on a busy
# machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tolerances are those of float32; a processor with native bfloat16 would compute in that.
# Tests of other types set it themselves.
os.environ.setdefault("CODECHAT_DTYPE", "float32")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHARED_ROWS = SHARED_DATA.with_name("rows")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real samples in the hubs' columns, beside the repository; tests that need it
    skip without."""
    if not SHARED_DATA.is_dir():
        pytest.skip(
            f"no real samples: ../shared/data is absent beside {SHARED_DATA.parents[1].name}/"
        )
    return SHARED_DATA


@pytest.fixture(scope="session")
def shared_rows() -> Path:
    """Folder of a few rows of each public form, beside the repository; tests that need it skip
    without."""
    if not SHARED_ROWS.is_dir():
        pytest.skip(
            f"no sample rows: ../shared/rows is absent beside {SHARED_ROWS.parents[1].name}/"
        )
    return SHARED_ROWS


def _own_files() -> dict[str, int]:
    """What a user's work has left below the checkout, with the time of its last change."""
    root = Path(__file__).resolve().parents[1]
    files = [
        path
        for name in ("runs", "data", "reports")
        for path in (root / name).rglob("*")
        if path.is_file()
    ]
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in files}


@pytest.fixture(scope="session", autouse=True)
def checkout_is_left_alone() -> Iterator[None]:
    """No test writes below the checkout's runs/, data/ or reports/: a user's finished runs are
    there."""
    before = _own_files()
    yield
    after = _own_files()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    assert not changed, f"tests wrote {', '.join(changed[:5])} below the checkout"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of its own for every test: run directories appear under home / "runs"."""
    from codechat.runs import paths

    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def make_run(home: Path) -> Callable[..., Any]:
    """make_run(name, ...): a run with checkpoints of untrained toy models, each of other
    weights."""
    from codechat.models.config import GPTConfig
    from codechat.models.gpt import GPT
    from codechat.runs import checkpoint
    from codechat.runs.run import Run
    from codechat.tasks.toy import TOY_MODEL
    from codechat.text import tokenizer

    def make(
        name: str,
        spec: str = "bytes",
        steps: int = 1,
        lineage: Any = (),
        kind: str = "sft",
        **shape: int,
    ) -> Run:
        tok = tokenizer.load(spec)
        cfg = GPTConfig(**TOY_MODEL | shape, vocab_size=tok.n_vocab)
        meta = {"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": list(lineage)}
        with Run.create(name, {"seed": 4}, kind=kind) as run:
            for step in range(1, steps + 1):
                checkpoint.save(run.path, step, model=GPT(cfg, seed=step), meta=meta)
        return run

    return make


@pytest.fixture
def toy_run(make_run: Callable[..., Any]) -> Any:
    return make_run("toy", steps=2)


@pytest.fixture(scope="session")
def quick() -> Callable[..., Any]:
    """`quick(limit_s, call, *args)` gives what `call` returns; one of five tries takes less
    processor time than limit_s.

    A collection of garbage in the middle of a try takes half a second in a process that has
    loaded everything."""

    def within(limit_s: float, call: Callable[..., Any], *args: Any) -> Any:
        for _ in range(5):
            begun = time.process_time()
            result = call(*args)
            if time.process_time() - begun < limit_s:
                return result
        raise AssertionError(f"five times {limit_s} s or more: {args!r:.80}")

    return within


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of headless Chromium; tests that need it skip without."""
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to the workers, so that a module's fixtures are made once; an executed
    notebook is a unit of its own."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndNotebooks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return (
                nodeid
                if "::test_every_walk_through_executes" in nodeid
                else super()._split_scope(nodeid)
            )

    return FilesAndNotebooks(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; torch is asked only if there are
    any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
