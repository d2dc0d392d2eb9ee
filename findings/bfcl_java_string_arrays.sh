#!/bin/bash
# A good guess: the leaderboard reads a Java array of strings as the list of these strings, as it reads an ArrayList.
# The truth (bfcl-eval 2026.3.23): of `new String[]{"a", "b"}` each element keeps its double quotes, while those of
# `new ArrayList<String>(Arrays.asList("a", "b"))` lose them. The expected answers hold plain strings, so the ordinary way to write a
# String[] is judged wrong where the schema says Array, and right where it says ArrayList.
# Where users meet it: the category simple_java (eight parameters are arrays of strings). A model that writes correct Java
# loses the problem; one that leaves the quotes out (`new String[]{a, b}`, which no compiler takes) gets it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# without its dependencies: the converter needs none of them
"$work/venv/bin/pip" install -q --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from importlib.resources import files

from bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter import java_type_converter

print("bfcl-eval", version("bfcl-eval"))
data = files("bfcl_eval") / "data"


def rows(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


problems = rows(data / "BFCL_v4_simple_java.json")
answers = rows(data / "possible_answer" / "BFCL_v4_simple_java.json")
found = 0
for name, problem in problems.items():
    (function,) = problem["function"]
    for argument, schema in function["parameters"]["properties"].items():
        if schema["type"] == "Array" and schema.get("items", {}).get("type") == "String":
            (values,) = [call[function["name"]].get(argument) for call in answers[name]["ground_truth"]]
            found += any(type(value) is list and value for value in values or [])
print(found, "parameters of simple_java are arrays of strings with an expected list")

right = ["user:online:today", "user:online:yesterday"]
assert right in answers["simple_java_35"]["ground_truth"][0]["RedissonConnection.bitOp"]["keys"]
listed = ", ".join(f'"{key}"' for key in right)
array = java_type_converter(f"new String[]{{{listed}}}", "Array", "String")
array_list = java_type_converter(f"new ArrayList<String>(Arrays.asList({listed}))", "ArrayList", "String")
bare = java_type_converter(f"new String[]{{{', '.join(right)}}}", "Array", "String")
print("expected by simple_java_35:", right)
print("String[]:", array)
print("ArrayList<String>:", array_list)
print("String[] without quotes:", bare)
assert found == 8
assert array == [f'"{key}"' for key in right]
assert array_list == right
assert bare == right
PYTHON
