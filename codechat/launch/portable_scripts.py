"""`codechat export-scripts`: short shell scripts with their settings beside them, for the loops and for whole recipes, to run on any machine.

    codechat export-scripts --out scripts                          every loop on eight GPUs; v6 and ours at 2b and 8b
    codechat export-scripts --out mine --nproc 2 --recipes v5 --scales 8b
    PYTHON=python3.12 sh scripts/sft.sh --run-name mine --max-steps 100
    SKIP_TO=7 sh scripts/v6-8b.sh

NAME.sh of a loop starts torchrun with NAME.json; flags after it come last. NAME-SCALE.sh of a recipe calls `codechat run` with NAME-SCALE.json, which
holds the settings of every stage: what is edited there counts, finished stages are skipped. SKIP_TO takes a stage or a number: for v6 that of the
original's script, else the stage's place. FORCE_STAGE=1 (FORCE_PLAIN_CALLS=1) runs a stage again; v6 also knows the original's FORCE_PREP_CODE,
FORCE_PREP_FUNCALL, FORCE_MERGE and FORCE_PREP_RL. The names of runs are set by --run-name alone: torchrun takes --run for an option of its own.

The files hold what differs from the defaults, and no path of this machine. A notebook cell writes the script of its configuration with
`launcher.write(cfg, nproc=8, scripts="scripts")`.

Left out: environments (`make venv` makes one), and clusters (`codechat launch --slurm`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest
from codechat.launch.job_scripts import SAVE_S
from codechat.launch.recipes import NANO, RECIPES, SCALES, Bound, bound_stages, find_scale
from codechat.runs import paths

LOOPS = {
    "pretrain": "--preset d20 --device-batch-size 16 --run-name d20",
    "sft": "--init-from d20 --run-name d20-chat",
    "reinforce": "--init-from d20-chat --run-name d20-reinforce",
    "grpo": "--init-from d20-chat --run-name d20-grpo",
    "ppo": "--init-from d20-chat --run-name d20-ppo",
    "expert_iteration": "--init-from d20-chat --run-name d20-expert",
    "preference": "--init-from d20-chat --loss dpo --task funcall --run-name d20-dpo",
    "chars": "--objective grpo --kl-coef 0.001 --partial-logprob 0.05 --run-name chars",
}
V6_NUMBERS = ("plain-programs", "plain-calls", "v6-sft", "v6-sft", "v6-diagnose", "v6-diagnose", "v6-rl", "v6-evaluate")
V6_FORCED = {
    "FORCE_PREP_CODE": "plain-programs", "FORCE_PREP_FUNCALL": "plain-calls", "FORCE_MERGE": "v6-sft", "FORCE_PREP_RL": "plain-calls",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Where to, and which recipes at which scales."""

    out: Path = opt(Path("scripts"), "folder to write to; files of the same names are replaced")
    nproc: int = opt(8, "ranks of the loops' scripts: one per GPU; NPROC changes it when a script runs")
    recipes: tuple[str, ...] = opt(("v6", "ours"), "recipes to write")
    scales: tuple[str, ...] = opt(("2b", "8b"), "their sizes: nano, 2b (one GPU), 8b (eight GPUs)")

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"nproc is {self.nproc}; it must be at least 1")


def changed_settings(cfg: Any) -> dict[str, Any]:
    """{dotted setting: value} of what a configuration does not have by default; `config.from_dict` gives it back."""
    return {name: here for name, (_, here) in config.changed(cfg).items()}


# ---- loops


def loop_script(entry: registry.Entry, name: str, nproc: int, up: str) -> str:
    """NAME.sh: torchrun with NAME.json beside it."""
    return (
        "#!/bin/sh\n"
        f"# codechat {entry.command}: {entry.about}. Settings: {name}.json, then the flags given here, such as --run-name MINE or --resume.\n"
        "# PYTHON: the interpreter. NPROC: ranks, one per GPU.\n"
        f"{_go(up)}"
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_S}  # seconds to save in when told to stop\n"
        f'exec "${{PYTHON:-python}}" -m torch.distributed.run --standalone --nproc-per-node "${{NPROC:-{nproc}}}" \\\n'
        f'    -m {entry.module} -- --config "$here/{name}.json" "$@"\n'
    )


def write_loop(cfg: Any, out: str | Path, nproc: int = 8, name: str = "") -> Path:
    """Write the script and the settings of one run of a loop; the script's path. `name`: of the files; default the run's."""
    entry = registry.entry_of(cfg, registry.ENTRIES)
    name = name or cfg.run_name.replace("/", "-")
    return _write(
        Path(out),
        name,
        {**changed_settings(cfg), "run_name": cfg.run_name},
        loop_script(entry, name, nproc, _up(Path(out))),
    )


