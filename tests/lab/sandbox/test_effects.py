"""Programs that try to reach out of their place: files, processes, sockets, secrets, resources.
Each harmless one is shown to work against an executor that only makes a subprocess, and must
leave no trace from ours."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from codechat_lab.sandbox.pool import Pool, Program

NOBODY = 65534
SECRET = "a-secret-of-the-trainer"
TRY = ["assert attempt() == 'done'"]
VICTIM = (
    "import ctypes, os, time\nsecret = ctypes.create_string_buffer(b'in-the-memory-of-another')\n"
    "print(ctypes.addressof(secret), flush=True)\ntime.sleep(60)"
)


class Host(NamedTuple):
    """A folder, a process and three listeners that programs may try to reach; all of an
    ordinary user."""

    folder: Path
    victim: subprocess.Popen[str]
    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    names: dict[str, object]


def python() -> str:
    """An interpreter that an ordinary user can start: that of the tests may lie in a folder
    closed to it."""
    own = os.path.realpath(sys.executable)
    closed = any(not os.stat(p).st_mode & 0o001 for p in Path(own).parents)
    found = (
        shutil.which("python3", path="/usr/bin:/usr/local/bin")
        if closed and os.getuid() == 0
        else own
    )
    return found or pytest.skip("no interpreter that an ordinary user could start")


def as_user() -> dict[str, int]:
    """Never show an attack with root's rights."""
    return {"user": NOBODY, "group": NOBODY} if os.getuid() == 0 else {}


@contextlib.contextmanager
def made_host() -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="host-"))
    (folder / "home").mkdir()
    (folder / "precious").write_text("precious")
    for path, mode in ((folder, 0o777), (folder / "home", 0o777), (folder / "precious", 0o666)):
        path.chmod(mode)
    argv = [python(), "-S", "-c", VICTIM]
    victim = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        env={"SECRET": SECRET},
        **as_user(),
    )
    name = f"codechat-{os.getpid()}-{time.monotonic_ns()}"
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind("\0" + name)
    abstract.listen()
    for s in (tcp, udp, abstract):
        s.settimeout(0.1)
    names = {
        "folder": folder,
        "pid": victim.pid,
        "address": int(victim.stdout.readline()),
        "name": name,
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
    }
    with tcp, udp, abstract:
        yield Host(folder, victim, tcp, udp, abstract, names)
    victim.kill()
    victim.communicate()
    shutil.rmtree(folder)


@pytest.fixture
def hosts() -> Iterator[Iterator[Host]]:
    with contextlib.ExitStack() as stack:
        yield (stack.enter_context(made_host()) for _ in range(2))


def accepted(listener: socket.socket) -> bool:
    with contextlib.suppress(TimeoutError):
        listener.accept()[0].close()
        return True
    return False


def received(listener: socket.socket) -> bool:
    with contextlib.suppress(TimeoutError):
        return bool(listener.recv(10))
    return False


def exists(name: str) -> Callable[[Host], bool]:
    return lambda host: (host.folder / name).exists()


def told(text: str) -> Callable[[Host], bool]:
    """The program writes a secret where the naive executor lets it; here it can only raise or
    answer."""
    return lambda host: (
        (host.folder / "told").exists()
        and text in (host.folder / "told").read_text(errors="replace")
    )


def stopped(host: Host) -> bool:
    """A signal reaches a process on a busy machine only when it has its turn."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        if Path(f"/proc/{host.victim.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def ended(host: Host) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.victim.wait(0.3)
    return host.victim.returncode is not None


PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
REACHES = {row["name"]: row["code"] for row in PROGRAMS["reaches"]}
# How it is seen that a program did it to the host.
HAPPENED: dict[str, Callable[[Host], bool]] = {
    "delete a file": lambda h: not (h.folder / "precious").exists(),
    "overwrite a file": lambda h: (h.folder / "precious").read_text() != "precious",
    "make a file": exists("new"),
    "change a mode": lambda h: (
        (h.folder / "home/x").exists() or (h.folder / "home").stat().st_mode & 0o777 != 0o777
    ),
    "rename a file": exists("moved"),
    "plant usercustomize": lambda h: any(h.folder.rglob("usercustomize.py")),
    "a tree 200 deep": exists("d/d/d"),
    **dict.fromkeys(("a shell", "os.system"), exists("shell")),
    "a daemon that outlives the run": lambda h: time.sleep(0.8) or exists("daemon")(h),
    "a thread that outlives the run": lambda h: time.sleep(0.6) or exists("late")(h),
    "kill another process": ended,
    **dict.fromkeys(("stop another process", "queue a signal by ctypes"), stopped),
    "slow another process down": lambda h: os.getpriority(os.PRIO_PROCESS, h.victim.pid) == 15,
    "limit another process": lambda h: (
        "Max open files            5" in Path(f"/proc/{h.victim.pid}/limits").read_text()
    ),
    "pin another process": lambda h: (
        len(os.sched_getaffinity(h.victim.pid)) == 1 < len(os.sched_getaffinity(0))
    ),
    "read another's environment": told(SECRET),
    **dict.fromkeys(
        ("read another's memory file", "read another's memory by a call"), told("in-the-memory")
    ),
    "read a file of the host": told("precious"),
    "connect by TCP": lambda h: accepted(h.tcp),
    "send by UDP": lambda h: received(h.udp),
    "connect to an abstract socket": lambda h: accepted(h.abstract),
    "leave shared memory": lambda h: Path(f"/dev/shm/{h.names['name']}").exists(),
}
PROGRAM = """import os, signal, socket
def tell(what): open('%(folder)s/told', 'w').write(str(what))
def attempt():
{body}
    return 'done'
