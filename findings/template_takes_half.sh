#!/usr/bin/env bash
# Chat templates that take half of a conversation with tools, as trl carries them.
# A good guess: a template that writes tool calls also lists the tools, and the other way round; or it raises.
# The truth: DeepSeek-V3's writes calls and drops `tools`: the model never sees what it may call. LFM2's first template lists
#   `tools` and drops `tool_calls`: the answer that calls becomes an empty answer. Neither raises, and transformers'
#   `apply_chat_template(tools=...)` passes both on without a word.
# Where users meet it: fine-tuning on tool conversations (the loss falls on empty answers, or on calls of unknown tools), and
#   servers that offer tools through the template.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps trl==1.16.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sysconfig
from importlib.metadata import version
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

place = Path(sysconfig.get_paths()["purelib"]) / "trl" / "chat_templates"
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": parameters}}
call = {"type": "function", "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}
messages = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
]


def text(name: str, **given: object) -> str:
    template = environment.from_string((place / f"{name}.jinja").read_text())
    return template.render(bos_token="", add_generation_prompt=False, **given)


print("trl", version("trl"))
for name in ("deepseekv3", "lfm2", "qwen3"):
    listed = "look_up" in text(name, messages=messages[:1], tools=[tool])
    called = "Oslo" in text(name, messages=messages)
    print(f"{name:12} lists the tool: {listed!s:6} writes the call: {called}")
    assert (listed, called) == {"deepseekv3": (False, True), "lfm2": (True, False), "qwen3": (True, True)}[name]
print(repr(text("lfm2", messages=messages)))
PYTHON
