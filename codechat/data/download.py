"""`codechat download`: a model or data set of the Hugging Face hub into a directory, by huggingface_hub.

    codechat download Qwen/Qwen2.5-0.5B-Instruct
    codechat download openai/openai_humaneval --out data/humaneval
    codechat download Qwen/Qwen3-0.6B --mirror hf-mirror

Files arrive in OUT.partial, which is renamed to OUT when it is complete; the same command continues after an
interruption. Of a model it fetches what `codechat import` reads (safetensors, json, templates), of a data set
everything. HF_ENDPOINT, HF_TOKEN and HF_HOME work as in huggingface_hub. --mirror comes before HF_ENDPOINT; no token is
sent to it, so it has public names only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from codechat.core import config
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError, UserError
from codechat.data import sources
from codechat.runs import paths

MIRRORS = {"hf-mirror": "https://hf-mirror.com"}
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.md", "LICENSE*"]


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """What to fetch, and where to."""

    name: str = opt(REQUIRED, "OWNER/NAME on the hub", positional=True)
    out: Path | None = opt(None, "directory to make; none = data/hub/NAME")
    mirror: str | None = opt(None, "hf-mirror or an address to fetch from; none = HF_ENDPOINT, else the hub itself")


def download(cfg: DownloadConfig) -> Path:
    """Fetch into the directory; returns its path. UserError within seconds where the hub does not answer."""
    out = cfg.out or paths.ROOT / "data" / "hub" / Path(cfg.name).name
    if out.exists():
        raise ConfigError(f"{out} exists; a free name is required; remove it to fetch {cfg.name} again, or set --out")
    endpoint = MIRRORS.get(cfg.mirror, cfg.mirror.rstrip("/")) if cfg.mirror else None
    remedy = "connect to a network, set --mirror hf-mirror (or HF_ENDPOINT), or copy the directory here"
    sources.probe_hub(cfg.name, remedy, endpoint)
    partial = out.with_name(out.name + ".partial")
    kind = next((kind for kind in ("model", "dataset") if _fetched(cfg, kind, partial, endpoint)), None)
    if kind is None:
        raise UserError(f"the hub has no model or data set {cfg.name}; check the spelling, or set HF_TOKEN")
    os.rename(partial, out)
    print(f"{out}: {kind} {cfg.name}, {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 2**20:.1f} MiB")
    return out


def _fetched(cfg: DownloadConfig, kind: str, partial: Path, endpoint: str | None) -> bool:
    """Fetch the files; False where the hub has no such name of this kind."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.snapshot_download(
            cfg.name,
            token=False if cfg.mirror else None,  # it is the hub's, not the mirror's
            allow_patterns=MODEL_FILES if kind == "model" else None,
            repo_type=kind,
            local_dir=partial,
            endpoint=endpoint,
        )
    except Exception as error:  # the transport is another package in each release of huggingface_hub
        if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
            return False
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0][:200]}"
        raise UserError(f"{cfg.name} is incomplete ({reason}); the same command continues with {partial}") from error
    return True


def main(argv: list[str] | None = None) -> int:
    """`codechat download`; 0 when the directory is there."""
    words = sys.argv[1:] if argv is None else argv
    download(config.parse(DownloadConfig, words, prog="codechat download", epilog=__doc__))
    return 0
