"""Framed messages over a socket: four bytes of length, then the bytes.

A receiver sets the longest message that it accepts; a longer one raises WireError before its bytes are read.
"""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("!I")
FROM_PROGRAM = 8 << 20  # most bytes of one message from an untrusted program that sets no other limit
TRUSTED = 256 << 20  # most bytes of one message between trusted processes

# A judge's requests to its zygote, and the zygote's answer to END. Without a frame, to save time for every program.
COMMAND = 5  # bytes: a letter and a process
FORK, END = b"F\0\0\0\0", b"K"
ENDED = b"e"


class WireError(ConnectionError):
    """The other side has closed, or broke the protocol."""


def send(sock: socket.socket, data: bytes) -> None:
    """Send one message. WireError where the other side has closed; TimeoutError where the socket has a timeout."""
    try:
        sock.sendall(HEADER.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise WireError(f"cannot send: {error.strerror or error}") from None


def receive(sock: socket.socket, limit: int) -> bytes:
    """The next message. WireError at the end of the stream and for a message above `limit` bytes."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    if length > limit:
        raise WireError(f"a message of {length} bytes; at most {limit} are taken")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    part = _some(sock, count)
    if len(part) == count:
        return part
    buffer = bytearray(part)
    while len(buffer) < count:
        buffer += _some(sock, count - len(buffer))
    return bytes(buffer)


def _some(sock: socket.socket, count: int) -> bytes:
    if not count:
        return b""
    try:
        part = sock.recv(min(count, 1 << 20))
    except TimeoutError:
        raise
    except OSError as error:
        raise WireError(f"cannot receive: {error.strerror or error}") from None
    if not part:
        raise WireError("the other side has gone")
    return part
