"""Launching: what is written reads back as what was asked for; starting, following, stopping;
what is refused."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raising import raising

from codechat.core import config, registry
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.processes import descendants, process_start
from codechat.core.registry import LOOPS
from codechat.evaluation.diagnose import DiagnoseConfig
from codechat.evaluation.evaluate import EvaluateConfig
from codechat.models.config import GPTConfig
from codechat.pretrain import PretrainConfig
from codechat.reinforce import ReinforceConfig
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run, list_runs
from codechat.sft import SFTConfig
from codechat_lab.instruments.pass_rates import PasskConfig
from codechat_lab.launch import launcher, runner
from codechat_lab.launch.launcher import Machines

PROJECT = Path(__file__).resolve().parents[3]
CONFIGS = [
    PretrainConfig(
        run_name="big/pre.train-1",
        model=GPTConfig(depth=3, n_embd=4096, n_head=32, recompute="blocks"),
        compile=False,
    ),
    SFTConfig(
        run_name="s",
        data_dir="a folder with 'quotes' and $HOME",
        mix=("calls=0.7", "code=0.3"),
        max_steps=3,
    ),
    ReinforceConfig(
        task="toy",
        run_name="r",
        ks=(1, 8),
        row_tokens=64,
        init_from="big/pre.train-1@1200",
        temperature=0.9,
    ),
    EvaluateConfig(
        task="toy", run_name="e", ckpt=("nano/sft", "nano/rl@best"), split=("test", "test_hard")
    ),
    DiagnoseConfig(task="toy", run_name="d", ckpt="nano/sft"),
    PasskConfig(task="micro", run_name="p", ckpt=("nano/sft",)),
]


@pytest.mark.parametrize("id", LOOPS)
def test_every_loop_begins_and_resumes_the_run_that_was_launched(id: str, home: Path) -> None:
    needed = {"task": "toy", "teacher": "t"}
    fields = config.fields_of(LOOPS[id].config_class)
    words = [word for name in needed if name in fields for word in (f"--{name}", needed[name])]
    runner.launch([LOOPS[id].command, "--", *words, "--run-name", "x"])
    cfg = config.from_dict(
        LOOPS[id].config_class, json.loads((home / "runs/x/config.json").read_text())
    )
    # as the loop writes them into its run
    cfg = cfg.resolved() if hasattr(cfg, "resolved") else cfg
    with Run.create("x", cfg, kind=id) as run:
        run.stop("for now")
    with Run.create("x", cfg, kind=id, resume=True) as run:
        pass
    assert Run.open("x").status["status"] == "finished"


def stand_in(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def use_python(launch_sh: Path, python: str | Path) -> None:
    launch_sh.write_text(launch_sh.read_text().replace(shlex.quote(sys.executable), str(python)))


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.run_name)
def test_the_shell_gives_torchrun_these_words(
    cfg: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    path = launcher.write(cfg, Machines(nproc=2, max_restarts=3)).path
    use_python(path / "launch.sh", stand_in(home / "said", 'printf "%s\\n" "$(pwd)" "$@"'))

    def words(*options: str) -> list[str]:
        command = ["sh", str(path / "launch.sh"), *options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd="/", check=True
        )
        return done.stdout.splitlines()

    entry = registry.entry_of(cfg, launcher.LAUNCHABLE)
    settings = f"--config runs/{cfg.run_name}/config.json --run-name {cfg.run_name}".split()
    loop = ["-m", "codechat", entry.command, "--", *settings]
    head = [str(home), "-m", "torch.distributed.run"]
    assert words() == [*head, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *loop]
    assert words("--nnodes", "2") == [
        *head,
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        *loop,
    ]
    status = (path / "status.json").read_text()
    (path / "status.json").write_text(status.replace('"planned"', '"stopped"'))
    assert words()[len(head) + 9 :] == [
        *settings,
        "--resume" if hasattr(cfg, "resume") else "--overwrite",
    ]
    for back in (settings, ["--", *settings]):  # some Pythons pass the -- on
        read = config.parse(type(cfg), back, presets=entry.presets)
        assert read == (cfg.resolved() if hasattr(cfg, "resolved") else cfg)


@pytest.mark.parametrize(
    "cfg",
    [GPTConfig(), SFTConfig(resume=True), SFTConfig(overwrite=True)],
    ids=["no run", "resume", "overwrite"],
)
def test_an_impossible_launch_writes_nothing(cfg: Any, home: Path) -> None:
    with pytest.raises(ConfigError):
        launcher.write(cfg)
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("sft --nproc 8 --init-from base", "--init-from is a setting of sft"),
        ("sft --nproc 8 -- --init-from base", ""),
        ("sft --nproc 8 --nosuch 3", ""),
    ],
)
def test_a_setting_of_the_loop_before_the_dashes_is_named(typed: str, found: str) -> None:
    words = typed.split(" -- ")[0].split()
    with raising(ConfigError, found, "after --") if found else contextlib.nullcontext():
        launcher.check_order(words)


def test_a_launch_without_a_process_is_refused() -> None:
    with pytest.raises(ConfigError):
        Machines(nproc=0)


def test_only_what_differs_from_the_defaults_is_listed() -> None:
    cfg = SFTConfig(run_name="x/y", lr=0.5, model=GPTConfig(depth=7))
    written = launcher.write(cfg, Machines(nproc=4))
    assert written.changes == {"lr": (1e-3, 0.5), "model.depth": (4, 7)}
    assert "lr" in str(written) == repr(written)


def test_a_launch_with_all_defaults_says_so() -> None:
    assert "all defaults" in str(launcher.write(SFTConfig(run_name="z")))


def test_a_written_launch_is_a_planned_run() -> None:
    launcher.write(SFTConfig(run_name="x/y"))
    assert list_runs().set_index("run").loc["x/y", "status"] == "planned"
    assert Run.open("x/y").env["kind"] == "sft"


@pytest.fixture
def job(home: Path) -> Path:
    """The directory of a run on two nodes of eight GPUs."""
    runner.launch(["sft", "--nproc", "8", "--nodes", "2", "--", "--run-name", "s"])
    return home / "runs" / "s"


def test_a_job_asks_for_its_machines(job: Path) -> None:
    lines = (job / "job.slurm").read_text().splitlines()
    for asked in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--ntasks-per-node=1",
        "--time=24:00:00",
        "--requeue",
    ):
        assert f"#SBATCH {asked}" in lines


def run_on_cluster(command: list[str], job: Path, tmp_path: Path) -> Any:
    """With stand-ins for the cluster's commands and for Python."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_in(commands / "scontrol", "printf 'node-a\\nnode-a\\nnode-b\\n'")
    stand_in(commands / "srun", 'shift; "$@"; "$@"')
    stand_in(commands / "said", 'echo "$@"')
    use_python(job / "launch.sh", "said")
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "77",
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)


