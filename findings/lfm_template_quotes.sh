#!/usr/bin/env bash
# Calls that LFM2.5's chat template writes, as trl carries it for training.
# A good guess: a call that the template writes into training text can be read back, whatever its arguments hold; the
#   template of LFM2 escapes strings.
# The truth: the templates of LFM2.5 put a string between single quotes as it is. An apostrophe or a line end in an argument
#   makes the list of calls unreadable for Python and for every parser of that form; other strings come back.
# Where users meet it: fine-tuning on conversations with tool calls (trl, axolotl and others render them with this template):
#   the model learns text that no parser reads, and a reward for a readable call is out of its reach on such requests.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps trl==1.16.0
"$folder/venv/bin/python" - <<'PYTHON'
import ast
import json
import re
import sysconfig
from importlib.metadata import version
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

place = Path(sysconfig.get_paths()["purelib"]) / "trl" / "chat_templates"
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)


def written(name: str, value: str) -> str:
    """The list of calls that a template writes for one argument."""
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", (place / f"{name}.jinja").read_text())
    call = {"type": "function", "function": {"name": "note", "arguments": {"text": value}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = environment.from_string(source).render(bos_token="", messages=messages, add_generation_prompt=False)
    return text.partition("<|tool_call_start|>")[2].partition("<|tool_call_end|>")[0]


def comes_back(text: str, value: str) -> bool:
    """Whether Python reads the argument as it was."""
    try:
        (call,) = ast.parse(text, mode="eval").body.elts
    except SyntaxError:
        return False
    return ast.literal_eval(call.keywords[0].value) == value


print("trl", version("trl"))
seen = {}
for name in ("lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2"):
    for value in ("plain", 'a "quoted" word', "it's here", "two\nlines"):
        text = written(name, value)
        seen[name, value] = comes_back(text, value)
        print(f"{name:12} {value!r:20} {text!r:40} {'comes back' if seen[name, value] else 'cannot be read'}")
assert all(good for (name, _), good in seen.items() if name == "lfm2_v2")
for name in ("lfm2_2_5", "lfm2_2_5_v2"):
    assert seen[name, "plain"] and seen[name, 'a "quoted" word']
    assert not seen[name, "it's here"] and not seen[name, "two\nlines"]
PYTHON
