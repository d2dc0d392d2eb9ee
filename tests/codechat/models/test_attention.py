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
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.models.masks import Documents
from codechat.text import tokenizer
from codechat_lab.serve.call_grammar import Rules, call_grammar

SHAPE = GPTConfig(depth=2, n_embd=64, n_head=4, block_size=256, vocab_size=300)
GROUPED = replace(SHAPE, n_kv_head=2)
LATENT = replace(SHAPE, attention="mla")
DOCS = torch.tensor(
    [
        [0] * 50 + [1] * 60 + [2] * 90 + [-1] * 56,
        [0] * 256,
    ]
)
BRANCHES = (torch.arange(256) // 20 % 3).expand(2, 256).contiguous()


def random_model(shape: GPTConfig) -> GPT:
    return randomise(GPT(shape), 0.1)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_packed_rows_give_the_same_losses_and_gradients(shape: GPTConfig) -> None:
    """Flex attention refuses a backward pass on a CPU, although what it is without the compiler
    has one."""
    model = random_model(shape)
    ids = random_ids(*DOCS.shape)
    targets = ids.masked_fill(DOCS < 0, -100)
    positions = torch.arange(256).expand(2, 256)

    def values(branched: Any) -> list[Tensor]:
        model.zero_grad()
        mask = conversations.packed_mask(DOCS)
        loss = model.loss(ids, targets, positions=positions, mask=mask)
        logprobs, _ = model.token_logprobs(ids, targets, positions=positions, mask=branched)
        objective = loss + (logprobs * torch.linspace(-1, 1, 256)).sum()
        objective.backward()
        return [loss.detach(), logprobs.detach(), *(p.grad for p in model.parameters())]

    want = values(fast.packed_mask(DOCS, BRANCHES))
    with on_gpu.as_on_a_gpu():
        found = values(fast.packed_mask(DOCS, BRANCHES))
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def gradient(shape: GPTConfig, products: bool, dtype: torch.dtype) -> Tensor:
    """Of a model's loss, with or without `attention_products`, as one vector."""
    model = GPT(replace(shape, attention_products=products))
    for block in model.blocks:
        rng = torch.Generator().manual_seed(1)
        torch.nn.init.normal_(block.attn.out.weight, std=0.1, generator=rng)
    ids = random_ids(2, 150)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


WIDE_HEADS = replace(SHAPE, n_head=2, block_size=160)
with_and_without_products = pytest.mark.parametrize(
    "shape",
    [replace(WIDE_HEADS, qk_norm=True), replace(WIDE_HEADS, attention="mla")],
    ids=["qk_norm", "latent"],
)


@with_and_without_products
def test_under_bfloat16_autocast_gradients_of_products_point_the_same_way(
    shape: GPTConfig,
) -> None:
    plain = gradient(shape, products=False, dtype=torch.bfloat16)
    other = gradient(shape, products=True, dtype=torch.bfloat16)
    assert torch.cosine_similarity(plain, other, dim=0) > 0.999
    assert not torch.equal(plain, other)


@with_and_without_products
def test_in_float32_products_change_nothing(shape: GPTConfig) -> None:
    plain = gradient(shape, products=False, dtype=torch.float32)
    other = gradient(shape, products=True, dtype=torch.float32)
    assert torch.equal(plain, other)


@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["heads", "grouped"])
def test_decoding_on_a_gpu_gives_torchs_attention_no_mask(
    shape: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free and under a grammar, behind prompts of different lengths: the same completions."""
    tok = tokenizer.load("gpt2:512")
    model = random_model(replace(shape, vocab_size=tok.n_vocab))
    tool = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
    grammar = call_grammar(tok, "reserved", [tool], Rules(required=True))
    prompts = [[1, 2, 3], [4], [5] * 9]
    masks = []
    sdpa = F.scaled_dot_product_attention

    def recorded(*qkv: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        masks.append(attn_mask is not None)
        return sdpa(*qkv, attn_mask=attn_mask, **others)

    def completions() -> list[Completion]:
        one = generate.sample(model, prompts, graph=False, max_new_tokens=12, seed=0)
        two = generate.sample(
            model, prompts, graph=False, max_new_tokens=12, seed=0, samples_per_prompt=2
        )
        grammars = [None, grammar, grammar]
        called = generate.sample(model, prompts, grammars=grammars, max_new_tokens=12, seed=0)
        return one + two + called

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    expected = completions()
    masks.clear()
    monkeypatch.setattr(device, "CPU_KINDS", ())
    found = completions()
    assert masks
    assert not any(masks)
    for mine, masked in zip(found, expected, strict=True):
        assert mine.ids == masked.ids
        torch.testing.assert_close(
            torch.tensor(mine.logprobs), torch.tensor(masked.logprobs), atol=1e-5, rtol=1e-5
        )


def mask_by_definition(seen: Documents) -> Tensor:
    """(B, 1, T, T), written anew because `Documents.mask` has the rule of its pieces: a token
    sees itself, and the earlier ones of its document that are of its branch or of none."""
    rows, length = seen.docs.shape
    branch = torch.zeros_like(seen.docs) if seen.branches is None else seen.branches
    mask = torch.eye(length, dtype=torch.bool).repeat(rows, 1, 1, 1)
    for row in range(rows):
        for i in range(length):
            if seen.docs[row, i] < 0:  # padding
                continue
            for j in range(i):
                same_document = seen.docs[row, i] == seen.docs[row, j]
                mask[row, 0, i, j] = same_document and branch[row, j] in (0, branch[row, i])
    return mask


def assert_as_masked(seen: Documents, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """Attention piece by piece is attention under the mask, with gradients. queries, keys:
    shapes; values have that of keys."""
    rng = torch.Generator().manual_seed(0)

    def leaf(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    q = leaf(queries)
    k = leaf(keys)
    v = leaf(keys)
    mask = mask_by_definition(seen)
    assert torch.equal(seen.mask, mask)
    found = attention.attend(q, k, v, seen, causal=True)
    want = attention.attend(q, k, v, mask, causal=True)
    real = (seen.docs >= 0)[:, None, :, None]
    # the softmax is float32
    torch.testing.assert_close(found * real, want * real, atol=1e-6, rtol=1e-6)
    # a loss never reaches padding
    up = torch.randn(found.shape, generator=rng, dtype=torch.float64) * real
    found_slopes = torch.autograd.grad(found, (q, k, v), up)
    want_slopes = torch.autograd.grad(want, (q, k, v), up)
    for mine, theirs in zip(found_slopes, want_slopes, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def numbered(lengths: list[int], padding: int = 0) -> list[int]:
    """The number of its document for each token of a row, -1 for padding."""
    row = []
    for number, length in enumerate(lengths):
        row += [number] * length
    return row + [-1] * padding


@pytest.fixture
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fast.Pieces:
    """Two rows of three documents, in pieces that do not divide them, three to a product."""
    padding = request.param
    monkeypatch.setattr(fast, "QUERIES", 16)
    monkeypatch.setattr(fast, "ABREAST", 3)
    first = numbered([37, 3, 20 - padding], padding)
    second = numbered([1, 16, 43 - padding], padding)
    return fast.Pieces(torch.tensor([first, second]))


@pytest.mark.parametrize("packed", [0, 5], indirect=True, ids="{} of padding".format)
def test_a_piece_has_just_the_keys_that_one_of_it_sees(packed: fast.Pieces) -> None:
    assert [len(some.keys) for some in packed.plan.alike] == [3, 3, 2]
    used = sum((some.keys < packed.docs.numel()).sum() for some in packed.plan.alike)
    assert used == sum(block.any(2).sum() for block in packed.mask.split(16, dim=2))


@pytest.mark.parametrize("packed, key_heads", [(0, 6), (5, 2)], indirect=["packed"])
def test_attention_by_documents_is_attention_under_their_mask(
    packed: fast.Pieces, key_heads: int
) -> None:
    length = packed.docs.shape[1]
    assert_as_masked(packed, queries=(2, 6, length, 8), keys=(2, key_heads, length, 8))


def test_branches_see_the_prompt_and_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents in a row, with branches that come back after others."""
    monkeypatch.setattr(fast, "QUERIES", 8)
    docs = torch.tensor([numbered([24, 14, 16], padding=2)])
    # (branch, tokens) of each document, then of the padding
    runs = [(0, 5), (1, 10), (2, 3), (1, 2), (0, 2), (2, 2)]
    runs += [(0, 3), (1, 5), (2, 6)]
    runs += [(0, 4), (1, 3), (2, 4), (3, 2), (4, 1), (3, 2)]
    runs += [(0, 2)]
    branches = [branch for branch, tokens in runs for _ in range(tokens)]
    seen = fast.Pieces(docs, torch.tensor([branches]))
    assert_as_masked(seen, queries=(1, 2, 56, 8), keys=(1, 2, 56, 8))


def test_packed_rows_keep_no_heads_but_those_they_need() -> None:
    """Queries, keys and values are parts of one tensor, which a view would keep whole."""
    heads = torch.randn(2, 256, 8, 16, requires_grad=True)
    q, k, v = heads.transpose(1, 2).split((6, 1, 1), dim=1)
    kept = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.untyped_storage().nbytes() / saved.numel() / saved.element_size())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        attention.attend(q, k, v, fast.packed_mask(DOCS), causal=True, products=False)
    assert max(kept) == 1.0
