"""Faults in numbers: processes killed at random moments, two of one name, a disk that fills up or
turns read-only, fuzzed inputs, a server under hostile clients.

    make torture                                    everything, an hour at most
    python tools/torture.py kills --kills 40        one part; parts: kills names disk fuzz server
    python tools/torture.py kills --jobs recipe     one job of a part
    python tools/torture.py --minutes 10 --seed 1

Each part prints a table and the script ends with 1 where a row has a failure. It is seeded; the
moments at which a process is killed still depend on the machine. Where the hour ends first, fewer
faults were made, and the table says how many. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CODECHAT_DTYPE", "float32")
# a job works in a folder of its own: the library must still be this checkout's
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parent)}

MODEL = [
    "--model.depth",
    "2",
    "--model.n-embd",
    "32",
    "--model.n-head",
    "2",
    "--model.block-size",
    "64",
]
TOY = [
    "--preset",
    "toy",
    "--max-steps",
    "60",
    "--save-every",
    "5",
    "--eval-every",
    "20",
    "--seed",
    "0",
]
SFT = [
    "--data-dir",
    "{home}/talks",
    "--tokenizer",
    "bytes",
    "--device-batch-size",
    "2",
    "--probe-examples",
    "0",
    *MODEL,
]
STEPS = [
    "--max-steps",
    "120",
    "--save-every",
    "10",
    "--eval-every",
    "40",
    "--log-every",
    "1",
    "--no-compile",
]
PRETRAIN = [
    "--data-dir",
    "{home}/corpus",
    "--seq-len",
    "32",
    "--device-batch-size",
    "4",
    "--eval-tokens",
    "512",
    *MODEL,
]


@dataclass(frozen=True)
class Job:
    """A command that is killed and started again. runs: those that it writes, of which the
    weights are compared, or the rows of eval.jsonl where it saves none; out: a folder of which
    every file is compared. before: words of a command that runs first and is never killed.
    program: run in place of codechat, which goes on by itself."""

    name: str
    words: list[str]
    runs: tuple[str, ...] = ()
    out: str = ""
    before: tuple[str, ...] = ()
    program: str = ""


# two pretrainings, SFT and RL of a few steps each, on a corpus that the first stage writes
RECIPE = """
import sys
from codechat import cli
from codechat.core.registry import COMMANDS
from codechat_lab.launch import runner
from codechat_lab.launch.recipes import RECIPES, Recipe, Stage
home = sys.argv.pop(1)
model = dict(depth=2, n_embd=32, n_head=2, block_size=64)
steps = dict(max_steps=30, save_every=5, device_batch_size=2)
text = dict(model=model, seq_len=32, eval_tokens=64, eval_every=10, compile=False, **steps)
RECIPES["tiny"] = Recipe("a test", (
    Stage(name="corpus", about="text", kind="data.corpus", out="{data}/corpus", settings=dict(source=f"{home}/text.txt", tokenizer="bytes")),
    Stage(name="first", about="train", needs=("corpus",), kind="pretrain", settings=dict(data_dir="{corpus}", **text)),
    Stage(name="second", about="train on", needs=("first",), kind="pretrain", settings=dict(init_from="{first}", data_dir="{corpus}", **text)),
    Stage(name="sft", about="conversations", needs=("second",), kind="sft",
          settings=dict(init_from="{second}", data_dir=f"{home}/talks", probe_examples=0, compile=False, **steps)),
    Stage(name="rl", about="reward", needs=("sft",), kind="reinforce",
          settings=dict(init_from="{sft}", task="toy", group_size=4, max_new_tokens=8, eval_every=10, eval_examples=4, diagnose_groups=0, **steps)),
    Stage(name="evaluate", about="scores", needs=("rl",), kind="evaluate",
          settings=dict(ckpt=("{rl}",), task="toy", limit=16, n=4, ks=(1, 4), max_new_tokens=8, contamination=False)),
))
sys.exit(cli.guarded(COMMANDS['run'].run, sys.argv[1:]))
"""


JOBS = (
    Job(
        "data corpus",
        ["data", "corpus", "--source", "{home}/text.txt", "--tokenizer", "bytes", "--out", "made"],
        out="made",
    ),
    Job(
        "data calls",
        [
            "data",
            "calls",
            "--out",
            "calls",
            "--tokenizer",
            "bytes",
            "--max-examples",
            "3000",
            "--copies",
            "500",
            "--problems",
            "300",
            "--eval-examples",
            "50",
            "--probes",
            "3",
        ],
        out="calls",
    ),
    Job("pretrain", ["pretrain", *PRETRAIN, *STEPS, "--run-name", "p"], runs=("p",)),
    Job("sft", ["sft", *SFT, *STEPS, "--run-name", "s"], runs=("s",)),
    *(
        Job(name, [name, *TOY, "--run-name", name], runs=(name,))
        for name in ("reinforce", "grpo", "ppo", "expert")
    ),
    Job(
        "preference",
        [
            "preference",
            "--preset",
            "toy",
            "--task",
            "toy",
            "--max-steps",
            "40",
            "--save-every",
            "5",
            "--run-name",
            "d",
        ],
        runs=("d",),
    ),
    Job(
        "evaluate",
        [
            "evaluate",
            "--ckpt",
            "base",
            "--task",
            "toy",
            "--limit",
            "400",
            "--n",
            "8",
            "--max-new-tokens",
            "8",
            "--no-contamination",
            "--run-name",
            "e",
        ],
        runs=("e",),
        before=("reinforce", "--preset", "toy", "--max-steps", "5", "--run-name", "base"),
    ),
    Job(
        "recipe",
        ["{home}", "tiny"],
        runs=tuple(f"tiny/{stage}" for stage in ("first", "second", "sft", "rl", "evaluate")),
        out="data/tiny",
        program=RECIPE,
    ),
)


@dataclass
class Table:
    """What was done to each thing, and what came of it."""

    title: str
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def count(self, name: str, what: str, n: int = 1) -> None:
        self.rows.setdefault(name, Counter())[what] += n

    def fail(self, name: str, why: str) -> None:
        self.count(name, "failures")
        self.failures.append(f"{name}: {why}")

    def print(self) -> None:
        print(f"\n{self.title}")
        for name in self.rows:
            self.print_row(name)
        for line in self.failures[:20]:
            print(f"  FAILED {line[:600]}")

    def print_row(self, name: str) -> None:
        print(
            f"  {name:<28}" + ", ".join(f"{what} {n:,}" for what, n in self.rows[name].items()),
            flush=True,
        )


# ---------------------------------------------------------------- kills


def command(home: Path, root: Path, job: Job, *more: str) -> list[str]:
    first = ["-c", job.program] if job.program else ["-m", "codechat", "--root", str(root)]
    return [sys.executable, *first, *(w.format(home=home) for w in (*job.words, *more))]


def write_inputs(home: Path) -> None:
    """A text, its corpus and conversations, small enough for seconds."""
    from codechat.data import corpus_writer
    from codechat.text import tokenizer

    texts = [f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(400)]
    (home / "text.txt").write_text("\n\n".join(texts))
    corpus_writer.write_corpus(texts, home / "corpus", tokenizer.load("bytes"))
    (home / "talks").mkdir()
    for split, n in (("train", 60), ("select", 8)):
        turns = [[("user", f"add {i} to x"), ("assistant", f"x + {i}")] for i in range(n)]
        rows = [
            {
                "id": f"c{i}",
                "domain": "code",
                "meta": {},
                "messages": [{"role": r, "content": c} for r, c in t],
            }
            for i, t in enumerate(turns)
        ]
        (home / "talks" / f"code.{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )


def outcome(job: Job, root: Path) -> str:
    """A hash of what the job left: the weights of each run's last checkpoint, or its
    evaluations; every file of its folder."""
    from codechat.core.atomic_files import read_rows
    from codechat.runs import checkpoint

    parts = []
    for name in job.runs:
        path = root / "runs" / name
        if checkpoints(path):
            state = checkpoint.load(path).model_state
            parts += [
                key.encode() + tensor.contiguous().numpy().tobytes()
                for key, tensor in sorted(state.items())
            ]
        else:
            rows = [
                {k: v for k, v in row.items() if k != "time" and not k.endswith("_s")}
                for row in read_rows(path / "eval.jsonl")
            ]
            assert rows, f"{path} has neither weights nor evaluations"
            parts.append(json.dumps(rows, sort_keys=True).encode())
    files = sorted(p for p in (root / job.out).rglob("*") if p.is_file()) if job.out else []
    parts += [p.name.encode() + p.read_bytes() for p in files]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def checkpoints(run: Path) -> list[Path]:
    return [
        p for p in (run / "checkpoints").glob("step*") if p.name.removeprefix("step_").isdigit()
    ]


def again(job: Job, root: Path) -> list[str]:
    """The flag with which a killed job goes on; a recipe needs none."""
    if job.program or not job.runs or not (root / "runs" / job.runs[0]).exists():
        return []
    return ["--resume"] if checkpoints(root / "runs" / job.runs[0]) else ["--overwrite"]


def finish(home: Path, root: Path, job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(home, root, job, *again(job, root)),
        cwd=root,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def prepared(home: Path, root: Path, job: Job) -> Path:
    """A new folder in which the command that goes before the job is done."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    if job.before and (done := finish(home, root, Job(job.name, list(job.before)))).returncode:
        raise RuntimeError(f"{job.name}: {shlex.join(job.before)}: {done.stderr[-400:]}")
    return root


