"""Judging programs: passes and failures in every style; time, memory and lifetime; user errors."""

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from raising import raising
from test_effects import as_user, python

from codechat.core.errors import ConfigError, DataError
from codechat.core.registry import COMMANDS
from codechat_lab.sandbox import attempts, codec, judge, kernel, zygote
from codechat_lab.sandbox import pool as pool_module
from codechat_lab.sandbox.pool import (
    Pool,
    Program,
    SandboxUnavailable,
    Verdict,
    choose,
    entry_points_of,
    shared_pool,
)

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
ADD = "def add(a, b):\n    return a + b\n"


def judged(pool: Pool, code: str, *tests: str, **more: object) -> Verdict:
    return pool.run(Program(code=textwrap.dedent(code), tests=tests, **{"timeout_s": 2.0} | more))


# ---- verdicts
def test_each_test_has_its_result(pool: Pool) -> None:
    verdict = judged(
        pool,
        ADD,
        "assert add(1, 2) == 3",
        "assert add(1, 2) == 4",
        "assert add('a', 'b') == 'ab'",
    )
    assert [r.passed for r in verdict.results] == [True, False, True]
    assert verdict.stage == "tests"
    assert verdict.reason == "assertion failed"
    assert not verdict.passed
    assert 0 < verdict.seconds < 10


@pytest.mark.parametrize("row", PROGRAMS["failures"], ids=lambda row: row["reason"])
def test_a_failure_has_stage_and_reason(row: dict[str, str], pool: Pool) -> None:
    code, stage, reason = row.values()
    verdict = judged(pool, code, "assert add(1, 2) == 3", entry_points=("add",))
    assert (verdict.stage, verdict.passed) == (stage, False) and reason in verdict.reason, verdict


def test_the_next_test_runs_after_one_that_ran_out_of_time_or_killed_its_process(
    pool: Pool,
) -> None:
    code = "import os\ndef f(x):\n    while x == 1: pass\n    if x == 2: os._exit(0)\n    return x"
    verdict = judged(pool, code, *(f"assert f({i}) == {i}" for i in range(5)), timeout_s=0.5)
    assert [r.passed for r in verdict.results] == [True, False, False, True, True]
    assert verdict.seconds < 3
    assert verdict.results[1].reason == "out of time"
    assert "lost" in verdict.results[2].reason


def test_a_whole_program_has_a_time_limit(pool: Pool) -> None:
    code = "def f(x):\n    while True: pass"
    verdict = judged(pool, code, *["assert f(1) == 1"] * 50, timeout_s=0.2)
    assert not any(r.passed for r in verdict.results)
    assert "not tried" in verdict.results[-1].reason
    assert verdict.seconds < 3


def test_a_judge_that_hangs_in_c_code_is_ended(pool: Pool) -> None:
    honest = judged(pool, "def f(): return range(10**12)", "assert sum(f()) == 0", timeout_s=0.3)
    assert (honest.stage, honest.passed) == ("judge", False)
    assert "hung" in honest.reason
    assert judged(pool, ADD, "assert add(1, 2) == 3").passed


# ---- values that cross
def test_data_round_trips(pool: Pool) -> None:
    values = [
        "None",
        "True",
        "-1",
        "2**70",
        "10**4000",
        "0.1",
        "float('inf')",
        "'a\\ud800\\n'",
        "b'\\xff'",
        "bytearray(b'a')",
        "1j",
        "[]",
        "[[1], (2,)]",
        "{'a': {1: (2, None)}}",
        "{1, 2}",
        "frozenset({(1, 2)})",
        "range(3, 9, 2)",
        "Decimal('1.50')",
        "Fraction(1, 3)",
        "deque([1, 2], maxlen=3)",
        "{(1, 2): [3]}",
        "...",
        "int",
        "[str, type(None)]",
    ]
    imports = (
        "from collections import deque\nfrom decimal import "
        "Decimal\nfrom fractions import Fraction\n"
    )
    same = "\nr = same(v)\nassert r == v and type(r) is type(v) and repr(r) == repr(v)"
    verdict = judged(
        pool,
        "def same(x): return x",
        *(f"v = {value}{same}" for value in values),
        setup=imports,
    )
    assert verdict.passed, verdict.results


