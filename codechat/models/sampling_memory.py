"""How many completions a device samples at once: rows whose keys, values and logits fit beside the weights. No torch:
`codechat plan` reads it too.

Counted: a copy of the weights in the dtype of compute, each row's keys and values with its share of its prompt's, its
logits, the states of one prefill pass, the scores of one block's attention.
"""

from __future__ import annotations

from codechat.models.config import GPTConfig

SPARE = 0.1  # of the free memory, for what the allocator cannot use
PREFILL_TOKENS = 16384  # of one prefill pass on a GPU: more are no faster, and their states would take the rows' memory
SMALLEST = 4  # slots of a static batch: a shape of 1 would be compiled apart
COLUMNS = 16  # a static cache's room is a multiple of it, and one multiple longer than what is used (`decode_graph`)


def bucket(rows: int) -> int:
    """Slots of a static batch for so many rows: powers of two, and halfway between them."""
    power = max(SMALLEST, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if rows <= power * 3 // 4 and power > SMALLEST else power


def weight_bytes(cfg: GPTConfig, size: int) -> int:
    """Matrices of the blocks and the output head, `size` bytes each."""
    return size * (cfg.depth * cfg.block_matmul_params + cfg.padded_vocab * cfg.n_embd)


def row_bytes(cfg: GPTConfig, size: int, *, prompt_tokens: int, new_tokens: int, samples: int) -> float:
    """One row's keys and values, its share of the prompt's, logits (three times, with what a draw makes), scores."""
    columns = -(-new_tokens // COLUMNS) * COLUMNS + COLUMNS
    scores = cfg.n_head * (columns + prompt_tokens) * (8 + 2 * size)
    states = 12 * (cfg.n_embd + cfg.hidden_width)
    cache = size * cfg.depth * cfg.cache_width * (columns + prompt_tokens / samples)
    return cache + 16 * cfg.padded_vocab + scores + states


def rows(
    cfg: GPTConfig,
    free: float,
    size: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    samples: int = 1,
    copies: bool = True,
) -> int:
    """Rows that fit into `free` bytes, a full bucket or 1. samples: per prompt; copies: weights are copied first."""
    # the states of one prefill pass at the widest moment of a block
    prefill = PREFILL_TOKENS * (4 * 4 * cfg.n_embd + size * (cfg.n_embd + 3 * cfg.hidden_width))
    left = free * (1 - SPARE) - (weight_bytes(cfg, size) if copies else 0) - prefill
    one = row_bytes(cfg, size, prompt_tokens=prompt_tokens, new_tokens=new_tokens, samples=samples)
    most = max(1, int(left / one))
    return next((n for n in range(most, SMALLEST, -1) if bucket(n) == n), most)
