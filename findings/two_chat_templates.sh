#!/usr/bin/env bash
# Two chat templates of one model, `default` and `tool_use` (Hermes 2 Pro, Hermes 3, Command R+), in transformers.
# A good guess: `tools=[]` offers nothing, so it is the same prompt as `tools=None`; and chat_template.jinja beside the
#   weights is the model's chat template.
# The truth: an empty list takes the template for tools, as a full one does, and None takes the other. `save_pretrained`
#   writes `default` into chat_template.jinja and the other into a folder of its own, additional_chat_templates: who
#   reads the one file offers tools through a template that knows none, and nothing is raised.
# Where users meet it: rows of conversations whose column of tools is [] beside rows where it is missing (both mean none:
#   the first are trained behind an instruction to call functions, the second are not), clients that send `tools: []`, and
#   converters and servers that copy chat_template.jinja.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 tokenizers==0.23.1
"$folder/venv/bin/python" - <<'PYTHON' 2> /dev/null
from pathlib import Path

import tokenizers
import transformers

turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
listed = "You may call: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ '\\n' }}"
made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
tokenizer.chat_template = {"default": turns, "tool_use": listed + turns}
asked = [{"role": "user", "content": "Hello."}]
tool = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}

print("transformers", transformers.__version__)
texts = []
for tools in (None, [], [tool]):
    texts.append(tokenizer.apply_chat_template(asked, tools=tools, tokenize=False))
    print(f"{len(tools) if tools is not None else 'no list of'} tools: {texts[-1]!r}")
assert texts[0] == "[user] Hello.\n"
assert texts[1] == "You may call: \n" + texts[0]
assert "look_up" in texts[2]

tokenizer.save_pretrained("saved")
files = sorted(str(path.relative_to("saved")) for path in Path("saved").rglob("*.jinja"))
print(files)
assert files == ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
assert "tools" not in Path("saved/chat_template.jinja").read_text()
PYTHON
