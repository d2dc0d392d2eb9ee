#!/bin/sh
# codechat distill: learn what a larger model would write: reverse or forward KL. Settings: distill.json, then the flags given here, such as --run-name MINE or --resume.
# PYTHON: the interpreter. NPROC: ranks, one per GPU.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$here/.." || exit 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds to save in when told to stop
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" \
    -m codechat distill -- --config "$here/distill.json" "$@"
