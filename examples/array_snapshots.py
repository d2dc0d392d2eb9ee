"""Snapshots of arrays for tests of your own: NAME.npz holds what a function gave once, and a test compares what it gives now.

    import pytest
    from array_snapshots import ArraySnapshots

    @pytest.fixture
    def numpy_snapshot(request):
        return ArraySnapshots("tests/_snapshots", name=request.node.name, exact=False, update=False)

    def test_my_loss(numpy_snapshot):
        numpy_snapshot.assert_match({"loss": my_loss(), "gradient": my_gradient()})

The first run takes update=True and writes the file; look at what it holds before you commit it. exact=True compares bit by bit, types included, which
only the same machine and library can meet. The names of the arguments are those of the fixture in Stanford's CS336.

Left out: pickles, which may run code when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from codechat.core.errors import MissingFile


class ArraySnapshots:
    """Snapshots in one folder. name: of a snapshot where `assert_match` is given none."""

    def __init__(
        self,
        snapshot_dir: str | Path = "tests/_snapshots",
        *,
        name: str = "",
        exact: bool = False,
        update: bool = False,
    ) -> None:
        self.folder, self.name, self.exact, self.update = Path(snapshot_dir), name, exact, update

    def assert_match(
        self,
        actual: Any,
        test_name: str | None = None,
        force_update: bool = False,
        rtol: float = 1e-4,
        atol: float = 1e-2,
    ) -> None:
        """AssertionError unless an array, or each of a mapping, equals the snapshot within rtol and atol; in exact mode bit by bit.

        Shapes must be equal: nothing is broadcast. NaN equals NaN. MissingFile where there is no snapshot and none is written."""
        name = test_name or self.name
        arrays = {
            key: _array(value)
            for key, value in (actual if isinstance(actual, Mapping) else {"array": actual}).items()
        }
        path = self.folder / f"{name}.npz"
        if self.update or force_update:
            return _write(path, arrays)
        if not name or not path.is_file():
            raise MissingFile(
                f"no snapshot {path}; write it once with update=True, and look at what it holds"
            )
        with np.load(path, allow_pickle=False) as file:
            expected = {key: file[key] for key in file.files}
        assert arrays.keys() == expected.keys(), (
            f"{name} has the arrays {sorted(arrays)}; its snapshot {sorted(expected)}"
        )
        for key, array in arrays.items():
            self._compare(f"{name}: {key}", array, expected[key], rtol, atol)

    def _compare(
        self, what: str, here: np.ndarray, there: np.ndarray, rtol: float, atol: float
    ) -> None:
        assert here.shape == there.shape, (
            f"{what} has shape {here.shape}; its snapshot {there.shape}"
        )
        if self.exact:
            assert here.dtype == there.dtype, f"{what} is {here.dtype}; its snapshot {there.dtype}"
            different = int((_bits(here) != _bits(there)).sum())
            assert not different, (
                f"{what}: {different} bytes of {here.nbytes} differ from the snapshot"
            )
        else:
            np.testing.assert_allclose(here, there, rtol=rtol, atol=atol, err_msg=what)


def _array(value: Any) -> np.ndarray:
    """A numpy array of an array or tensor; bfloat16, which numpy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.npz")
    np.savez(partial, **arrays)
    os.replace(partial, path)