# ---- recipes


def recipe_script(recipe: str, scale: str, stages: list[str], gpus: int, up: str) -> str:
    """RECIPE-SCALE.sh: `codechat run` with RECIPE-SCALE.json beside it."""
    numbers = V6_NUMBERS if recipe == "v6" else stages
    cases = "".join(f"    {i}) SKIP_TO={stage} ;;\n" for i, stage in enumerate(numbers, 1))
    forced = V6_FORCED if recipe == "v6" else {}
    lines = "".join(f'[ "${{{flag}:-0}}" != 1 ] || set -- --force {stage} "$@"\n' for flag, stage in forced.items())
    machine = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"
    return (
        "#!/bin/sh\n"
        f"# Recipe {recipe} at {scale}: {machine}. Settings of every stage: {recipe}-{scale}.json. Finished stages are skipped, a stopped one continues.\n"
        "# SKIP_TO=N or STAGE: from there on, again. FORCE_STAGE=1: that stage again, and those that need it. PYTHON: the interpreter.\n"
        "# Further options of `codechat run` may follow, such as --until sft-general, or --yes where nobody can be asked.\n"
        f"{_go(up)}"
        f"case ${{SKIP_TO:-}} in\n{cases}esac\n"
        '[ -z "${SKIP_TO:-}" ] || set -- --from "$SKIP_TO" "$@"\n'
        f"{lines}"
        f"for stage in {' '.join(stages)}; do\n"
        "    flag=FORCE_$(echo \"$stage\" | tr 'a-z-' 'A-Z_')\n"
        '    eval "wish=\\${$flag:-0}"\n'
        '    [ "$wish" != 1 ] || set -- --force "$stage" "$@"\n'
        "done\n"
        f'exec "${{PYTHON:-python}}" -m codechat run {recipe} --scale {scale} --settings "$here/{recipe}-{scale}.json" "$@"\n'
    )


def write_recipe(recipe: str, scale: str, out: str | Path) -> Path:
    """Write the script of a recipe at a scale, and the settings of its stages; the script's path."""
    bound, size = bound_stages(recipe, scale), find_scale(scale)
    gpus = max((size.ranks_of(b.stage) for b in bound), default=0) if size else 0
    settings = {b.stage.name: _of_stage(b) for b in bound}
    return _write(
        Path(out), f"{recipe}-{scale}", settings, recipe_script(recipe, scale, list(settings), gpus, _up(Path(out)))
    )


def _of_stage(b: Bound) -> dict[str, Any]:
    place = "out" if b.stage.out else "run_name"
    return {place: config.plain(getattr(b.cfg, place)), **changed_settings(b.cfg)}


# ---- files


def _up(out: Path) -> str:
    """How a script in this folder goes to the project's root; empty where the folder lies elsewhere."""
    inside = Path(os.path.abspath(out)).is_relative_to(paths.ROOT)
    return os.path.relpath(paths.ROOT, os.path.abspath(out)) if inside else ""


def _go(up: str) -> str:
    here = 'here=$(cd "$(dirname "$0")" && pwd) || exit 1\n'
    return here + (f'cd "$here/{up}" || exit 1\n' if up else "")


def _write(out: Path, name: str, settings: Mapping[str, Any], script: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / f"{name}.json", json.dumps(settings, indent=1) + "\n")
    path = out / f"{name}.sh"
    write_atomic(path, script)
    path.chmod(0o755)
    return path


def export(cfg: ExportConfig) -> list[Path]:
    """Write all scripts; their paths. ConfigError before anything is written."""
    for what, valid in ((cfg.recipes, RECIPES), (cfg.scales, (NANO, *SCALES))):
        if unknown := [word for word in what if word not in valid]:
            raise ConfigError(f"no {unknown[0]!r}{nearest(unknown[0], valid)}")
    found = []
    for id, words in LOOPS.items():
        entry = registry.find(id, registry.LOOPS)
        settings = config.parse(entry.config_class, words.split(), presets=entry.presets)
        found.append(write_loop(settings, cfg.out, cfg.nproc, name=id))
    return found + [write_recipe(recipe, scale, cfg.out) for recipe in cfg.recipes for scale in cfg.scales]


def main(argv: list[str] | None = None) -> None:
    """`codechat export-scripts`."""
    words = sys.argv[1:] if argv is None else argv
    for path in export(config.parse(ExportConfig, words, prog="codechat export-scripts", epilog=__doc__)):
        print(path)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
