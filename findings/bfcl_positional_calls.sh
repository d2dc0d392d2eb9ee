#!/usr/bin/env bash
# The calls of the leaderboard's own multi-turn answers, read back by its reader for models that it prompts (bfcl-eval 2026.3.23).
# A good guess: a model that writes exactly the reference calls has every conversation right: the runner reads a text, and the
#   reference is text of the same form.
# The truth: the reader drops positional arguments: `cd('document')` becomes `cd()`. 160 of the reference calls, in 96 of the 800
#   conversations, have some; there the reference loses against itself, with an error of the simulated system as its result.
# Where users meet it: scoring a prompted model on multi-turn, and making training data from the reference: what is copied
#   into an answer as it stands fails, and only calls with names pass. `tool_calls` of an API have names and are not concerned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23 tree-sitter==0.21.3 \
    tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4 filelock==3.16.1 tenacity==9.1.2
"$folder/venv/bin/python" - <<'PYTHON'
import ast
import json
from importlib.metadata import version
from importlib.resources import files

from bfcl_eval.model_handler.utils import default_decode_execute_prompting as read

print("bfcl-eval", version("bfcl-eval"))
print(read("[cd('document')]"), read("[cd(folder='document')]"))
assert read("[cd('document')]") == ["cd()"]
assert read("[cd(folder='document')]") == ["cd(folder='document')"]

calls = positional = entries = concerned = 0
for category in ("base", "miss_func", "miss_param", "long_context"):
    path = files("bfcl_eval") / "data" / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json"
    for line in path.read_text().splitlines():
        texts = [call for turn in json.loads(line)["ground_truth"] for call in turn]
        some = [text for text in texts if ast.parse(text, mode="eval").body.args]
        calls += len(texts)
        positional += len(some)
        entries += 1
        concerned += bool(some)
        for text in some:
            (got,) = read(f"[{text}]")
            assert not ast.parse(got, mode="eval").body.args, got
print(f"{positional} of {calls} reference calls, in {concerned} of {entries} conversations, have positional arguments")
assert (positional, calls, concerned, entries) == (160, 4625, 96, 800)
PYTHON
