"""PEFT's files of adapters: peft reads what we write, we read what it writes; what is no plain
LoRA raises."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import IDS, SHAPE, made, moved
from safetensors.torch import load_file, save_file

from codechat.core.errors import CheckpointError, ConfigError, UserError
from codechat.formats import exchange, peft_format
from codechat.models import lora
from codechat.models.config import LORA_TARGETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer


def write_peft(model: GPT, directory: Path, **more: Any) -> None:
    peft_format.save(lora.adapters(model), model.cfg, 6.0, directory, **more)


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, mlp="relu2", qk_norm=True)], ids=["swiglu", "nano"]
)
@torch.no_grad()
def test_peft_loads_them_onto_the_exported_model(
    tmp_path: Path, home: Path, shape: GPTConfig
) -> None:
    """transformers with the export, peft with the adapters: our logits. And back: what peft
    saves is what we load."""
    transformers, peft = (
        pytest.importorskip(name, reason="needs the test extra")
        for name in ("transformers", "peft")
    )
    shape = replace(shape, vocab_size=300)
    targets = [t for t in LORA_TARGETS if t != "gate" or shape.mlp == "swiglu"]
    model = moved(lora.attach(made(shape), 3, 6.0, targets)).eval()
    meta = {"tokenizer": tokenizer.load("gpt2:299").to_dict(), "tags": "text"}
    with Run.create("base", {}, kind="test") as base:
        checkpoint.save(base.path, 1, model=made(shape), meta=meta)
    exchange.export(exchange.ExportConfig(ckpt="base", out=tmp_path / "out", dtype="float32"))
    write_peft(model, tmp_path / "adapter", base="out")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (
        about.items()
        >= {
            "peft_type": "LORA",
            "r": 3,
            "lora_alpha": 6.0,
            "base_model_name_or_path": "out",
        }.items()
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(IDS).logits, model(IDS), atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(
        peft_format.load(made(shape), tmp_path / "again")(IDS),
        model(IDS),
        atol=1e-5,
        rtol=1e-5,
    )


@torch.no_grad()
def test_settings_of_peft_count_or_are_refused(tmp_path: Path) -> None:
    write_peft(moved(lora.attach(made(), 4, 6.0, ("qkv",))), tmp_path)
    path = tmp_path / "adapter_config.json"
    name = "blocks.0.attn.qkv.weight"
    about = json.loads(path.read_text())
    before = made().state_dict()[name]

    def change(**settings: object) -> torch.Tensor:
        path.write_text(json.dumps(about | settings))
        return peft_format.load(made(), tmp_path).state_dict()[name] - before

    plain = change(init_lora_weights="gaussian", lora_dropout=0.1, use_dora=False, rank_pattern={})
    assert plain.abs().max() > 0
    torch.testing.assert_close(change(use_rslora=True), 2 * plain)  # alpha / sqrt(4) for alpha / 4
    for settings in json.loads(Path(__file__).with_name("foreign.json").read_text())[
        "not plain lora of rank 4"
    ]:
        with pytest.raises(CheckpointError):
            change(**settings)
    for text in ("{}", "[]", "{"):
        path.write_text(text)
        with pytest.raises(UserError):
            peft_format.load(made(), tmp_path)
    path.write_text(json.dumps(about))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    elsewhere = {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()}
    for foreign in (tensors | {"base_model.model.lm_head.bias": torch.ones(3)}, elsewhere):
        save_file(foreign, path)
        with pytest.raises(CheckpointError):
            peft_format.load(made(), tmp_path)


@torch.no_grad()
def test_an_adapter_of_squared_relu_is_two_in_peft_that_are_equal(tmp_path: Path) -> None:
    """The exported gate projection repeats the up projection."""
    shape = replace(SHAPE, mlp="relu2", qk_norm=True)
    path = tmp_path / "adapter_model.safetensors"
    write_peft(moved(lora.attach(made(shape), 3, 6.0, ("up", "down"))), tmp_path)
    tensors = load_file(path)
    gates = {k for k in tensors if "gate_proj" in k}
    assert len(gates) == 4
    for other in (
        *({k: v for k, v in tensors.items() if name not in k} for name in ("gate_proj", "up_proj")),
        tensors | {k: tensors[k] + 1 for k in gates},
    ):
        save_file(other, path)
        with pytest.raises(CheckpointError):
            peft_format.load(made(shape), tmp_path)


def test_a_model_and_a_directory_without_adapters_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_peft(made(), tmp_path)
    with pytest.raises(UserError):
        peft_format.load(made(), tmp_path)


def test_adapters_of_latent_attention_have_no_names_in_peft(tmp_path: Path) -> None:
    shape = replace(SHAPE, attention="mla", n_kv_head=None)
    with pytest.raises(ConfigError, match="model.attention mla"):
        write_peft(lora.attach(made(shape), 4), tmp_path)
