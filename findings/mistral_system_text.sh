#!/usr/bin/env bash
# The system text in Mistral's chat template with function calls (Mistral-7B-Instruct-v0.3's, as bfcl-eval carries it).
# A good guess: a system text is part of every prompt of a conversation, wherever the template puts it.
# The truth: the template writes it into the last message if that is a user's. When the last message is a tool's result, as
#   in the second request of every tool loop, the system text is in no place of the prompt, and nothing is raised.
# Where users meet it: transformers' `apply_chat_template` and servers that render this template: rules, persona and
#   date given as system text are gone when the model words its answer from a result; and training text of such
#   conversations differs from the prompts of its own earlier turns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
"$folder/venv/bin/python" - <<'PYTHON'
import ast
import json
import sysconfig
import textwrap
from importlib.metadata import version
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

source = Path(sysconfig.get_paths()["purelib"]) / "bfcl_eval/model_handler/local_inference/mistral_fc.py"
texts = [
    ast.get_docstring(node, clean=False) or ""
    for node in ast.walk(ast.parse(source.read_text()))
    if isinstance(node, ast.FunctionDef)
]
(docstring,) = [text for text in texts if '"chat_template":' in text]
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
template = environment.from_string(textwrap.dedent(docstring.partition('"chat_template":')[2]))

RULE = "Answer in French."
call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
talk = [
    {"role": "system", "content": RULE},
    {"role": "user", "content": "Is it cold in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3 degrees"},
]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": parameters}}

print("bfcl-eval", version("bfcl-eval"))
for n, last in ((2, "a user's request"), (4, "a tool's result")):
    text = template.render(bos_token="<s>", eos_token="</s>", messages=talk[:n], tools=[tool], add_generation_prompt=True)
    print(f"last message {last:16}: the system text is in the prompt: {RULE in text}")
    assert (RULE in text) == (n == 2)
    assert "Oslo" in text
print(text[-150:])
PYTHON
