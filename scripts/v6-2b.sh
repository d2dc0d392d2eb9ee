#!/bin/sh
# Recipe v6 at 2b: 1 GPU. Settings of every stage: v6-2b.json. Finished stages are skipped, a stopped one continues.
# SKIP_TO=N or STAGE: from there on, again. FORCE_STAGE=1: that stage again, and those that need it. BASE=RUN: from SFT on, from this
# checkpoint in place of the recipe's pretraining. PYTHON: the interpreter.
# Further options of `codechat run` may follow, such as --until sft-general, or --yes where nobody can be asked.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$here/.." || exit 1
case ${SKIP_TO:-} in
    1) SKIP_TO=plain-programs ;;
    2) SKIP_TO=plain-calls ;;
    3) SKIP_TO=v6-sft ;;
    4) SKIP_TO=v6-sft ;;
    5) SKIP_TO=v6-diagnose ;;
    6) SKIP_TO=v6-diagnose ;;
    7) SKIP_TO=v6-rl ;;
    8) SKIP_TO=v6-evaluate ;;
esac
[ -z "${SKIP_TO:-}" ] || set -- --from "$SKIP_TO" "$@"
[ -z "${BASE:-}" ] || set -- --base "$BASE" "$@"
[ "${FORCE_PREP_CODE:-0}" != 1 ] || set -- --force plain-programs "$@"
[ "${FORCE_PREP_FUNCALL:-0}" != 1 ] || set -- --force plain-calls "$@"
[ "${FORCE_MERGE:-0}" != 1 ] || set -- --force v6-sft "$@"
[ "${FORCE_PREP_RL:-0}" != 1 ] || set -- --force plain-calls "$@"
for stage in corpus base-code base-calls pretrain plain-code plain-programs plain-calls sft-general v6-sft v6-diagnose v6-rl v6-evaluate; do
    flag=FORCE_$(echo "$stage" | tr 'a-z-' 'A-Z_')
    eval "wish=\${$flag:-0}"
    [ "$wish" != 1 ] || set -- --force "$stage" "$@"
done
exec "${PYTHON:-python}" -m codechat run v6 --scale 2b --settings "$here/v6-2b.json" "$@"
