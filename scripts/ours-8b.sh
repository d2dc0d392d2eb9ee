#!/bin/sh
# Recipe ours at 8b: 8 GPUs. Settings of every stage: ours-8b.json. Finished stages are skipped, a stopped one continues.
# SKIP_TO=N or STAGE: from there on, again. FORCE_STAGE=1: that stage again, and those that need it. BASE=RUN: from SFT on, from this
# checkpoint in place of the recipe's pretraining. PYTHON: the interpreter.
# Further options of `codechat run` may follow, such as --until sft-general, or --yes where nobody can be asked.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$here/.." || exit 1
case ${SKIP_TO:-} in
    1) SKIP_TO=corpus ;;
    2) SKIP_TO=base-code ;;
    3) SKIP_TO=base-calls ;;
    4) SKIP_TO=pretrain ;;
    5) SKIP_TO=base ;;
    6) SKIP_TO=ours-diagnose ;;
    7) SKIP_TO=ours-rl ;;
    8) SKIP_TO=ours-choose ;;
    9) SKIP_TO=ours-evaluate ;;
esac
[ -z "${SKIP_TO:-}" ] || set -- --from "$SKIP_TO" "$@"
[ -z "${BASE:-}" ] || set -- --base "$BASE" "$@"
for stage in corpus base-code base-calls pretrain base ours-diagnose ours-rl ours-choose ours-evaluate; do
    flag=FORCE_$(echo "$stage" | tr 'a-z-' 'A-Z_')
    eval "wish=\${$flag:-0}"
    [ "$wish" != 1 ] || set -- --force "$stage" "$@"
done
exec "${PYTHON:-python}" -m codechat run ours --scale 8b --settings "$here/ours-8b.json" "$@"
