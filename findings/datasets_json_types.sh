#!/bin/bash
# A good guess: load_dataset("json") gives the values that the file has, and to_parquet writes columns that any reader of
# parquet gives back as such objects; a text stays a text.
# The truth (datasets 5.2.0): a column whose texts all look like ISO dates becomes a timestamp, so "1969-07-20" comes back
# as a datetime, and "2024-05-01T10:00:00Z" without its time zone. Objects whose keys differ become the type arrow.json,
# which pyarrow returns as JSON text: a row that held a list of messages holds a list of texts.
# Where users meet it: question sets whose answers are dates, and chats with tool calls (messages with different keys),
# converted from jsonl to parquet; the trainer then finds no answer, or texts in place of messages.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/home" "$work/venv/bin/python" - <<'PY'
import json

import datasets
import pyarrow.parquet

print("datasets", datasets.__version__)
calls = [{"name": "f", "arguments": {"city": "Oslo"}}, {"name": "g", "arguments": {"amount": 3}}]
rows = [
    {"day": "1969-07-20", "time": "2024-05-01T10:00:00Z", "calls": [calls[0]]},
    {"day": "1970-01-02", "time": "2024-05-01T11:00:00Z", "calls": [calls[1]]},
]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
table = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
print("given  ", rows[0])
print("loaded ", table[0])
table.to_parquet("rows.parquet")
read = pyarrow.parquet.read_table("rows.parquet").to_pylist()
print("parquet", read[0])

day, time, call = table[0]["day"], table[0]["time"], read[0]["calls"][0]
assert not isinstance(day, str) and day.isoformat() == "1969-07-20T00:00:00", day
assert not isinstance(time, str) and time.tzinfo is None, time
arguments = call if isinstance(call, str) else call["arguments"]
assert isinstance(arguments, str), call
print("dates became timestamps, the time zone is gone, and objects came back as JSON text")
PY
