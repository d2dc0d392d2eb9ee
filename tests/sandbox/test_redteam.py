"""Programs that try to pass tests which they do not solve. Each succeeds against an executor that runs program
and tests in one interpreter of a subprocess, which is shown first, and must not against ours."""

import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from codechat.sandbox.pool import Pool, Program

PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
WORKERS = 2
# How the naive executor tells: by exit code, by a last line, by a nonce that it prints, by results as json.
NAIVE = {
    "exit": "{code}\n{asserts}\n",
    "print": "{code}\ntry:\n    exec({tests!r})\nexcept BaseException:\n    print('FAILED')\nelse:\n    print('PASSED')\n",
    "nonce": "NONCE = 'a4f1'\nexec({code!r})\nexec({tests!r})\nprint('PASSED', NONCE)\n",
    "results": (
        "import json\ntests = {each!r}\nresults = []\nspace = {{}}\nexec({code!r}, space)\n"
        "for test in tests:\n    try:\n        exec(test, space)\n        results.append(True)\n"
        "    except Exception:\n        results.append(False)\nprint(json.dumps(results))\n"
    ),
}
ADD = ("assert add(1, 2) == 3", "assert add(100, 150) == 250")
HONEST = Program(code="def add(a, b): return a + b", tests=ADD)


CHANNEL = (
    "import json, os, struct, sys\n"
    "def say(message, fds=range(3, 16)):\n"
    "    data = json.dumps(message).encode()\n"
    "    for fd in fds:\n"
    "        try: os.write(fd, struct.pack('!I', len(data)) + data)\n"
    "        except OSError: pass\n"
)


@dataclass(frozen=True)
class Attack:
    """`code` does not solve `tests`, but passes them where `naive` executes it."""

    name: str
    code: str
    tests: tuple[str, ...] = ADD
    naive: str = "exit"


FORGES, SPEAKS, INHERENT = ([Attack(**row) for row in PROGRAMS[kind]] for kind in ("forges", "speaks", "inherent"))


def forged_naively(attack: Attack, folder: Path) -> bool:
    """Whether the naive executor takes the program for a solution."""
    script = folder / "run.py"
    tests = "\n".join(attack.tests)
    text = NAIVE[attack.naive].format(code=attack.code, asserts=tests, tests=tests, each=list(attack.tests))
    script.write_text(text)
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, timeout=20, cwd=folder)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if attack.naive == "results":
        return last.startswith("[") and all(json.loads(last))
    return (
        done.returncode == 0 and {"exit": True, "print": last == "PASSED", "nonce": last == "PASSED a4f1"}[attack.naive]
    )


def program(attack: Attack) -> Program:
    return Program(code=attack.code, tests=attack.tests, timeout_s=2.0)


@pytest.mark.parametrize("attack", FORGES, ids=lambda a: a.name)
def test_forges_naively_and_not_here(attack: Attack, pool: Pool, tmp_path: Path) -> None:
    assert forged_naively(attack, tmp_path), "it does not even fool the naive executor"
    assert not pool.run(program(attack)).passed


@pytest.mark.parametrize("attack", SPEAKS, ids=lambda a: a.name)
def test_forged_messages_and_tricks_gain_nothing(attack: Attack, pool: Pool) -> None:
    code = CHANNEL + attack.code if "say(" in attack.code else attack.code
    verdict = pool.run(Program(code=code, tests=ADD, timeout_s=1.0))
    assert not verdict.passed and verdict.seconds < 6
    assert pool.run(HONEST).passed, "the next program is judged as ever"


def test_wrong_programs_that_satisfy_the_tests_pass_everywhere(pool: Pool) -> None:
    assert [attack.name for attack in INHERENT if not pool.run(program(attack)).passed] == []


def test_after_all_of_them_an_honest_program_passes(pool: Pool) -> None:
    for attack in FORGES[:8]:
        pool.run(program(attack))
    assert pool.run(HONEST).passed
