"""A run that knows `taught.lessons` by heart, a server of it, and commands."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server import Running, Serving
from taught import TOK, learn, new_model

from codechat import cli
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat_lab.serve import engine


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the run tiny/sft, and the same as tiny/text, whose tags are plain text."""
    root = tmp_path_factory.mktemp("root")
    model = new_model(0)
    learn(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        for name, tags in (("tiny/sft", "reserved"), ("tiny/text", "text")):
            with Run.create(name, {"lr": 0.003}, kind="sft") as run:
                meta = {"tokenizer": TOK.to_dict(), "tags": tags, "lineage": []}
                checkpoint.save(run.path, 60, model=model, meta=meta)
    return root


@pytest.fixture(scope="module")
def root(taught: Path) -> Iterator[Path]:
    """The root of this module's runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", taught)
        yield taught


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That root in the tests that use it, else one of their own."""
    own = request.getfixturevalue("root") if "root" in request.fixturenames else tmp_path
    monkeypatch.setattr(paths, "ROOT", own)
    return own


@pytest.fixture(scope="module")
def up(root: Path) -> Iterator[Running]:
    with Serving() as running:
        yield running


@pytest.fixture
def slow_down() -> Iterator[Callable[[float], None]]:
    """slow_down(seconds): at least so long for a token, so that a test can interfere with an
    answer."""
    advance = engine.SlotCache.advance
    with pytest.MonkeyPatch.context() as patch:
        late = lambda seconds: lambda cache, *new: time.sleep(seconds) or advance(cache, *new)  # noqa: E731
        yield lambda seconds: patch.setattr(engine.SlotCache, "advance", late(seconds))


@pytest.fixture
def said(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        out = capsys.readouterr()
        return (
            code,
            out.out,
            "\n".join(x for x in out.err.splitlines() if not x.startswith("compute:")),
        )

    return run
