"""Does a change of the code change what it computes? The same short runs at two commits, compared
bit by bit.

    python tools/same_results.py 68b4fe7                      # that commit against the working tree
    python tools/same_results.py 68b4fe7 HEAD --keep DIR      # BASE's results stay in DIR and are reused the
        next time
    python tools/same_results.py 68b4fe7 --only toy/grpo-0    # this run, and the runs and data it needs

Both trees run JOBS on this machine: the nano recipe at a tenth of its steps, and every loop on
small models. Compared per run: the final weights with the tensors saved beside them (adapters,
value heads), and every row of every *.jsonl, key by key. Times are left out (TIMES), and metrics
that change on purpose (MENDED). A key or file that only NEW has is listed, not counted. Prepared
data are compared by
hash. Exit code: 0 same, 1 different, 2 BASE does not run.

A tree is what `git archive` gives of it; the working tree counts as `git add -A` would record it.
The files are read directly, so that the code under test does not judge itself.

Left out: optimizer and random states (the resumed runs depend on them), sharded checkpoints,
GPUs, config.json and printed text.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 6  # differences printed per run

TIMES = (  # keys of a row, as patterns
    "time",  # when the row was written
    "*_s",  # seconds, and tok_per_s
    "mfu",  # FLOPs over time
    "peak_memory_mb",  # depends on the allocator
)
# Metrics whose definition is changed on purpose: {loop: {metric, as a pattern: reason}}. Their
# differences are listed, not counted.
RL = {
    "entropy": (
        "of all completions, from the sampler's log-probabilities; was of "
        "the completions that were trained on, from the trainer's"
    ),
    "effective_groups": "of all ranks in every loop",
    "policy_loss": "of all ranks in every loop",
    "reward_std": "of the completions of all ranks; was the mean of each rank's",
    "logprob_mismatch": "the largest of all ranks; was the mean of each rank's",
    "ratio_max": "the largest of all ranks; was the mean of each rank's",
    "mismatch_kl": "per token of all ranks; was the mean of each rank's",
    "importance_capped": "per token of all ranks; was the mean of each rank's",
}
JUDGED = (
    "of the batch that is trained on; was of the one before groups without variance were replaced"
)
MENDED: dict[str, dict[str, str]] = {loop: RL for loop in ("reinforce", "grpo", "ppo", "expert")}
MENDED["grpo"] = RL | dict.fromkeys(("reward_mean", "exact_match", "frac_zero_std_groups"), JUDGED)
# Flags that have another name now: {new: old}. JOBS has the new ones; a tree that refuses them
# is given the old ones.
RENAMED: dict[str, str] = {}


# ---- what is run


@dataclass(frozen=True)
class Job:
    """Commands that leave one run (or prepared data) behind. rewind: instead, a run whose copy
    goes back to this step before it continues."""

    name: str  # below runs/; "data" is data/made/
    loop: str  # key of MENDED
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    rewind: tuple[str, int] | None = None
    ranks: int = 1
    dtype: str | None = (
        "float32"  # None: what the machine's CPU computes in natively, mostly bfloat16
    )

    def recipe(self) -> list[Any]:
        """Everything that decides what the job leaves behind, but for the code."""
        above = [JOBS[n].recipe() for n in self.needs if n != "data"]
        return [
            self.name,
            self.commands,
            self.rewind,
            self.ranks,
            self.dtype,
            *above,
            *([packages()] if self.name == "data" else []),
        ]


def _nano() -> Iterator[Job]:
    """The recipe's own flags (recipe_nano) at a tenth of its steps, with smaller batches and
    data."""
    tokenizer, where = "--tokenizer gpt2:4096", "--data-dir data/nano/sft"
    answer = f"--task funcall {where} --max-new-tokens 64"
    yield _job(
        "data",
        f"data corpus --source embedded --out data/made/corpus {tokenizer} --max-tokens 1000000",
        f"data sft --source embedded --out data/made/sft {tokenizer} --max-examples 1000",
        f"data calls --source embedded --out data/made/sft {tokenizer} "
        "--max-examples 3000 --copies 1500",
    )
    yield _job(
        "nano/pretrain",
        "pretrain --preset nano --data-dir data/nano/corpus --seq-len 128 --device-batch-size 8 --max-steps 32 --eval-every 16 --save-every 16 "
        "--eval-tokens 4096",
        needs=("data",),
        dtype=None,
    )
    sft = (
        f"sft --init-from nano/pretrain {where} --seq-len 512 --device-batch-size 2 --mix calls=0.85 code=0.13 chat=0.02 --max-steps 36 "
        "--lr 3e-3 --muon-lr 0.02 --eval-every 18 --save-every 18 --eval-examples 16 --probe-examples 4"
    )
    yield _job("nano/sft", sft, needs=("nano/pretrain",), dtype=None)
    yield _job(
        "nano/sft-resumed",
        sft + " --resume",
        needs=("nano/sft",),
        rewind=("nano/sft", 18),
        dtype=None,
    )
    yield _job(
        "nano/diagnose",
        f"diagnose --ckpt nano/sft --groups 64 --group-size 4 {answer}",
        needs=("nano/sft",),
        dtype=None,
    )
    yield _job(
        "nano/rl",
        f"reinforce --init-from nano/sft --device-batch-size 8 --group-size 16 --max-steps 6 --lr 3e-4 --eval-every 3 --save-every 2 "
        f"--keep-last 4 --diagnose-groups 0 --eval-examples 32 --log-rollouts-every 2 {answer}",
        needs=("nano/sft",),
        dtype=None,
    )
    yield _job(
        "nano/choose",
        "evaluate --ckpt nano/rl --all-checkpoints --split "
        f"select --limit 24 --n 8 --probe-examples 0 {answer}",
        needs=("nano/rl",),
        dtype=None,
    )
    yield _job(
        "nano/evaluate",
        "evaluate --ckpt nano/sft nano/rl@best --split test "
        f"test_hard --limit 24 --n 8 --probe-examples 4 {answer}",
        needs=("nano/choose",),
        dtype=None,
    )


def _toy() -> Iterator[Job]:
    """Every loop on two seeds; the second also takes the branches that the first does not."""
    often = "--preset toy --max-steps 12 --eval-every 6 --save-every 6"
    rl = often + " --log-rollouts-every 4 --diagnose-groups 16"
    several = "--inner-epochs 2 --minibatches 2"
    tiny = "--model.depth 2 --model.n-embd 32 --model.n-head 2"
    yield _job(
        "toy/pretrain-1",
        f"pretrain {tiny} --data-dir data/nano/corpus --model.block-size 64 --device-batch-size 4 --grad-accum 2 --max-steps 12 "
        "--optimizer adamw --schedule cosine --eval-every 6 --save-every 6 --eval-tokens 2048 --log-every 3 --seed 1",
        needs=("data",),
    )
    yield _job(
        "toy/sft-1",
        f"sft {tiny} --data-dir data/nano/sft --tokenizer gpt2:4096 --tags text --model.block-size 512 --device-batch-size 2 "
        "--grad-accum 2 --mix calls=2 code=1 --mix-by rows --lora-rank 4 --optimizer adamw --max-steps 12 --eval-every 6 --save-every 6 --eval-examples 8 "
        "--probe-examples 2 --log-every 3 --seed 1",
        needs=("data",),
    )
    # what the toy presets were; they have other defaults now
    as_before = "--group-size 16 --schedule constant"
    yield _job("toy/reinforce-0", f"reinforce {rl} {as_before} --seed 0")
    yield _job(
        "toy/reinforce-1",
        f"reinforce {rl} --group-size 16 --seed 1 --entropy-coef 0.01 "
        "--baseline leave_one_out --optimizer muon --schedule cosine",
    )
    yield _job("toy/reinforce-lora", f"reinforce {rl} {as_before} --lora-rank 4")
    yield _job(
        "toy/reinforce-2-ranks", f"reinforce {rl} {as_before} --device-batch-size 2", ranks=2
    )
    yield _job("toy/grpo-0", f"grpo {rl} {as_before} --variant grpo --seed 0 {several}")
    yield _job(
        "toy/grpo-1",
        f"grpo {rl} {as_before} --variant grpo --seed 1 {several} "
        "--old-logprobs trainer --importance-cap 2",
    )
    yield _job("toy/grpo-kl", f"grpo {rl} {as_before} --variant grpo {several} --kl-coef 0.05")
    yield _job(
        "toy/dapo-0",
        f"grpo {rl} --schedule constant --variant dapo --seed 0 {several} --group-size 4",
    )
    yield _job(
        "toy/dapo-1",
        f"grpo {rl} {as_before} --variant dapo --seed 1 {several} "
        "--kl-coef 0.05 --kl-kind k1 --kl-in reward",
    )
    yield _job("toy/gspo-1", f"grpo {rl} {as_before} --variant gspo --seed 1 {several}")
    yield _job("toy/ppo-0", f"ppo {rl} --lr 2e-3 --schedule constant --seed 0")
    yield _job(
        "toy/ppo-1",
        f"ppo {rl} --lr 2e-3 --schedule constant --seed 1 --kl-coef 0.05 --entropy-coef 0.01",
    )
    yield _job(
        "toy/ppo-resumed",
        f"ppo {rl} --lr 2e-3 --schedule constant --seed 0 --resume",
        needs=("toy/ppo-0",),
        rewind=("toy/ppo-0", 6),
    )
    yield _job(
        "toy/expert-0",
        f"expert {rl} --group-size 16 --schedule constant --device-batch-size 4 --seed 0",
    )
    yield _job(
        "toy/expert-1",
        f"expert {rl} --group-size 16 --schedule constant "
        f"--device-batch-size 4 --seed 1 {several} --lora-rank 4",
    )
    yield _job("toy/preference-0", f"preference {often} --seed 0 --loss dpo")
    yield _job("toy/preference-1", f"preference {often} --seed 1 --loss simpo --grad-accum 2")
    yield _job("toy/preference-kto", f"preference {often} --loss kto")


def _chars() -> Iterator[Job]:
    """Four objectives, 12 steps each: --max-tokens is 12 times batch x horizon, x group size
    where the policy reads its own symbols, x passes."""
    shape = (
        "chars --model.depth 2 --model.n-embd 32 --model.n-head 2 --model.block-size 64 --horizon 24 --device-batch-size 8 --group-size 4 "
        "--eval-every 6 --save-every 6 --log-every 3 --warmup-steps 2"
    )
    places = 12 * 8 * 24
    several = (
        "--inner-epochs 2 --minibatches 2 --partial-logprob "
        "0.05 --kl-coef 0.01 --kl-warmup-tokens 1000"
    )
    for seed, fed, factor, more in ((0, "own", 4, ""), (1, "text", 2, several)):
        yield _job(
            f"toy/chars-supervised-{seed}",
            f"{shape} --objective supervised --max-tokens {places} --seed {seed}",
        )
        yield _job(
            f"toy/chars-denoise-{seed}",
            f"{shape} --objective denoise --max-tokens {places} --seed {seed}",
        )
        yield _job(
            f"toy/chars-grpo-{seed}",
            f"{shape} --objective grpo --feed {fed} "
            f"--max-tokens {places * factor} --seed {seed} {more}",
        )
        yield _job(
            f"toy/chars-ppo-{seed}",
            f"{shape} --objective ppo --feed {fed} --max-tokens {places * factor} "
            f"--seed {seed} {more}",
        )


def _job(name: str, *commands: str, **more: Any) -> Job:
    words = [tuple(c.split()) + (() if name == "data" else ("--run-name", name)) for c in commands]
    return Job(name, words[0][0], tuple(words), **more)


JOBS = {job.name: job for job in (*_nano(), *_toy(), *_chars())}


def chosen(names: Sequence[str]) -> list[Job]:
    """These jobs (patterns; none = all) and what they need, in the order of JOBS."""
    for name in names:
        if not fnmatch.filter(JOBS, name):
            raise SystemExit(f"no run is called {name!r}; there are {', '.join(JOBS)}")
    found = [n for n in JOBS if not names or any(fnmatch.fnmatch(n, name) for name in names)]
    for name in found:
        found += [n for n in JOBS[name].needs if n not in found]
    return [job for job in JOBS.values() if job.name in found]


# ---- trees


def git(*words: str, **env: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def tree_of(commit: str | None) -> str:
    """Hash of a commit's tree; of the working tree, untracked files included that git does not
    ignore, for None."""
    if commit is not None:
        return git("rev-parse", "--verify", f"{commit}^{{tree}}")
    with tempfile.TemporaryDirectory() as folder:
        index = str(Path(folder) / "index")
        git("read-tree", "HEAD", GIT_INDEX_FILE=index)
        git("add", "-A", GIT_INDEX_FILE=index)
        return git("write-tree", GIT_INDEX_FILE=index)


def check_out(tree: str, folder: Path) -> None:
    """The tree's files below `folder`, where they are not there yet."""
    if (folder / ".complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.Popen(["git", "archive", tree], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit(f"git archive {tree} failed")
    # entry points name the laboratory's commands and tasks; a tree that is not installed has none
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / ".complete").touch()


