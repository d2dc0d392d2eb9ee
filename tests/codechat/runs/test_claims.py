"""Two of one name at once: one of them writes, the others get one line; shared files lose no
entry; what
--overwrite replaces is not lost."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raising

from codechat.core import processes
from codechat.core.atomic_files import atomic_directory
from codechat.core.errors import ConfigError, DataError, RunError
from codechat.data import corpus, corpus_writer, prepared
from codechat.data.corpus_writer import CorpusConfig
from codechat.runs import checkpoint, paths
from codechat.runs.paths import runs_dir
from codechat.runs.run import Run, list_runs
from codechat.text import tokenizer
from codechat_lab.launch import runner

PROJECT = Path(__file__).resolve().parents[3]
HEAD = """
import pathlib, sys, time
from codechat.core.errors import UserError
from codechat.runs import paths
from codechat.runs.run import Run
home, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
paths.ROOT = home
"""
READY = """
print("ready", flush=True)
while not (home / "go").exists():
    time.sleep(0.001)
"""


def at_once(home: Path, program: str, loads: str = "", n: int = 3) -> list[tuple[int, str, str]]:
    """(exit code, output, last line of the errors) of n processes that run the program in the
    same moment; `number` differs.
    loads: what it imports before."""
    (home / "go").unlink(missing_ok=True)
    command = [sys.executable, "-c", HEAD + loads + READY + program, str(home)]
    started = [
        subprocess.Popen(
            [*command, str(i)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=PROJECT,
        )
        for i in range(n)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    (home / "go").touch()
    ends = [process.communicate(timeout=300) for process in started]
    return [
        (p.returncode, out, (err.strip().splitlines() or [""])[-1])
        for p, (out, err) in zip(started, ends)
    ]


def hashes(folder: Path) -> dict[str, str]:
    """Of every file below, but locks."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


CREATE = """
time.sleep(0.01 * number)  # the second sees no run yet when the first has begun to write it
try:
    run = Run.create("a/r", {"number": number}, kind="test", **%s)
except UserError as error:
    (home / f"refused{number}").touch()
    sys.exit(f"refused: {error}")
(run.path / "mine").write_text(str(number))
end = time.monotonic() + 120
while len(list(home.glob("refused*"))) < 2 and time.monotonic() < end:
    time.sleep(0.01)  # the name is held until the others have asked for it
run.finish()
print(number)
"""


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_one_of_several_processes_gets_a_name_and_the_others_one_line(
    home: Path, how: dict[str, bool]
) -> None:
    if how:
        Run.create("a/r", {"number": 9}, kind="test").finish()
    if "resume" in how:
        program = CREATE.replace('{"number": number}', '{"number": 9}') % how
    else:
        program = CREATE % how
    ended = at_once(home, program)
    assert sorted(code for code, _, _ in ended) == [0, 1, 1]
    assert all("refused: run" in line for code, _, line in ended if code)
    (winner,) = [int(out) for code, out, _ in ended if code == 0]
    found = Run.open("a/r")
    assert (found.path / "mine").read_text() == str(winner)
    assert found.status["status"] == "finished"
    assert "resume" in how or found.config == {"number": winner}
    assert sorted(path.name for path in (runs_dir() / "a").iterdir()) == ["r"], (
        "no lock and no former run is left"
    )


def test_threads_of_one_process_do_not_share_a_name_either(home: Path) -> None:
    made: list[Run] = []
    refused: list[RunError] = []
    gate = threading.Barrier(4)

    def create() -> None:
        gate.wait()
        try:
            made.append(Run.create("r", {}, kind="test"))
        except RunError as error:
            refused.append(error)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(refused) == 3
    assert all("in use" in str(error) for error in refused)
    made[0].finish()


def test_a_link_to_a_run_is_the_same_name(home: Path) -> None:
    Run.create("r", {}, kind="test").finish()
    (runs_dir() / "link").symlink_to(runs_dir() / "r")
    program = (
        'run = Run.create("r", {}, kind="test", '
        'overwrite=True); print("up", flush=True); '
        "time.sleep(60)"
    )
    (home / "go").touch()
    command = [sys.executable, "-c", HEAD + READY + program, str(home), "0"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, cwd=PROJECT) as other:
        assert [other.stdout.readline() for _ in range(2)] == ["ready\n", "up\n"]
        with raising(RunError, "being written", str(other.pid)):
            Run.create("link", {}, kind="test", overwrite=True)
        assert Run.open("link").status["status"] == "running"
        other.kill()


def test_a_name_that_is_refused_stays_free_for_others_and_held_by_its_run(home: Path) -> None:
    run = Run.create("r", {}, kind="test")
    with raising(RunError, "in use"):
        Run.create("r", {}, kind="test")
    assert processes.holder(paths.lock_of(run.path)) == os.getpid(), (
        "the run that goes on keeps its name"
    )
    run.finish()
    with raising(RunError, "in use"):
        Run.create("r", {}, kind="test")
    assert processes.holder(paths.lock_of(run.path)) is None


