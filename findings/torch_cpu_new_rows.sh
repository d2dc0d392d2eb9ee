#!/usr/bin/env bash
# A bfloat16 product of torch on a CPU with a number of rows that the process has not met.
# A good guess: eager torch does not mind shapes; only torch.compile and CUDA graphs prepare something for each one.
# The truth (torch 2.13.0): oneDNN prepares a product for each new number of rows: 1.5 ms for the first call with a size, 0.24 ms for the
#   second (one core with AMX, beside other work). It keeps the latest 1,024 (ONEDNN_PRIMITIVE_CACHE_CAPACITY).
# Where users meet it: steps that select rows (only tokens with a loss, only live sequences, batches cut to their longest), whose number
#   differs in each step, so that a small model waits for it in each. Rounded up to a multiple of 64 the sizes come back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.13.0
cat > "$folder/rows.py" <<'PYTHON'
import statistics
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
weight = torch.randn(768, 192).bfloat16()
sizes = list(range(600, 640)) if sys.argv[1] == "any" else [640] * 40
F.linear(torch.randn(64, 192).bfloat16(), weight)
seconds = []
for _ in range(2):
    for n in sizes:
        rows = torch.randn(n, 192).bfloat16()
        begun = time.perf_counter()
        F.linear(rows, weight)
        seconds.append(time.perf_counter() - begun)
first, again = (1e3 * statistics.median(part) for part in (seconds[:40], seconds[40:]))
print(f"times: {first:.3f} ms, again {again:.3f} ms", file=sys.stderr)
PYTHON
if ! "$folder/venv/bin/python" -c "import torch, sys; sys.exit(not torch.ops.mkldnn._is_mkldnn_bf16_supported())"; then
    echo "this processor has no bfloat16 products in oneDNN; nothing to see here"
    exit 0
fi
for sizes in any one; do
    ONEDNN_VERBOSE=profile_create "$folder/venv/bin/python" "$folder/rows.py" "$sizes" > "$folder/$sizes.txt" 2> "$folder/times.txt"
    made=$(grep -c "create:cache_miss" "$folder/$sizes.txt" || true)
    echo "torch 2.13.0, 80 products, sizes: $sizes; prepared $made; $(cat "$folder/times.txt")"
    echo "$made" > "$folder/$sizes.made"
done
[ "$(cat "$folder/any.made")" -ge 40 ] && [ "$(cat "$folder/one.made")" -le 5 ]
