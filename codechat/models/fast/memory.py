"""How many rows decode at a time, and in what dtype a device keeps keys and values.

Shapes: B rows (padded), P prompts, V padded vocabulary, D width.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch

from codechat.models.config import GPTConfig
from codechat.models.fast.device import compute_dtype
from codechat.models.gpt import GPT

# on a CPU, memory of keys, values and logits that the default batch size aims at
CACHE_BYTES = 2**31
CPU_PREFILL = 1024  # prompt tokens that a CPU runs at once
# the same on a GPU: more are no faster, and their states would take the rows' memory
GPU_PREFILL = 16384
SPARE = 0.1  # of a GPU's free memory, for what the allocator cannot use
SMALLEST = 4  # slots of a batch at least
COLUMNS = 16  # the cache's room is a multiple of it


def prefill_tokens(device: torch.device) -> int:
    """Prompt tokens of one prefill pass."""
    return GPU_PREFILL if device.type == "cuda" else CPU_PREFILL


def batches(
    model: GPT, lengths: Sequence[int], new_tokens: int, samples: int, kept: int, size: int
) -> Iterator[slice]:
    """Neighbouring rows, whose prompts have these lengths: as many together as the longest of them
    allows. The longest of all would keep every batch small. size: of `rows_at_once`."""
    start = 0
    while start < len(lengths):
        left = lengths[start:]

        def too_many(n: int) -> bool:
            return rows_at_once(model, max(left[:n]), new_tokens, samples, kept, size) < n

        n = bisect_left(range(1, len(left) + 1), True, key=too_many)
        yield slice(start, start + n)
        start += n


def rows_at_once(
    model: GPT, longest: int, new_tokens: int, samples: int, kept: int, size: int
) -> int:
    """How many rows of prompts of at most `longest` tokens keep caches (with a share of the
    prompt) and logits under CACHE_BYTES; on a GPU, in free memory.

    samples: per prompt; kept: ids that are noted of each new token; size: bytes of a number that
    a CPU's cache keeps."""
    cfg = model.cfg
    weight = model.wte.weight
    if weight.device.type != "cuda":
        tokens = new_tokens + longest / samples
        cache = size * cfg.depth * cfg.cache_width * tokens
        return max(1, int(CACHE_BYTES / (cache + 16 * cfg.padded_vocab + 4 * kept * new_tokens)))
    dtype = compute_dtype(weight)
    # what nobody uses, and what torch keeps for itself
    free, _ = torch.cuda.mem_get_info(weight.device)
    reserved = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(
        weight.device
    )
    row = row_bytes(
        cfg,
        dtype.itemsize,
        prompt_tokens=longest,
        new_tokens=new_tokens,
        samples=samples,
        kept=kept,
    )
    copies = any(p.dtype != dtype for p in model.blocks.parameters() if p.ndim == 2)
    return rows_in_memory(cfg, free + reserved, dtype.itemsize, row, copies=copies)


def rows_in_memory(
    cfg: GPTConfig, free: float, size: int, row: float, *, copies: bool = True
) -> int:
    """Rows of `row` bytes each that fit into `free` bytes of a GPU, a full bucket or 1. copies:
    weights are copied first, `size` bytes per number."""
    # the states of one prefill pass at the widest moment of a block
    prefill = GPU_PREFILL * (4 * 4 * cfg.n_embd + size * (cfg.n_embd + 3 * cfg.hidden_width))
    left = free * (1 - SPARE) - (weight_bytes(cfg, size) if copies else 0) - prefill
    most = max(1, int(left / row))
    return next((n for n in range(most, SMALLEST, -1) if bucket(n) == n), most)


def row_bytes(
    cfg: GPTConfig,
    size: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    samples: int,
    kept: int = 0,
) -> float:
    """One row's keys and values of `size` bytes each, its share of those of the prompt, logits
    (three times, with what a draw makes), the scores of one block and its states, and `kept`
    ids that are noted of each new token.

    samples: rows of one prompt."""
    columns = room_for(new_tokens)
    scores = cfg.n_head * (columns + prompt_tokens) * (8 + 2 * size)
    cache = size * cfg.depth * cfg.cache_width * (columns + prompt_tokens / samples)
    noted = 4 * kept * new_tokens
    return cache + 16 * cfg.padded_vocab + scores + 12 * (cfg.n_embd + cfg.hidden_width) + noted


def weight_bytes(cfg: GPTConfig, size: int) -> int:
    """Matrices of the blocks and the output head, `size` bytes per number."""
    return size * (cfg.depth * cfg.block_matmul_params + cfg.padded_vocab * cfg.n_embd)


def bucket(rows: int) -> int:
    """Slots of a batch for so many rows: powers of two, and halfway between them."""
    power = max(SMALLEST, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if rows <= power * 3 // 4 and power > SMALLEST else power


def room_for(columns: int) -> int:
    """Columns of a cache for so many tokens."""
    return -(-columns // COLUMNS) * COLUMNS
