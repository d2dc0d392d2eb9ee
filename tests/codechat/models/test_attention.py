"""Attention: the block mask of a GPU is the dense one of a CPU, pieces are attention under
their mask, and on a GPU no mask reaches torch's dense attention."""

from dataclasses import replace
from typing import Any

import on_gpu
import pytest
import torch
import torch.nn.functional as F
from random_models import randomise
from torch import Tensor

from codechat.data import conversations
from codechat.models import attention, generate
from codechat.models.config import GPTConfig
from codechat.models.fast import attention as fast
from codechat.models.fast import device
from codechat.models.gpt import GPT
from codechat.models.masks import Documents
from codechat.text import tokenizer
from codechat_lab.serve.call_grammar import Rules, call_grammar

SHAPE = GPTConfig(depth=2, n_embd=64, n_head=4, block_size=256, vocab_size=300)
DOCS = torch.tensor([[0] * 50 + [1] * 60 + [2] * 90 + [-1] * 56, [0] * 256])
BRANCHES = (torch.arange(256) // 20 % 3).expand(2, 256).contiguous()


def random_model(**options: Any) -> GPT:
    return randomise(GPT(replace(SHAPE, **options)), 0.1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", [dict(n_kv_head=2), dict(attention="mla")], ids=str)
def test_packed_rows_give_the_same_losses_and_gradients(options: dict[str, Any]) -> None:
    """Flex attention refuses a backward pass on a CPU, although what it is without the compiler
    has one."""
    model = random_model(**options)
    ids = torch.randint(300, DOCS.shape, generator=torch.Generator().manual_seed(0))
    targets = ids.masked_fill(DOCS < 0, -100)
    positions = torch.arange(256).expand(2, 256)

    def values(branched: Any) -> list[Tensor]:
        model.zero_grad()
        loss = model.loss(ids, targets, positions=positions, mask=conversations.packed_mask(DOCS))
        logprobs, _ = model.token_logprobs(ids, targets, positions=positions, mask=branched)
        (loss + (logprobs * torch.linspace(-1, 1, 256)).sum()).backward()
        return [loss.detach(), logprobs.detach(), *(p.grad for p in model.parameters())]

    want = values(fast.packed_mask(DOCS, BRANCHES))
    with on_gpu.as_on_a_gpu():
        for got, expected in zip(values(fast.packed_mask(DOCS, BRANCHES)), want):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(qk_norm=True), dict(attention="mla")], ids=str)
