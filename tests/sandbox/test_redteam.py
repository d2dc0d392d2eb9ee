"""Programs that try to pass tests which they do not solve. Each succeeds against an executor that runs program
and tests in one interpreter of a subprocess, which is shown first, and must not against ours."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from codechat.sandbox.pool import Pool, Program

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


@dataclass(frozen=True)
class Attack:
    """`code` does not solve `tests`, but passes them where `naive` executes it."""

    name: str
    code: str
    tests: tuple[str, ...] = ADD
    naive: str = "exit"


YES = "class Yes{base}:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
HASHED = "class Yes{base}:\n    def __eq__(self, other): return True\n    def __hash__(self): return hash({like})\n"
NOTHING = "def add(a, b): return 0\n"

ATTACKS = [
    # the process's end
    Attack("prints the sentinel and leaves", "import os\nprint('PASSED', flush=True)\nos._exit(0)", naive="print"),
    Attack("exits with code 0", "import sys\nsys.exit(0)"),
    Attack("ends the process with code 0", "import os\nos._exit(0)"),
    Attack("raises SystemExit in the function", "def add(a, b): raise SystemExit(0)"),
    Attack("changes the exit code at exit", NOTHING + "import atexit, os\natexit.register(os._exit, 0)"),
    Attack("replaces the exception hook", NOTHING + "import sys, os\nsys.excepthook = lambda *a: os._exit(0)"),
    Attack("a thread prints and leaves",
           NOTHING + "import os, threading, time\ndef late():\n    print('PASSED', flush=True)\n    os._exit(0)\nthreading.Timer(0.05, late).start()\n"
           "time.sleep(0.2)", naive="print"),
    Attack("patches print", NOTHING + "import builtins, sys\nprint = lambda *a: sys.stdout.write('PASSED\\n')", naive="print"),
    Attack("prints json of results", "import os\nprint('[true, true]', flush=True)\nos._exit(0)", naive="results"),
    # objects that agree with everything
    Attack("== that is always true", YES.format(base="") + "def add(a, b): return Yes()"),
    *[Attack(f"{kind} with such an ==", YES.format(base=f"({kind})") + "def f(): return Yes()", (f"assert f() == {value!r}",))
      for kind, value in {"int": 3, "str": "hello", "list": [1, 2], "dict": {"a": 1}, "tuple": (1, 2), "float": 0.5, "bytes": b"ab"}.items()],
    Attack("such an object in a list", YES.format(base="") + "def f(): return [Yes(), Yes()]", ("assert f() == [1, 2]",)),
    Attack("such an object in a dict", YES.format(base="") + "def f(): return {'a': Yes()}", ("assert f() == {'a': 1}",)),
    Attack("such an object, asked in reverse", YES.format(base="(int)") + "def add(a, b): return Yes()", ("assert 3 == add(1, 2)",)),
    Attack("such an object in a set of the test", HASHED.format(base="", like=3) + "def add(a, b): return Yes()", ("assert add(1, 2) in {3}",)),
    Attack("such an object as a key", HASHED.format(base="(str)", like="'a'") + "def f(): return Yes()", ("assert {f(): 1} == {'a': 1}",)),
    Attack("a class whose class agrees",
           "class Meta(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\nclass Yes(metaclass=Meta): pass\n"
           "def add(a, b): return Yes"),
    Attack("mock.ANY", "from unittest.mock import ANY\ndef add(a, b): return ANY"),
    Attack("MagicMock",
           "from unittest.mock import MagicMock\ndef add(a, b):\n    m = MagicMock()\n    m.__eq__ = lambda self, o: True\n    return m"),
    Attack("claims to be an int",
           "class Yes:\n    __class__ = property(lambda self: int)\n    def __eq__(self, o): return True\ndef add(a, b): return Yes()",
           ("r = add(1, 2)\nassert isinstance(r, int) and r == 3",)),
    Attack("!= that is always false",
           "class No:\n    def __ne__(self, o): return False\n    def __eq__(self, o): return True\ndef add(a, b): return No()",
           ("assert add(1, 2) == 3 and not add(1, 2) != 3",)),
    Attack("differs by nothing", "class Near:\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\ndef f(x): return Near()",
           ("assert abs(f(3.5) - 0.5) < 1e-6",)),
    Attack("differs by nothing in reverse", "class Near(float):\n    def __rsub__(self, o): return 0.0\ndef f(x): return Near()",
           ("assert abs(0.5 - f(3.5)) < 1e-6",)),
    Attack("is between anything",
           "class Between:\n    def __gt__(self, o): return True\n    __lt__ = __ge__ = __le__ = __gt__\ndef f(x): return Between()",
           ("assert 2 < f(3) < 4 and f(3) >= 3",)),
    Attack("contains everything", "class All:\n    def __contains__(self, o): return True\ndef f(): return All()",
           ("assert 3 in f() and 'x' in f()",)),
    Attack("starts with everything", "class Text:\n    def startswith(self, o): return True\ndef f(): return Text()",
           ("assert f().startswith('abc')",)),
    Attack("is a digit by its own word", "class Text:\n    def isdigit(self): return True\ndef f(): return Text()", ("assert f().isdigit()",)),
    Attack("learns the answer in ==",
           "seen = {}\nclass Learn:\n    def __eq__(self, o): seen[0] = o; return True\ndef f(): return seen.get(0, Learn())",
           ("assert f() == 77 and f() == 77",)),
    # reading what the interpreter holds
    Attack("reads the test in a frame",
           "import sys\ndef add(a, b):\n    frame = sys._getframe(1)\n    while 'test' not in frame.f_locals: frame = frame.f_back\n"
           "    return eval(frame.f_locals['test'].split('==')[1])", naive="results"),
    Attack("reads the caller's constants",
           "import sys\ndef add(a, b):\n    code = sys._getframe(1).f_code\n    return [c for c in code.co_consts if c not in (a, b, None)][0]",
           ("assert add(1, 2) == 3",), naive="results"),
    Attack("finds the tests on the heap",
           "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if type(o) is list:\n            for x in o:\n"
           "                if type(x) is str and x.startswith(f'assert add({a}, {b})'):\n                    return int(x.split('==')[1])",
           naive="results"),
    Attack("empties the list of tests",
           NOTHING + "import gc\nfor o in gc.get_objects():\n    if type(o) is list and o and type(o[0]) is str and o[0].startswith('assert'):\n"
           "        o[:] = ['pass' for _ in o]", naive="results"),
    Attack("prints the nonce of a frame", "import sys, os\nprint('PASSED', sys._getframe(1).f_globals['NONCE'], flush=True)\nos._exit(0)",
           naive="nonce"),
    Attack("reads the source of main",
           "import sys\ndef add(a, b):\n    text = open(sys.argv[0]).read()\n    return int(text.split(f'assert add({a}, {b}) ==')[1].split()[0])"),
    Attack("asks inspect for the caller's line", "import inspect\ndef add(a, b):\n    return int(inspect.stack()[1].code_context[0].split('==')[1])"),
    # changing what the interpreter holds
    Attack("patches exec", "import builtins\nbuiltins.exec = lambda *a: None", naive="results"),
    Attack("patches json", NOTHING + "import json\njson.dumps = lambda r: '[true, true]'", naive="results"),
    Attack("appends to the results",
           "import sys\nf = sys._getframe(1)\nf.f_globals['results'] = type('R', (list,), {'append': lambda s, x: list.append(s, True)})()\n" + NOTHING,
           naive="results"),
    Attack("patches abs", "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 9.0", ("assert abs(f(3.5) - 0.5) < 1e-6",)),
    Attack("patches sorted", "import builtins\nbuiltins.sorted = lambda x: [1, 2]\ndef f(): return []", ("assert sorted(f()) == [1, 2]",)),
    Attack("patches all", "import builtins\nbuiltins.all = lambda x: True\ndef f(x): return 0", ("assert all(f(i) == i for i in range(1, 5))",)),
    Attack("patches isinstance and len", "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 3\ndef f(): return ''",
           ("assert isinstance(f(), str) and len(f()) == 3",)),
    Attack("patches math.isclose", "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 9.0",
           ("import math\nassert math.isclose(f(2), 0.5)",)),
    Attack("is the module math",
           "import sys\nclass Fake:\n    isclose = staticmethod(lambda *a, **k: True)\nsys.modules['math'] = Fake\ndef f(x): return 9.0",
           ("import math\nassert math.isclose(f(2), 0.5)",)),
    Attack("patches import",
           "import builtins\nreal = __import__\nclass Fake:\n    isclose = staticmethod(lambda *a, **k: True)\n"
           "builtins.__import__ = lambda name, *a, **k: Fake if name == 'math' else real(name, *a, **k)\ndef f(x): return 9.0",
           ("import math\nassert math.isclose(f(2), 0.5)",)),
    Attack("patches random", "import random\nrandom.randint = lambda a, b: 0\ndef f(x): return 0",
           ("import random\nx = random.randint(1, 10**9)\nassert f(x) == 2 * x",)),
    Attack("pokes an int by ctypes",
           "import ctypes\nat = int.__basicsize__\nctypes.memmove(id(250) + at, id(251) + at, 4)\ndef add(a, b): return 251",
           ("assert add(100, 150) == 250",)),
    # ending the test's own loop
    Attack("StopIteration in the test's map", "def add(a, b): raise StopIteration",
           ("assert all(map(lambda c: add(*c[0]) == c[1], [((1, 2), 3), ((2, 2), 4)]))",)),
    Attack("StopIteration in a comprehension of next", "def f(x): raise StopIteration",
           ("cases = iter([1, 2])\nok = [True for x in map(f, cases) if x != 5]\nassert not ok or ok == [1]",)),
    Attack("AssertionError for the test's own", "def f(x): raise AssertionError",
           ("try:\n    assert f(1) == 2, 'wrong'\nexcept AssertionError as e:\n    assert 'wrong' not in e.args",)),
]  # fmt: skip

# They speak to the judge themselves: there is nothing of the kind in a naive executor.
CHANNEL = (
    "import json, os, struct, sys\n"
    "def say(message, fds=range(3, 16)):\n"
    "    data = json.dumps(message).encode()\n"
    "    for fd in fds:\n"
    "        try: os.write(fd, struct.pack('!I', len(data)) + data)\n"
    "        except OSError: pass\n"
)
PROTOCOL = {
    "answers in advance": CHANNEL + "def add(a, b):\n    for n in range(9): say([n, 'ok', [True, None]])\n    return 0",
    "answers while it loads": CHANNEL + "for n in range(9): say([n, 'ok', [['add', 3]]])",
    "claims a message of 4 GB": "import os\ndef add(a, b):\n    for fd in range(3, 16):\n        try: os.write(fd, b'\\xff' * 4)\n"
    "        except OSError: pass",
    "sends rubbish": "import os\ndef add(a, b):\n    for fd in range(3, 16):\n        try: os.write(fd, bytes([0, 0, 0, 9]) + b'{\"x\": [[]')\n"
    "        except OSError: pass",
    "sends a call back to no function": CHANNEL + "def add(a, b): say([0, 'callback', 7, {'t': []}, {'d': []}])",
    "sends a function of the test": CHANNEL + "def add(a, b): say([2, 'ok', [{'k': 0}, None]])",
    "closes its sockets": "import os\ndef add(a, b): os.closerange(3, 64)",
    "gives a wrong write-back": CHANNEL
    + "def add(a, b): say([2, 'ok', [3, [[1], [2], [3]]]]); say([3, 'ok', [3, 'x']])",
    "replaces the encoder": "import sys\nfor m in list(sys.modules.values()):\n"
    "    if hasattr(m, 'PACKERS'): m.encode = lambda *a: b'[1, \"ok\", true]'\ndef add(a, b): return 0",
    "nests deeply": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "contains itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "returns 20 MB": "def add(a, b): return 'x' * (20 << 20)",
    "returns a generator without end": "import itertools\ndef add(a, b): return itertools.count()",
    "an attribute that raises everything": "class X:\n    def __getattribute__(self, n): raise KeyboardInterrupt\ndef add(a, b): return X()",
}

# Inherent to any executor: they are expected to pass.
INHERENT = {
    "a hard-coded answer": Attack("", "def add(a, b): return {(1, 2): 3, (100, 150): 250}[a, b]"),
    "NaN against a weak test": Attack("", "def f(x): return float('nan')", ("assert not abs(f(1) - 2) > 1e-6",)),
    "a length without items against a test that asks for each once": Attack(
        "",
        "class F:\n    def __len__(self): return 2\n    def __iter__(self): return iter([])\ndef f(): return F()",
        ("r = f()\nassert len(r) == 2 and all(a == b for a, b in zip(r, [1, 2]))",),
    ),
}


WORKERS = 2


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


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
def test_forges_naively_and_not_here(attack: Attack, pool: Pool, tmp_path: Path) -> None:
    assert forged_naively(attack, tmp_path), "it does not even fool the naive executor"
    assert not pool.run(program(attack)).passed


@pytest.mark.parametrize("name", PROTOCOL)
def test_forged_messages_gain_nothing(name: str, pool: Pool) -> None:
    verdict = pool.run(Program(code=PROTOCOL[name], tests=ADD, timeout_s=1.0))
    assert not verdict.passed and verdict.seconds < 6


@pytest.mark.parametrize("name", INHERENT)
def test_wrong_programs_that_satisfy_the_tests_pass_everywhere(name: str, pool: Pool) -> None:
    assert pool.run(program(INHERENT[name])).passed


def test_after_all_of_them_an_honest_program_passes(pool: Pool) -> None:
    for attack in ATTACKS[:8]:
        pool.run(program(attack))
    verdict = pool.run(Program(code="def add(a, b): return a + b", tests=ADD))
    assert verdict.passed, verdict