def kills(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """Kill each job -9 at random moments, start it again each time, and compare what it leaves
    with a run that nobody killed."""
    home.joinpath("kept").mkdir()
    for at, job in enumerate(JOBS):
        whole = prepared(home, home / f"whole-{at}", job)
        kept = home / "kept" / str(at)
        victim = home / f"victim-{at}"
        shutil.copytree(whole, kept)
        shutil.copytree(kept, victim)
        began = time.monotonic()
        done = finish(home, whole, job)
        if done.returncode:
            table.fail(job.name, f"without any kill: {done.stderr[-400:]}")
            continue
        seconds = time.monotonic() - began
        due = -(-n // len(JOBS))
        # no job takes the time of those after it
        ends = time.monotonic() + max(0.0, until - time.monotonic()) / (len(JOBS) - at)
        while due and time.monotonic() < ends:
            process = subprocess.Popen(
                command(home, victim, job, *again(job, victim)),
                cwd=victim,
                env=ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            try:
                _, err = process.communicate(timeout=rng.uniform(min(0.3, seconds / 4), seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                table.count(job.name, "kills")
                due -= 1
                continue
            if process.returncode:
                table.fail(job.name, f"after a kill: {err[-400:]}")
                break
            compare(table, job, whole, victim)
            shutil.rmtree(victim)
            shutil.copytree(kept, victim)
        done = finish(home, victim, job)
        if done.returncode:
            table.fail(job.name, f"after the last kill: {done.stderr[-400:]}")
            continue
        compare(table, job, whole, victim)
        table.print_row(job.name)


def compare(table: Table, job: Job, whole: Path, victim: Path) -> None:
    if outcome(job, whole) == outcome(job, victim):
        table.count(job.name, "ended the same")
    else:
        table.fail(job.name, "ended with other bytes than the run that nobody killed")


# ---------------------------------------------------------------- names


# a run whose last evaluation never ends: the moment in which it is killed does not depend on
# the machine
SLOW = """
import sys, time
from codechat import cli
from codechat.runs.run import Run
usual = Run.log_eval
def slow(self, step, values):
    if step:
        print("last evaluation", flush=True)
        time.sleep(600)
    usual(self, step, values)
Run.log_eval = slow
sys.exit(cli.main(sys.argv[1:]))
"""

FEW_STEPS = ["--max-steps", "12", "--save-every", "0", "--eval-every", "0"]
BASE = ["reinforce", "--preset", "toy", "--max-steps", "2", "--diagnose-groups", "0", "--run-name"]
SCORED = [
    "--task",
    "toy",
    "--limit",
    "8",
    "--n",
    "1",
    "--ks",
    "1",
    "--max-new-tokens",
    "8",
    "--no-contamination",
]
CHARS = [
    "--source",
    "{home}/text.txt",
    "--objective",
    "supervised",
    "--horizon",
    "8",
    "--max-tokens",
    "3072",
    "--save-every",
    "0",
    "--eval-every",
    "0",
    "--model.depth",
    "1",
    "--model.n-embd",
    "16",
    "--model.n-head",
    "2",
    "--model.block-size",
    "16",
    "--samples",
    "0",
]
LOOPS = {
    "pretrain": [*PRETRAIN, *FEW_STEPS, "--no-compile"],
    "sft": [*SFT, *FEW_STEPS, "--no-compile"],
    **{
        name: ["--preset", "toy", *FEW_STEPS, "--diagnose-groups", "0"]
        for name in ("reinforce", "grpo", "ppo", "expert")
    },
    "distill": ["--preset", "toy", "--teacher", "base", "--task", "toy", *FEW_STEPS],
    "preference": ["--preset", "toy", "--task", "toy", *FEW_STEPS],
    "chars": CHARS,
}
# (words, the run that the command would replace and reads)
READING = (
    ("evaluate --task toy --ckpt other base", "base"),
    ("evaluate --task toy --ckpt other base@2", "base"),
    ("evaluate --task toy --ckpt other runs/base/checkpoints/step_000002", "base"),
    ("evaluate --task toy --ckpt other link", "base"),
    ("diagnose --task toy --ckpt base", "base"),
    ("sft --init-from base --data-dir {home}/talks --probe-examples 0 --max-steps 1", "base"),
    ("grpo --preset toy --init-from base --max-steps 1", "base"),
    ("preference --preset toy --task toy --init-from base --max-steps 1", "base"),
    ("distill --preset toy --task toy --teacher base --max-steps 1", "base"),
    ("import runs/base", "base"),
)


def start(home: Path, root: Path, words: list[str], program: str = "") -> subprocess.Popen[str]:
    """A command in a session of its own."""
    first = ["-c", program] if program else ["-m", "codechat"]
    command = [sys.executable, *first, *(word.format(home=home) for word in words)]
    return subprocess.Popen(
        command,
        cwd=root,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def one_line(err: str) -> bool:
    return (
        "Traceback" not in err
        and len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """Two of every loop, of an evaluation and of a corpus at once with one name: one of them is
    whole, the other says so in one line. Every loop killed in its last evaluation on a host
    that is then called otherwise: no step is lost, and it goes on. No command replaces a run
    that it reads."""
    root = home / "names"
    root.mkdir()
    for base in ("base", "other"):
        _, err = start(home, root, [*BASE, base]).communicate(timeout=600)
        assert (root / "runs" / base / "checkpoints").exists(), err
    for turn in range(n):
        for name, words in LOOPS.items():
            if time.monotonic() > until:
                return
            two_at_once(
                table,
                home,
                root,
                Job(name, [name, *words, "--run-name", f"{name}-{turn}"], runs=(f"{name}-{turn}",)),
                rng,
            )
            kill_in_last_evaluation(
                table,
                home,
                root,
                Job(
                    name, [name, *words, "--run-name", f"{name}-k{turn}"], runs=(f"{name}-k{turn}",)
                ),
            )
            table.print_row(name)
        two_at_once(
            table,
            home,
            root,
            Job(
                "evaluate",
                ["evaluate", "--ckpt", "base", *SCORED, "--run-name", f"e{turn}"],
                runs=(f"e{turn}",),
            ),
            rng,
        )
        corpus = [
            "data",
            "corpus",
            "--source",
            "{home}/text.txt",
            "--tokenizer",
            "bytes",
            "--out",
            f"made-{turn}",
        ]
        two_at_once(table, home, root, Job("data corpus", corpus, out=f"made-{turn}"), rng)
    reading(table, home, root)
    launched(table, home, root)


def two_at_once(table: Table, home: Path, root: Path, job: Job, rng: random.Random) -> None:
    first = start(home, root, job.words)
    time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 0.5)]))
    second = start(home, root, job.words)
    ends = [(p.communicate(timeout=600)[1], p.returncode) for p in (first, second)]
    refused = [err for err, code in ends if code]
    if len(refused) > 1 or (job.runs and not refused) or not all(map(one_line, refused)):
        table.fail(job.name, f"two at once ended with {[(code, err[-300:]) for err, code in ends]}")
        return
    alone = root / f"alone-{job.name.replace(' ', '-')}"
    if not alone.exists():
        alone.mkdir()
        shutil.copytree(root / "runs" / "base", alone / "runs" / "base")
        start(home, alone, job.words).communicate(timeout=600)
        (alone / "outcome").write_text(outcome(job, alone))
    if outcome(job, root) != (alone / "outcome").read_text():
        table.fail(job.name, "two at once left other bytes than one alone")
    elif left := [p.name for run in job.runs for p in (root / "runs").glob(f".{run}.*")]:
        table.fail(job.name, f"left {left}")
    else:
        table.count(job.name, "two at once, one whole")


def kill_in_last_evaluation(table: Table, home: Path, root: Path, job: Job) -> None:
    """The weights were saved before that evaluation began, so nothing is left to train."""
    process = start(home, root, job.words, SLOW)
    said = process.stdout.readline() if process.stdout else ""
    while said and "last evaluation" not in said:
        said = process.stdout.readline() if process.stdout else ""
    os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    run = root / "runs" / job.runs[0]
    if "last evaluation" not in said:
        table.fail(job.name, f"ended before its last evaluation: {err[-300:]}")
        return
    rename_host(run)
    from codechat.runs import paths

    state = paths.read_status(run)["status"]
    if state != "killed":
        table.fail(
            job.name, f"killed in its last evaluation, on a host that was renamed, it is {state}"
        )
    steps = paths.checkpoint_paths(run)
    rows = len((run / "metrics.jsonl").read_text().splitlines())
    if not steps:
        table.fail(job.name, "killed in its last evaluation it has lost all steps: no checkpoint")
        return
    _, err = (going := start(home, root, [*job.words, "--resume"])).communicate(timeout=600)
    if going.returncode or paths.read_status(run)["status"] != "finished":
        table.fail(job.name, f"killed in its last evaluation it does not go on: {err[-300:]}")
    elif len((run / "metrics.jsonl").read_text().splitlines()) != rows:
        table.fail(job.name, "killed in its last evaluation it trained steps again")
    else:
        table.count(job.name, "killed in its last evaluation, no step lost")


def rename_host(folder: Path) -> None:
    """As of a container that starts again."""
    for name in ("status.json", "env.json", "process.json"):
        file = folder / name
        if file.is_file():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "a-former-name"}))


