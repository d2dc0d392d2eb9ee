#!/usr/bin/env bash
# Java maps in calls that the leaderboard reads from text (bfcl-eval 2026.3.23, category simple_java).
# A good guess: its converter reads `new HashMap<String, Integer>() {{ put("a", 1); }}`, so a prompted model that writes a map
#   this way has it read.
# The truth: the reader of texts, before the converter, drops the class body between `{{` and `}}`. What the converter gets
#   is `new HashMap<String,Integer>()`, an empty map. Text outside of ASCII in front of an argument also shifts what it cuts out,
#   since places counted in bytes are used in a string.
# Where users meet it: four problems of simple_java expect a filled map. Correct Java of a prompted model loses them; the same map
#   from an API's `tool_calls`, as one string, is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23 tree-sitter==0.21.3 \
    tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4 filelock==3.16.1 tenacity==9.1.2
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from importlib.resources import files

from bfcl_eval.constants.enums import ReturnFormat
from bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter import java_type_converter
from bfcl_eval.model_handler.utils import default_decode_ast_prompting

print("bfcl-eval", version("bfcl-eval"))


def read(text: str) -> dict:
    ((name, arguments),) = default_decode_ast_prompting(text, ReturnFormat.JAVA)[0].items()
    return arguments


written = 'new HashMap<String, Integer>() {{ put("a", 1); put("b", 2); }}'
alone = java_type_converter(written, "HashMap", "Integer")
kept = read(f"[Box.fill(items={written})]")["items"]
print("the converter alone:", alone)
print("read from a text:", repr(kept), "->", java_type_converter(kept, "HashMap", "Integer"))
assert alone == {"a": 1, "b": 2}
assert kept == "new HashMap<String,Integer>()"
assert java_type_converter(kept, "HashMap", "Integer") == {}

plain = read('[Box.fill(name="Muller", size=5)]')
shifted = read('[Box.fill(name="Müller", size=5)]')
print(plain, shifted)
assert plain == {"name": "Muller", "size": "5"} and shifted.keys() != plain.keys()

data = files("bfcl_eval") / "data"
answers = data / "possible_answer" / "BFCL_v4_simple_java.json"
types = {}
for line in (data / "BFCL_v4_simple_java.json").read_text().splitlines():
    row = json.loads(line)
    types[row["id"]] = row["function"][0]["parameters"]["properties"]
filled = []
for row in map(json.loads, answers.read_text().splitlines()):
    ((_, expected),) = row["ground_truth"][0].items()
    maps = [ways for name, ways in expected.items() if types[row["id"]].get(name, {}).get("type") == "HashMap"]
    if any(isinstance(way, dict) for ways in maps for way in ways):
        filled.append(row["id"])
print("problems that expect a filled map:", filled)
assert len(filled) == 4
PYTHON
