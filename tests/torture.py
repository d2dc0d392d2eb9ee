"""Faults in numbers: processes killed at random moments, a disk that fills up, fuzzed inputs, a server under hostile clients.

    make torture                                    everything, an hour at most
    python tests/torture.py kills --kills 40        one part; parts: kills disk fuzz server
    python tests/torture.py --minutes 10 --seed 1

Each part prints a table and the script ends with 1 where a row has a failure. It is seeded; the moments at which a process is killed still depend
on the machine. Where the hour ends first, fewer faults were made, and the table says how many. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
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

MODEL = ["--model.depth", "2", "--model.n-embd", "32", "--model.n-head", "2", "--model.block-size", "64"]
TOY = ["--preset", "toy", "--max-steps", "60", "--save-every", "5", "--eval-every", "20", "--seed", "0"]
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
STEPS = ["--max-steps", "120", "--save-every", "10", "--eval-every", "40", "--log-every", "1", "--no-compile"]
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
    """A command that is killed and started again. run: the run that it writes, none = the folder `out`."""

    name: str
    words: list[str]
    run: str = ""
    out: str = ""


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
    ),  # fmt: skip
    Job("pretrain", ["pretrain", *PRETRAIN, *STEPS, "--run-name", "p"], run="p"),
    Job("sft", ["sft", *SFT, *STEPS, "--run-name", "s"], run="s"),
    *(Job(name, [name, *TOY, "--run-name", name], run=name) for name in ("reinforce", "grpo", "ppo", "expert")),
    Job(
        "preference",
        ["preference", "--preset", "toy", "--task", "toy", "--max-steps", "40", "--save-every", "5", "--run-name", "d"],
        run="d",
    ),  # fmt: skip
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
        print(f"  {name:<28}" + ", ".join(f"{what} {n:,}" for what, n in self.rows[name].items()), flush=True)


# ---------------------------------------------------------------- kills


def command(home: Path, root: Path, words: list[str]) -> list[str]:
    return [sys.executable, "-m", "codechat", "--root", str(root), *(w.format(home=home) for w in words)]


def write_inputs(home: Path) -> None:
    """A text, its corpus and conversations, small enough for seconds."""
    from codechat.data import corpus
    from codechat.text import tokenizer

    texts = [f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(400)]
    (home / "text.txt").write_text("\n\n".join(texts))
    corpus.write_corpus(texts, home / "corpus", tokenizer.load("bytes"))
    (home / "talks").mkdir()
    for split, n in (("train", 60), ("select", 8)):
        turns = [[("user", f"add {i} to x"), ("assistant", f"x + {i}")] for i in range(n)]
        rows = [{"id": f"c{i}", "domain": "code", "meta": {}, "messages": [{"role": r, "content": c} for r, c in t]} for i, t in enumerate(turns)]  # fmt: skip
        (home / "talks" / f"code.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def outcome(job: Job, root: Path) -> str:
    """A hash of what the job left: the weights of its last checkpoint, or every file of its folder."""
    if job.run:
        from codechat.runs import checkpoint

        state = checkpoint.load(root / "runs" / job.run).model_state
        parts = [name.encode() + tensor.contiguous().numpy().tobytes() for name, tensor in sorted(state.items())]
    else:
        files = sorted(p for p in (root / job.out).rglob("*") if p.is_file())
        parts = [p.name.encode() + p.read_bytes() for p in files]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def again(job: Job, root: Path) -> list[str]:
    """The flag with which a killed job goes on."""
    if not job.run or not (root / "runs" / job.run).exists():
        return []
    saved = list((root / "runs" / job.run / "checkpoints").glob("*"))
    return ["--resume"] if any(p.name.isdigit() or p.name.startswith("step") for p in saved) else ["--overwrite"]


def finish(home: Path, root: Path, job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(home, root, job.words + again(job, root)), cwd=root, capture_output=True, text=True, timeout=1800)  # fmt: skip


def kills(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """Kill each job -9 at random moments, start it again each time, and compare what it leaves with a run that nobody killed."""
    for at, job in enumerate(JOBS):
        whole, victim = home / f"whole-{at}", home / f"victim-{at}"
        whole.mkdir(), victim.mkdir()
        began = time.monotonic()
        if (done := finish(home, whole, job)).returncode:
            table.fail(job.name, f"without any kill: {done.stderr[-400:]}")
            continue
        seconds, due = time.monotonic() - began, n // len(JOBS)
        while due and time.monotonic() < until:
            process = subprocess.Popen(command(home, victim, job.words + again(job, victim)), cwd=victim, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
            try:
                _, err = process.communicate(timeout=rng.uniform(0.3, max(1.0, seconds)))
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
            victim.mkdir()
        if (done := finish(home, victim, job)).returncode:
            table.fail(job.name, f"after the last kill: {done.stderr[-400:]}")
            continue
        compare(table, job, whole, victim)
        table.print_row(job.name)


def compare(table: Table, job: Job, whole: Path, victim: Path) -> None:
    if outcome(job, whole) == outcome(job, victim):
        table.count(job.name, "ended the same")
    else:
        table.fail(job.name, "ended with other bytes than the run that nobody killed")


# ---------------------------------------------------------------- disk


def disk(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """A pretraining run on a small file system that fills up, or turns read-only, after its first checkpoint: one line, an older checkpoint that
    loads, and the same weights once there is room."""
    job = Job("pretrain", ["pretrain", *PRETRAIN, *STEPS, "--run-name", "p"], run="p")
    whole, small = home / "disk-whole", home / "disk"
    whole.mkdir(), small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)]).returncode:
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


def break_disk(table: Table, home: Path, small: Path, whole: Path, job: Job, fault: str, rng: random.Random) -> None:
    process = subprocess.Popen(command(home, small, job.words), cwd=small, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    while process.poll() is None and again(job, small) != ["--resume"]:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 1.5))
    ballast = small / "ballast"
    if fault == "full":
        fill(ballast)
    else:
        # over itself: the file system has open files, so it cannot be remounted
        for words in (["--bind", str(small), str(small)], ["-o", "remount,bind,ro", str(small)]):
            subprocess.run(["mount", *words], check=True)
    _, err = process.communicate(timeout=600)
    if fault == "full":
        ballast.unlink(missing_ok=True)
    else:
        subprocess.run(["umount", "-l", str(small)], check=True)
    table.count(fault, "faults")
    if process.returncode and "Traceback" in err:
        table.fail(fault, f"a traceback: {err[-400:]}")
    elif process.returncode == 0:
        table.count(fault, "finished before it was noticed")
    if (done := finish(home, small, job)).returncode:
        table.fail(fault, f"cannot go on: {done.stderr[-400:]}")
    else:
        compare(table, Job(fault, job.words, run=job.run), whole, small)


def fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass  # full, as wanted


# ---------------------------------------------------------------- fuzz


def mutated(rng: random.Random, text: bytes) -> bytes:
    """The bytes with up to three of: a flipped bit, a cut, a piece repeated, a piece of json put in."""
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
                [b"null", b"[]", b"{}", b'"', b"1e999", b"-1", b"true", b"\xff", b"\n", b'{"a": ', b"NaN"]
            )
    return bytes(found)


def targets(home: Path) -> Iterator[tuple[str, bytes, Callable[[Path], Any]]]:
    """(name, a good file, what reads it)."""
    from codechat.core import config
    from codechat.data import conversations
    from codechat.data.prepared import Row  # noqa: F401  (the room loads before the first file is timed)
    from codechat.inference import api_schema
    from codechat.runs import run
    from codechat.sft import SFTConfig
    from codechat.tasks.funcall.staircase import score_call
    from codechat.tasks.toolbox.prepare import CallsConfig, prepare_calls
    from codechat.text import chat

    talk = {"id": "a", "domain": "calls", "meta": {}, "messages": [{"role": "user", "content": "add 1"}, {"role": "assistant", "content": chat.format_call("add", {"a": 1})}]}  # fmt: skip
    openai = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}  # fmt: skip
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "tools": openai["tools"]}  # fmt: skip
    yield "conversations", (json.dumps(talk) + "\n").encode() * 3, lambda p: list(conversations.read(p))
    yield "configuration", json.dumps({"max_steps": 3, "data_dir": "x", "mix": ["calls=1"], "model": {"depth": 2}}).encode(), lambda p: config.parse(SFTConfig, ["--config", str(p)])  # fmt: skip
    yield "request", json.dumps(request).encode(), lambda p: api_schema.ChatRequest.model_validate_json(p.read_bytes())
    yield "call", talk["messages"][1]["content"].encode(), lambda p: score_call(p.read_bytes().decode("utf-8", "replace"), {"name": "add", "arguments": {"a": 1}})  # fmt: skip
    rows = (json.dumps(openai) + "\n").encode() * 2
    made = dict(out=str(home / "fuzzed"), tokenizer="bytes", probes=0, max_lost=1.0)
    yield "rows of others", rows, lambda p: prepare_calls(CallsConfig(source=str(p), **made))
    where = home / "whole-2" / "runs" / "p"
    if where.exists():
        yield "status of a run", (where / "status.json").read_bytes(), lambda p: run.read_status(p) if hasattr(run, "read_status") else json.loads(p.read_text())  # fmt: skip


def fuzz(table: Table, home: Path, rng: random.Random, until: float, n: int) -> None:
    """Damaged files: read, or rejected by a UserError (a request by pydantic's error); nothing else."""
    import contextlib
    import io

    import pydantic

    from codechat.core.errors import UserError

    every = list(targets(home))
    for name, good, read in every:
        suffix = ".json" if name == "configuration" else ".jsonl"
        for i in range(n // len(every)):
            if time.monotonic() > until:
                return
            path = home / f"fuzz-{i % 7}{suffix}"
            path.write_bytes(mutated(rng, good))
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    read(path)
                table.count(name, "read")
            except (UserError, pydantic.ValidationError, SystemExit):
                table.count(name, "rejected")
            except Exception as error:  # what this part looks for
                kept = path.read_bytes()
                table.fail(name, f"{type(error).__name__}: {error} for {kept[:300]!r}")


# ---------------------------------------------------------------- server


def server(table: Table, home: Path, rng: random.Random, until: float, clients: int) -> None:
    """Clients that ask for their own number, some of which leave in the middle or read slowly: every answer that is awaited to its end is the one
    that was given alone, and the memory stays where it was."""
    from server import Serving

    from codechat import gpt
    from codechat.runs import paths, run
    from codechat.tasks import toy  # noqa: F401

    paths.ROOT = run.ROOT = home
    save_tiny(home, gpt)
    with Serving(ckpt="tiny/sft", max_batch=16) as running:
        alone = {i: ask(running, i) for i in range(8)}
        before, lock = resident(), threading.Lock()

        def client(number: int) -> None:
            mine = random.Random(f"{number} {rng.random()}")
            while time.monotonic() < until:
                which, manner = mine.randrange(8), mine.choice(["whole", "whole", "leaves", "slow"])
                try:
                    found = ask(running, which, manner, mine)
                except (OSError, ValueError) as error:
                    with lock:
                        table.fail("server", f"{manner}: {type(error).__name__}: {error}")
                    continue
                with lock:
                    table.count("server", manner)
                    if found is not None and found != alone[which]:
                        table.fail("server", f"answer {which} is another one than alone: {found[:80]!r}")

        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
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


def save_tiny(home: Path, gpt: Any) -> None:
    from codechat import sft

    inputs = home / "server"
    inputs.mkdir(exist_ok=True)
    if not (inputs / "talks").exists():
        write_inputs(inputs)
    words = [
        w.format(home=inputs)
        for w in [*SFT, "--max-steps", "5", "--no-compile", "--run-name", "tiny/sft", "--overwrite"]
    ]
    from codechat.core import config

    sft.train(config.parse(sft.SFTConfig, words))


def ask(running: Any, which: int, manner: str = "whole", rng: random.Random | None = None) -> str | None:
    """The text of the answer to request `which`; none where the client leaves before its end."""
    import http.client

    link = http.client.HTTPConnection(*running.place, timeout=300)
    body = {"model": "tiny/sft", "messages": [{"role": "user", "content": f"add {which}"}], "max_tokens": 12, "temperature": 1.0, "seed": which, "stream": True}  # fmt: skip
    link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, text = link.getresponse(), ""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="kills disk fuzz server; none = all")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disks", type=int, default=10, help="faults of each kind")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    sizes = {"kills": given.kills, "disk": given.disks, "fuzz": given.inputs, "server": given.clients}
    share = {"kills": 0.6, "disk": 0.1, "fuzz": 0.13, "server": 0.17}
    parts = given.parts or list(sizes)
    if unknown := [part for part in parts if part not in sizes]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(sizes)}")
    tables = []
    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        home = Path(folder)
        write_inputs(home)
        for part in parts:
            tables.append(Table(f"{part} (seed {given.seed})"))
            minutes = given.minutes * share[part] / sum(share[p] for p in parts)
            globals()[part](tables[-1], home, random.Random(f"{part} {given.seed}"), time.monotonic() + 60 * minutes, sizes[part])  # fmt: skip
            tables[-1].print()
    return int(any(table.failures for table in tables))


if __name__ == "__main__":
    sys.exit(main())
