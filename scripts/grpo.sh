#!/bin/sh
# codechat grpo: GRPO, Dr. GRPO, DAPO, GSPO or CISPO on a task's reward. Settings: grpo.json, then the flags given here, such as --run-name MINE or --resume.
# PYTHON: the interpreter. NPROC: ranks, one per GPU.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
# A variable that looks like one of this script, or of another exported one, but is none would change nothing, without a word: it is refused.
awk -v read="NPROC PYTHON" -v others="SKIP_TO BASE NPROC PYTHON" '
function short(name) { gsub("_", "", name); return toupper(name) }
function near(a, b,    i) {  # at most one letter more, less or another, or two exchanged
    if (length(a) > length(b)) return near(b, a)
    for (i = 1; i <= length(a) && substr(a, i, 1) == substr(b, i, 1); i++);
    if (substr(a, i, 2) == substr(b, i + 1, 1) substr(b, i, 1)) return substr(a, i + 2) == substr(b, i + 2)
    if (length(b) <= 4) return a == b  # BASE is one letter away from many names
    return substr(a, i + (length(a) == length(b))) == substr(b, i + 1)
}
function refuse(name, why) {
    print "error: " name "=" ENVIRON[name] ": " why > "/dev/stderr"
    wrong = 1
}
BEGIN {
    for (i = split(read, names, " "); i; i--) known[names[i]] = 1
    split(others, meant, " ")
    for (name in ENVIRON) {
        value = tolower(ENVIRON[name])
        if (name in known) {
            if (name ~ /^FORCE_/ && value !~ /^[01]?$/) refuse(name, "required is 1, or 0 for not")
            if (name == "NPROC" && value !~ /^([1-9][0-9]*|auto|cpu|gpu|xpu)?$/) refuse(name, "required is a number, or gpu for all")
            continue
        }
        other = toupper(name) ~ /^FORCE(_|$)/ && value ~ /^ *([0-9]+|true|false|t|f|yes|no|y|n|on|off) *$/
        if (name ~ /^FORCE_(COLOR|CUDA|TTY|HYPERLINK|TORCHRUN|UNSAFE_CONFIGURE|JAVASCRIPT_.*)$/) other = 0  # of other programs
        stage = "FORCE_" toupper(value)
        gsub("-", "_", stage)
        if (toupper(name) ~ /^SKIP_?(TO|FROM|UNTIL|STAGES?)(_.*)?$/) other = 1
        if (toupper(name) == "SKIP" && value ~ /^ *[0-9]+ *$/) other = 1  # pre-commit reads SKIP too: names of hooks
        if (toupper(name) ~ /^SKIP(_|$)/ && stage in known) other = 1
        for (i in meant) if (name ~ /^[A-Za-z_]*[A-Za-z]0?$/ && near(short(name), short(meant[i]))) other = 1
        for (flag in known) if (flag ~ /^FORCE_/ && near(short(name), short(flag))) other = 1
        if (other) refuse(name, "this script reads " read "; correct its name, or unset it")
    }
    exit wrong
}' || exit 2
cd "$here/.." || exit 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds to save in when told to stop
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" \
    -m codechat grpo -- --config "$here/grpo.json" "$@"
