"""Checkpoints: a resumed run continues on the same curve, and nothing that existed is lost."""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import Bomb, raising
from torch import nn

from codechat.core.errors import CheckpointError
from codechat.models.config import GPTConfig
from codechat.runs import checkpoint
from codechat.runs.paths import pointed_step
from codechat.runs.run import Run

TINY = GPTConfig(depth=2, n_embd=16, n_head=2, block_size=16, vocab_size=257)


@pytest.fixture
def run() -> Run:
    return Run.create("r", {}, kind="test")


def tiny(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Dropout(0.5), nn.Linear(width, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of a few steps that draw from every global random state."""
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 2) + float(np.random.rand()) + random.random()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(run: Run, step: int, model: nn.Module | None = None, **more: object) -> Path:
    return checkpoint.save(run.path, step, model=model or tiny(), **more)


def test_resuming_is_bitwise_and_samples_the_same_numbers(run: Run) -> None:
    model = tiny()
    optimizer = adamw(model)
    learn(model, optimizer, 5)
    save(
        run,
        5,
        model,
        optimizers=[optimizer],
        extra={"loader": {"cursor": 7, "order": torch.arange(3)}},
    )
    expected = learn(model, optimizer, 5)
    learn(tiny(), adamw(tiny()), 3)  # disturbs every random state
    again = tiny()
    other = adamw(again)
    ckpt = checkpoint.load("r")
    checkpoint.restore(ckpt, again)
    checkpoint.restore_optimizers(ckpt, again, [other])
    assert learn(again, other, 5) == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert ckpt.step == 5
    assert ckpt.extra["loader"]["cursor"] == 7
    assert torch.equal(ckpt.extra["loader"]["order"], torch.arange(3))


def test_starting_from_a_checkpoint_leaves_the_random_states_alone(run: Run) -> None:
    save(run, 1)
    model = tiny()
    torch.manual_seed(5)
    random.seed(5)
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    checkpoint.restore(checkpoint.load("r"), model)
    assert torch.equal(of_torch, torch.get_rng_state())
    assert of_python == random.getstate()


def test_lineage_names_the_runs_and_steps_behind_the_weights(run: Run) -> None:
    save(run, 10, meta={"lineage": [{"run": "r", "data": "abc"}]})
    child = Run.create("child", {}, kind="test", parent="r")
    parents = checkpoint.load("r").meta["lineage"]
    save(child, 20, meta={"lineage": [*parents, {"run": "child", "data": "def"}]})
    assert checkpoint.read_meta("child")["lineage"] == [
        {"run": "r", "data": "abc", "step": 10},
        {"run": "child", "data": "def", "step": 20},
    ]


@pytest.mark.parametrize("keep_last, resumable", [(0, {4, 5}), (1, {5}), (3, {3, 4, 5})])
def test_older_steps_that_are_kept_lose_their_optimizer_states(
    run: Run, keep_last: int, resumable: set[int]
) -> None:
    model = tiny()
    optimizer = adamw(model)
    learn(model, optimizer, 1)
    for step in range(1, 6):
        save(run, step, model, optimizers=[optimizer], keep_last=keep_last)
        checkpoint.set_best(run.path, 1)
    for step in run.checkpoints():
        if step in resumable:
            assert checkpoint.load(f"r@{step}").optim_state
            continue
        checkpoint.check(f"r@{step}")
        assert checkpoint.load(f"r@{step}", optimizer=False).step == step
        with raising(CheckpointError, "optim.pt", "--init-from"):
            checkpoint.load(f"r@{step}")


def test_which_checkpoints_stay(run: Run) -> None:
    for step in range(1, 11):
        save(run, step, keep_last=2)
        if step == 3:
            checkpoint.set_best(run.path, 3)
    assert run.checkpoints() == [3, 9, 10]
    assert pointed_step(run.path, "latest") == 10
    save(run, 11, keep_last=0)
    save(run, 11, keep_last=0, extra={"again": 1})
    assert checkpoint.load("r").extra == {"again": 1}, "saving a step again replaces it"
    assert run.checkpoints() == [3, 9, 10, 11]
    save(run, 12, keep_last=1)
    assert run.checkpoints() == [3, 12], "best and latest stay whatever the rule"
    assert {p.name for p in (run.path / "checkpoints").iterdir()} == {
        "best",
        "latest",
        "step_000003",
        "step_000012",
    }


def test_a_run_continues_from_the_step_before_a_damaged_one_as_the_message_says(run: Run) -> None:
    save(run, 3, extra={"n": 3})
    run.log(3, train_loss=3.0)
    folder = save(run, 6, extra={"n": 6})
    run.log(6, train_loss=6.0)
    run.stop("later")
    flip(folder / "model.pt")
    with raising(CheckpointError, folder, "--resume"):
        checkpoint.load("r")
    shutil.rmtree(folder)
    with Run.create("r", run.config, kind=run.status["kind"], resume=True) as again:
        assert again.resumed
        assert checkpoint.load(again.path).extra == {"n": 3}
        again.log(4, train_loss=4.0)
    assert again.metrics()["step"].tolist() == [3, 4]


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["torch.save", "os.fsync", "os.rename", "os.replace"])
def test_a_full_disk_leaves_the_former_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(run, 1, extra={"n": 1})
    with monkeypatch.context() as m:
        m.setattr(call, full_disk)
        for step in (2, 1):
            with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
                save(run, step, extra={"n": 4 - step})
    assert not [*(run.path / "checkpoints").glob("*.tmp"), *(run.path / "checkpoints").glob(".*")]
    assert checkpoint.load("r@1").extra["n"] in (1, 3)
    assert 1 in run.checkpoints()
    save(run, 3)
    assert checkpoint.load("r").step == 3


def test_a_write_beside_training_that_fails_is_raised_at_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    save(run, 1, model)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_step", full_disk)
        save(run, 2, model, wait=False)
        with pytest.raises(CheckpointError, match="step_000002"):
            save(run, 3, model, wait=False)
    with checkpoint.settled():
        save(run, 4, model, wait=False)
        model[0].weight.data.zero_()  # the copy was taken before
    assert run.checkpoints() == [1, 4]
    assert checkpoint.load("r").model_state["0.weight"].abs().sum() > 0


# ---- weights that stay in their file, and hashes that are kept


@pytest.fixture
def large(run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step whose files count as large and old."""
    monkeypatch.setattr(checkpoint, "NOTED_BYTES", 0)
    monkeypatch.setattr(checkpoint, "SETTLED_NS", 0)
    monkeypatch.setattr(checkpoint.MappedWeights, "LEAST", 64)
    return save(run, 1, tiny(width=40))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed."""
    names: list[str] = []
    record = checkpoint.file_record

    def noted(path: Path) -> dict[str, object]:
        names.append(path.name)
        return record(path)

    monkeypatch.setattr(checkpoint, "file_record", noted)
    return names


def assert_equal(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(right)
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


def test_weights_in_their_file_equal_those_read_whole(large: Path) -> None:
    mapped = checkpoint.load("r", mmap=True).model_state
    assert_equal(mapped, checkpoint.load("r").model_state)


def test_what_was_read_through_a_former_map_is_given_back(large: Path) -> None:
    mapped = checkpoint.load("r", mmap=True).model_state
    former = weakref.ref(mapped.tensors["0.weight"])
    assert mapped["0.weight"].shape == (40, 2)
    assert former() is None


def test_a_removed_file_is_read_to_its_end(large: Path) -> None:
    right = checkpoint.load("r").model_state
    mapped = checkpoint.load("r", mmap=True).model_state
    shutil.rmtree(large)
    assert_equal(mapped, right)


def test_a_replaced_file_is_not_mixed_with_the_former_one(large: Path, run: Run) -> None:
    right = checkpoint.load("r").model_state
    mapped = checkpoint.load("r", mmap=True).model_state
    torch.save({name: tensor + 1 for name, tensor in right.items()}, large / "new")
    os.replace(large / "new", large / "model.pt")
    assert_equal(mapped, right)


def test_a_large_file_is_hashed_once(large: Path, hashed: list[str]) -> None:
    checkpoint.load("r")
    assert sorted(hashed) == ["model.pt", "ranks.pt"]
    checkpoint.load("r")
    assert len(hashed) == 2


def test_a_changed_file_is_noticed_though_its_hash_was_kept(large: Path) -> None:
    checkpoint.load("r")
    content = bytearray((large / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (large / "model.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.pt is missing or damaged"):
        checkpoint.load("r")


def test_the_hash_of_a_file_that_was_just_written_is_not_kept(
    large: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SETTLED_NS", 10**12)
    checkpoint.load("r")
    checkpoint.load("r")
    assert len(hashed) == 4


def test_a_directory_that_cannot_be_written_is_hashed_every_time(
    large: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(checkpoint, "write_json", refuse)
    checkpoint.load("r")
    checkpoint.load("r")
    assert len(hashed) == 4


KILLED_WHILE_SAVING = Path(__file__).with_name("killed_while_saving.txt").read_text()  # a program


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "a new step"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    run: Run, home: Path, step: int
) -> None:
    repository = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(home), str(step)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 8, "every sync and rename of a save is a moment"


@pytest.fixture
def learned(run: Run) -> nn.Module:
    """A model with a checkpoint of it and its optimizer."""
    model = tiny(3)
    optimizer = adamw(model)
    learn(model, optimizer, 1)
    save(run, 1, model, optimizers=[optimizer])
    return model


def test_another_shape_is_an_error_with_both(learned: nn.Module) -> None:
    wide = tiny(5)
    before = wide[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"0.weight.*\(3, 2\).*\(5, 2\).*0.bias.*\(3,\)"):
        checkpoint.restore(checkpoint.load("r"), wide)
    assert torch.equal(before, wide[0].weight), "nothing is half loaded"


def test_another_architecture_is_an_error_with_both(learned: nn.Module) -> None:
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match="2.weight.*1.weight"):
        checkpoint.restore(checkpoint.load("r"), other)


def test_another_number_of_optimizers_is_an_error_with_both(learned: nn.Module) -> None:
    with pytest.raises(CheckpointError, match="1 optimizer.*2.*--optimizer"):
        checkpoint.restore_optimizers(
            checkpoint.load("r"), learned, [adamw(learned), adamw(learned)]
        )


def test_a_run_that_is_over_has_no_states_to_go_on_with(run: Run) -> None:
    save(run, 1, tiny())
    with pytest.raises(CheckpointError, match="its run is over.*--init-from"):
        checkpoint.restore_optimizers(checkpoint.load("r"), tiny(), [adamw(tiny())])


def test_an_optimizer_of_other_parameters_is_an_error(learned: nn.Module) -> None:
    other = torch.optim.AdamW([learned[0].weight])
    with pytest.raises(CheckpointError, match="AdamW"):
        checkpoint.restore_optimizers(checkpoint.load("r"), learned, [other])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["model.pt", "optim.pt", "ranks.pt"])
def test_damage_is_found(run: Run, name: str, damage: Callable[[Path], None]) -> None:
    model = tiny()
    path = save(run, 1, model, optimizers=[adamw(model)]) / name
    damage(path)
    with raising(CheckpointError, name):
        checkpoint.load("r@1")


def test_reading_never_executes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(run, 1)
    torch.save({"w": Bomb()}, path / "model.pt")
    meta = json.loads((path / "meta.json").read_text())
    data = (path / "model.pt").read_bytes()
    meta["files"]["model.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="model.pt"):
        checkpoint.load("r")
    assert not (tmp_path / "exploded").exists()