def test_a_job_starts_torchrun_on_every_node(job: Path, tmp_path: Path) -> None:
    done = run_on_cluster(["bash", str(job / "job.slurm")], job, tmp_path)
    assert done.returncode == 0, done.stderr
    torchrun = (
        f"-m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-a:{launcher.PORT} "
        "--rdzv-id 77 --nproc-per-node 8 -m codechat sft -- --config runs/s/config.json --run-name s"
    )
    assert done.stdout.splitlines() == [torchrun, torchrun]


def test_a_run_on_two_nodes_is_not_started_on_one(job: Path, tmp_path: Path) -> None:
    done = run_on_cluster(["sh", str(job / "launch.sh")], job, tmp_path)
    assert done.returncode == 2
    assert "2 nodes" in done.stderr


@pytest.fixture
def toy(home: Path) -> ReinforceConfig:
    return ReinforceConfig(run_name="toy", task="toy", tokenizer="bytes", max_steps=2)


def resolved(toy: ReinforceConfig) -> ReinforceConfig:
    """As the loop writes it into its run."""
    return dataclasses.replace(toy, model=dataclasses.replace(toy.model, vocab_size=257))


def test_the_loop_takes_a_planned_directory_over(toy: ReinforceConfig, home: Path) -> None:
    path = launcher.write(toy).path
    with Run.create("toy", resolved(toy), kind="reinforce") as run:
        assert run.status["status"] == "running"
        assert not run.resumed
        run.log(1, train_loss=2.0)
    assert (path / "launch.sh").is_file()
    assert run.config["model"]["vocab_size"] == 257
    assert Run.open("toy").status["status"] == "finished"
    assert len(run.metrics()) == 1


