"""Programs that read stdin and write stdout: each test runs the whole program in its own process.

The judge reads the program's descriptor 1 and compares the output here, ignoring white space at the ends of lines and
of the text. An uncaught exception or a non-zero exit fails, whatever was written.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from codechat.sandbox import codec, wire
from codechat.sandbox.clock import OUT_OF_TIME, TOTAL, OutOfTime, at_most
from codechat.sandbox.handles import Lost, Session
from codechat.sandbox.nursery import Nursery

OUTPUT = 16 << 20  # bytes of stdout that are read; a program that writes more fails


def judge(job: dict[str, Any], nursery: Nursery) -> dict[str, Any]:
    deadline = time.monotonic() + TOTAL * job["timeout_s"]
    results = []
    for given, expected in job["tests"]:
        left = min(job["timeout_s"], deadline - time.monotonic())
        reason = attempt(job, nursery, given, expected, left) if left > 0 else "not tried: out of time"
        results.append((not reason, reason))
    return {"results": results, "stage": "tests", "reason": next((why for _, why in results if why), "")}


def attempt(job: dict[str, Any], nursery: Nursery, given: str, expected: str, seconds: float) -> str:
    """Why one test fails, or ""."""
    pid, channel = nursery.take()
    try:
        with at_most(seconds):
            output, problem = run(job, channel, given)
    except OutOfTime:
        return OUT_OF_TIME
    except (Lost, OSError) as error:
        return f"the program's process was lost: {error}"
    finally:
        with channel:
            nursery.end(pid)
    return problem or ("" if lines(output) == lines(expected) else "another output than expected")


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run(job: dict[str, Any], channel: socket.socket, given: str) -> tuple[str, str]:
    """(output, problem) of the program with `given` on stdin. Lost or OSError where its process has ended."""
    stdin = os.memfd_create("stdin")
    read_end, write_end = os.pipe()
    try:
        with open(stdin, "wb", closefd=False) as f:
            f.write(given.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        message = [1, "script", job["code"], [job["memory_mb"], TOTAL * job["timeout_s"]]]
        wire.send(channel, codec.encode(message))
        socket.send_fds(channel, [b"."], [stdin, write_end])
        os.close(write_end)
        write_end = -1
        output, problem = collect(channel, read_end)
    finally:
        for fd in (stdin, read_end, write_end):
            if fd >= 0:
                os.close(fd)
    return output.decode("utf-8", errors="replace"), problem


def collect(channel: socket.socket, pipe: int) -> tuple[bytearray, str]:
    """Read the pipe until the program reports its end, and then the rest."""
    os.set_blocking(pipe, False)
    output = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(channel, select.POLLIN)
    done = False
    while True:
        ready = {fd for fd, _ in poll.poll(0 if done else None)}
        if pipe in ready:
            part = os.read(pipe, 1 << 20)
            output += part
            if len(output) > OUTPUT:
                return output, f"more than {OUTPUT} bytes of output"
            if part:
                continue
            poll.unregister(pipe)
        if done:
            return output, ""
        if channel.fileno() in ready:
            if problem := answer(channel):
                return output, problem
            done = True


def answer(channel: socket.socket) -> str:
    """The problem that the program's process reports, or ""."""
    kind, *rest = Session(channel).receive(1)
    if kind == "ok":
        return ""
    return ": ".join(x for x in rest if type(x) is str)[:300] or "no answer"
