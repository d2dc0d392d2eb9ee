"""transformers, against which imports and exports are measured."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def transformers() -> Any:
    found = pytest.importorskip(
        "transformers", reason="parity is measured against it: pip install -e '.[bench]'"
    )
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found
