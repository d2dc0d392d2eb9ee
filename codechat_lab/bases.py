"""Pretrained models that released adapters belong to: fetched once, before the first command
that reads such an adapter."""

import io
from contextlib import redirect_stdout, suppress
from typing import Any

from codechat.core import config, registry
from codechat.core.atomic_files import read_json
from codechat.core.errors import UserError
from codechat.core.processes import alone
from codechat.runs import paths


def fetch_bases(cfg: Any) -> None:
    """Make the run base/NAME of every adapter that these settings read: an entry point
    `codechat.before`.

    Other commands that need it wait. Raises what the download or the import raises."""
    for _, ref in config.read_by(cfg, "run"):
        name = base_of(ref)
        if name:
            fetch(name, ref)


def base_of(ref: str) -> str | None:
    """The pretrained model of a released adapter, or of one below other adapters; None of any
    other checkpoint, and of what does not exist: the command says so itself."""
    with suppress(UserError):
        meta = read_json(paths.find_checkpoint(ref) / "meta.json")
        base = paths.base_of(meta)
        if base and base.fingerprint:
            return base_of(base.checkpoint)
        return meta.get("base")
    return None


def fetch(name: str, ref: str) -> None:
    """Download and import a pretrained model as run base/NAME, unless it is there. NAME alone
    is taken: recipe `smollm2` has its runs there."""
    run = f"base/{name}"
    path = paths.runs_dir() / run
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_name(f".{name}.fetch")):
        if paths.latest_step(path) is not None:
            return
        print(f"{ref} is an adapter of {name}, which is fetched once, into {path}", flush=True)
        download = registry.find("download")
        make = registry.find("import")
        source = download.load(download.function)(download.config_class(name=name))
        # what an import says of tokens without trained rows is not true of the adapter: it has them
        with redirect_stdout(io.StringIO()):
            make.load(make.function)(
                make.config_class(source=source, run_name=run, overwrite=paths.exists(run))
            )
        print(f"run {run}: the pretrained model of {ref}", flush=True)
