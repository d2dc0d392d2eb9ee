#!/bin/sh
# {{name}}: {{command}} on {{ranks}}. Run it again to continue from the last checkpoint.
cd "$(dirname "$0")/{{up}}" || exit 1
again=; grep -q '"status": "planned"' {{where}}/status.json || again={{again}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={{save_s}}  # seconds to save in when told to stop
{{guard}}[ $# -gt 0 ] || set -- --standalone
exec {{python}} -m torch.distributed.run "$@" --nproc-per-node {{nproc}}{{restarts}} \
    -m codechat {{command}} -- --config {{where}}/config.json --run-name {{name}} $again