"""


def code_of(reach: str, host: Host) -> str:
    return PROGRAM.replace("{body}", textwrap.indent(REACHES[reach], "    ")) % host.names


@pytest.mark.parametrize("reach", REACHES)
def test_reaches_out_naively_and_not_here(reach: str, hosts: Iterator[Host], pool: Pool) -> None:
    if reach == "pin another process" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    happened = HAPPENED[reach]
    host = next(hosts)
    script = code_of(reach, host) + "\nassert attempt() == 'done'\n"
    home = {"HOME": str(host.folder / "home"), "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [python(), "-c", script],
        timeout=20,
        cwd=host.folder,
        env=home,
        check=True,
        capture_output=True,
        **as_user(),
    )
    assert happened(host), "it does not even get out of a subprocess"
    Path(f"/dev/shm/{host.names['name']}").unlink(missing_ok=True)
    host = next(hosts)
    pool.run(
        Program(code=code_of(reach, host), tests=TRY, entry_points=("attempt",), timeout_s=2.0)
    )
    assert not happened(host)
    assert host.victim.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("row", PROGRAMS["selfish"], ids=lambda row: row["name"])
def test_the_next_program_finds_everything_in_order(row: dict[str, str], pool: Pool) -> None:
    name, body = row.values()
    test = "assert sum(attempt()) < 0" if "lazy" in name else TRY[0]
    harmless = "output" in name
    code = f"def attempt():\n{textwrap.indent(body, '    ')}\n    return 'done'"
    code = body if body.startswith("# whole") else code
    free = shutil.disk_usage("/").free
    start = time.monotonic()
    selfish = pool.run(
        Program(
            code=code,
            tests=[test],
            entry_points=("attempt",),
            timeout_s=30.0 if harmless else 1.0,
        )
    )
    assert time.monotonic() - start < 90, "the pool hung"
    assert selfish.passed == harmless, selfish
    assert pool.run(Program(code="def attempt(): return 'done'", tests=TRY)).passed
    assert free - shutil.disk_usage("/").free < 200 << 20
    assert os.path.isfile(os.__file__)


def test_killing_its_own_parent_kills_no_judge(pool: Pool) -> None:
    pool.run(Program(code="def attempt(): return 'done'", tests=TRY))
    judge = next(iter(pool.judges.values()))
    code = "import os\ndef attempt():\n    os.kill(os.getppid(), 9)\n    return 'done'"
    assert not pool.run(Program(code=code, tests=TRY, entry_points=("attempt",))).passed
    assert next(iter(pool.judges.values())) is judge
    assert judge.process.poll() is None


def test_programs_see_nothing_of_the_trainers_environment(pool: Pool) -> None:
    code = "import os\ndef seen(): return dict(os.environ)"
    known = {"LANG", "PATH", "HOME", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "TMPDIR"}
    assert set(os.environ) - known, "there is nothing to be hidden"
    verdict = pool.run(Program(code=code, tests=[f"assert set(seen()) <= {known}, seen()"]))
    assert verdict.passed, verdict.reason


def test_installed_packages_with_answers_are_hidden(pool: Pool) -> None:
    """The first 5000 files of them; an interpreter may have a million."""
    code = (
        "import itertools, os, sys\ndef files():\n"
        "    there = (os.path.join(w[0], f) for d in sys.path + [os.path.dirname(os.__file__)]\n"
        "        for r in ('site-packages', 'dist-packages') for w in os.walk(os.path.join(d, r)) for f in w[2])\n"
        "    return [f for f in itertools.islice(there, 5000) if readable(f)]\n"
        "def readable(p):\n    try: open(p, 'rb').close()\n    except OSError: return False\n    return True"
    )
    assert pool.run(
        Program(code=code, tests=["assert files() == [], files()[:3]"], timeout_s=30.0)
    ).passed