def machine() -> str:
    """Hash of what the results depend on besides the code and the data: processor, Python,
    torch, numpy."""
    cpu = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "flags"))
    ][:2]
    return _digest(platform.python_version(), torch.__version__, metadata.version("numpy"), cpu)


def packages() -> str:
    """Hash of what the embedded data are made of: the installed packages."""
    installed = sorted(
        f"{d.name} {d.version}" for d in metadata.distributions() if d.name != "codechat"
    )
    return _digest(
        installed,
        [f.read_text() for f in sorted(Path(torch.__file__).parents[1].glob("__editable__*.py"))],
    )


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]


def share_data(made: Path, base: Path, new: Path) -> None:
    """One set of data for the runs of both trees, made by BASE when it was first needed.
    Packages that are installed later change what `codechat data` makes, and must not make kept
    results useless; whether both trees make the same now is compared by itself."""
    if made.exists() and not base.exists():
        shutil.copytree(made, base)
    if base.exists() and base != new:
        shutil.copytree(base, new)


# ---- running


@dataclass
class Tree:
    """A checked-out tree and the jobs that were done in it. done/NAME keeps a job's recipe, so
    that the next comparison can reuse its results."""

    path: Path
    failed: dict[str, str] = field(default_factory=dict)

    def mark(self, job: Job) -> Path:
        return self.path / "done" / job.name.replace("/", "-")

    def is_done(self, job: Job) -> bool:
        return self.mark(job).exists() and self.mark(job).read_text() == json.dumps(job.recipe())

    def output(self, job: Job) -> Path:
        return self.path / ("data/made" if job.name == "data" else f"runs/{job.name}")

    def run(self, job: Job) -> None:
        """Run the job's commands anew; what went wrong is kept in `failed`."""
        self.mark(job).unlink(missing_ok=True)
        lacking = [n for n in job.needs if n in self.failed and n != "data"]
        if lacking:  # BASE's data are there
            self.failed[job.name] = f"not run, since {lacking[0]} failed"
            return
        shutil.rmtree(self.output(job), ignore_errors=True)
        began = time.perf_counter()
        used = cpu_seconds()
        if job.rewind:
            rewind(self.path / "runs" / job.rewind[0], self.output(job), job.rewind[1])
        for words in job.commands:
            code, log = self.call(job, words)
            if code == 2 and RENAMED.keys() & set(words):
                code, log = self.call(job, [RENAMED.get(w, w) for w in words])
            if code:
                last = log.read_text(errors="replace").strip().splitlines() or [""]
                self.failed[job.name] = f"exit code {code}: {last[-1][-300:]} (all of it in {log})"
                return
        self.mark(job).parent.mkdir(exist_ok=True)
        self.mark(job).write_text(json.dumps(job.recipe()))
        print(
            f"  {job.name}: {time.perf_counter() - began:.0f} "
            f"s, {cpu_seconds() - used:.0f} s of CPU",
            file=sys.stderr,
            flush=True,
        )

    def check_import(self) -> None:
        """SystemExit where a process in this tree would import another package: an installed
        one, say."""
        asked = [sys.executable, "-c", "import codechat; print(codechat.__file__)"]
        found = subprocess.run(
            asked,
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": str(self.path)},
            capture_output=True,
            text=True,
        ).stdout.strip()
        if not Path(found).is_relative_to(self.path):
            raise SystemExit(
                f"{self.path} imports {found or 'no codechat'}; its own package is required"
            )

    def call(self, job: Job, words: Sequence[str]) -> tuple[int, Path]:
        """Exit code and log of one command in this tree."""
        env = os.environ | {
            "PYTHONPATH": str(self.path),
            "OMP_NUM_THREADS": "1",
            "GIT_CEILING_DIRECTORIES": str(self.path.parent),
        }
        env = {k: v for k, v in env.items() if not k.startswith("CODECHAT_")} | (
            {"CODECHAT_DTYPE": job.dtype} if job.dtype else {}
        )
        start = ["-m", "codechat", words[0]]
        if job.ranks > 1:
            start = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(job.ranks),
                *start,
            ]
        log = self.path / "logs" / job.name.replace("/", "-")
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as out:
            done = subprocess.run(
                [sys.executable, *start, *words[1:]],
                cwd=self.path,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        return done.returncode, log


def cpu_seconds() -> float:
    """Of all commands so far: what a busy machine does not stretch."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def rewind(source: Path, target: Path, step: int) -> None:
    """A copy of a finished run that was stopped at `step`: --resume goes on from `latest` and
    drops the rows after it."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (target / "checkpoints" / "latest").write_text(f"step_{step:06d}\n")


def run_all(tree: Tree, jobs: Sequence[Job]) -> None:
    """Run the jobs that are not done, one after the other."""
    waiting = [job for job in jobs if not tree.is_done(job)]
    if waiting:
        print(
            f"running {len(waiting)} of {len(jobs)} jobs in {tree.path}",
            file=sys.stderr,
            flush=True,
        )
        tree.check_import()
    for job in waiting:
        tree.run(job)


# ---- comparing


@dataclass
class Findings:
    """What the comparison of one job found."""

    counts: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(job: Job, base: Tree, new: Tree) -> Findings:
    found = Findings()
    a = base.output(job)
    b = new.output(job)
    if job.name in new.failed:
        found.differences.append(new.failed[job.name])
    elif job.name == "data":
        compare_files(a, b, found)
    else:
        compare_weights(a, b, found)
        compare_rows(a, b, MENDED.get(job.loop, {}), found)
    return found


def compare_files(a: Path, b: Path, found: Findings) -> None:
    """Prepared data by hash; manifests are left out, since they hold paths."""
    one, two = (
        {
            str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest()
            for f in sorted(root.rglob("*"))
            if f.suffix in (".bin", ".jsonl", ".npy")
        }
        for root in (a, b)
    )
    found.differences += [
        f"{name} {'differs' if name in two else 'is lost'}"
        for name in one
        if one[name] != two.get(name)
    ]
    found.notes += [f"new file {name}" for name in two if name not in one]
    found.counts.append(f"{len(one)} files")


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint, and the tensors in the `extra` of each rank by their
    path; nothing for a run without checkpoints."""
    steps = sorted((run / "checkpoints").glob("step_*"))
    if not steps:
        return {}
    found = {}
    for file in steps[-1].glob("*.safetensors"):
        found |= load_file(file)
    if (steps[-1] / "model.pt").exists():
        found |= torch.load(steps[-1] / "model.pt", weights_only=True)
    for i, rank in enumerate(torch.load(steps[-1] / "ranks.pt", weights_only=True)):
        found |= dict(_tensors(rank["extra"], f"rank {i}: "))
    return {f"{steps[-1].name} {name}": value for name, value in found.items()}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _tensors(v, f"{name}{'' if name.endswith(' ') else '.'}{k}")


def compare_weights(a: Path, b: Path, found: Findings) -> None:
    """Tensor by tensor, bitwise."""
    one = last_tensors(a)
    two = last_tensors(b)
    found.differences += [f"{name} is lost" for name in one if name not in two]
    found.notes += [f"new tensor {name}" for name in two if name not in one]
    differing = [n for n in one if n in two and not same_bits(one[n], two[n])]
    if differing:
        x = one[differing[0]]
        y = two[differing[0]]
        gap = (
            f"by at most {float((x.double() - y.double()).abs().max()):.3g}"
            if x.shape == y.shape
            else f"{tuple(x.shape)} became {tuple(y.shape)}"
        )
        found.differences.append(
            f"{len(differing)} of {len(one)} tensors differ, first {differing[0]}, {gap}"
        )
    found.counts.append(f"{len(one)} tensors")


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))
    )


def compare_rows(a: Path, b: Path, mended: dict[str, str], found: Findings) -> None:
    """Every *.jsonl of the run, row by row and key by key. 1 and 1.0 are the same number."""
    rows = 0
    keys = set[str]()
    found.notes += [
        f"new file {f.name}" for f in sorted(b.glob("*.jsonl")) if not (a / f.name).exists()
    ]
    for file in sorted(a.glob("*.jsonl")):
        if not (b / file.name).exists():
            found.differences.append(f"{file.name} is lost")
            continue
        one, two = (
            [json.loads(line) for line in f.read_text(encoding="utf-8").splitlines()]
            for f in (file, b / file.name)
        )
        if len(one) != len(two):
            found.differences.append(f"{file.name}: {len(one)} rows became {len(two)}")
        rows += len(one)
        keys |= _compare_keys(file.name, one, two, mended, found)
    found.counts.append(f"{rows} rows of {len(keys)} keys")


def _compare_keys(
    file: str,
    one: list[dict[str, Any]],
    two: list[dict[str, Any]],
    mended: dict[str, str],
    found: Findings,
) -> set[str]:
    """One line for each key that differs: the first row in which it does, and in how many more.
    Returns the keys that were compared."""
    first = dict[str, str]()
    count = Counter[str]()
    added = Counter[str]()
    compared = set[str]()
    for i, (x, y) in enumerate(zip(one, two), 1):
        added.update(y.keys() - x.keys())
        for key in (k for k in x if not _matches(k, TIMES)):
            compared.add(key)
            if key not in y or x[key] != y[key]:
                first.setdefault(
                    key,
                    f"{_short(x[key])} {'became ' + _short(y[key]) if key in y else 'is lost'} "
                    f"in row {i} (step {x.get('step')})",
                )
                count[key] += 1
    for key, text in first.items():
        line = f"{file} {key}: {text}" + (f" and {count[key] - 1} more" if count[key] > 1 else "")
        reason = next((mended[m] for m in mended if fnmatch.fnmatchcase(key, m)), None)
        if reason is None:
            found.differences.append(line)
        else:
            found.notes.append(f"mended ({reason}): {line}")
    found.notes += [
        f"new key {file} {key} in {n} rows"
        for key, n in sorted(added.items())
        if not _matches(key, TIMES)
    ]
    return compared


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, p) for p in patterns)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the command


def report(job: Job, found: Findings) -> None:
    """One line for a job that is the same, the first differences of one that is not."""
    if found.differences:
        print(f"{job.name}: DIFFERENT")
        more = len(found.differences) - SHOWN
        print(
            *(
                f"  {line}"
                for line in found.differences[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
            ),
            sep="\n",
        )
    else:
        print(f"{job.name}: same: {', '.join(found.counts)}")
    for note in found.notes:
        print(f"  ({note})")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="commit whose results are right")
    parser.add_argument(
        "new",
        metavar="NEW",
        nargs="?",
        help="commit to check; default: the working tree",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"runs, as names or patterns: {', '.join(JOBS)}",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="directory in which BASE's results stay, and are looked for",
    )
    args = parser.parse_args()
    jobs = chosen(args.only)
    trees = (tree_of(args.base), tree_of(args.new))
    with contextlib.ExitStack() as stack:
        kept = (
            args.keep.resolve()
            if args.keep
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same-base-")))
        )
        base = Tree(kept / f"{trees[0][:12]}-{machine()}")
        new = Tree(Path(tempfile.mkdtemp(prefix="same-new-")) / "tree")
        for tree, name in zip((base, new), trees, strict=True):
            check_out(name, tree.path)
            run_all(tree, [job for job in jobs if job.name == "data"])
            if not base.failed:
                share_data(
                    base.output(JOBS["data"]), base.path / "data/nano", tree.path / "data/nano"
                )
                run_all(tree, [job for job in jobs if job.name != "data"])
            if base.failed:
                shutil.rmtree(new.path.parent)
                print(*(f"{k} fails in BASE: {v}" for k, v in base.failed.items()), sep="\n")
                return 2
        findings = {job.name: compare(job, base, new) for job in jobs}
    for job in jobs:
        report(job, findings[job.name])
    different = [name for name, found in findings.items() if found.differences]
    if different:
        print(f"{len(different)} of {len(jobs)} differ; NEW's runs are in {new.path}")
        return 1
    shutil.rmtree(new.path.parent)
    print(f"all {len(jobs)} are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
