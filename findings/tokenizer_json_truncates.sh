#!/usr/bin/env bash
# A tokenizer.json that was saved while truncation or padding was on.
# A good guess: they are settings of a call, as in transformers, where `tokenizer(text)` neither truncates nor pads.
# The truth: the package tokenizers saves them in the file and applies them to every `encode` after loading it, without a
#   word: the end of a text is lost, or every text is padded.
# Where users meet it: files that are saved after a training script called with `truncation=True` or `padding="max_length"`,
#   and then read by anything that uses the package itself (servers, data loaders, other languages).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # not where a module of the same name as one of Python's may lie
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.22.1
"$folder/venv/bin/python" - "$folder/tokenizer.json" <<'PYTHON'
import sys
import tokenizers

made = tokenizers.Tokenizer(tokenizers.models.BPE())
made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
made.train_from_iterator(
    ["some text to learn merges from"] * 9,
    tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=letters, show_progress=False),
)
text = "a text of many words, far more than sixteen tokens in all, which nobody asked to be cut"
whole = len(made.encode(text).ids)
made.enable_truncation(16)  # as a training script does
made.enable_padding(length=32)
made.save(sys.argv[1])
again = tokenizers.Tokenizer.from_file(sys.argv[1])
ids = again.encode(text).ids
print(f"tokenizers {tokenizers.__version__}: {whole} ids before; from the saved file {len(ids)}, of which", end=" ")
print(f"{sum(again.encode(text).attention_mask)} are of the text")
again.no_truncation()
again.no_padding()
assert len(again.encode(text).ids) == whole
if (len(ids), sum(again.encode(text).attention_mask)) != (32, whole):
    sys.exit("the behaviour has changed")
PYTHON
