#!/bin/sh
# Recipe {{recipe}} at {{scale}}: {{machine}}. Settings of every stage: {{recipe}}-{{scale}}.json. Finished stages are skipped, a stopped one continues.
# SKIP_TO=N or STAGE: from there on, again. FORCE_STAGE=1: that stage again, and those that need it. BASE=RUN: from SFT on, from this
# checkpoint in place of the recipe's pretraining. PYTHON: the interpreter.
# Further options of `codechat run` may follow, such as --until sft-general, or --yes where nobody can be asked.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
{{check}}{{go}}case ${SKIP_TO:-} in
{{cases}}esac
[ -z "${SKIP_TO:-}" ] || set -- --from "$SKIP_TO" "$@"
[ -z "${BASE:-}" ] || set -- --base "$BASE" "$@"
{{forced}}for stage in {{stages}}; do
    flag=FORCE_$(echo "$stage" | tr 'a-z-' 'A-Z_')
    eval "wish=\${$flag:-0}"
    [ "$wish" != 1 ] || set -- --force "$stage" "$@"
done
exec "${PYTHON:-python}" -m codechat run {{recipe}} --scale {{scale}} --settings "$here/{{recipe}}-{{scale}}.json" "$@"