def reading(table: Table, home: Path, root: Path) -> None:
    """No command replaces what it reads."""
    (root / "link").symlink_to(root / "runs" / "base")
    for text, name in READING:
        before = bytes_of(root / "runs" / name)
        words = [
            *text.split(),
            "--run-name",
            name,
            "--overwrite",
            *(SCORED if text.startswith("evaluate") else ()),
        ]
        _, err = (process := start(home, root, words)).communicate(timeout=600)
        if process.returncode != 2 or not one_line(err) or bytes_of(root / "runs" / name) != before:
            table.fail("reading", f"{text}: {process.returncode}, {err[-300:]}")
        else:
            table.count("reading", "commands that keep what they read")


def launched(table: Table, home: Path, root: Path) -> None:
    """A launched run that was killed on a host that is then called otherwise: status, tail and
    stop end, and start goes on."""
    words = (
        "launch reinforce --start -- --preset toy --max-steps 400 --save-every 5 "
        "--eval-every 0 --diagnose-groups 0 --dead-patience 100000 --run-name launched"
    )
    start(home, root, words.split()).communicate(timeout=600)
    run = root / "runs" / "launched"
    ends = time.monotonic() + 120
    while not checkpoints(run) and time.monotonic() < ends:
        time.sleep(0.2)
    start(home, root, ["launch", "launched", "stop", "--now"]).communicate(timeout=600)
    rename_host(run)
    told = {}
    for what in ("status", "tail", "stop", "start", "tail"):
        process = start(home, root, ["launch", "launched", what])
        out, err = process.communicate(timeout=600)
        told[what] = (process.returncode, out + err)
    good = (
        "killed" in told["status"][1]
        and "not running" in told["stop"][1]
        and told["start"][0] == told["tail"][0] == 0
    )
    if not good or "finished" not in told["tail"][1]:
        table.fail(
            "launched", str({what: (code, text[-200:]) for what, (code, text) in told.items()})
        )
    else:
        table.count("launched", "killed on a renamed host, and finished")


