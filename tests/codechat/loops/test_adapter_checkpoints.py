"""Checkpoints of runs with adapters: A and B and the name of a base, never its weights; what
reads them gives base and adapters together, or says which base is missing or has changed."""

import shutil
from pathlib import Path
from typing import Any

import contracts
import pytest
import torch
from contracts import TINY, small, train, weights
from raising import raising
from random_models import randomise

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.formats import exchange, peft_format
from codechat.models import loading
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.text import tokenizer
from codechat.training.session import build_policy
from codechat_lab import bases

LORA = dict(lora_rank=2, lora_targets=("qkv", "up"))


def write_base(name: str = "base", seed: int = 0, step: int = 7) -> str:
    meta = dict(tokenizer=tokenizer.load("bytes").to_dict(), tags="reserved", lineage=[])
    model = GPT(TINY)
    model.init_weights(seed)
    with Run.create(name, {}, kind="sft", overwrite=paths.exists(name)) as run:
        checkpoint.save(run.path, step, model=randomise(model), meta=meta)
    return name


def settings(home: Path, **changes: Any) -> Any:
    usual = LORA | {"init_from": "base", "run_name": "tuned"}
    return small("sft", home, usual | changes)


@pytest.fixture
def tuned(home: Path) -> Run:
    write_base()
    return train(settings(home))


def test_a_checkpoint_holds_adapters_and_names_its_base(tuned: Run) -> None:
    folder = paths.find_checkpoint("tuned")
    meta = checkpoint.read_meta(folder)
    assert set(meta["files"]) == {"adapter.safetensors", "ranks.pt"}
    assert "optim.pt" in checkpoint.read_meta("tuned@2")["files"], "for --resume"
    assert meta["base"] == {
        "checkpoint": "base@7",
        "fingerprint": paths.fingerprint(checkpoint.read_meta("base")),
        "scale": 8.0,
        "sha256": "",
    }
    numbers = TINY.lora_params(2, ("qkv", "up"))
    written = (folder / "adapter.safetensors").stat().st_size
    assert 4 * numbers < written < 4 * numbers + 2000, "A and B in float32, and their names"


def test_a_finished_run_is_resumed_without_optimizer_states(tuned: Run, home: Path) -> None:
    before = weights(tuned)
    again = train(settings(home, resume=True))
    assert again.status["status"] == "finished"
    assert all(torch.equal(before[name], weight) for name, weight in weights(again).items())


def test_it_is_read_as_the_base_with_the_adapters_added(tuned: Run) -> None:
    ckpt = checkpoint.load("tuned")
    base = checkpoint.load("base").model_state
    for name, weight in ckpt.model_state.items():
        expected = base[name]
        if f"{name}.b" in ckpt.adapters:
            expected = expected + 8.0 * ckpt.adapters[f"{name}.b"] @ ckpt.adapters[f"{name}.a"]
            assert not torch.equal(weight, base[name])
        assert torch.equal(weight, expected), name
    assert ckpt.model_state.keys() == base.keys()


def test_a_frozen_embedding_is_read_from_the_file_of_its_base(home: Path) -> None:
    write_base()
    parent = checkpoint.load("base", optimizer=False, mmap=True)
    model = build_policy(settings(home, model=TINY), parent)
    rows = parent.model_state["wte.weight"]
    assert model.wte.weight.data_ptr() == rows.data_ptr()
    assert not model.wte.weight.requires_grad


@pytest.mark.parametrize("loop", ["sft", "grpo", "ppo", "preference"])
def test_a_run_on_a_base_resumes_bitwise(loop: str, home: Path) -> None:
    if loop == "sft":
        write_base()
    else:
        train(small("reinforce", home, run_name="base", max_steps=1))
    contracts.resume_contract(small(loop, home, LORA, init_from="base"), 2)
    assert "model.pt" not in checkpoint.read_meta("whole")["files"]


def test_adapters_of_random_weights_come_with_them(home: Path) -> None:
    train(settings(home, init_from=None))
    files = checkpoint.read_meta("tuned")["files"]
    assert {"model.pt", "adapter.safetensors"} <= set(files)
    assert "base" not in checkpoint.read_meta("tuned")


def test_a_base_that_was_deleted_is_named(tuned: Run) -> None:
    shutil.rmtree(paths.runs_dir() / "base")
    with raising(MissingFile, "tuned", "base@7", "missing", "put back"):
        checkpoint.load("tuned")


def test_a_base_that_was_changed_is_named(tuned: Run) -> None:
    shutil.rmtree(paths.runs_dir() / "base")
    write_base(seed=1)
    with raising(CheckpointError, "tuned", "base@7", "has changed", "put back"):
        checkpoint.load("tuned")


def test_a_base_that_is_damaged_is_named(tuned: Run) -> None:
    path = paths.find_checkpoint("base") / "model.pt"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with raising(CheckpointError, str(path), "damaged"):
        loading.load_model("tuned")


def test_a_base_that_was_moved_away_is_found(tuned: Run) -> None:
    before = weights(tuned)
    paths.move_away("base")
    write_base(seed=1)
    after = weights(tuned)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_base_outside_of_runs_is_named_by_its_path(home: Path, tmp_path: Path) -> None:
    write_base()
    elsewhere = tmp_path / "elsewhere"
    shutil.move(paths.runs_dir() / "base", elsewhere)
    train(settings(home, init_from=str(elsewhere)))
    named = checkpoint.read_meta("tuned")["base"]["checkpoint"]
    assert Path(named) == elsewhere.resolve() / "checkpoints" / "step_000007"
    loading.load_model("tuned")


