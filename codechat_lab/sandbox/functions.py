"""Worlds of a Python file of functions, for the calls of a model: the instrument
`sandboxed_functions` of the library.

A world is a process of the sandbox that has loaded the file, so what a call changes lasts until
the world ends. One process runs at a time. A world whose turn comes again after another one's
gets a new process, which repeats its calls: random numbers begin with the same seed, the clock
does not. Where a repeated call gives another result, stderr says so once."""

import json
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text import tool_worlds
from codechat.text.tool_worlds import Answer, as_json
from codechat_lab.sandbox.handles import Lost, Session
from codechat_lab.sandbox.pool import MEMORY_MB
from codechat_lab.sandbox.values import Processes

LONGEST = 1 << 20  # bytes of an answer of the process
REASON = 300  # characters
LOAD_S = 10.0  # seconds in which the file must load
CPU_S = 600.0  # seconds of processor time of a world
# What the process runs behind the source of `tool_worlds`.
ANSWERS = """
import json
_world = World.of(execute({source!r}, {name!r}, {path!r}))
def _call(name, arguments):
    return list(_world.call(name, json.loads(arguments)))
def _judge(messages, row):
    return _world.judge(json.loads(messages), json.loads(row))
"""


class Called(NamedTuple):
    """A call of a world, and its result."""

    name: str
    arguments: str
    text: str


class Failed(Exception):
    """The process did not give what was asked for."""


class Process:
    """The process that runs now, the world that has it, and the two functions of ANSWERS."""

    def __init__(self, channel: socket.socket, world: "SandboxedWorld", code: str) -> None:
        """Failed where the file does not load."""
        self.world = world
        self.session = Session(channel, LONGEST)
        names = ["_call", "_judge"]
        found = self.request("load", code, names, "", MEMORY_MB, CPU_S, seconds=LOAD_S)
        functions = dict(found)
        self.call = functions["_call"]
        self.judge = functions["_judge"]

    def ask(self, function: Any, *words: str, seconds: float) -> Any:
        """What a function of ANSWERS returns."""
        return self.request("call", function, words, {}, seconds=seconds)[0]

    def request(self, op: str, *args: Any, seconds: float) -> Any:
        """Failed where the answer takes longer, or is an error; what a process sends may be
        anything."""
        self.session.channel.settimeout(seconds)
        try:
            answer = self.session.request(op, *args)
            if type(answer) is list and len(answer) == 2:
                return answer
            self.session.lose("an answer of the wrong shape")
        except (Exception, Lost) as error:
            late = "timed out" in str(error)
            why = f"ran {seconds:g} seconds" if late else f"{type(error).__name__}: {error}"
            raise Failed(why[:REASON]) from None


class SandboxedFile:
    """Gives worlds of a file. DataError where it does not load in the sandbox;
    SandboxUnavailable where the machine has none."""

    def __init__(self, source: bytes, path: str, call_s: float) -> None:
        self.processes = Processes()
        self.path = path
        self.call_s = call_s
        with open(tool_worlds.__file__, encoding="utf-8") as file:
            driver = file.read()
        self.code = driver + ANSWERS.format(source=source, name="tools_file", path=path)
        self.process: Process | None = None
        self.lock = threading.RLock()
        self.told = False
        try:
            self.process_of(self())
        except Failed as error:
            raise DataError(
                f"{path} does not load in the sandbox ({error}), which has the standard library "
                "and no other file; set --trust if its calls may run in this process"
            ) from None

    def __call__(self) -> "SandboxedWorld":
        return SandboxedWorld(self)

    def process_of(self, world: "SandboxedWorld") -> Process:
        """The process of a world in the state that its calls have left."""
        if self.process and self.process.world is world and not self.process.session.lost:
            return self.process
        self.process = None  # where the next one does not load, the former one has ended
        self.process = Process(self.processes.begin(), world, self.code)
        for call in world.calls:
            answer = self.process.ask(
                self.process.call, call.name, call.arguments, seconds=self.call_s
            )
            if answer[0] != call.text and not self.told:
                self.told = True
                print(
                    f"{self.path}: {call.name}({call.arguments}) gave another result when it was "
                    "repeated; with --trust no call is repeated",
                    file=sys.stderr,
                )
        return self.process


class SandboxedWorld:
    """The functions of a file and the state that the calls of one conversation leave."""

    def __init__(self, file: SandboxedFile) -> None:
        self.file = file
        self.calls: list[Called] = []

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run a call. One that ends the process, or takes too long, leaves no trace."""
        written = json.dumps(arguments)
        with self.file.lock:
            try:
                process = self.file.process_of(self)
                answer = process.ask(process.call, name, written, seconds=self.file.call_s)
            except Failed as error:
                return Answer(as_json("error", f"{name}: {error}"), False)
            text = str(answer[0])
            self.calls.append(Called(name, written, text))
            return Answer(text, answer[1] is True)

    def judge(self, messages: list[Any], row: Mapping[str, Any]) -> str:
        """What the file's reward says of the conversation, in the state of its world. Values of
        the row that JSON does not hold, such as those of a parquet file, are texts."""
        words = (json.dumps(messages), json.dumps(row, default=str))
        with self.file.lock:
            try:
                process = self.file.process_of(self)
                return str(process.ask(process.judge, *words, seconds=self.file.call_s))
            except Failed as error:
                return as_json("error", f"reward: {error}")