# ---------------------------------------------------------------- disk


def disk(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """A pretraining run on a small file system that fills up, or turns read-only, after its
    first checkpoint: one line, an older checkpoint that loads, and the same weights once there
    is room."""
    job = Job("pretrain", ["pretrain", *PRETRAIN, *STEPS, "--run-name", "p"], runs=("p",))
    whole = home / "disk-whole"
    small = home / "disk"
    whole.mkdir(), small.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)]
        ).returncode
    ):
        table.count("disk", "not run: no right to mount a file system")
        return
    try:
        finish(home, whole, job)
        for fault in ("full", "read-only") * n:
            if time.monotonic() > until:
                break
            shutil.rmtree(small / "runs", ignore_errors=True)
            break_disk(table, home, small, whole, job, fault, rng)
    finally:
        subprocess.run(["umount", "-l", str(small)])


def break_disk(
    table: Table,
    home: Path,
    small: Path,
    whole: Path,
    job: Job,
    fault: str,
    rng: random.Random,
) -> None:
    process = subprocess.Popen(
        command(home, small, job),
        cwd=small,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and again(job, small) != ["--resume"]:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 1.5))
    ballast = small / "ballast"
    if fault == "full":
        fill(ballast)
    else:
        # Over itself: the file system has files open for writing, so it cannot be remounted;
        # nor can this, in the moment in which one is opened.
        subprocess.run(["mount", "--bind", str(small), str(small)], check=True)
        read_only = ["mount", "-o", "remount,bind,ro", str(small)]
        while (
            subprocess.run(read_only, stderr=subprocess.DEVNULL).returncode
            and process.poll() is None
        ):
            time.sleep(0.01)
    _, err = process.communicate(timeout=600)
    if fault == "full":
        ballast.unlink(missing_ok=True)
    else:
        subprocess.run(["umount", "-l", str(small)], check=True)
    table.count(fault, "faults")
    if "Traceback" in err:
        table.fail(fault, f"a traceback: {err[-400:]}")
    elif process.returncode == 0:
        table.count(fault, "finished before it was noticed")
    done = finish(home, small, job)
    if done.returncode:
        table.fail(fault, f"cannot go on: {done.stderr[-400:]}")
    else:
        compare(table, Job(fault, job.words, runs=job.runs), whole, small)


def fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass  # full, as wanted


# ---------------------------------------------------------------- fuzz


def mutated(rng: random.Random, text: bytes) -> bytes:
    """The bytes with up to three of: a flipped bit, a cut, a piece repeated, a piece of json
    put in."""
    found = bytearray(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + rng.randint(1, 20)]
        elif kind == 2:
            found[at:at] = found[max(0, at - rng.randint(1, 30)) : at]
        else:
            found[at:at] = rng.choice(
                [
                    b"null",
                    b"[]",
                    b"{}",
                    b'"',
                    b"1e999",
                    b"-1",
                    b"true",
                    b"\xff",
                    b"\n",
                    b'{"a": ',
                    b"NaN",
                ]
            )
    return bytes(found)


def targets(home: Path) -> Iterator[tuple[str, bytes, Callable[[Path], Any]]]:
    """(name, a good file, what reads it)."""
    from codechat.core import config
    from codechat.data import conversations
    from codechat.data.prepared import Row  # noqa: F401  (the room loads before the first file is timed)
    from codechat.sft import SFTConfig
    from codechat.text import tool_calls
    from codechat_lab.serve import protocol
    from codechat_lab.tasks.funcall import score_call
    from codechat_lab.tasks.toolbox.prepare import CallsConfig, prepare_calls

    talk = {
        "id": "a",
        "domain": "calls",
        "meta": {},
        "messages": [
            {"role": "user", "content": "add 1"},
            {"role": "assistant", "content": tool_calls.format_call("add", {"a": 1})},
        ],
    }
    openai = {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
    }
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "tools": openai["tools"],
    }
    yield (
        "conversations",
        (json.dumps(talk) + "\n").encode() * 3,
        lambda p: list(conversations.read(p)),
    )
    yield (
        "configuration",
        json.dumps(
            {"max_steps": 3, "data_dir": "x", "mix": ["calls=1"], "model": {"depth": 2}}
        ).encode(),
        lambda p: config.parse(SFTConfig, ["--config", str(p)]),
    )
    yield (
        "request",
        json.dumps(request).encode(),
        lambda p: protocol.ChatRequest.model_validate_json(p.read_bytes()),
    )
    yield (
        "call",
        talk["messages"][1]["content"].encode(),
        lambda p: score_call(
            p.read_bytes().decode("utf-8", "replace"), {"name": "add", "arguments": {"a": 1}}
        ),
    )
    rows = (json.dumps(openai) + "\n").encode() * 2
    made = dict(out=str(home / "fuzzed"), tokenizer="bytes", probes=0, max_lost=1.0)
    yield "rows of others", rows, lambda p: prepare_calls(CallsConfig(source=str(p), **made))
    yield (
        "rows in parquet",
        as_parquet(home, [openai] * 2),
        lambda p: prepare_calls(CallsConfig(source=str(p), **made)),
    )
    yield from damaged_runs(home)