def test_objects_of_a_class_are_used_as_in_one_process(pool: Pool) -> None:
    code = """
    class Node:
        def __init__(self, value): self.value, self.left, self.right = value, None, None
        def __len__(self): return 1 + sum(len(c) for c in (self.left, self.right) if c)
        def __getitem__(self, i): return (self.left, self.right)[i]
        def __iter__(self): yield from (self.value, *(self.left or ()), *(self.right or ()))
        def __str__(self): return f"<{self.value}>"
    def depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0
    """
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)"
    tests = [
        "assert depth(root) == 3",
        "assert len(root) == 3 and list(root) == [1, 2, 3]",
        "assert root.left.value == 2",
        "assert root[0] is root.left and root.left == root.left and root != root.left",
        "assert str(root) == '<1>'",
        "assert root.right is None and root.left and not root == 1",
    ]
    verdict = judged(pool, code, *tests, setup=setup)
    assert verdict.passed, verdict.results


def test_operations_that_would_reveal_the_answer_are_not_forwarded(pool: Pool) -> None:
    code = """
    class X:
        asked = []
        def __getattr__(self, n): raise AttributeError(n)
        def any(self, *a): X.asked.append(a); return True
        __add__ = __radd__ = __abs__ = __lt__ = __eq__ = __hash__ = __float__ = __contains__ = any
    x = X()
    def asked(): return len(X.asked)
    """
    operations = [
        "x + 1",
        "1 + x",
        "abs(x)",
        "x < 1",
        "3 in [x]",
        "x == 1",
        "hash(x) == 1",
        "float(x)",
        "x.__class__ is int",
    ]
    test = "try:\n    ok = {}\nexcept TypeError:\n    ok = False\nassert not ok and asked() == 0"
    verdict = judged(pool, code, *map(test.format, operations), entry_points=("x", "asked"))
    assert verdict.passed, verdict.results


@pytest.mark.parametrize("row", PROGRAMS["cases"])
def test_a_test_passes_or_fails(row: dict[str, Any], pool: Pool) -> None:
    """What a test may see: swallowed exceptions, plain data of subclasses, changed arguments,
    exceptions by their builtin name but for those that would mean something to the test; of a
    program its entry points only; its memory."""
    verdict = judged(pool, row["code"], row["test"], timeout_s=4.0, memory_mb=200)
    assert verdict.passed == row["passed"], verdict.reason


# ---- styles
def test_check_style(pool: Pool) -> None:
    prompt = "def helper(x):\n    return x + 1\n\ndef f(x):\n    '''Two more.'''\n"
    tests = (
        "def check(candidate):\n    assert candidate(1) == "
        "3\n    assert candidate(2) == helper(3)\n"
    )
    program = Program(
        code=prompt + "    return helper(helper(x))",
        tests=tests,
        setup=prompt,
        entry_points=("f",),
    )
    assert pool.run(program).passed
    lie = (
        "def helper(x): return None\n"
        + prompt.replace("x + 1", "None")
        + "    return 3 if x == 1 else None"
    )
    program = Program(code=lie, tests=tests, setup=prompt, entry_points=("f",))
    assert not pool.run(program).passed, "its own helper was used"
    with pytest.raises(DataError, match="entry_points"):
        pool.run(Program(code="", tests=tests))


@pytest.mark.parametrize("code", [row["code"] for row in PROGRAMS["ordinary"]])
def test_odd_but_ordinary_programs_pass(code: str, pool: Pool) -> None:
    verdict = judged(pool, code, "assert f() == 1", "assert f() == 1", timeout_s=4.0)
    assert verdict.passed, verdict


