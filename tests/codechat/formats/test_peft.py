"""PEFT's files of adapters: peft reads what we write, we read what it writes; what is no plain
LoRA raises."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from random_models import IDS, SHAPE, made, moved
from safetensors.torch import load_file, save_file

from codechat.core.errors import CheckpointError, ConfigError, UserError
from codechat.formats import exchange, peft_format
from codechat.models import lora
from codechat.models.config import LORA_TARGETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.text import tokenizer


def write_peft(model: GPT, directory: Path, base: str | None = None) -> None:
    peft_format.save(lora.adapters(model), model.cfg, 6.0, directory, base=base)


def attached(shape: GPTConfig = SHAPE, rank: int = 3, targets: Sequence[str] = ("qkv",)) -> GPT:
    """A model with adapters that change its logits."""
    return moved(lora.attach(made(shape), rank, 6.0, targets)).eval()


class Adapted(NamedTuple):
    """A model with adapters on all its matrices, and peft's model of its files."""

    shape: GPTConfig
    ours: GPT
    folder: Path
    theirs: Any


@pytest.fixture(
    scope="module",
    params=[SHAPE, replace(SHAPE, mlp="relu2", qk_norm=True)],
    ids=["swiglu", "nano"],
)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """transformers has the export, peft adds the adapters."""
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    peft = pytest.importorskip("peft", reason="needs the test extra")
    shape = replace(request.param, vocab_size=300)
    root = tmp_path_factory.mktemp("peft")
    ours = attached(shape, 3, [t for t in LORA_TARGETS if t != "gate" or shape.mlp == "swiglu"])
    meta = {"tokenizer": tokenizer.load("gpt2:299").to_dict(), "tags": "text"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        with Run.create("base", {}, kind="test") as base:
            checkpoint.save(base.path, 1, model=made(shape), meta=meta)
        exchange.export(exchange.ExportConfig(ckpt="base", out=root / "out", dtype="float32"))
    write_peft(ours, root / "adapter", base="out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "out")
    theirs = peft.PeftModel.from_pretrained(theirs, root / "adapter").eval()
    return Adapted(shape, ours, root / "adapter", theirs)


def test_a_file_of_adapters_names_its_base_its_rank_and_its_scale(adapted: Adapted) -> None:
    about = json.loads((adapted.folder / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA"
    assert about["r"] == 3
    assert about["lora_alpha"] == 6.0
    assert about["base_model_name_or_path"] == "out"


@torch.no_grad()
def test_peft_computes_our_logits_on_the_exported_model(adapted: Adapted) -> None:
    torch.testing.assert_close(adapted.theirs(IDS).logits, adapted.ours(IDS), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_what_peft_saves_is_what_we_load(adapted: Adapted, tmp_path: Path) -> None:
    adapted.theirs.save_pretrained(tmp_path)
    again = peft_format.load(made(adapted.shape), tmp_path)
    torch.testing.assert_close(again(IDS), adapted.ours(IDS), atol=1e-5, rtol=1e-5)


NAME = "blocks.0.attn.qkv.weight"


@pytest.fixture
def of_rank_4(tmp_path: Path) -> Path:
    """A folder with adapters of one matrix of each block."""
    write_peft(attached(rank=4), tmp_path)
    return tmp_path


@torch.no_grad()
def change_by(folder: Path, settings: dict[str, Any]) -> torch.Tensor:
    """What the adapters add to a matrix under other settings of peft."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return peft_format.load(made(), folder).state_dict()[NAME] - made().state_dict()[NAME]


def test_settings_of_peft_that_only_training_reads_change_nothing(of_rank_4: Path) -> None:
    plain = change_by(of_rank_4, {})
    settings = {
        "init_lora_weights": "gaussian",
        "lora_dropout": 0.1,
        "use_dora": False,
        "rank_pattern": {},
    }
    assert plain.abs().max() > 0
    assert torch.equal(change_by(of_rank_4, settings), plain)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(of_rank_4: Path) -> None:
    plain = change_by(of_rank_4, {})
    # alpha / sqrt(4) for alpha / 4
    torch.testing.assert_close(change_by(of_rank_4, {"use_rslora": True}), 2 * plain)


NOT_PLAIN = json.loads(Path(__file__).with_name("foreign.json").read_text())[
    "not plain lora of rank 4"
]


@pytest.mark.parametrize("settings", NOT_PLAIN, ids=str)
def test_settings_of_peft_that_are_no_plain_lora_are_refused(
    settings: dict[str, Any], of_rank_4: Path
) -> None:
    with pytest.raises(CheckpointError):
        change_by(of_rank_4, settings)


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_settings_that_cannot_be_read_are_refused(text: str, of_rank_4: Path) -> None:
    (of_rank_4 / "adapter_config.json").write_text(text)
    with pytest.raises(UserError):
        peft_format.load(made(), of_rank_4)


def refused(folder: Path, tensors: dict[str, torch.Tensor], shape: GPTConfig = SHAPE) -> None:
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError):
        peft_format.load(made(shape), folder)


def test_a_tensor_that_is_no_adapter_is_refused(of_rank_4: Path) -> None:
    tensors = load_file(of_rank_4 / "adapter_model.safetensors")
    refused(of_rank_4, tensors | {"base_model.model.lm_head.bias": torch.ones(3)})


def test_adapters_of_a_layer_that_the_model_lacks_are_refused(of_rank_4: Path) -> None:
    tensors = load_file(of_rank_4 / "adapter_model.safetensors")
    refused(of_rank_4, {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()})


SQUARED = replace(SHAPE, mlp="relu2", qk_norm=True)


@pytest.fixture
def of_squared_relu(tmp_path: Path) -> Path:
    """The exported gate projection repeats the up projection."""
    write_peft(attached(SQUARED, 3, ("up", "down")), tmp_path)
    return tmp_path


def test_an_adapter_of_squared_relu_is_written_for_the_gate_too(of_squared_relu: Path) -> None:
    tensors = load_file(of_squared_relu / "adapter_model.safetensors")
    gates = [name for name in tensors if "gate_proj" in name]
    assert len(gates) == 4
    for name in gates:
        assert torch.equal(tensors[name], tensors[name.replace("gate_proj", "up_proj")])


@pytest.mark.parametrize("missing", ["gate_proj", "up_proj"])
def test_one_of_the_two_adapters_of_squared_relu_alone_is_refused(
    missing: str, of_squared_relu: Path
) -> None:
    tensors = load_file(of_squared_relu / "adapter_model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if missing not in name}
    refused(of_squared_relu, left, SQUARED)


def test_two_adapters_of_squared_relu_that_differ_are_refused(of_squared_relu: Path) -> None:
    tensors = load_file(of_squared_relu / "adapter_model.safetensors")
    moved_gates = {name: t + 1 for name, t in tensors.items() if "gate_proj" in name}
    refused(of_squared_relu, tensors | moved_gates, SQUARED)


def test_a_model_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_peft(made(), tmp_path)


def test_a_directory_without_adapters_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        peft_format.load(made(), tmp_path)


def test_adapters_of_latent_attention_have_no_names_in_peft(tmp_path: Path) -> None:
    shape = replace(SHAPE, attention="mla", n_kv_head=None)
    with pytest.raises(ConfigError, match="model.attention mla"):
        write_peft(lora.attach(made(shape), 4), tmp_path)
