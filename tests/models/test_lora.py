"""LoRA: only adapters learn, merging is exact, PEFT's files say what its documentation says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import resume_contract, weights
from safetensors.torch import load_file, save_file
from test_gpt import randomise

from codechat import grpo, preference, reinforce
from codechat.core import config
from codechat.core.errors import CheckpointError, ConfigError, UserError
from codechat.models import exchange, loading, lora
from codechat.models.config import LORA_TARGETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer

SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, n_kv_head=2, block_size=32, vocab_size=58, mlp="swiglu")
IDS = torch.randint(58, (2, 9), generator=torch.Generator().manual_seed(0))


def made(shape: GPTConfig = SHAPE) -> GPT:
    return randomise(GPT(shape), 0.1).train()


def moved(model: GPT) -> GPT:
    """As after some training: B is no longer zero."""
    with torch.no_grad():
        for i, (_, layer) in enumerate(lora.adapted(model)):
            layer.b.add_(torch.randn(layer.b.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return model


def write_peft(model: GPT, directory: Path, **more: Any) -> None:
    lora.save_peft(lora.adapters(model), model.cfg, 6.0, directory, **more)


def test_it_starts_from_the_model_as_it_is_and_trains_the_adapters_only() -> None:
    before = made()(IDS)
    model = lora.attach(made(), 3, 6.0, LORA_TARGETS)
    torch.testing.assert_close(model(IDS), before)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 5 and all(3 in p.shape for p in trained)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    torch.optim.SGD(trained, lr=1.0).step()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert (model(IDS) - before).abs().max() > 1e-3


def test_the_formula_and_merging_by_hand() -> None:
    """W x + (alpha / r) B A x, and the merged matrix is W + (alpha / r) B A."""
    model = moved(lora.attach(made(), 2, 8.0, ("qkv", "down")))
    layer, x = model.blocks[0].attn.qkv, torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), x @ layer.base.weight.T + 4.0 * (x @ layer.a.T) @ layer.b.T)
    plain = lora.merged(model)
    assert type(plain) is GPT and plain.state_dict().keys() == made().state_dict().keys()
    torch.testing.assert_close(plain(IDS), model(IDS), atol=1e-5, rtol=1e-5)
    assert plain.wte.weight.data_ptr() == model.wte.weight.data_ptr()  # only the adapted matrices are copies
    assert lora.merged(plain) is plain


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, mlp="relu2", qk_norm=True)], ids=["swiglu", "nano"])
@torch.no_grad()
def test_peft_loads_them_onto_the_exported_model(tmp_path: Path, runs_root: Path, shape: GPTConfig) -> None:
    """transformers with the export, peft with the adapters: our logits. And back: what peft saves is what we load."""
    transformers, peft = (pytest.importorskip(name, reason="needs the test extra") for name in ("transformers", "peft"))
    shape = replace(shape, vocab_size=300)
    targets = [t for t in LORA_TARGETS if t != "gate" or shape.mlp == "swiglu"]
    model = moved(lora.attach(made(shape), 3, 6.0, targets)).eval()
    meta = {"tokenizer": tokenizer.load("gpt2:299").to_dict(), "tags": "text"}
    with Run.create("base", {}, kind="test") as base:
        checkpoint.save(base.path, 1, model=made(shape), meta=meta)
    exchange.export(exchange.ExportConfig(ckpt="base", out=tmp_path / "out", dtype="float32"))
    write_peft(model, tmp_path / "adapter", base="out")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about.items() >= {"peft_type": "LORA", "r": 3, "lora_alpha": 6.0, "base_model_name_or_path": "out"}.items()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(IDS).logits, model(IDS), atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(lora.load_peft(made(shape), tmp_path / "again")(IDS), model(IDS), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_settings_of_peft_count_or_are_refused(tmp_path: Path) -> None:
    write_peft(moved(lora.attach(made(), 4, 6.0, ("qkv",))), tmp_path)
    path, name = tmp_path / "adapter_config.json", "blocks.0.attn.qkv.weight"
    about, before = json.loads(path.read_text()), made().state_dict()[name]

    def change(**settings: object) -> torch.Tensor:
        path.write_text(json.dumps(about | settings))
        return lora.load_peft(made(), tmp_path).state_dict()[name] - before

    plain = change(init_lora_weights="gaussian", lora_dropout=0.1, use_dora=False, rank_pattern={})
    assert plain.abs().max() > 0
    torch.testing.assert_close(change(use_rslora=True), 2 * plain)  # alpha / sqrt(4) for alpha / 4
    for settings in json.loads(Path(__file__).with_name("foreign.json").read_text())["not plain lora of rank 4"]:
        with pytest.raises(CheckpointError):
            change(**settings)
    for text in ("{}", "[]", "{"):
        path.write_text(text)
        with pytest.raises(UserError):
            lora.load_peft(made(), tmp_path)
    path.write_text(json.dumps(about))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    elsewhere = {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()}
    for foreign in (tensors | {"base_model.model.lm_head.bias": torch.ones(3)}, elsewhere):
        save_file(foreign, path)
        with pytest.raises(CheckpointError):
            lora.load_peft(made(), tmp_path)


@torch.no_grad()
def test_an_adapter_of_squared_relu_is_two_in_peft_that_are_equal(tmp_path: Path) -> None:
    """The exported gate projection repeats the up projection."""
    shape, path = replace(SHAPE, mlp="relu2", qk_norm=True), tmp_path / "adapter_model.safetensors"
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
            lora.load_peft(made(shape), tmp_path)


NOT_LORA = (dict(lora_alpha=0.0), dict(lora_targets=("q",)), dict(lora_targets=()))


def test_adapters_that_do_not_fit_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_peft(made(), tmp_path)
    with pytest.raises(UserError):
        lora.load_peft(made(), tmp_path)
    with pytest.raises(CheckpointError):
        lora.load(lora.attach(made(), 4), lora.adapters(lora.attach(made(), 2)))
    for settings in (dict(lora_rank=-1), *(dict(lora_rank=2) | more for more in NOT_LORA)):
        with pytest.raises(ConfigError):
            grpo.GRPOConfig(**settings)


@pytest.mark.parametrize(
    "loop", [pytest.param(reinforce, marks=pytest.mark.slow), grpo, pytest.param(preference, marks=pytest.mark.slow)]
)
def test_a_loop_with_adapters_resumes_bitwise_and_leaves_a_plain_model(loop: Any, home: Path) -> None:
    cls = {reinforce: reinforce.ReinforceConfig, grpo: grpo.GRPOConfig, preference: preference.PreferenceConfig}[loop]
    base = dict(max_steps=4, save_every=2, lora_rank=2, lora_targets=("qkv", "up"), init_from="start")
    base |= dict(sample_groups=8) if loop is preference else dict(diagnose_groups=0)
    first = dict(max_steps=1, diagnose_groups=0, run_name="start")
    toy = config.resolve(reinforce.ReinforceConfig, "toy", overrides=first, presets=reinforce.RUN_PRESETS)
    started = reinforce.train(toy)
    whole, _ = resume_contract(loop.train, config.resolve(cls, "toy", overrides=base, presets=loop.RUN_PRESETS), 2)
    a, start = weights(whole), weights(started)
    changed = {n.rpartition(".weight")[0].rpartition(".")[2] for n in a if not torch.equal(a[n], start[n])}
    assert changed == {"qkv", "up"}
    lora.save_peft(*lora.of_checkpoint("whole"), home / "adapter")  # the start and the adapter are the trained model
    again = lora.load_peft(loading.load_model("start").model, home / "adapter").state_dict()
    for name, tensor in a.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=1e-5)
    with pytest.raises(CheckpointError):
        lora.of_checkpoint("start")
