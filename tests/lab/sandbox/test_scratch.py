"""The folder in which a program may write: honest programs find it, others find its walls and
leave nothing in it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from test_effects import as_user, python
from test_sandbox import ROOT, processes_below

from codechat_lab.sandbox import scratch
from codechat_lab.sandbox.pool import Pool, Program, Verdict

WORKERS = 2

# Bodies of f() that give "done" in a folder of one's own.
HONEST = {
    "a file by its name": "open('x.txt', 'w').write('done')\nreturn open('x.txt').read()",
    "mkstemp": (
        "fd, path = tempfile.mkstemp()\nos.write(fd, "
        "b'done')\nos.close(fd)\nreturn open(path).read()"
    ),
    "NamedTemporaryFile": "with tempfile.NamedTemporaryFile('w+') as f:\n    f.write('done')\n    f.flush()\n"
    "    return open(f.name).read()",
    "TemporaryFile": (
        "with tempfile.TemporaryFile('w+') as f:\n    "
        "f.write('done')\n    f.seek(0)\n    return f.read()"
    ),
    "TemporaryDirectory": "with tempfile.TemporaryDirectory() as d:\n    p = os.path.join(d, 'x')\n"
    "    open(p, 'w').write('done')\n    text = open(p).read()\nreturn text if not os.path.exists(d) else 'there'",
    "folders": "os.makedirs('a/b/c')\nos.rename('a/b', 'e')\nshutil.rmtree('e')\n"
    "return 'done' if os.listdir() == ['a'] else ''",
    "copies": "open('x', 'w').write('done')\nshutil.copy('x', 'y')\nshutil.copy2('y', 'z')\nshutil.move('z', 'w')\n"
    "return open('w').read()",
    "pathlib": "p = pathlib.Path('x')\np.write_text('done')\nq = p.rename('y')\ntext = q.read_text()\n"
    "q.unlink()\nreturn text",
    "touch": (
        "p = pathlib.Path('x')\np.touch()\np.touch()\nreturn "
        "'done' if os.listdir() == ['x'] else ''"
    ),
    "truncated": (
        "with open('x', 'w+') as f:\n    f.write('done and "
        "more')\n    f.truncate(4)\nreturn open('x').read()"
    ),
    "a zip": "import zipfile\nwith zipfile.ZipFile('x.zip', 'w') as z: z.writestr('a', 'done')\n"
    "return zipfile.ZipFile('x.zip').read('a').decode()",
    "a data base": "import sqlite3\nwith sqlite3.connect('x.db') as d:\n    d.execute('create table t (a)')\n"
    "    d.execute('insert into t values (?)', ('done',))\n"
    "return sqlite3.connect('x.db').execute('select a from t').fetchone()[0]",
    "a module of its own": "import sys\nopen('own_module.py', 'w').write('word = \"done\"')\n"
    "sys.path.insert(0, os.getcwd())\n"
    "import own_module\nreturn own_module.word",
    "a map of a file": "import mmap\nopen('x', 'wb').write(b'done')\nwith open('x', 'r+b') as f:\n"
    "    with mmap.mmap(f.fileno(), 0) as m: return m[:].decode()",
    "a file at home": (
        "p = os.path.expanduser('~/x')\nopen(p, 'w').write('done')\nreturn open(p).read()"
    ),
    "many files, one after another": "for i in range(3000):\n    open('x', 'w').close()\n    os.remove('x')\n"
    "return 'done'",
}

# Bodies that end in "done" where nothing stops them.
FORBIDDEN = {
    "a symbolic link": "os.symlink('/etc/passwd', 'x')",
    "a hard link": "open('x', 'w').close()\nos.link('x', 'y')",
    "a pipe with a name": "os.mkfifo('x')",
    "a device": "import stat\nos.mknod('x', 0o600 | stat.S_IFCHR, os.makedev(1, 3))",
    "a socket with a name": "import socket\nsocket.socket(socket.AF_UNIX).bind('x')",
    "a file beside it": "open('../x', 'w').close()",
    "a folder beside it": "os.mkdir('../x')",
    "a look beside it": "os.listdir('..')",
    "another name for it": "os.rename(os.getcwd(), os.getcwd() + 'x')",
    "its end": "os.rmdir(os.getcwd())",
    "a move out of it": "open('x', 'w').close()\nos.rename('x', '../x')",
    "a program to execute": (
        "import shutil, sys\nshutil.copy(sys.executable, 'x')\nos.execv('x', ['x'])"
    ),
    "a file that is too long": "open('x', 'wb').write(bytes(17 << 20))",
    "a long file of holes": "open('x', 'wb').truncate(17 << 20)",
    "a descriptor that is sent": "import socket\na, b = socket.socketpair()\n"
    "socket.send_fds(a, [b'x'], [os.open('.', 0)])",
}

FILLING = {
    "what cannot be counted": "os.mkdir('closed', 0o300)\ntime.sleep(1)\nreturn 'done'",
    "long files": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(8 << 20))\n    n += 1",
    "deleted open files": "kept = []\nwhile True:\n    f = open('x', 'wb')\n    f.write(bytes(8 << 20))\n"
    "    f.flush()\n"
    "    os.unlink('x')\n    kept.append(f)",
    "unnamed files": "kept = []\nwhile True:\n    f = os.open('.', os.O_TMPFILE | os.O_WRONLY)\n"
    "    os.write(f, bytes(8 << 20))\n"
    "    kept.append(f)",
    "deleted mapped files": "import mmap\nkept = []\nwhile True:\n    f = open('x', 'wb+')\n"
    "    f.write(bytes(8 << 20))\n    f.flush()\n"
    "    os.unlink('x')\n    kept.append(mmap.mmap(f.fileno(), 4096))\n    f.close()",
    "holes that are filled in memory": "import mmap\nn = 0\nwhile True:\n    f = open(str(n), 'wb+')\n"
    "    f.truncate(8 << 20)\n"
    "    with mmap.mmap(f.fileno(), 0) as m: m[:] = b'x' * (8 << 20)\n    n += 1",
    "empty files": "for i in range(10**6): open(str(i), 'w').close()",
    "a tree without end": "while True:\n    os.mkdir('d')\n    os.chdir('d')",
    "long names without end": "while True:\n    os.mkdir('d' * 255)\n    os.chdir('d' * 255)",
    "a folder that is always renamed": "import threading\nos.mkdir('a')\ndef turn():\n    while True:\n"
    "        os.rename('a', 'b')\n"
    "        os.rename('b', 'a')\nthreading.Thread(target=turn, daemon=True).start()\nn = 0\nwhile True:\n    n += 1\n"
    "    with contextlib.suppress(OSError): open(f'a/{n}', 'wb').write(bytes(4 << 20))",
}

PROGRAM = "import contextlib, os, pathlib, shutil, tempfile, time\ndef f():\n{body}\n"


def code_of(body: str) -> str:
    return PROGRAM.format(body=textwrap.indent(body, "    "))


def judged(
    pool: Pool,
    body: str,
    test: str = "assert f() == 'done', f()",
    timeout_s: float = 5.0,
) -> Verdict:
    return pool.run(Program(code=code_of(body), tests=[test], timeout_s=timeout_s))


def stepped_down(pool: Pool) -> bool:
    return pool.run(
        Program(code="import os\ndef f(): return os.getuid()", tests=["assert f()"])
    ).passed


def folders() -> list[Path]:
    return [
        path for path in Path(scratch._place()).iterdir() if path.name.startswith(scratch.PREFIX)
    ]


def left_behind() -> set[Path]:
    """Those that no process holds locked."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    held = {lock[5].rpartition(":")[2] for lock in locks}
    found = set()
    for path in folders():
        with contextlib.suppress(FileNotFoundError):
            if str(path.stat().st_ino) not in held:
                found.add(path)
    return found


