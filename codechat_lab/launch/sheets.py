"""List the recipes, show the stages of one, or print command lines for public models and data.

    codechat recipes            each recipe and the names of its stages
    codechat recipes nano       what each stage of nano does
    codechat recipes my.toml    the stages of your own recipe (docs/recipes.md)
    codechat recipes gsm8k      command lines to copy: GSM8K with models of the hub

Nothing is run: `codechat run NAME` does that."""

import textwrap
from dataclasses import dataclass

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import check_choice
from codechat_lab.launch.recipes import FOLDER, RECIPES, find_recipe

SHEETS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.txt"))}


@dataclass(frozen=True, kw_only=True)
class SheetConfig(config.Settings):
    """`codechat recipes`: all recipes, the stages of one, or command lines to copy for public
    models and data (codechat_lab/recipes/NAME.txt)."""

    name: str | None = opt(None, "a recipe, or the path of its file; none = all", positional=True)


def show_recipes(cfg: SheetConfig) -> None:
    """`codechat recipes [NAME]`: each recipe and the names of its stages, or one stage a line."""
    if cfg.name is not None:
        return show_one(cfg.name)
    for name, recipe in RECIPES.items():
        print(f"{name}: {recipe.about}")
        stages = " ".join(stage.name for stage in recipe.stages)
        print(
            textwrap.fill(
                stages, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            )
        )
    for sheet, text in SHEETS.items():
        print(
            f"{sheet}: {text.splitlines()[0].lstrip('# ')}; "
            f"codechat recipes {sheet} prints its command lines"
        )


def show_one(name: str) -> None:
    """The stages of a recipe with what each does, or a sheet of command lines."""
    if name in SHEETS:
        return print(SHEETS[name], end="")
    if not name.endswith(".toml"):
        check_choice("recipe", name, [*RECIPES, *SHEETS])
    recipe = find_recipe(name)
    print(f"{name}: {recipe.about}")
    width = max(len(stage.name) for stage in recipe.stages)
    for stage in recipe.stages:
        print(f"  {stage.name:{width}}  {stage.about}")
