"""Errors by their type and by what they name: settings, numbers, files. How the sentence around
them reads is free to change."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raising(kind: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo]:
    """The block must raise `kind` with a message that holds every one of `named`: a number as a
    number, anything else as it is written."""
    with pytest.raises(kind) as raised:
        yield raised
    message = str(raised.value)
    for name in named:
        number = isinstance(name, (int, float)) and not isinstance(name, bool)
        found = (
            re.search(rf"(?<![\w.]){re.escape(str(name))}(?![\w])", message)
            if number
            else str(name) in message
        )
        assert found, f"{name!r} is not named in: {message}"


class Bomb:
    """Unpickled, it makes the directory `exploded`."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)
