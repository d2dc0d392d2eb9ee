"""A file system that turns read-only, or fills up, in the middle of a loop or of another command: one line, an exit code, no traceback; the
checkpoint stays, and nothing is left half done."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
UNSHARED = ["unshare", "--mount", *(() if Path("/proc/self").stat().st_uid == 0 else ("--map-root-user",))]
LOOPS = ("pretrain", "sft", "reinforce", "grpo", "ppo", "expert", "preference")

# Mounts inside a mount namespace of its own. The run is broken between two rows of metrics, after its first checkpoint.
PROGRAM = """
import contextlib, io, json, shutil, subprocess, sys
from pathlib import Path

home, small = Path(sys.argv[1]), Path(sys.argv[1]) / "small"
import torture
from codechat.cli import guarded, main
from codechat.runs import checkpoint, paths, run

small.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], check=True)
paths.ROOT = small
torture.write_inputs(home)
log, found = run.Run.log, {}


def read_only():
    for words in (["--bind", str(small), str(small)], ["-o", "remount,bind,ro", str(small)]):
        subprocess.run(["mount", *words], check=True)


def mend(fault):
    if fault == "read-only":
        subprocess.run(["umount", "-l", str(small)], check=True)
    else:
        (small / "ballast").unlink()


for job in [job for job in torture.JOBS if job.runs and not job.before and not job.program]:
    for fault in sys.argv[2:]:
        broken = []

        def breaking(self, step, values=None, /, **metrics):
            if not broken and step > 10:
                checkpoint.settle()
                broken.append(read_only() if fault == "read-only" else torture.fill(small / "ballast"))
            log(self, step, values, **metrics)

        run.Run.log, err = breaking, io.StringIO()
        words = [w.format(home=home) for w in job.words]
        for flag, value in {"--max-steps": "14", "--save-every": "5"}.items():
            words[words.index(flag) + 1] = value
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            code = guarded(main, [*words, "--overwrite"])
        assert broken, (job.name, code, err.getvalue()[-2000:])
        mend(fault)
        found[f"{job.name} {fault}"] = [code, err.getvalue(), checkpoint.load(job.runs[0]).step]
        shutil.rmtree(small / "runs")
print("@" + json.dumps(found))
"""


def may_mount() -> bool:
    return sys.platform == "linux" and not subprocess.run([*UNSHARED, "true"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="no right to mount a file system")
def test_a_failing_file_system_ends_every_loop_in_one_line(tmp_path: Path) -> None:
    words = [*UNSHARED, sys.executable, "-c", PROGRAM, str(tmp_path), "read-only", "full"]
    done = subprocess.run(words, cwd=TOOLS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("@")[2])
    assert {name.split()[0] for name in found} == set(LOOPS)
    for name, (code, err, step) in found.items():
        assert code == 2 and "Traceback" not in err, f"{name}: {err}"
        errors = [line for line in err.splitlines() if "cannot be written" in line or line.startswith("error")]
        assert len(errors) == 1 and errors[0] == err.splitlines()[-1] and errors[0].startswith("error: "), (
            f"{name}: {err}"
        )
        assert step == 10, f"{name}: the checkpoint before the fault is readable"
