"""`codechat export-scripts`: shell scripts with json settings, for the loops and for whole
recipes, to run on any machine.

    codechat export-scripts --out scripts                          every loop on eight GPUs; v6 and ours at 2b and 8b
    codechat export-scripts --out mine --recipes v5 --scales 8b
    PYTHON=python3.12 sh scripts/sft.sh --run-name mine --max-steps 100
    SKIP_TO=7 sh scripts/v6-8b.sh
    BASE=my-base sh scripts/v6-8b.sh

NAME.sh of a loop starts torchrun with NAME.json; flags after it win. NAME-SCALE.sh of a recipe
calls `codechat run` with NAME-SCALE.json, the settings of every stage, which you can edit.
SKIP_TO takes a stage or a number: for v6 the original script's number, otherwise the position
of the stage. FORCE_STAGE=1 runs a stage again; v6 also knows the original's FORCE_PREP_CODE,
FORCE_PREP_FUNCALL, FORCE_MERGE and FORCE_PREP_RL. A script refuses FORCE_NAME=1 of no stage and
misspelt variables. The files hold what differs from the defaults, and no path of this
machine."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.runs import paths
from codechat_lab.launch.recipes import bound_stages, find_scale

# that torchrun gives its ranks to write a checkpoint when it is told to stop; its own default is 30
SAVE_S = 600
# the words of each
LOOPS: dict[str, str] = json.loads(Path(__file__).with_name("loops.json").read_text())
V6_NUMBERS = (
    "plain-programs",
    "plain-calls",
    "v6-sft",
    "v6-sft",
    "v6-diagnose",
    "v6-diagnose",
    "v6-rl",
    "v6-evaluate",
)
V6_FORCED = {
    "FORCE_PREP_CODE": "plain-programs",
    "FORCE_PREP_FUNCALL": "plain-calls",
    "FORCE_MERGE": "v6-sft",
    "FORCE_PREP_RL": "plain-calls",
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Where to, and which recipes at which scales."""

    out: Path = opt(Path("scripts"), "folder to write to; files of the same names are replaced")
    recipes: tuple[str, ...] = opt(("v6", "ours"), "recipes to write")
    scales: tuple[str, ...] = opt(("2b", "8b"), "their sizes: nano, 2b (one GPU), 8b (eight GPUs)")


def fill(template: str, **values: Any) -> str:
    """A template beside this file with a value for each {{name}}."""
    text = Path(__file__).with_name(template).read_text()
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", str(value))
    left = re.search(r"{{\w+}}", text)
    if left:
        raise ValueError(f"{template} has {left[0]}, for which there is no value")
    return text


def changed_settings(cfg: Any) -> dict[str, Any]:
    """{dotted setting: value} of what a configuration does not have by default, sorted;
    `config.from_dict` gives it back."""
    return {name: here for name, (_, here) in sorted(config.changed(cfg).items())}


def write_loop(cfg: Any, out: str | Path, nproc: int = 8, name: str = "") -> Path:
    """Write the script and the settings of one run of a loop; the script's path. `name`: of the
    files; default the run's."""
    entry = registry.entry_of(cfg, registry.ENTRIES)
    name = name or cfg.run_name.replace("/", "-")
    script = fill(
        "loop.sh",
        name=name,
        command=entry.command,
        about=entry.about,
        check=check_of("NPROC", "PYTHON"),
        go=_go(out),
        nproc=nproc,
        save_s=SAVE_S,
    )
    return _write(out, name, {"run_name": cfg.run_name, **changed_settings(cfg)}, script)


def write_recipe(recipe: str, scale: str, out: str | Path) -> Path:
    """Write the script of a recipe at a scale, and the settings of its stages; the script's
    path."""
    bound = bound_stages(recipe, scale)
    size = find_scale(scale)
    settings = {}
    for b in bound:
        place = "out" if b.stage.out else "run_name"
        settings[b.stage.name] = {
            place: config.plain(getattr(b.cfg, place)),
            **changed_settings(b.cfg),
        }
    gpus = max(size.ranks_of(b.stage) for b in bound)
    numbers = V6_NUMBERS if recipe == "v6" else tuple(settings)
    forced = V6_FORCED if recipe == "v6" else {}
    flags = [f"FORCE_{stage.upper().replace('-', '_')}" for stage in settings]
    cases = [f"    {i}) SKIP_TO={stage} ;;\n" for i, stage in enumerate(numbers, 1)]
    forcing = [
        f'[ "${{{flag}:-0}}" != 1 ] || set -- --force {name} "$@"\n'
        for flag, name in forced.items()
    ]
    script = fill(
        "recipe.sh",
        recipe=recipe,
        scale=scale,
        stages=" ".join(settings),
        machine={0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs"),
        check=check_of("SKIP_TO", "BASE", "PYTHON", *flags, *forced),
        go=_go(out),
        cases="".join(cases),
        forced="".join(forcing),
    )
    return _write(out, f"{recipe}-{scale}", settings, script)


def check_of(*variables: str) -> str:
    """The part of a script that refuses what is like one of its variables and is none."""
    return fill("variables.sh", variables=" ".join(variables))


def _go(out: str | Path) -> str:
    """The line of a script that goes to the project's root; "" where `out` is outside of it."""
    folder = os.path.abspath(out)
    if not Path(folder).is_relative_to(paths.ROOT):
        return ""
    return f'cd "$here/{os.path.relpath(paths.ROOT, folder)}" || exit 1\n'


def _write(out: str | Path, file: str, settings: Mapping[str, Any], script: str) -> Path:
    """Write FILE.json and FILE.sh; the script's path."""
    path = Path(out) / f"{file}.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".json"), json.dumps(settings, indent=1) + "\n")
    write_atomic(path, script)
    path.chmod(0o755)
    return path


def export(cfg: ExportConfig) -> list[Path]:
    """Write all scripts; their paths. ConfigError before anything is written."""
    chosen = list(product(cfg.recipes, cfg.scales))
    written = []
    for recipe, scale in chosen:
        bound_stages(recipe, scale)
    for loop, words in LOOPS.items():
        settings = registry.LOOPS[loop].parse(words.split())
        written.append(write_loop(settings, cfg.out, name=loop))
    return written + [write_recipe(recipe, scale, cfg.out) for recipe, scale in chosen]


def main(cfg: ExportConfig) -> None:
    """`codechat export-scripts`."""
    print(*export(cfg), sep="\n")