def test_asking_who_holds_a_lock_neither_takes_nor_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert processes.holder(path) is None
    assert not path.exists()
    assert processes.lock(path)
    (tmp_path / "link").symlink_to(path)
    asked = [
        sys.executable,
        "-c",
        (
            "import pathlib; from codechat.core import processes as "
            f"p; print(p.holder(pathlib.Path({str(path)!r})))"
        ),
    ]
    for name in ("lock", "link"):
        assert processes.holder(tmp_path / name) == os.getpid()
        done = subprocess.run(asked, capture_output=True, text=True, cwd=PROJECT, check=True)
        assert done.stdout == f"{os.getpid()}\n"
    processes.unlock(path)
    assert processes.holder(path) is None
    assert not path.exists()


# ---- what other files commands share


NOTES = """
for i in range(20):
    runner.note(home / "runs" / "stages.json", f"stage-{number}-{i}", {"hash": "h", "seconds": 1.0})
"""


def test_a_ledger_keeps_the_entries_of_all_seeds_that_run_at_once(home: Path) -> None:
    assert [
        code for code, _, _ in at_once(home, NOTES, "from codechat_lab.launch import runner")
    ] == [0, 0, 0]
    kept = runner.read_ledger(home / "runs" / "stages.json")
    assert kept.keys() == {f"stage-{number}-{i}" for number in range(3) for i in range(20)}
    assert [path.name for path in (home / "runs").iterdir()] == ["stages.json"]


def test_a_ledger_keeps_the_entries_of_all_threads(home: Path) -> None:
    ledger = home / "stages.json"

    def notes(number: int) -> None:
        for i in range(20):
            runner.note(ledger, f"{number}-{i}", {"hash": "h"})

    threads = [threading.Thread(target=notes, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runner.read_ledger(ledger)) == 80


CORPUS = """
texts = (f"text {number} {i} " * 50 for i in range(600))
try:
    made = corpus_writer.write_corpus(texts, home / "made", tokenizer.load("bytes"), shard_tokens=20_000)
except UserError as error:
    sys.exit(f"refused: {error}")
print(made["hash"])
"""


def test_one_of_several_corpora_in_one_folder_is_written_whole(home: Path) -> None:
    ended = at_once(
        home, CORPUS, "from codechat.data import corpus_writer; from codechat.text import tokenizer"
    )
    made = [out.strip() for code, out, _ in ended if code == 0]
    assert made and all("is being written" in line for code, _, line in ended if code), ended
    manifest, shards = corpus.open_corpus(home / "made", "train")
    text = b"".join(bytes(shard.astype("u1")) for shard in shards)
    assert manifest["hash"] in made
    assert (
        len({text[i + 5 : i + 6] for i in range(len(text)) if text.startswith(b"text ", i)}) == 1
    ), "of one command"
    listed = {file["name"] for file in manifest["files"]}
    assert {path.name for path in (home / "made").iterdir()} == {
        *listed,
        "manifest.json",
        "token_bytes.npy",
    }


CONVERSATIONS = """
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class Settings:
    tokenizer: str = "bytes"
Settings.__name__ = f"Command{number % 2}"
talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": str(number)}]
name = f"domain{number % 2}"
rows = [{"id": f"{i}", "domain": name, "meta": {}, "messages": talk} for i in range(300)]
rows = {f"{name}.{split}": list(rows) for split in ("train", "select")}
prepared.write(home / "made", rows, [], Settings())
"""


def test_commands_that_write_one_folder_of_conversations_wait_for_each_other(home: Path) -> None:
    """Two pairs of equal commands: every file is of one process, and the manifest knows the
    files of both commands."""
    assert [
        line
        for code, _, line in at_once(
            home, CONVERSATIONS, "from codechat_lab.data import prepared", n=4
        )
        if code
    ] == []
    manifest = json.loads((home / "made" / "manifest.json").read_text())
    names = {f"domain{i}.{split}.jsonl" for i in (0, 1) for split in ("train", "select")}
    assert (
        manifest["files"].keys()
        == names
        == {p.name for p in (home / "made").iterdir()} - {"manifest.json"}
    )
    assert manifest["domains"].keys() == {"domain0", "domain1"}
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((home / "made" / name).read_bytes()).hexdigest() == entry["sha256"]
    for domain in ("domain0", "domain1"):
        texts = [
            (home / "made" / f"{domain}.{split}.jsonl").read_text() for split in ("train", "select")
        ]
        assert texts[0] == texts[1], "both splits are of one process"


def test_a_directory_that_another_process_made_meanwhile_is_kept(tmp_path: Path) -> None:
    with raising(RunError, "meanwhile"), atomic_directory(tmp_path / "out") as fresh:
        (fresh / "a").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "b").read_text() == "theirs"


