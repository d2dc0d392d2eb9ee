"""A model that only decodes: its weights stay in their file, and each is copied once."""

from typing import Any

import pytest
import torch

from codechat.core.errors import CheckpointError
from codechat.models import attention, loading, lora
from codechat.models.config import GPTConfig
from codechat.models.fast import reader
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer

META: dict[str, Any] = {"tokenizer": tokenizer.load("bytes").to_dict(), "lineage": []}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "ours": dict(),
    "GPT-2": dict(pos="learned", mlp="gelu"),
    "Qwen": dict(n_kv_head=2, mlp="swiglu", qkv_bias=True),
    "untied": dict(mlp="swiglu", qk_norm=True, tied=False),
    "latents": dict(attention="mla"),
}


def saved(**options: Any) -> GPT:
    shape = dict(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=257)
    model = GPT(GPTConfig(**shape | options))
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=rng)
    with Run.create("r", {}, kind="test") as run:
        checkpoint.save(run.path, 1, model=model, meta=META)
    return model.eval()


@torch.inference_mode()
def logits(decoder: Reader) -> torch.Tensor:
    """Of a prompt and of three tokens more, by a cache."""
    cache = attention.KVCache(decoder.model.cfg, 2, 63)
    found = []
    for n in (60, 1, 1, 1):
        ids = torch.arange(2 * n).view(2, n) % 257
        found.append(decoder.logits_of(decoder.model.hidden(ids, cache=cache)))
    return torch.cat(found, dim=1)


@pytest.fixture(params=["float32", "bfloat16"])
def products(request: pytest.FixtureRequest) -> Any:
    if request.param == "bfloat16":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    else:
        yield


@pytest.mark.parametrize("packed", [0, 1 << 62], ids=["packed", "not packed"])
@pytest.mark.parametrize("options", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_weights_in_their_file_decode_as_those_of_a_model(
    options: dict[str, Any], packed: int, products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PACKED", packed)
    monkeypatch.setattr(checkpoint.MappedWeights, "LEAST", 4096)
    model = saved(**options)
    right = logits(reader_of(model, graph=False))
    assert torch.equal(logits(loading.load_model("r", decodes=True).reader()), right)


def test_adapters_are_added_to_weights_in_their_file(products: None) -> None:
    base = saved()
    adapted = lora.attach(loading.load_model("r").model, 2)
    rng = torch.Generator().manual_seed(2)
    for layer in (layer for _, layer in lora.adapted(adapted)):
        torch.nn.init.normal_(layer.b, generator=rng)
    added = lora.adapters(adapted)
    scale = next(layer for _, layer in lora.adapted(adapted)).scale
    weights = checkpoint.Adapted(checkpoint.load("r", mmap=True).model_state, added, scale)
    with torch.device("meta"):
        empty = GPT(base.cfg)
    found = logits(reader_of(empty.eval(), weights=weights))
    assert torch.equal(found, logits(reader_of(lora.merged(adapted).eval(), graph=False)))


def test_few_changed_rows_of_an_embedding_leave_its_file_and_each_other_alone() -> None:
    """They are written into a map of the file, each time into another one."""
    saved()
    loaded = checkpoint.load("r", mmap=True)
    base = loaded.model_state
    rng = torch.Generator()
    rng.manual_seed(3)
    before = base["wte.weight"].clone()
    n_rows, width = before.shape
    a = torch.randn(2, width, generator=rng)
    b = torch.zeros(n_rows, 2)
    b[3] = torch.randn(2, generator=rng)
    b[7] = torch.randn(2, generator=rng)
    added = {
        "wte.weight.a": a,
        "wte.weight.b": b,
    }
    weights = checkpoint.Adapted(base, added, 0.5)
    right = before + 0.5 * b @ a
    first = weights["wte.weight"]
    torch.testing.assert_close(first, right)
    changed = (first != before).any(1)
    assert changed[3]
    assert changed[7]
    assert changed.sum() == 2
    assert torch.equal(weights["wte.weight"], first)
    assert torch.equal(base["wte.weight"], before)
    again = checkpoint.load("r", mmap=True).model_state
    assert torch.equal(again["wte.weight"], before)


def test_a_model_that_decodes_holds_no_weights_of_its_own() -> None:
    saved()
    loaded = loading.load_model("r", decodes=True)
    assert all(p.is_meta for p in loaded.model.parameters())
    assert loaded.device.type == "cpu"


def test_weights_of_another_shape_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved()
    other = GPTConfig(depth=1, n_embd=32, n_head=4, block_size=64, vocab_size=257)
    describe = loading.describe
    monkeypatch.setattr(loading, "describe", lambda path, meta: (other, *describe(path, meta)[1:]))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        loading.load_model("r", decodes=True)
