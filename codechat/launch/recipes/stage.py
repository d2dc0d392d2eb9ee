"""A stage of a recipe: one configuration of one training function, with placeholders; `bind` fills them in and hashes the result.

In `settings`, `out` and `when`, {runs} and {data} stand for the recipe's prefix of run names and its data directory, {NAME} for the place where
the stage of that name leaves its result. Recipes name no runs: the seed decides a stage's place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.errors import ConfigError, nearest
from codechat.runs.paths import ROOT, exists
from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Stage:
    """kind: the id of its function in `core.registry`. out: the directory that it writes; empty = the run {runs}/NAME.

    seeded: repeated per seed, in a run of its own; once: for seed 0 only; otherwise all seeds share it.
    when: a pattern of files; where none matches, the stage is skipped with a message. asked: it runs only where --until, --from or --force names it,
    or a stage that needs it."""

    name: str
    about: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seeded: bool = False
    once: bool = False
    asked: bool = False
    out: str = ""
    when: str = ""

    def made(self, cfg: Any) -> bool:
        """Whether its result is still there: a finished run, or its output directory."""
        if hasattr(cfg, "run_name"):
            return exists(cfg.run_name) and Run.open(cfg.run_name).status["status"] == "finished"
        out = getattr(cfg, "out", None)
        return out is None or (ROOT / Path(out)).exists()

    def result(self, cfg: Any) -> str:
        """The last evaluations of the stage's run in a few words, then its median training speed."""
        if not hasattr(cfg, "run_name"):
            return ""
        run = Run.open(cfg.run_name)
        evals, metrics = run.evals().to_dict("records"), run.metrics()
        lines = [_summary(row) for row in (evals[-4:] if self.name.endswith("evaluate") else evals[-1:])]
        if {"tok_per_s", "mfu"} <= set(metrics):
            lines.append(f"{metrics['tok_per_s'].median():,.0f} tok/s, MFU {metrics['mfu'].median():.0%}")
        return "\n".join(lines)


SUMMARY = ("val_bpb", "exact_match", "pass@1", "pass@8", "reward_mean")


def _summary(row: Mapping[str, Any]) -> str:
    where = " on ".join(row[k] for k in ("checkpoint", "split") if isinstance(row.get(k), str))
    verdict = [row["verdict"]] if isinstance(row.get("verdict"), str) else []
    shown = [f"{k} {row[k]:.3f}" for k in SUMMARY if isinstance(row.get(k), float)]
    losses = [f"{k.removeprefix('heldout_loss/')} {v:.2f}" for k, v in row.items() if k.startswith("heldout_loss/")]
    return " ".join([f"{where}:"] * bool(where) + verdict + shown + ["held-out loss"] * bool(losses) + losses)


@dataclass(frozen=True)
class Bound:
    """A stage with its placeholders filled in, its configuration built, its identity hashed."""

    stage: Stage
    name: str  # in the ledger
    cfg: Any
    action: Callable[[Any], Any]
    hash: str
    when: str = ""  # pattern of files under the root


def bind(
    recipe: str,
    stages: tuple[Stage, ...],
    seed: int,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Bound]:
    """The stages in order, ready to run. ConfigError names a stage whose settings do not fit its configuration.

    own: {stage: settings without placeholders} that replace those of the recipe."""
    own = own or {}
    if unknown := [name for name in own if name not in (names := [s.name for s in stages])]:
        raise ConfigError(
            f"settings for a stage {unknown[0]!r}{nearest(unknown[0], names)}; recipe {recipe} has {', '.join(names)}"
        )
    if bad := [name for name, settings in own.items() if not isinstance(settings, Mapping)]:
        raise ConfigError(
            f"settings of stage {bad[0]} are a {type(own[bad[0]]).__name__}; required is an object {{setting: value}}"
        )
    bound: dict[str, Bound] = {}
    places = {"runs": recipe, "data": f"data/{recipe}"}
    for stage in stages:
        if seed and stage.once:
            continue
        suffix = f"-s{seed}" if seed and stage.seeded else ""
        place = "out" if stage.out else "run_name"
        places[stage.name] = _fill(stage.out or f"{{runs}}/{stage.name}", places) + suffix
        entry = registry.find(stage.kind)
        settings = _fill(stage.settings, places) | {place: places[stage.name]}
        if stage.name in own:
            settings = {place: places[stage.name]} | dict(own[stage.name])
            places[stage.name] = settings[place]
        cfg = config.from_dict(entry.config_class, settings | ({"seed": seed} if stage.seeded else {}),
                               where=f"recipe {recipe}, stage {stage.name}")  # fmt: skip
        what = [entry.id, config.config_hash(cfg), [bound[n].hash for n in stage.needs]]
        bound[stage.name] = Bound(
            stage,
            stage.name + suffix,
            cfg,
            entry.load(entry.function),
            hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12],
            _fill(stage.when, places),
        )
    return list(bound.values())


def _fill(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return value.format_map(places)
    if isinstance(value, Mapping):
        return {k: _fill(v, places) for k, v in value.items()}
    return [_fill(v, places) for v in value] if isinstance(value, (list, tuple)) else value
