"""Copies of weights for decoding: the same products, for as long as the context is open."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from codechat.distributed import sharding
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT


def model(**options: object) -> GPT:
    return GPT(GPTConfig(depth=2, n_embd=64, n_head=4, block_size=64, vocab_size=300, **options)).eval()


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_copies_give_the_products_of_the_weights(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a head that oneDNN packs."""
    monkeypatch.setattr(generate, "PACKED_HEAD", large)
    for options in ({}, dict(qkv_bias=True, mlp="swiglu"), dict(attention="mla")):
        for rows in (1, generate.FEW_ROWS, generate.FEW_ROWS + 1):
            gpt, ids = model(**options), torch.arange(rows)[:, None]
            with torch.no_grad():
                expected = gpt(ids)[:, 0]
                with generate.transposed(gpt) as logits_of:
                    logits = logits_of(gpt.hidden(ids)[:, 0])
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_only_few_rows_without_gradient_read_a_copy_while_the_context_is_open() -> None:
    gpt = model()
    layer = gpt.blocks[0].mlp.up
    few, many = torch.randn(1, 64), torch.randn(generate.FEW_ROWS + 1, 64)
    old = layer.weight.detach().clone()
    with pytest.raises(KeyError), generate.transposed(gpt):
        layer.weight.data.mul_(2)  # shows which of the two is read
        with torch.no_grad():
            torch.testing.assert_close(layer(few), F.linear(few, old))
            torch.testing.assert_close(layer(many), F.linear(many, 2 * old))
        torch.testing.assert_close(layer(few), F.linear(few, 2 * old))
        layer(few).sum().backward()
        raise KeyError
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer(few), F.linear(few, 2 * old))
    assert not any("forward" in vars(m) for m in gpt.blocks.modules() if isinstance(m, nn.Linear))


def test_a_copy_for_reading_shares_weights_that_have_its_dtype() -> None:
    plain = model()
    same, narrow = (sharding.plain_copy(plain, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert same.blocks[1].mlp.up.weight.data_ptr() == plain.blocks[1].mlp.up.weight.data_ptr()
    assert narrow.blocks[1].mlp.up.weight.dtype == torch.bfloat16
    assert narrow.norm.weight.data_ptr() == plain.norm.weight.data_ptr()