def as_parquet(home: Path, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), home / "rows.parquet")
    return (home / "rows.parquet").read_bytes()


def damaged_runs(home: Path) -> Iterator[tuple[str, bytes, Callable[[Path], Any]]]:
    """Each file of a run and of its checkpoint; what still loads has the weights that were
    saved."""
    import torch

    from codechat.runs import checkpoint, paths, run

    paths.ROOT = home / "fuzzed-runs"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    saved = {name: p.clone() for name, p in model.state_dict().items()}
    with run.Run.create("r", {"lr": 0.1}, kind="test") as made:
        for step in (1, 2):
            made.log(step, train_loss=1.0 / step)
            made.log_eval(step, {"pass@1": 0.5, "n": 4})
            checkpoint.save(
                made.path,
                step,
                model=model,
                optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
            )

    def reading(file: Path, read: Callable[[], Any]) -> Callable[[Path], Any]:
        good = file.read_bytes()

        def attempt(damaged: Path) -> None:
            file.write_bytes(damaged.read_bytes())
            try:
                read()
            finally:
                file.write_bytes(good)

        return attempt

    def weights() -> None:
        found = checkpoint.load("r").model_state
        assert found.keys() == saved.keys() and all(
            torch.equal(found[name], saved[name]) for name in saved
        ), "other weights were loaded"

    def shown() -> None:
        run.list_runs()
        made.status, made.metrics(), made.evals()  # noqa: B018

    folder = made.path / "checkpoints" / "step_000002"
    files = {
        f"checkpoint {name}": (folder / name, weights)
        for name in ("model.pt", "optim.pt", "ranks.pt", "meta.json")
    }
    files |= {"checkpoint latest": (made.path / "checkpoints" / "latest", weights)}
    files |= {
        f"run {name}": (made.path / name, shown)
        for name in ("status.json", "env.json", "metrics.jsonl", "eval.jsonl")
    }
    for name, (file, read) in files.items():
        yield name, file.read_bytes(), reading(file, read)