def own_folders() -> set[Path]:
    """Those that this process's pools hold locked; other tests have pools beside it."""
    mine = {str(child.pid) for child in psutil.Process().children(recursive=True)}
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    held = {lock[5].rpartition(":")[2] for lock in locks if lock[4] in mine}
    found = set()
    for path in folders():
        with contextlib.suppress(FileNotFoundError):  # another test's is gone
            if str(path.stat().st_ino) in held:
                found.add(path)
    return found


@pytest.mark.parametrize("body", HONEST.values(), ids=HONEST)
def test_honest_programs_write(body: str, pool: Pool) -> None:
    verdict = judged(pool, body)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("body", FORBIDDEN.values(), ids=FORBIDDEN)
def test_nothing_leads_out_of_the_folder(body: str, pool: Pool) -> None:
    stopped = (
        f"try:\n{textwrap.indent(body, '    ')}\nexcept "
        "OSError:\n    return 'stopped'\nreturn 'done'"
    )
    verdict = judged(pool, stopped, "assert f() == 'stopped'")
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("body", FILLING.values(), ids=FILLING)
def test_a_program_that_fills_the_folder_is_ended(body: str, pool: Pool) -> None:
    if "0o300" in body and not stepped_down(pool):
        pytest.skip("root reads any folder")
    place = scratch._place()
    before = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    verdict = judged(pool, body, timeout_s=20.0)
    assert not verdict.passed
    assert "64 MiB" in verdict.reason
    assert judged(pool, "return '' if os.listdir() else 'done'").passed, (
        "the next program finds an empty folder"
    )
    left = before - os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    assert left < 200 << 20


