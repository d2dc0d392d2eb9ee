#!/usr/bin/env bash
# Two calls in one answer, in chat templates as trl carries them.
# A good guess: a template that takes `tool_calls` writes all of them, and `tool_call_id` says which result belongs to which;
#   else it raises, as Llama 3.1's does ("only supports single tool-calls at once").
# The truth: gpt-oss's writes the first call and both results: the second result has no call. Qwen2.5's, Qwen3's and LFM2's write
#   both calls and no id at all: results whose order differs from the calls' (valid, their ids are right) stand behind the
#   wrong call. None of them raises.
# Where users meet it: functions that run at the same time and are answered as they end, through transformers'
#   `apply_chat_template` or a server that renders these templates; fine-tuning on such conversations teaches that Oslo has
#   Rome's weather.
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
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
environment.globals["strftime_now"] = lambda form: "2026-01-01"
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": parameters}}
cities = {"Oslo": "5 C", "Rome": "20 C"}
calls = []
results = []
for city, weather in cities.items():
    function = {"name": "weather", "arguments": {"city": city}}
    calls.append({"id": f"call_{city}", "type": "function", "function": function})
    results.append({"role": "tool", "tool_call_id": f"call_{city}", "content": weather})
messages = [
    {"role": "user", "content": "How warm is it there?"},
    {"role": "assistant", "content": "", "tool_calls": calls},
    *reversed(results),
]

print("trl", version("trl"))
for name in ("gptoss", "lfm2_v2", "qwen2_5", "qwen3"):
    template = environment.from_string((place / f"{name}.jinja").read_text())
    text = template.render(messages=messages, tools=[tool], add_generation_prompt=True, bos_token="")
    written = [city for city in cities if city in text]
    given = sorted(cities.values(), key=text.index)
    ids = [city for city in cities if f"call_{city}" in text]
    print(f"{name:8} calls: {written}  results: {given}  ids: {ids}")
    assert written == (["Oslo"] if name == "gptoss" else ["Oslo", "Rome"])
    assert given == ["20 C", "5 C"] and not ids
print(text[text.rindex("<|im_start|>assistant\n<tool_call>"):])
PYTHON
