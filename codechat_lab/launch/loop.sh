#!/bin/sh
# codechat {{command}}: {{about}}. Settings: {{name}}.json, then the flags given here, such as --run-name MINE or --resume.
# PYTHON: the interpreter. NPROC: ranks, one per GPU.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
{{check}}{{go}}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={{save_s}}  # seconds to save in when told to stop
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-{{nproc}}}" \
    -m codechat {{command}} -- --config "$here/{{name}}.json" "$@"