def fuzz(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """Damaged files: read, or rejected by a UserError (a request by pydantic's error); nothing
    else."""
    import contextlib
    import io

    import pydantic

    from codechat.core.errors import UserError

    every = list(targets(home))
    # in turn: an early end leaves none out
    for i, (name, good, read) in itertools.product(range(-(-n // len(every))), every):
        if time.monotonic() > until:
            return
        suffix = {"configuration": ".json", "rows in parquet": ".parquet"}.get(name, ".jsonl")
        path = home / f"fuzz-{i % 7}{suffix}"
        path.write_bytes(mutated(rng, good))
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                read(path)
            table.count(name, "read")
        except (UserError, pydantic.ValidationError, SystemExit):
            table.count(name, "rejected")
        except Exception as error:  # what this part looks for
            kept = path.read_bytes()
            table.fail(name, f"{type(error).__name__}: {error} for {kept[:300]!r}")


# ---------------------------------------------------------------- server


def server(table: Table, home: Path, rng: random.Random, until: float, clients: int) -> None:
    """Clients that ask for their own number, some of which leave in the middle or read slowly:
    every answer that is awaited to its end is the one that was given alone, and the memory
    stays where it was."""
    from server import Serving

    from codechat.runs import paths

    paths.ROOT = home
    save_tiny(home)
    weights = home / "runs" / "tiny" / "sft" / "checkpoints"
    versions = sorted(p.name for p in weights.glob("step_*"))
    assert len(versions) == 2
    with Serving(ckpt="tiny/sft", max_batch=16, reload_from=weights) as running:
        alone = {}  # (weights, request) -> the answer
        for version in versions:
            reload(running, version)
            alone |= {(version, i): ask(running, i) for i in range(8)}
        before = resident()
        lock = threading.Lock()

        def client(number: int) -> None:
            mine = random.Random(f"{number} {rng.random()}")
            while time.monotonic() < until:
                which = mine.randrange(8)
                manner = mine.choice(["whole", "whole", "leaves", "slow"])
                try:
                    found = ask(running, which, manner, mine)
                except Busy:
                    with lock:
                        table.count("server", "turned away, the queue being full")
                    time.sleep(mine.uniform(0.1, 1.0))
                    continue
                except (OSError, ValueError, KeyError) as error:
                    with lock:
                        table.fail("server", f"{manner}: {type(error).__name__}: {error}")
                    continue
                with lock:
                    table.count("server", manner)
                    if found is not None and found not in {
                        alone[version, which] for version in versions
                    }:
                        table.fail(
                            "server", f"answer {which} is another one than alone: {found[:80]!r}"
                        )

        def trainer() -> None:
            for turn in itertools.count():
                if time.monotonic() > until:
                    return
                status = reload(running, versions[turn % 2])
                with lock:
                    table.count(
                        "server",
                        "reloads"
                        if status == 200
                        else "reloads that came too late"
                        if status == 503
                        else "failures",
                    )
                time.sleep(rng.uniform(0.2, 2.0))

        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
        threads.append(threading.Thread(target=trainer, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        table.count("server", "clients", clients)
        if not running.idle():
            table.fail("server", f"work is left: {running.health()}")
        grown = (resident() - before) / before
        table.count("server", "memory grown by percent", round(100 * grown))
        if grown > 0.5:
            table.fail("server", f"memory grew by {grown:.0%}")


class Busy(Exception):
    """The server has as many requests as it takes."""


def reload(running: Any, version: str) -> int:
    return running.send("POST", "/admin/weights", {"path": version})[0]


def save_tiny(home: Path) -> None:
    from codechat import sft

    inputs = home / "server"
    inputs.mkdir(exist_ok=True)
    if not (inputs / "talks").exists():
        write_inputs(inputs)
    words = [
        w.format(home=inputs)
        for w in [
            *SFT,
            "--max-steps",
            "10",
            "--save-every",
            "5",
            "--lr",
            "0.01",
            "--no-compile",
            "--run-name",
            "tiny/sft",
            "--overwrite",
        ]
    ]
    from codechat.core import config

    sft.train(config.parse(sft.SFTConfig, words))


def ask(
    running: Any, which: int, manner: str = "whole", rng: random.Random | None = None
) -> str | None:
    """The text of the answer to request `which`; none where the client leaves before its end."""
    import http.client

    link = http.client.HTTPConnection(*running.place, timeout=300)
    body = {
        "model": "tiny/sft",
        "messages": [{"role": "user", "content": f"add {which}"}],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": which,
        "stream": True,
    }
    link.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    answer = link.getresponse()
    text = ""
    if answer.status == 429:
        raise Busy
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.read()[:200]!r}")
    for line in answer:
        if manner == "leaves" and rng and rng.random() < 0.3:
            link.close()
            return None
        if manner == "slow" and rng:
            time.sleep(rng.uniform(0, 0.2))
        if line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"]
            text += (delta[0]["delta"].get("content") or "") if delta else ""
    link.close()
    return text


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- main


def main() -> int:
    global JOBS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="kills names disk fuzz server; none = all")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--jobs",
        nargs="+",
        default=[job.name for job in JOBS],
        help="of kills, such as 'data calls' or recipe",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=2,
        help="of names: how often two of each are started at once",
    )
    parser.add_argument("--disks", type=int, default=10, help="faults of each kind")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    sizes = {
        "kills": given.kills,
        "names": given.turns,
        "disk": given.disks,
        "fuzz": given.inputs,
        "server": given.clients,
    }
    share = {"kills": 0.5, "names": 0.1, "disk": 0.1, "fuzz": 0.13, "server": 0.17}
    parts = given.parts or list(sizes)
    unknown = [name for name in given.jobs if name not in {job.name for job in JOBS}]
    if unknown:
        parser.error(f"no job {unknown[0]!r}; there are {', '.join(job.name for job in JOBS)}")
    JOBS = tuple(job for job in JOBS if job.name in given.jobs)
    unknown = [part for part in parts if part not in sizes]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(sizes)}")
    tables = []
    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        home = Path(folder)
        write_inputs(home)
        for part in parts:
            tables.append(Table(f"{part} (seed {given.seed})"))
            minutes = given.minutes * share[part] / sum(share[p] for p in parts)
            globals()[part](
                tables[-1],
                home,
                random.Random(f"{part} {given.seed}"),
                time.monotonic() + 60 * minutes,
                sizes[part],
            )
            tables[-1].print()
    return int(any(table.failures for table in tables))


if __name__ == "__main__":
    sys.exit(main())