def test_a_model_with_products_learns_as_one_without(options: dict[str, Any]) -> None:
    """Under bfloat16 autocast the gradients point the same way; in float32 the option changes
    nothing."""
    shape = GPTConfig(depth=2, n_embd=64, n_head=2, block_size=160, vocab_size=300, **options)
    ids = torch.randint(300, (2, 150), generator=torch.Generator().manual_seed(0))

    def gradient(products: bool, dtype: torch.dtype) -> torch.Tensor:
        model = GPT(replace(shape, attention_products=products))
        for block in model.blocks:
            torch.nn.init.normal_(
                block.attn.out.weight, std=0.1, generator=torch.Generator().manual_seed(1)
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    plain, other = (gradient(products, torch.bfloat16) for products in (False, True))
    assert torch.cosine_similarity(plain, other, dim=0) > 0.999
    assert not torch.equal(plain, other)
    assert torch.equal(*(gradient(products, torch.float32) for products in (False, True)))


def test_decoding_on_a_gpu_gives_torchs_attention_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free and under a grammar, behind prompts of different lengths: the same completions."""
    tok = tokenizer.load("gpt2:512")
    masks = []
    sdpa = F.scaled_dot_product_attention
    tool = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
    grammar = call_grammar(tok, "reserved", [tool], Rules(required=True))
    prompts = [[1, 2, 3], [4], [5] * 9]

    def recorded(*qkv: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        masks.append(attn_mask is not None)
        return sdpa(*qkv, attn_mask=attn_mask, **how)

    def completions(model: GPT) -> list[Any]:
        how = dict(max_new_tokens=12, seed=0)
        found = generate.sample(model, prompts, graph=False, **how)
        found += generate.sample(model, prompts, graph=False, samples_per_prompt=2, **how)
        return found + generate.sample(model, prompts, grammars=[None, grammar, grammar], **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    for options in ({}, dict(n_kv_head=2)):
        model = random_model(vocab_size=tok.n_vocab, **options)
        expected = completions(model)
        masks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(device, "CPU_KINDS", ())
            found = completions(model)
        assert masks
        assert not any(masks)
        for mine, masked in zip(found, expected, strict=True):
            assert mine.ids == masked.ids
            torch.testing.assert_close(
                torch.tensor(mine.logprobs),
                torch.tensor(masked.logprobs),
                atol=1e-5,
                rtol=1e-5,
            )


def assert_as_masked(seen: Documents, *shapes: tuple[int, ...], rng: torch.Generator) -> None:
    """Attention piece by piece is attention under the mask, with gradients. shapes: of queries,
    keys and values."""
    q, k, v = (torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes)
    real, (B, T) = (seen.docs >= 0)[:, None, :, None], seen.docs.shape
    branch = torch.zeros_like(seen.docs) if seen.branches is None else seen.branches
    mask = torch.eye(T, dtype=torch.bool).repeat(
        B,
        1,
        1,
        1,
    )  # written anew: `Documents.mask` has the rule of its pieces
    for b, i, j in (
        (b, i, j) for b in range(B) for i in range(T) for j in range(i) if seen.docs[b, i] >= 0
    ):
        mask[b, 0, i, j] = seen.docs[b, i] == seen.docs[b, j] and branch[b, j] in (0, branch[b, i])
    assert torch.equal(seen.mask, mask)
    found, want = (attention.attend(q, k, v, how, causal=True) for how in (seen, mask))
    torch.testing.assert_close(
        found * real, want * real, atol=1e-6, rtol=1e-6
    )  # the softmax is float32
    up = (
        torch.randn(found.shape, generator=rng, dtype=torch.float64) * real
    )  # a loss never reaches padding
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), up), torch.autograd.grad(want, (q, k, v), up)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_attention_by_documents_is_attention_under_their_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces that do not divide the documents, three to a product; a piece has just the keys
    that one of it sees."""
    monkeypatch.setattr(fast, "QUERIES", 16)
    monkeypatch.setattr(fast, "ABREAST", 3)
    for groups, padding in ((1, 0), (3, 5)):
        lengths = [(37, 3, 20 - padding), (1, 16, 43 - padding)]
        docs = torch.tensor(
            [[d for d, n in enumerate(row) for _ in range(n)] + [-1] * padding for row in lengths]
        )
        T = docs.shape[1]
        seen = fast.Pieces(docs)
        assert [len(some.keys) for some in seen.plan.alike] == [3, 3, 2]
        used = sum((some.keys < docs.numel()).sum() for some in seen.plan.alike)
        assert used == sum(block.any(2).sum() for block in seen.mask.split(16, dim=2))
        keyed = (2, 6 // groups, T, 8)
        assert_as_masked(seen, (2, 6, T, 8), keyed, keyed, rng=torch.Generator().manual_seed(0))


def test_branches_see_the_prompt_and_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents in a row, with branches that come back after others."""
    monkeypatch.setattr(fast, "QUERIES", 8)
    docs = torch.tensor([[0] * 24 + [1] * 14 + [2] * 16 + [-1] * 2])
    runs = [(0, 5), (1, 10), (2, 3), (1, 2), (0, 2), (2, 2), (0, 3), (1, 5), (2, 6)]
    runs += [(0, 4), (1, 3), (2, 4), (3, 2), (4, 1), (3, 2), (0, 2)]
    seen = fast.Pieces(docs, torch.tensor([[b for b, n in runs for _ in range(n)]]))
    assert_as_masked(seen, *[(1, 2, 56, 8)] * 3, rng=torch.Generator().manual_seed(0))
