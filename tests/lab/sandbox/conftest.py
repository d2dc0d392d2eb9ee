"""A pool of workers for all tests of a file; they skip where the machine isolates nothing."""

from collections.abc import Iterator

import pytest

from codechat_lab.sandbox.pool import Pool, SandboxUnavailable


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """One worker, or WORKERS of the file."""
    try:
        with Pool(getattr(request.module, "WORKERS", 1)) as made:
            yield made
    except SandboxUnavailable as why:
        pytest.skip(f"no isolation on this machine: {why}")