def test_the_largest_value_is_limited_to_the_setting(pool: Pool) -> None:
    code = "def f(n): return list(range(n))"  # 9 MB as text
    test = "assert f(1_200_000) == list(range(1_200_000))"
    assert "message" in judged(pool, code, test, timeout_s=20.0).reason
    assert judged(pool, code, test, timeout_s=20.0, message_mb=32).passed
    with raising(DataError, "message_mb 0"):
        judged(pool, code, test, message_mb=0)


# ---- what tests may use
@pytest.mark.parametrize(
    "tests", [["assert f(g(3)) == 3"], "def check(candidate):\n    assert candidate(g(3)) == 3\n"]
)
def test_other_names_of_the_program_that_tests_use_need_not_be_entry_points(
    tests: object, pool: Pool
) -> None:
    """HumanEval/32, 38 and 50 use the function that the prompt defines beside the requested one."""
    g = "def g(x): return x + 1\n"
    f = "def f(x): return x - 1\n"
    programs = [Program(code=code, tests=tests, entry_points=("f",)) for code in (g + f, f, g)]
    whole, without_g, without_f = pool.map(programs)
    assert whole.passed, whole.reason
    assert "g" in without_g.reason and without_g.stage == "tests", "required is f alone"
    assert without_f.stage == "load"
    assert "define f" in without_f.reason


def test_entry_points_come_from_the_reference_and_may_have_a_builtins_name(pool: Pool) -> None:
    reference = (
        "import math\nclass Pair: pass\ndef helper(): pass\ndef sum(a, b): return a + b\nLIMIT = 3"
    )
    tests = ["assert sum(1, 2) == 3", "assert Pair() and math.pi and LIMIT"]
    assert entry_points_of(reference, tests) == ("LIMIT", "Pair", "sum")
    assert entry_points_of(reference, tests, "LIMIT = 4") == ("Pair", "sum")
    assert judged(
        pool, "def sum(a, b): return a - b", "assert sum(5, 2) == 3", entry_points=("sum",)
    ).passed


@pytest.mark.parametrize(
    "more, match",
    [
        ({"tests": []}, "tests"),
        ({"tests": ["assert ("]}, "assert"),
        ({"tests": ["1"], "timeout_s": 0}, "timeout_s"),
        ({"tests": ["1"], "setup": "def"}, "set-up"),
    ],
)
def test_invalid_tests_are_user_errors(more: dict[str, object], match: str, pool: Pool) -> None:
    with pytest.raises(DataError, match=match):
        pool.run(Program(code="", **more))


# ---- isolation
def test_nothing_runs_without_isolation_or_where_asserts_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose.cache_clear()
    monkeypatch.setattr(pool_module, "_shared", {})
    with monkeypatch.context() as patch:
        patch.setattr(judge, "FLAGS", (*judge.FLAGS, "-O"))
        with raising(SandboxUnavailable, "no isolation here (judge: python -O", "isolation=none"):
            Pool(1)
        with pytest.raises(SandboxUnavailable):
            shared_pool("auto")
        patch.setattr(pool_module, "choose", lambda isolation: "landlock")
        with Pool(1) as other, pytest.raises(SandboxUnavailable):
            other.run(Program(code=ADD, tests=["assert add(1, 2) == 4"]))
    with pytest.raises(ConfigError, match="none"):
        choose("nune")
    assert choose("none") == "none"
    assert choose("auto") == "landlock"
    with Pool(1, isolation="none") as trusting:  # the verdict is still the judge's
        yes = "class Y:\n    def __eq__(s, o): return True\ndef add(a, b): return Y()"
        assert [judged(trusting, code, "assert add(1, 2) == 3").passed for code in (yes, ADD)] == [
            False,
            True,
        ]


