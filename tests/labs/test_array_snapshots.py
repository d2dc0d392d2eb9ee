"""Snapshots of arrays: what matches, what does not, exact mode, and files that are not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from codechat.core.errors import MissingFile
from codechat.labs.array_snapshots import ArraySnapshots

VALUES = {"loss": torch.tensor([1.0, 2.0, float("nan")]), "count": np.array([3, 4])}


def test_what_was_written_matches_and_what_differs_does_not(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="update"):
        ArraySnapshots(tmp_path / "new", name="a").assert_match(VALUES)
    assert not (tmp_path / "new").exists()
    ArraySnapshots(tmp_path, name="a", update=True).assert_match(VALUES)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    snapshots = ArraySnapshots(tmp_path, name="a")
    snapshots.assert_match(VALUES)
    near = {**VALUES, "loss": VALUES["loss"] + 1e-3}
    snapshots.assert_match(near)
    for wrong in (
        {**VALUES, "loss": VALUES["loss"] + 1},
        {"loss": VALUES["loss"]},
        {**VALUES, "more": np.zeros(1)},
        {**VALUES, "count": np.array([[3, 4]])},
        {**VALUES, "loss": VALUES["loss"].nan_to_num(0.0)},
    ):
        with pytest.raises(AssertionError):
            snapshots.assert_match(wrong)
    with pytest.raises(AssertionError):
        snapshots.assert_match(near, rtol=0, atol=1e-4)


def test_a_scalar_is_not_broadcast(tmp_path: Path) -> None:
    ArraySnapshots(tmp_path, update=True).assert_match(torch.ones(4), "ones")
    with pytest.raises(AssertionError, match="shape"):
        ArraySnapshots(tmp_path).assert_match(torch.tensor(1.0), "ones")


def test_exact_mode_compares_bits_and_types(tmp_path: Path) -> None:
    ArraySnapshots(tmp_path, update=True).assert_match(VALUES, "a")
    exact = ArraySnapshots(tmp_path, exact=True)
    exact.assert_match(VALUES, "a")
    step = np.nextafter(np.float32(1), np.float32(2))
    for wrong in (torch.tensor([float(step), 2.0, float("nan")]), VALUES["loss"].double()):
        with pytest.raises(AssertionError):
            exact.assert_match({**VALUES, "loss": wrong}, "a")
        ArraySnapshots(tmp_path).assert_match({**VALUES, "loss": wrong}, "a")
    zero = torch.tensor([0.0])
    ArraySnapshots(tmp_path, update=True).assert_match(zero, "zero")
    with pytest.raises(AssertionError):
        exact.assert_match(-zero, "zero")


def test_a_snapshot_is_replaced_on_request_and_bfloat16_is_kept(tmp_path: Path) -> None:
    snapshots = ArraySnapshots(tmp_path)
    snapshots.assert_match(torch.tensor([1.5], dtype=torch.bfloat16), "b", force_update=True)
    ArraySnapshots(tmp_path, exact=True).assert_match(torch.tensor([1.5], dtype=torch.bfloat16), "b")
    snapshots.assert_match(torch.tensor([9.0]), "b", force_update=True)
    with pytest.raises(AssertionError):
        snapshots.assert_match(torch.tensor([1.5]), "b")
