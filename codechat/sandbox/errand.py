"""Programs with tool calls: the judge sends each call to the trainer and returns the answer to the program.

A program sees `apis.<app>.<tool>(...)`. Only the tool's name and plain arguments leave its process. An invalid call
raises an exception in the program. The printed output is collected in the program's process and returned at the end; no
verdict depends on it.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from codechat.sandbox import wire
from codechat.sandbox.clock import OUT_OF_TIME, TOTAL, OutOfTime, at_most
from codechat.sandbox.handles import Handle, Lost, ProgramError, Session
from codechat.sandbox.nursery import Nursery

# Runs in the program's process, before the program. Not trusted once the program has run.
STUB = """
import contextlib, io

class Refused(Exception):
    pass

class App:
    def __init__(self, name, tools, call):
        self._name, self._tools, self._call = name, tools, call

    def __getattr__(self, tool):
        name = f"{self._name}_{tool}"
        if name not in self._tools:
            raise AttributeError(f"there is no function apis.{self._name}.{tool}")
        def run(*args, **kwargs):
            good, value = self._call(name, dict(zip(self._tools[name], args)) | kwargs)
            if not good:
                raise Refused(value)
            return value
        return run

class Apis:
    def __init__(self, tools, call):
        for app in {name.partition("_")[0] for name in tools}:
            setattr(self, app, App(app, tools, call))

def run(source, tools, call):
    output, problem = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(source, "<action>", "exec", dont_inherit=True), {"apis": Apis(tools, call), "__name__": "__main__"})
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
    return [output.getvalue()[:10000], problem[:300]]
"""


def judge(job: dict[str, Any], nursery: Nursery, control: socket.socket) -> dict[str, Any]:
    """{"output", "problem", "waiting"} of one program. waiting: it was ended while the trainer still owed an answer."""
    waiting = [False]

    def call(name: Any, arguments: Any) -> Any:
        request = json.dumps(
            {"call": [str(name), arguments]}
        ).encode()  # a TypeError for arguments that are not data goes to the program
        waiting[0] = True
        wire.send(control, request)
        answer = json.loads(wire.receive(control, wire.TRUSTED))
        waiting[0] = False
        return answer

    pid, channel = nursery.take()
    try:
        with at_most(job["timeout_s"]):
            output, problem = carry_out(job, Session(channel), call)
    except OutOfTime:
        output, problem = "", OUT_OF_TIME
    except (Lost, ProgramError, OSError) as error:
        output, problem = "", f"the program's process was lost: {error}"
    finally:
        with channel:
            nursery.end(pid)
    return {"output": output, "problem": problem, "waiting": waiting[0]}


def carry_out(job: dict[str, Any], session: Session, call: Any) -> tuple[str, str]:
    most = [job["memory_mb"], TOTAL * job["timeout_s"]]
    found = session.request("load", STUB, ["run"], "", most)
    run = (
        found[0][1]
        if type(found) is list and len(found) == 1 and type(found[0]) is list and len(found[0]) == 2
        else None
    )
    said = run(job["code"], job["tools"], call) if type(run) is Handle else None
    if type(said) is not list or len(said) != 2 or not all(type(part) is str for part in said):
        session.lose("an answer of the wrong shape")
    return said[0], said[1]