def test_the_check_stops_every_attempt(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    assert COMMANDS["sandbox"].run(["check"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  stopped ") == len(attempts.ACTIONS)
    assert "ALLOWED" not in shown


def test_the_attempts_succeed_without_isolation() -> None:
    """Otherwise `stopped` in the check would mean nothing. Runs as an ordinary user, without
    isolation."""
    free = {
        "read a file of the host",
        "read another process",
        "open a connection",
        "start a process",
        "execute a program",
        "signal its parent",
        "make a namespace",
        "take more memory than it has",
    }
    for what in free:
        code = f"{Path(attempts.__file__).read_text()}\nprint(attempt({what!r}))"
        # a parent of the same user
        shell = [
            "/bin/sh",
            "-c",
            '"$0" -c "$1"; exit $?',
            python(),
            code,
        ]
        done = subprocess.run(
            shell, capture_output=True, text=True, timeout=20, cwd="/", **as_user()
        )
        if what == "make a namespace" and "stopped" in done.stdout:
            continue  # user namespaces are forbidden here
        assert "done" in done.stdout or (what == "start a process" and done.returncode == 0), (
            what,
            done,
        )


def test_works_for_an_ordinary_user() -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests run as an ordinary user")
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    user = dict(
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    reach = ["/usr/bin/python3", "-c", path + "import codechat; assert sys.version_info > (3, 11)"]
    if not os.path.exists(reach[0]) or subprocess.run(reach, **user).returncode:
        pytest.skip("no Python 3.11 and project that an ordinary user could read")
    code = path + (
        "from codechat.core.registry import COMMANDS; assert "
        "COMMANDS['sandbox'].run(['check']) == 0"
    )
    done = subprocess.run([reach[0], "-c", code], **user)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_program_runs_after_a_failed_isolation_step() -> None:
    done: list[str] = []
    steps = [kernel.prepared("close", 1 << 20), lambda: done.append("another step")]
    theirs, own = socket.socketpair()
    with theirs, own:
        codec.send(theirs, b'[1, "len", ["", ""]]')
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError) as raised:
            zygote.run(own, zygote.Walls(True, 0, steps, "/"))
        assert not done
        assert raised.value.errno == errno.EBADF
        assert raised.value.filename == "close"
        assert codec.receive(own, 100) == b'[1, "len", ["", ""]]', "a request was read"


def test_every_isolation_layer_is_among_the_steps() -> None:
    """In an order that works; the filter, which names the process, comes after them."""
    isolated, trusted = (
        zygote.own_walls(kernel.limit_threads(), ruleset, 8) for ruleset in (9, -1)
    )
    names = [kernel.NAMES[step.args[0].value] for step in isolated]
    assert names == ["prctl", "prlimit64", "close", "capset", "landlock_restrict_self", "close"]
    assert len(trusted) == 3


# ---- lifetime
def status(pid: object) -> list[str]:
    """State and parent of a process, first; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def processes_below(pid: int) -> set[int]:
    parents = {int(name): int(status(name)[1]) for name in os.listdir("/proc") if name.isdigit()}
    found = set()
    fresh = {pid}
    while fresh:
        fresh = {p for p, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if status(pid)[0] not in "ZX"}


def test_a_closed_pool_leaves_no_process_and_no_descriptor(pool: Pool) -> None:
    before = processes_below(os.getpid())
    fds = len(os.listdir("/proc/self/fd"))
    with Pool(2) as other:
        assert all(
            v.passed
            for v in other.map(
                Program(code=ADD, tests=["assert add(1, 2) == 3"]) for _ in range(20)
            )
        )
        end = time.monotonic() + 10  # each worker soon has a judge, a zygote and a child ahead
        while len(processes_below(os.getpid()) - before) < 6:
            assert time.monotonic() < end
    time.sleep(0.1)
    assert processes_below(os.getpid()) <= before
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(RuntimeError):
        other.run(Program(code=ADD, tests=["assert add(1, 2) == 3"]))


def test_closing_does_not_wait_for_a_program(pool: Pool) -> None:
    other = Pool(1)
    future = other.submit(
        Program(code="def f():\n    while True: pass", tests=["assert f()"], timeout_s=30.0)
    )
    waiting = other.submit(Program(code=ADD, tests=["assert add(1, 2) == 3"]))
    while not future.running() or not other.judges:
        time.sleep(0.01)
    time.sleep(0.3)
    start = time.monotonic()
    other.close()
    assert time.monotonic() - start < 5
    assert not future.result().passed
    assert waiting.cancelled()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("body", "test"),
    [("while True: pass", "assert f()"), ("return range(10**12)", "assert sum(f())")],
)
def test_all_processes_end_within_a_second_of_the_trainer(
    how: int,
    body: str,
    test: str,
    pool: Pool,
) -> None:
    code = (
        "from codechat_lab.sandbox.pool import Pool, Program\npool = Pool(1)\n"
        "pool.run(Program(code='def f(): return 1', tests=['assert f() == 1']))\n"
        f"future = pool.submit(Program(code='def f():\\n    {body}', tests=['{test}'], timeout_s=30.0))\n"
        "while not future.running(): pass\nprint('busy', flush=True)\nfuture.result()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert trainer.stdout.readline() == "busy\n"
        time.sleep(0.3)
        below = processes_below(trainer.pid)
        assert len(below) >= 3, "judge, zygote and program were expected"
        trainer.send_signal(how)
        trainer.wait(5)
        deadline = time.monotonic() + 1
        while running(below) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(below)
    finally:
        trainer.kill()
        trainer.stdout.close()


def test_a_judge_and_a_zygote_that_are_killed_are_replaced(pool: Pool) -> None:
    for victim in (lambda one: one.process.pid, lambda one: min(processes_below(one.process.pid))):
        assert judged(pool, ADD, "assert add(1, 2) == 3").passed
        os.kill(victim(next(iter(pool.judges.values()))), signal.SIGKILL)
        time.sleep(0.1)
        assert all(judged(pool, ADD, "assert add(1, 2) == 3").passed for _ in range(2))


def test_a_pool_serves_many_threads_and_a_fork_makes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_shared", {})
    with shared_pool("auto") as pool:
        with ThreadPoolExecutor(8) as callers:
            verdicts = list(
                callers.map(
                    lambda i: judged(pool, ADD, f"assert add({i}, 1) == {i + 1}"), range(40)
                )
            )
        assert all(v.passed for v in verdicts)
        assert shared_pool("auto") is pool
        pid = os.fork()
        if pid == 0:
            pool.close()  # of the parent: nothing
            os._exit(7 if shared_pool("auto") is not pool else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert judged(pool, ADD, "assert add(1, 2) == 3").passed


def test_judge_and_zygote_load_neither_torch_nor_numpy() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from codechat_lab.sandbox import judge, zygote\nzygote.preload()\n"
        "loaded = {m.partition('.')[0] for m in sys.modules}\n"
        "print(loaded - sys.stdlib_module_names - {'codechat', 'codechat_lab', '__main__'})"
    )
    done = subprocess.run(
        [sys.executable, "-s", "-S", "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_programs_leak_nothing(pool: Pool) -> None:
    """Processes, descriptors, memory and files of trainer, judge and zygote stay as after the
    first program."""

    def batch(n: int) -> None:
        odd = "import os\ndef add(a, b): os._exit(0)"
        codes = [odd if i % 50 == 0 else ADD for i in range(n)]
        passed = [
            v.passed
            for v in pool.map(Program(code=c, tests=["assert add(1, 2) == 3"]) for c in codes)
        ]
        assert passed == [c == ADD for c in codes]

    def used() -> dict[str, float]:
        time.sleep(0.5)  # a program that was ended may take a moment
        below = processes_below(os.getpid())
        memory = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in below) / 256
        fds = sum(len(os.listdir(f"/proc/{p}/fd")) for p in below | {os.getpid()})
        return {
            "processes": len(below),
            "descriptors": fds,
            "MB": memory,
            "threads": threading.active_count(),
        }

    batch(200)
    before = used()
    batch(10_000)
    after = used()
    assert after["processes"] == before["processes"]
    assert after["threads"] == before["threads"]
    assert after["descriptors"] <= before["descriptors"] + 2, (before, after)
    assert after["MB"] < before["MB"] + 30, (before, after)
