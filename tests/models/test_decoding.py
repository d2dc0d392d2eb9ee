"""Pre-transposed weights: the same products, for as long as the context is open."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sync_count import on_meta
from torch import nn

from codechat.models import decoding
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT


def model(**options: object) -> GPT:
    return GPT(GPTConfig(depth=2, n_embd=64, n_head=4, block_size=64, vocab_size=300, **options)).eval()


@pytest.mark.parametrize("rows", [1, decoding.FEW_ROWS, decoding.FEW_ROWS + 1])
@pytest.mark.parametrize("options", [{}, dict(qkv_bias=True, mlp="swiglu"), dict(attention="mla")], ids=str)
def test_copies_give_the_products_of_the_weights(rows: int, options: dict[str, object]) -> None:
    gpt, ids = model(**options), torch.arange(rows)[:, None]
    with torch.no_grad():
        expected = gpt(ids)[:, 0]
        with gpt.decoding() as logits_of:
            found = logits_of(gpt.hidden(ids)[:, 0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_only_few_rows_without_gradient_read_a_copy() -> None:
    layer = nn.Linear(8, 8, bias=False)
    few, many = torch.randn(1, 8), torch.randn(decoding.FEW_ROWS + 1, 8)
    old = layer.weight.detach().clone()
    with decoding.prepared(nn.ModuleList([layer]), lambda: layer.weight):
        layer.weight.data.mul_(2)  # shows which of the two is read
        with torch.no_grad():
            torch.testing.assert_close(layer(few), F.linear(few, old))
            torch.testing.assert_close(layer(many), F.linear(many, 2 * old))
        torch.testing.assert_close(layer(few), F.linear(few, 2 * old))
        layer(few).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer(few), F.linear(few, 2 * old))


def test_copies_are_dropped_when_the_context_closes() -> None:
    gpt = model()
    linear = [m for m in gpt.blocks.modules() if isinstance(m, nn.Linear)]
    with pytest.raises(KeyError), gpt.decoding():
        assert all("forward" in vars(m) for m in linear)
        raise KeyError
    assert not any("forward" in vars(m) for m in linear)


def test_a_large_head_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PACKED_HEAD", 1)
    gpt, x = model(), torch.randn(3, 64)
    with torch.no_grad(), gpt.decoding() as logits_of:
        torch.testing.assert_close(logits_of(x), F.linear(x, gpt.head_weight()), atol=1e-5, rtol=1e-5)


def test_only_a_cpu_reads_transposed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, here on the meta device, weights of the dtype of compute are read where they are."""
    monkeypatch.setattr(decoding, "_transposed", lambda *_: pytest.fail("a weight was transposed"))
    with on_meta(), torch.no_grad():
        elsewhere, ids = model().to("meta"), torch.zeros(3, 1, dtype=torch.long, device="meta")
        with elsewhere.decoding() as logits_of:
            assert logits_of(elsewhere.hidden(ids)[:, 0]).shape == (3, 320)
    plain = model()
    copy, weight = decoding.reader(plain)
    assert copy.blocks[1].mlp.up.weight.data_ptr() == plain.blocks[1].mlp.up.weight.data_ptr()
    assert weight.data_ptr() == plain.wte.weight.data_ptr()