@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_is_left_without_a_lock_also_after_a_failure(tmp_path: Path, wait: bool) -> None:
    with pytest.raises(ValueError), prepared.written_by_one(tmp_path / "made", wait=wait):
        raise ValueError
    assert list((tmp_path / "made").iterdir()) == []
    with prepared.written_by_one(tmp_path / "made", wait=wait):
        pass


FOREIGN = {
    "shards of another program": ({"train_000000.bin": b"\1\0" * 400}, "corpus"),
    "a manifest of another program": ({"manifest.json": b'{"name": "my site"}'}, "corpus"),
    "a manifest of another program, for conversations": (
        {"manifest.json": b'{"name": "my site"}'},
        "conversations",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_that_no_command_wrote_are_not_replaced(kind: str, tmp_path: Path) -> None:
    files, what = FOREIGN[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = hashes(tmp_path)
    with pytest.raises(DataError, match="did not write"):
        if what == "corpus":
            corpus_writer.write_corpus(["a text", "another"], tmp_path, tokenizer.load("bytes"))
        else:
            prepared.require_kind(tmp_path, what)
    assert hashes(tmp_path) == before


def test_a_source_folder_is_not_the_folder_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 100)
    with raising(DataError, "--source and --out are one folder"):
        corpus_writer.prepare_corpus(
            CorpusConfig(source=str(tmp_path), out=str(tmp_path), tokenizer="bytes")
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# ---- what --overwrite replaces


@pytest.fixture
def former(home: Path) -> dict[str, str]:
    """The files of a finished run `r` with a checkpoint."""
    with Run.create("r", {"lr": 0.1}, kind="test") as run:
        run.log(1, train_loss=1.0)
        checkpoint.save(run.path, 1, model=torch.nn.Linear(2, 2))
    return hashes(run.path)


def replace_run(**how: Any) -> Run:
    return Run.create("r", {"lr": 0.2}, kind="test", overwrite=True, **how)


def never_begins(run: Run) -> None:
    pass


def evaluates_first(run: Run) -> None:
    run.log_eval(0, {"val_loss": 3.0})
    run.log_samples(0, [{"text": "a"}])


@pytest.mark.parametrize("begin", [never_begins, evaluates_first])
@pytest.mark.parametrize(
    "error", [ValueError("a seed"), KeyboardInterrupt(), SystemExit(1)], ids=repr
)
def test_a_run_that_fails_before_its_first_step_gives_the_place_back(
    former: dict[str, str], begin: Callable[[Run], None], error: BaseException
) -> None:
    with pytest.raises(type(error)), replace_run() as run:
        begin(run)
        raise error
    assert hashes(runs_dir() / "r") == former
    assert [p.name for p in runs_dir().iterdir()] == ["r"]
    assert run.status["status"] in ("failed", "stopped"), (
        "what ended is told from the run that came back"
    )
    assert Run.open("r").status["status"] == "finished"


def test_a_run_that_was_stopped_before_its_first_step_gives_the_place_back(
    former: dict[str, str],
) -> None:
    with replace_run() as run:
        run.stop("interrupted at step 0")
    assert hashes(runs_dir() / "r") == former
    assert run.status["status"] == "stopped"


BEGUN: dict[str, Callable[[Run], Any]] = {
    "a row of metrics": lambda run: run.log(1, train_loss=2.0),
    "a checkpoint": lambda run: checkpoint.save(run.path, 1, model=torch.nn.Linear(2, 2)),
    "a kept evaluation": lambda run: (run.log_eval(5, {"pass@1": 0.5}), run.keep()),
}


@pytest.mark.parametrize("what", BEGUN)
def test_a_run_that_has_begun_stays_when_it_fails(former: dict[str, str], what: str) -> None:
    with pytest.raises(ValueError), replace_run() as run:
        BEGUN[what](run)
        raise ValueError
    assert Run.open("r").config == {"lr": 0.2}
    assert run.status["status"] == "failed"
    assert [p.name for p in runs_dir().iterdir()] == ["r"]


KILLED = """
run = Run.create("r", {"lr": 0.2}, kind="test", overwrite=True)
%s
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "begun, comes_back, reader",
    [
        ("", True, "by name"),
        ("", True, "list"),
        ("", True, "create"),
        ("", True, "checkpoint"),
        ("run.log_eval(0, {'val_loss': 1.0})", True, "by name"),
        ("run.log(1, train_loss=1.0)", False, "list"),
        (
            (
                "from codechat.runs import checkpoint; import torch; "
                "checkpoint.save(run.path, 1, model=torch.nn.Linear(2, 2))"
            ),
            False,
            "create",
        ),
    ],
)
def test_a_kill_before_the_first_step_brings_the_former_run_back(
    former: dict[str, str],
    home: Path,
    begun: str,
    comes_back: bool,
    reader: str,
) -> None:
    (home / "go").touch()
    command = [sys.executable, "-c", HEAD + READY + KILLED % begun, str(home), "0"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, cwd=PROJECT) as other:
        assert [other.stdout.readline() for _ in range(2)] == ["ready\n", "up\n"]
        assert Run.open("r").config == {"lr": 0.2}, "while it runs it has the name"
        other.send_signal(signal.SIGKILL)
    if reader == "list":
        assert list_runs().set_index("run")["status"].to_dict() == {
            "r": "finished" if comes_back else "killed"
        }
    elif reader == "create":
        with pytest.raises(RunError, match="finished" if comes_back else "killed"):
            Run.create("r", {}, kind="test")
    elif reader == "checkpoint":
        assert checkpoint.load("r").step == 1
    else:
        assert Run.open("r").config == {"lr": 0.1 if comes_back else 0.2}
    if comes_back:
        assert hashes(runs_dir() / "r") == former
    assert {path.name for path in runs_dir().iterdir()} <= {"r", ".r.lock", ".r.old"}


def test_a_kill_between_the_two_renames_loses_nothing(former: dict[str, str]) -> None:
    (runs_dir() / "r").rename(runs_dir() / ".r.old")
    assert paths.exists("r")
    assert hashes(runs_dir() / "r") == former


def test_a_former_run_beside_a_damaged_one_is_neither_deleted_nor_put_back(
    former: dict[str, str],
) -> None:
    run = replace_run()
    (run.path / "status.json").write_text("{")
    processes.unlock(paths.lock_of(run.path))
    with pytest.raises(RunError, match="status.json"):
        Run.open("r").status  # noqa: B018
    assert hashes(runs_dir() / ".r.old") == former


def test_a_launch_that_replaces_a_run_keeps_it_until_the_loop_begins(
    former: dict[str, str],
) -> None:
    for _ in range(2):  # and a plan that replaces the plan
        path = paths.prepare("r", {"lr": 0.2}, "test", overwrite=True, plan={"launch.sh": "exit 1"})
        assert hashes(runs_dir() / ".r.old") == former
        Run.create("r", {"lr": 0.2}, kind="test").fail("no such data")
        assert paths.read_status(path)["status"] == "failed" and (path / "launch.sh").is_file(), (
            "its log says why"
        )
        assert hashes(runs_dir() / ".r.old") == former
    with Run.create("r", {"lr": 0.2}, kind="test", resume=True) as run:
        run.log(1, train_loss=1.0)
    assert sorted(p.name for p in runs_dir().iterdir()) == ["r"]


def test_wandb_that_cannot_be_reached_gives_the_place_back(
    former: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLogin(Exception):
        pass

    def init(**how: Any) -> None:
        raise NoLogin("not logged in")

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(__name__="wandb", Error=NoLogin, init=init)
    )
    config = type("Config", (dict,), {"track": "wandb"})(lr=0.2)
    with raising(RunError, "not logged in"):
        Run.create("r", config, kind="test", overwrite=True)
    assert hashes(runs_dir() / "r") == former
    assert processes.holder(paths.lock_of(runs_dir() / "r")) is None


def test_a_run_is_moved_away_by_one_process_and_not_while_it_is_written(home: Path) -> None:
    Run.create("r", {}, kind="test").finish()
    Run.create("r.1", {}, kind="test").finish()
    assert paths.move_away("r").name == "r.2"
    assert not paths.exists("r")
    (home / "go").touch()
    program = 'run = Run.create("r", {}, kind="test"); print("up", flush=True); time.sleep(60)'
    command = [sys.executable, "-c", HEAD + READY + program, str(home), "0"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, cwd=PROJECT) as other:
        assert [other.stdout.readline() for _ in range(2)] == ["ready\n", "up\n"]
        with raising(RunError, "being written"):
            paths.move_away("r")
        other.kill()


def test_the_names_of_released_runs_are_not_for_others() -> None:
    with raising(ConfigError, "released/"):
        Run.create("released/mini", {}, kind="test")


def test_a_killed_run_whose_host_was_renamed_is_killed(home: Path) -> None:
    """Its status names a host that is not this one, as of a container that started again."""
    run = Run.create("r", {}, kind="test")
    status = json.loads((run.path / "status.json").read_text())
    (run.path / "status.json").write_text(
        json.dumps(status | {"host": "3f2b1c", "pid": 1, "pid_start": "1"})
    )
    assert Run.open("r").status["status"] == "running", "somebody writes it"
    processes.unlock(paths.lock_of(run.path))
    assert Run.open("r").status["status"] == "killed"