def test_overwrite_refuses_to_delete_a_base_and_names_the_run_that_needs_it(tuned: Run) -> None:
    with raising(ConfigError, "base", "step 7", "tuned", "--run-name"):
        write_base(seed=1)
    loading.load_model("tuned")
    shutil.rmtree(tuned.path)
    write_base(seed=1)


def test_overwrite_refuses_the_base_of_a_run_that_has_saved_nothing_yet(home: Path) -> None:
    write_base()
    run = Run.create("tuned", settings(home), kind="sft", parent="base")
    with raising(ConfigError, "base", "step 7", "tuned"):
        write_base(seed=1)
    run.finish()
    write_base(seed=1)


def test_a_whole_model_with_the_meta_of_adapters_is_saved_whole(tuned: Run) -> None:
    loaded = loading.load_model("tuned")
    with Run.create("copy", {}, kind="sft") as run:
        checkpoint.save(run.path, 1, model=loaded.model, meta=loaded.meta)
    found = checkpoint.load("copy", optimizer=False)
    assert "base" not in found.meta
    assert all(torch.equal(found.model_state[name], w) for name, w in weights(tuned).items())


def test_overwrite_may_delete_the_run_that_needs_a_base(tuned: Run, home: Path) -> None:
    again = train(settings(home, overwrite=True))
    assert again.status["status"] == "finished"


@pytest.mark.parametrize("ref", ["tuned", "tuned@best", "tuned@4"])
def test_overwrite_refuses_a_base_of_what_the_same_command_reads(
    ref: str, tuned: Run, home: Path
) -> None:
    checkpoint.set_best(tuned.path, 4)
    cfg = small("sft", home, run_name="base", init_from=ref, overwrite=True)
    with raising(ConfigError, "base", "--init-from"):
        train(cfg)


def test_pruning_keeps_the_step_that_other_adapters_need(home: Path) -> None:
    write_base()
    first = train(settings(home, max_steps=2))
    train(settings(home, init_from="tuned@2", run_name="second", max_steps=2))
    before = weights(Run.open("second"))
    model = loading.load_model("base").model
    for step in (10, 11, 12):
        checkpoint.save(first.path, step, model=model, keep_last=1)
    assert first.checkpoints() == [2, 12]
    after = weights(Run.open("second"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_pruning_keeps_no_step_that_only_whole_weights_began_from(home: Path) -> None:
    write_base()
    train(small("sft", home, init_from="base@7", run_name="whole"))
    for step in (8, 9):
        checkpoint.save(
            paths.runs_dir() / "base", step, model=GPT(TINY).requires_grad_(False), keep_last=1
        )
    assert Run.open("base").checkpoints() == [9]


def test_adapters_on_adapters_name_the_run_between_and_resume_bitwise(
    tuned: Run, home: Path
) -> None:
    contracts.resume_contract(settings(home, init_from="tuned"), 2)
    meta = checkpoint.read_meta("whole")
    assert meta["base"]["checkpoint"] == "tuned@4"
    start = weights(tuned)
    ckpt = checkpoint.load("whole")
    name = "blocks.0.attn.qkv.weight"
    change = 8.0 * ckpt.adapters[f"{name}.b"] @ ckpt.adapters[f"{name}.a"]
    assert torch.equal(ckpt.model_state[name], start[name] + change)
    shutil.rmtree(paths.runs_dir() / "base")
    with raising(MissingFile, "tuned", "base@7"):
        loading.load_model("whole")


def test_all_weights_learn_from_a_run_with_adapters(tuned: Run, home: Path) -> None:
    still = {"max_steps": 1, "lr": 0.0, "muon_lr": 0.0}
    whole = train(small("sft", home, still, init_from="tuned", run_name="whole"))
    assert "model.pt" in checkpoint.read_meta("whole")["files"]
    start = weights(tuned)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weight, start[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["run", "huggingface"])
def test_an_export_holds_the_merged_weights(format: Any, tuned: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exchange.export(exchange.ExportConfig(ckpt="tuned", out=out, format=format, dtype="float32"))
    ref = str(out)
    if format == "huggingface":
        exchange.import_model(exchange.ImportConfig(source=out, run_name="back"))
        ref = "back"
    expected = weights(tuned)
    shutil.rmtree(paths.runs_dir() / "base")
    found = checkpoint.load(ref).model_state
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_peft_files_of_a_run_on_its_base_are_the_run(tuned: Run, tmp_path: Path) -> None:
    peft_format.save(*peft_format.of_checkpoint("tuned"), tmp_path)
    again = peft_format.load(loading.load_model("base").model, tmp_path).state_dict()
    for name, weight in weights(tuned).items():
        torch.testing.assert_close(again[name], weight, rtol=1e-5, atol=1e-6)


def test_a_run_with_adapters_is_no_export_that_may_be_replaced(tuned: Run) -> None:
    (tuned.path / "metrics.jsonl").unlink()
    with raising(ConfigError, "--out"):
        exchange.export(
            exchange.ExportConfig(ckpt="base", out=tuned.path, format="run", overwrite=True)
        )
    loading.load_model("tuned")


def test_a_pretrained_model_below_several_adapters_is_fetched(home: Path) -> None:
    write_base("base/smollm2")
    given = train(settings(home, init_from="base/smollm2", run_name="given"))
    folder = paths.find_checkpoint("given")
    meta = checkpoint.read_meta(folder) | dict(base="smollm2", optimizers=[])
    ckpt = checkpoint.load("given")
    checkpoint.write_step(folder, {"adapter.safetensors": ckpt.adapters}, meta, {})
    train(settings(home, init_from="given"))
    assert bases.base_of("tuned") == "smollm2"
    assert bases.base_of(str(given.path)) == "smollm2"
    assert bases.base_of("base/smollm2") is None
