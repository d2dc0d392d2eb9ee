"""`codechat download`: a model or data set of the Hugging Face hub into a directory, by huggingface_hub.

    codechat download Qwen/Qwen2.5-0.5B-Instruct
    codechat download openai/openai_humaneval --out data/humaneval
    codechat download Qwen/Qwen3-0.6B --mirror hf-mirror
    HF_ENDPOINT=https://a-mirror codechat download Qwen/Qwen3-0.6B

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
from typing import Any, Literal

from codechat.core import config
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError, UserError, nearest
from codechat.data import sources
from codechat.runs import paths

TRANSPORTS = {"httpx", "httpx2", "requests"}
MIRRORS = {"hf-mirror": "https://hf-mirror.com"}
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.md", "LICENSE*"]


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """What to fetch, and where to."""

    name: str = opt(REQUIRED, "OWNER/NAME on the hub", positional=True)
    out: Path | None = opt(None, "directory to make; none = data/hub/NAME")
    kind: Literal["any", "model", "dataset"] = opt("any", "where the name is looked up; any = models, then data sets")
    revision: str | None = opt(None, "branch, tag or commit; none = main")
    mirror: str | None = opt(
        None, f"where to fetch from: {', '.join(MIRRORS)}, or an address; none = HF_ENDPOINT, else the hub itself"
    )

    def __post_init__(self) -> None:
        if self.mirror and self.mirror not in MIRRORS and not self.mirror.startswith(("https://", "http://")):
            raise ConfigError(f"no mirror {self.mirror!r}{nearest(self.mirror, MIRRORS)}; or an address (https://...)")

    @property
    def endpoint(self) -> str | None:
        """The address of --mirror; none where huggingface_hub decides."""
        return MIRRORS.get(self.mirror, self.mirror.rstrip("/")) if self.mirror else None


def download(cfg: DownloadConfig) -> Path:
    """Fetch into the directory; returns its path. UserError within seconds where the hub does not answer."""
    out = cfg.out or paths.ROOT / "data" / "hub" / Path(cfg.name).name
    if out.exists():
        raise ConfigError(f"{out} exists; a free name is required; remove it to fetch {cfg.name} again, or set --out")
    remedy = "connect to a network, set --mirror hf-mirror (or HF_ENDPOINT), or copy the directory here"
    sources.probe_hub(cfg.name, remedy=remedy, endpoint=cfg.endpoint)
    partial = out.with_name(out.name + ".partial")
    kinds = ("model", "dataset") if cfg.kind == "any" else (cfg.kind,)
    kind = next((kind for kind in kinds if _fetched(cfg, kind, partial)), None)
    if kind is None:
        what = " or data set" if cfg.kind == "any" else ""
        raise UserError(
            f"the hub has no {kinds[0]}{what} {cfg.name}; check the spelling, or set HF_TOKEN if it is private"
        )
    os.rename(partial, out)
    print(f"{out}: {kind} {cfg.name}, {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 2**20:.1f} MiB")
    return out


def _fetched(cfg: DownloadConfig, kind: str, partial: Path) -> bool:
    """Fetch the files; False where the hub has no such name of this kind."""
    import huggingface_hub
    from huggingface_hub import errors

    patterns = MODEL_FILES if kind == "model" else None
    token = False if cfg.mirror else None  # it is the hub's, not the mirror's
    where: Any = dict(repo_type=kind, revision=cfg.revision, local_dir=partial, endpoint=cfg.endpoint)
    try:
        huggingface_hub.snapshot_download(cfg.name, token=token, allow_patterns=patterns, **where)
    except errors.HFValidationError as error:
        raise ConfigError(f"{cfg.name!r} is no name on the hub ({error}); required is OWNER/NAME") from None
    except errors.GatedRepoError:
        raise UserError(f"{cfg.name} is gated; accept its terms, then set HF_TOKEN and leave out --mirror") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{kind} {cfg.name} has no revision {cfg.revision!r}; set --revision") from None
    except errors.RepositoryNotFoundError:
        return False
    except Exception as error:  # the transport is another package in each release of huggingface_hub
        packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
        if not isinstance(error, (OSError, errors.HfHubHTTPError)) and not packages & TRANSPORTS:
            raise
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0][:200]}"
        continued = f"run the same command to continue with {partial}"
        raise UserError(f"{cfg.name} is incomplete ({reason}); {continued}") from error
    return True


def main(argv: list[str] | None = None) -> int:
    """`codechat download`; 0 when the directory is there."""
    words = sys.argv[1:] if argv is None else argv
    download(config.parse(DownloadConfig, words, prog="codechat download", epilog=__doc__))
    return 0
