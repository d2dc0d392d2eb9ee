"""A run with untrained checkpoints."""

from collections.abc import Callable

import pytest

from codechat.runs.run import Run


@pytest.fixture
def toy_run(make_run: Callable[..., Run]) -> Run:
    return make_run("toy", steps=2)