def test_a_run_that_began_is_neither_made_nor_written_again(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    Run.create("toy", resolved(toy), kind="reinforce").finish()
    with pytest.raises(RunError, match="toy"):
        Run.create("toy", resolved(toy), kind="reinforce")
    with pytest.raises(RunError, match="toy"):
        launcher.write(toy)


def test_a_finished_run_is_written_over_when_told_so(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    Run.create("toy", resolved(toy), kind="reinforce").finish()
    path = launcher.write(dataclasses.replace(toy, lr=1e-5), Machines(overwrite=True)).path
    assert paths.read_status(path)["status"] == "planned"


def test_what_has_not_begun_may_be_written_again(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    path = launcher.write(dataclasses.replace(toy, lr=1e-5)).path
    assert paths.read_status(path)["status"] == "planned"


def assert_refused(named: str | None = None) -> None:
    """Neither written over nor started."""
    toy = ReinforceConfig(run_name="toy", task="toy", tokenizer="bytes", max_steps=2)
    with pytest.raises(RunError, match=named):
        launcher.write(toy, Machines(overwrite=True))
    with pytest.raises(RunError, match=named):
        launcher.start("toy")


def test_a_run_that_starts_is_not_written_over(toy: ReinforceConfig) -> None:
    path = launcher.write(toy).path
    me = {
        "host": paths.platform.node(),
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
    }
    (path / "process.json").write_text(json.dumps(me))
    assert_refused(str(os.getpid()))
    assert launcher.status("toy")["status"] == "starting"


HOLD = (
    "import sys; from pathlib import Path; from codechat.core.processes import lock; "
    "print(lock(Path(sys.argv[1])), flush=True); input()"
)


def test_a_run_that_lives_is_not_written_over(toy: ReinforceConfig) -> None:
    path = launcher.write(toy).path
    command = [sys.executable, "-c", HOLD, str(paths.lock_of(path))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "True\n"
        alive = {"status": "running", "pid": other.pid, "pid_start": process_start(other.pid)}
        change_status(path, alive)
        assert_refused()
        other.kill()


def change_status(path: Path, change: dict[str, Any]) -> None:
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | change))


GONE = {"host": paths.platform.node(), "pid": 1, "pid_start": "not this one"}


def test_the_status_of_a_planned_run_ends_with_0(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    assert runner.launch(["toy", "status"]) == 0


def test_the_status_of_a_finished_run_ends_with_0(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    Run.create("toy", toy, kind="reinforce").finish()
    assert runner.launch(["toy", "status"]) == 0


def test_the_status_of_a_stopped_run_ends_with_0(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    Run.create("toy", toy, kind="reinforce").stop("a reason")
    assert runner.launch(["toy", "status"]) == 0


def test_the_status_of_a_failed_run_ends_with_1(toy: ReinforceConfig) -> None:
    launcher.write(toy)
    Run.create("toy", toy, kind="reinforce").fail("a reason")
    assert runner.launch(["toy", "status"]) == 1


def test_the_status_of_a_run_whose_process_is_gone_ends_with_1(toy: ReinforceConfig) -> None:
    path = launcher.write(toy).path
    Run.create("toy", toy, kind="reinforce").fail("a reason")
    change_status(path, {"status": "running"} | GONE)
    assert runner.launch(["toy", "status"]) == 1


@pytest.fixture
def start_failed(toy: ReinforceConfig) -> Path:
    """A planned run whose first process ended with an error."""
    path = launcher.write(toy).path
    (path / "process.json").write_text(json.dumps(GONE))
    log = "loading\nerror: no run 'x'; valid: nothing\nTraceback of torchrun\n  more\n"
    (path / "launch.log").write_text(log)
    return path


def test_a_start_that_failed_says_why(start_failed: Path) -> None:
    state = launcher.status("toy")
    assert state["status"] == "start failed"
    assert state["reason"] == "error: no run 'x'; valid: nothing"


def test_status_and_tail_of_a_start_that_failed_end_with_1(start_failed: Path) -> None:
    assert runner.launch(["toy", "status"]) == 1
    assert runner.launch(["toy", "tail"]) == 1


def test_a_start_that_failed_cannot_be_stopped(start_failed: Path) -> None:
    with pytest.raises(RunError):
        launcher.stop("toy")


def test_a_run_that_is_not_there_cannot_be_started() -> None:
    with pytest.raises(MissingFile, match="nothing"):
        launcher.start("nothing")


def test_a_run_that_launch_did_not_write_is_not_stopped() -> None:
    Run.create("plain", SFTConfig(), kind="sft").finish()
    with pytest.raises(MissingFile, match="plain"):
        launcher.stop("plain")


@pytest.fixture
def elsewhere(toy: ReinforceConfig) -> Path:
    """A planned run whose process is on another host."""
    path = launcher.write(toy).path
    process = {"host": "elsewhere", "pid": os.getpid(), "pid_start": "1"}
    (path / "process.json").write_text(json.dumps(process))
    return path


def test_a_process_of_another_host_whose_lock_is_free_runs_no_more(elsewhere: Path) -> None:
    with pytest.raises(RunError, match="not running"):
        launcher.stop("toy")


def test_a_process_of_another_host_is_left_alone(elsewhere: Path) -> None:
    with held_as_a_detached_process(elsewhere):
        with pytest.raises(RunError, match="elsewhere"):
            launcher.stop("toy")
        with pytest.raises(RunError, match="elsewhere"):
            launcher.start("toy")


@contextlib.contextmanager
def held_as_a_detached_process(path: Path) -> Iterator[None]:
    """Another process that has the lock of a detached one."""
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(path / launcher.ALIVE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        yield
        other.kill()


def rename_host(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "its-former-name"}))


def test_a_detached_process_is_known_by_its_lock_and_number_whatever_its_host_is_called(
    toy: ReinforceConfig, home: Path
) -> None:
    """A container that starts again has another host name and the same folder."""
    path = launcher.write(toy).path
    use_python(path / "launch.sh", stand_in(home / "sleeps", "exec sleep 100"))
    launcher.start("toy")
    rename_host(path / "process.json")
    pid = launcher.process_of(path)["pid"]
    with pytest.raises(RunError, match=str(pid)):
        launcher.start("toy")
    assert launcher.stop("toy", now=True) == "planned"
    assert launcher.process_of(path) is None
    launcher.start("toy")  # free again
    rename_host(path / "process.json")
    os.kill(launcher.process_of(path)["pid"], 9)
    launcher._children[-1].wait()
    ends = time.monotonic() + 60
    # a command within the script may live a moment longer
    while launcher.process_of(path) and time.monotonic() < ends:
        time.sleep(0.01)
    assert launcher.process_of(path) is None
    assert launcher.status("toy")["status"] == "start failed"


def test_a_killed_run_of_a_renamed_host_is_stopped_started_and_followed_as_any_killed_one(
    toy: ReinforceConfig, home: Path
) -> None:
    path = launcher.write(toy).path
    program = (
        "import pathlib, sys\nfrom codechat.runs import paths\nfrom codechat.runs.run import Run\n"
        "paths.ROOT = pathlib.Path(sys.argv[1])\nrun = Run.create('toy', {}, kind='reinforce')\n"
        "print('up', flush=True)\ninput()"
    )
    command = [sys.executable, "-c", program, str(home)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
    ) as trainer:
        assert trainer.stdout.readline() == "up\n"
        rename_host(path / "status.json")
        rename_host(path / "env.json")
        assert launcher.status("toy")["status"] == "running", "its lock is held"
        trainer.kill()
    assert launcher.status("toy")["status"] == "killed"
    with pytest.raises(RunError, match="not running"):
        launcher.stop("toy")
    assert launcher.attach("toy")["status"] == "killed", "tail ends"
    use_python(path / "launch.sh", stand_in(home / "ends", "exit 0"))
    launcher.start("toy")
    launcher._children[-1].wait()


def test_each_row_is_read_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    # then a resumed run drops what came after its checkpoint, and goes on with a longer line or
    # further than before
    texts = ["1\n2a", "1\n2ab\n3\n", "1\n", "1\n2cde\n3\n4\n", "1\n2cde\n3\n5xyz\n6\n"]
    written = iter(texts)

    def going() -> bool:
        file.write_text(text := next(written))
        return text != texts[-1]

    assert list(launcher.new_lines(file, going, 0.0)) == [
        *"1",
        "2ab",
        "3",
        "2cde",
        "3",
        "4",
        "5xyz",
        "6",
    ]
    row = {"step": 20, "time": 1.0, "train_loss": 1.23456, "tok_per_s": 22300.0, "lr": None}
    assert (
        launcher.line_of(row, 100)
        == "step 20/100  train_loss 1.235 nats/token  tok_per_s 2.23e+04 tokens/s"
    )


TINY = """--task toy --tokenizer bytes --model.depth 1 --model.n-embd 32 --model.n-head 2 --model.block-size 64
--device-batch-size 2 --group-size 4 --eval-every 0 --eval-examples 4 --max-new-tokens 4 --diagnose-groups 0
--dead-patience 100000 --max-steps 100000 --save-every 0 --run-name a/toy"""


@pytest.mark.slow
def test_two_ranks_from_a_shell_start_stop_and_continue(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that is the root of all processes. Whatever is left running is killed, ranks
    included."""
    for name, value in {
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
        "CODECHAT_DTYPE": "float32",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    path = home / "runs/a/toy"

    def codechat(words: str) -> str:
        command = [sys.executable, "-m", "codechat", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for_more_than(step: int) -> None:
        ends = time.monotonic() + 90
        while (state := launcher.status(path))["status"] != "running" or state["step"] <= step:
            assert time.monotonic() < ends, state
            time.sleep(0.2)

    printed = codechat(f"launch reinforce --nproc 2 --start -- {TINY}")
    try:
        assert re.search(r"max_steps +50 -> 100000", printed)
        assert "started" in printed
        wait_for_more_than(3)
        shell = launcher.process_of(path)["pid"]
        assert os.getsid(shell) == shell != os.getsid(0), (
            "it outlives the shell or kernel that started it"
        )
        assert "running" in codechat("launch a/toy status")
        assert codechat("launch a/toy stop").strip() == "a/toy: stopped"
        saved = Run.open(path).checkpoints()[-1]
        assert checkpoint.read_meta("a/toy")["world_size"] == 2
        assert saved >= 3
        codechat("launch a/toy start")
        wait_for_more_than(saved)
        ranks = descendants(launcher.process_of(path)["pid"])
        assert codechat("launch a/toy stop --now").strip() == "a/toy: killed"
        assert len(ranks) >= 2
        assert not any(map(process_start, ranks))
        steps = Run.open(path).metrics()["step"].tolist()
        assert steps == sorted(set(steps)), "the curve is continuous"
    finally:
        process = launcher.process_of(path)
        if process:
            launcher.end("a/toy", process, now=True, where=path)