@pytest.mark.parametrize(
    "test",
    [
        "open('x', 'w').write('done')\nassert f('x') == 'done'",
        "import tempfile\nwith tempfile.NamedTemporaryFile('w') as t:\n    t.write('done')\n    t.flush()\n"
        "    assert f(t.name) == 'done'",
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n    path = os.path.join(d, 'x')\n"
        "    open(path, 'w').write('done')\n    assert f(path) == 'done'",
        (
            "import pathlib\np = pathlib.Path.home() / "
            "'x'\np.write_text('done')\nassert f(str(p)) == 'done'"
        ),
    ],
)
def test_a_program_finds_the_files_of_its_test_and_the_next_does_not(test: str, pool: Pool) -> None:
    code = (
        "def f(path):\n    with open(path) as file: text = "
        "file.read()\n    open(path, 'a').close()\n    return text"
    )
    with Pool(1) as one:
        verdict = one.run(Program(code=code, tests=[test]))
        assert verdict.passed, verdict.reason
        assert judged(one, "return os.listdir()", "assert f() == []").passed


@pytest.mark.parametrize(
    "act",
    ["os.remove(f())", "shutil.rmtree(os.path.dirname(f()))", "open(f(), 'w')", "open(f()).read()"],
)
def test_a_test_does_to_no_file_of_the_host_what_a_program_names(
    act: str, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    code = f"def f(): return {str(tmp_path / 'precious')!r}"
    verdict = pool.run(Program(code=code, tests=[f"import os, shutil\n{act}"]))
    assert not verdict.passed
    assert "PermissionError" in verdict.reason
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_test_that_leaves_the_folder_changes_nothing_for_the_next(pool: Pool) -> None:
    code = "def f(path): return open(path).read()"
    tests = [
        "import os, tempfile\nos.chdir(tempfile.mkdtemp())\nopen('x', 'w').write('done')\n"
        "assert f(os.path.abspath('x')) == 'done'",
        "open('y', 'w').write('done')\nassert f('y') == 'done'",
    ]
    with Pool(1) as one:
        assert [one.run(Program(code=code, tests=[test])).passed for test in tests] == [True, True]


def test_what_a_program_leaves_is_gone_for_the_next(pool: Pool) -> None:
    body = (
        "os.makedirs('a/b')\nopen('a/b/x', "
        "'w').write('x')\nopen('y', 'w').write('y')\nreturn "
        "os.getcwd()"
    )
    with Pool(1) as one:
        assert judged(one, body, "assert f()").passed
        assert judged(one, "return os.listdir()", "assert f() == []").passed


def test_the_same_program_starts_from_an_empty_folder_after_a_timeout(pool: Pool) -> None:
    code = code_of("there = os.listdir()\nopen('x', 'w').close()\nwhile there: pass\nreturn there")
    verdict = pool.run(
        Program(code=code, tests=["assert f() == []", "f()", "assert f() == []"], timeout_s=0.5)
    )
    assert [result.passed for result in verdict.results] == [True, False, True]


def test_programs_at_the_same_time_do_not_reach_each_other(pool: Pool) -> None:
    """The name of the other's folder is no secret: a program knows it from outside here."""
    slow = (
        "open('secret', 'w').write('x')\ntime.sleep(1.5)\nreturn "
        "'done' if open('secret').read() == 'x' else ''"
    )
    waiting = pool.submit(
        Program(code=code_of(slow), tests=["assert f() == 'done'"], timeout_s=5.0)
    )
    end = time.monotonic() + 5
    while not (there := [path for path in folders() if (path / "secret").exists()]):
        assert time.monotonic() < end
        time.sleep(0.01)
    (other,) = there
    for attempt in (
        f"open('{other}/secret').read()",
        f"os.listdir('{other}')",
        f"open('{other}/new', 'w')",
        f"os.unlink('{other}/secret')",
        f"os.chmod('{other}/secret', 0)",
        f"os.truncate('{other}/secret', 0)",
    ):
        body = (
            f"try:\n    {attempt}\nexcept OSError:\n    pass\nelse:\n"
            f"    return 'chmod' if 'chmod' in {attempt!r} else 'reached'\nreturn 'stopped'"
        )
        assert judged(pool, body, "assert f() in ('stopped', 'chmod'), f()").passed, attempt
    assert (other / "secret").stat().st_mode & 0o777
    assert waiting.result().passed


def test_a_pool_leaves_no_folder(pool: Pool) -> None:
    before = own_folders()
    with Pool(1) as one:
        judged(one, "open('x', 'w')\nreturn 'done'")
        judged(one, "open('x', 'w')\nwhile True: pass", timeout_s=0.3)
        (made,) = own_folders() - before
    assert not made.exists()


def test_a_judge_that_hangs_leaves_no_folder(pool: Pool) -> None:
    own = own_folders()
    before = set(folders())
    with Pool(1) as one:
        honest = judged(
            one, "open('x', 'w')\nreturn range(10**12)", "assert sum(f()) == 0", timeout_s=0.3
        )
        assert honest.stage == "judge"
        assert own_folders() <= own
        assert not left_behind() - before  # other programs have theirs, and lock them


def test_what_a_killed_trainer_left_is_removed_by_the_next(pool: Pool) -> None:
    source = (
        "from codechat_lab.sandbox.pool import Pool, Program\npool = Pool(1)\n"
        "code = \"def f():\\n    open('x', 'w').close()\\n    while True: pass\"\n"
        "future = pool.submit(Program(code=code, tests=['assert f()'], timeout_s=30.0))\n"
        "while not pool.judges: pass\nprint(next(iter(pool.judges.values())).told['folder'], flush=True)\n"
        "future.result()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    left = Path(trainer.stdout.readline().strip())
    end = time.monotonic() + 5
    while not (left / "x").exists():
        assert time.monotonic() < end
    below = processes_below(trainer.pid)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(5)
    trainer.stdout.close()
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < end
    # from here on a pool of any process on this machine may remove it: the next one is ours at the
    # latest
    with Pool(1) as one:
        assert judged(one, "return 'done'").passed
    assert not left.exists()


def test_a_folder_in_use_is_not_removed(pool: Pool) -> None:
    with Pool(1) as one:
        judged(one, "return 'done'")
        mine = Path(next(iter(one.judges.values())).told["folder"])
        with Pool(1) as other:
            assert judged(other, "return 'done'").passed
        assert mine.exists()
        assert judged(one, "open('x', 'w').write('x')\nreturn 'done'").passed


REACHING = """import fcntl, os
def f():
    open('left', 'w').close()
    for fd in range(128):
        acts = (
            lambda: fcntl.flock(fd, fcntl.LOCK_UN),
            lambda: os.lseek(fd, 1 << 40, 0),
            lambda: os.lseek(fd, 2, 0),
        )
        for act in acts:
            try: act()
            except OSError: pass
    return [fd for fd in range(128) if is_folder(fd)]
def is_folder(fd):
    try: return os.path.isdir(fd)
    except OSError: return False"""


def test_a_program_does_not_reach_the_lock_of_its_folder(pool: Pool) -> None:
    with Pool(1) as one:
        verdict = one.run(
            Program(code=REACHING, tests=["assert f() == [], 'a descriptor of the folder'"])
        )
        with Pool(1) as other:  # which removes what is not locked
            assert judged(other, "return 'done'").passed
        left = judged(
            one, "with tempfile.TemporaryFile() as f: return os.listdir()", "assert f() == []"
        )
        assert left.passed, left.reason
    assert verdict.passed, verdict.reason


def test_emptying_follows_no_link(tmp_path: Path) -> None:
    """A program can make none; what is in the folder is removed all the same."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/precious").write_text("x")
    top = tmp_path / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "link").symlink_to(tmp_path / "outside")
    (top / "a/b/link").symlink_to(tmp_path / "outside/precious")
    (top / "a/closed").mkdir()
    os.chmod(top / "a/closed", 0)
    fd = os.open(top, scratch.DIRECTORY)
    scratch.empty(fd)
    os.close(fd)
    assert not list(top.iterdir())
    assert (tmp_path / "outside/precious").read_text() == "x"


def test_where_no_place_is_writable_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scratch, "PLACES", ("/proc", "/sys"))
    with pytest.raises(OSError, match="set TMPDIR"):
        scratch.Scratch()


@pytest.mark.slow
def test_an_ordinary_user_has_a_folder_too() -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests run as an ordinary user")
    code = code_of(
        "os.makedirs('a/b')\nopen('a/b/x', 'w').write('done')\nreturn open('a/b/x').read()"
    )
    source = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom codechat_lab.sandbox.pool import Pool, Program\n"
        f"with Pool(1) as pool:\n    for _ in range(2):\n"
        f"        v = pool.run(Program(code={code!r}, tests=['assert f() == \"done\"']))\n"
        "        assert v.passed, v.reason\nprint('ok')"
    )
    done = subprocess.run(
        [python(), "-c", source],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        **as_user(),
    )
    if "ModuleNotFoundError" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip("no Python 3.11 and project that an ordinary user could read")
    assert done.stdout == "ok\n", done.stderr
