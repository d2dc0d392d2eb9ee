"""Programs that read stdin and write stdout: each test runs the whole program in a process of its own.

The judge reads what the program writes to its descriptor 1 and compares it here, without regard to white space
at the ends of lines and of the whole. An uncaught exception or a non-zero exit fails whatever was written.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from codechat.sandbox import codec, handles, wire
from codechat.sandbox.handles import Session
from codechat.sandbox.nursery import Nursery

OUTPUT = 16 << 20  # bytes of stdout that are read; a program that writes more fails
TOTAL = 3  # as in judge.py


def judge(job: dict[str, Any], nursery: Nursery) -> dict[str, Any]:
    deadline = time.monotonic() + TOTAL * job["timeout_s"]
    results = []
    for given, expected in job["tests"]:
        left = min(job["timeout_s"], deadline - time.monotonic())
        reason = attempt(job, nursery, given, expected, left) if left > 0 else "not tried: out of time"
        results.append((not reason, reason))
    return {"results": results, "stage": "tests", "reason": next((why for _, why in results if why), "")}


def attempt(job: dict[str, Any], nursery: Nursery, given: str, expected: str, seconds: float) -> str:
    """Why one test fails, or nothing."""
    pid, channel = nursery.take()
    try:
        output, problem = run(job, channel, given, seconds)
    finally:
        channel.close()
        nursery.end(pid)
    return problem or ("" if lines(output) == lines(expected) else "another output than expected")


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run(job: dict[str, Any], channel: socket.socket, given: str, seconds: float) -> tuple[str, str]:
    """(what it wrote, problem) of the program with `given` on stdin."""
    end = time.monotonic() + seconds
    stdin = os.memfd_create("stdin")
    read_end, write_end = os.pipe()
    try:
        os.write(stdin, given.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        channel.settimeout(seconds)
        message = [1, "script", job["code"], [job["memory_mb"], TOTAL * job["timeout_s"]]]
        wire.send(channel, codec.encode(message))
        socket.send_fds(channel, [b"."], [stdin, write_end])
        os.close(write_end)
        write_end = -1
        output, problem = collect(channel, read_end, end)
    except OSError as error:
        return "", f"the program's process was lost: {error}"
    finally:
        for fd in (stdin, read_end, write_end):
            if fd >= 0:
                os.close(fd)
    return output.decode("utf-8", errors="replace"), problem


def collect(channel: socket.socket, pipe: int, end: float) -> tuple[bytearray, str]:
    """Read the pipe until the program says that it is done, and then what is left in it."""
    os.set_blocking(pipe, False)
    output = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(channel, select.POLLIN)
    done = False
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return output, "out of time"
        ready = {fd for fd, _ in poll.poll(0 if done else left * 1000)}
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
            if problem := answer(channel, end):
                return output, problem
            done = True


def answer(channel: socket.socket, end: float) -> str:
    """The problem that the program's process reports, or nothing."""
    channel.settimeout(max(end - time.monotonic(), 1e-3))
    session = Session(channel)
    session.number = 1
    try:
        kind, *rest = session._receive(1)
    except handles.Lost as lost:
        return f"the program's process was lost: {lost}"
    except TimeoutError:
        return "out of time"
    if kind == "ok":
        return ""
    return ": ".join(x for x in rest if type(x) is str)[:300] or "no answer"
