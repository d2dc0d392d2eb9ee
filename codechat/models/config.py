"""The architecture as a configuration, and its named sizes. No torch: `--help`, the planner and
recipes read it too."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError

Schedule = Literal["constant", "cosine", "wsd"]  # of the learning rate: `optim.lr_scale`
# d12 and d20 are points of `by_depth`
PRESETS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("presets.json").read_text()
)
# each as --preset of a command
MODELS: dict[str, dict[str, Any]] = {name: {"model": sizes} for name, sizes in PRESETS.items()}


LORA_TARGETS = ("qkv", "out", "gate", "up", "down")
LORA_ALPHA = 16.0
LORA_CHOSEN = ("qkv", "out")
LORA_QKV = ("qkv", "q", "q_a", "q_b", "kv_a", "kv_b")  # the matrices that the target qkv stands for


def lora_matrices(targets: Sequence[str]) -> list[str]:
    """The names of matrices, present in a model or not, that these targets stand for."""
    names: list[str] = []
    for target in targets:
        names += LORA_QKV if target == "qkv" else (target,)
    return names


# settings that one kind of attention has, with the value they must keep under the other kind
NEUTRAL_OF_HEADS = {"qk_norm": False, "qkv_bias": False, "n_kv_head": None, "pos": "rope"}
NEUTRAL_OF_LATENTS = {"kv_rank": None, "q_rank": None, "rope_width": None}


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Settings):
    """Architecture: every number that decides the shape of a weight. `PRESETS` holds the named
    sizes."""

    depth: int = opt(4, "transformer blocks", least=1)
    n_embd: int = opt(256, "model width", least=1)
    n_head: int = opt(4, "attention heads", least=1)
    n_kv_head: int | None = opt(
        None, "key-value heads; none = as many as heads (fewer: grouped queries)", least=1
    )
    attention: Literal["mha", "mla"] = opt(
        "mha",
        "mha = keys and values of each head; mla = all from one "
        "compressed vector per token, which sampling keeps",
    )
    kv_rank: int | None = opt(None, "mla: width of that vector; none = 4 x head width", least=1)
    q_rank: int | None = opt(
        None, "mla: width of compressed queries; none = queries are not compressed", least=1
    )
    rope_width: int | None = opt(
        None, "mla: rotated part of queries and keys; none = half a head's width", least=2
    )
    block_size: int = opt(512, "longest sequence, tokens", least=1)
    vocab_size: int = opt(50257, "tokens of the tokenizer, end of text included", least=1)
    n_tags: int = opt(
        6, "reserved rows for chat tags, after the vocabulary; 0 where tags are plain text", least=0
    )
    mlp: Literal["relu2", "gelu", "swiglu"] = opt("relu2", "feed-forward kind; swiglu is gated")
    mlp_width: int | None = opt(None, "feed-forward width; none = 4 x n_embd", least=1)
    head_width: int | None = opt(None, "width of one head; none = n_embd / n_head", least=1)
    rows: int | None = opt(
        None, "embedding rows; none = tokens and tags up to a multiple of 64", least=1
    )
    pos: Literal["rope", "learned"] = opt(
        "rope", "positions: rotary, or a learned table as in GPT-2"
    )
    rope_theta: float = opt(10000.0, "base of the rotary frequencies", least=0)
    rope_scaling: tuple[float, float, float, float] | None = opt(
        None,
        "Llama 3.1's longer context: factor, low and high "
        "frequency factor, original context in tokens",
    )
    qk_norm: bool = opt(False, "RMSNorm on each head's query and key (Qwen3)")
    qkv_bias: bool = opt(False, "bias on query, key and value (Qwen2)")
    tied: bool = opt(True, "share the embedding with the output head")
    norm_eps: float = opt(1e-5, "epsilon of RMSNorm", least=0)
    causal: bool = opt(True, "attend to earlier tokens only")
    recompute: Literal["nothing", "blocks"] = opt(
        "nothing",
        "recompute in the backward pass; blocks = each block: "
        "less memory, about a third more compute",
    )
    attention_products: bool = opt(
        False,
        "on a CPU in bfloat16, attention as matrix products: "
        "twice as fast as the fused kernel, more memory",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_head % self.kv_heads or not (self.head_width or self.n_embd % self.n_head == 0):
            got = f"n_embd {self.n_embd}, n_head {self.n_head}, n_kv_head {self.kv_heads}"
            raise ConfigError(
                f"got {got}; expected each to divide the one before; change one of them"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"got head width {self.head_dim}; expected an even one; set --model.head-width"
            )
        foreign = self._foreign()
        if foreign and self.attention == "mla":
            raise ConfigError(
                f"got attention mla with {foreign}; "
                "expected qk_norm and qkv_bias off, n_kv_head none, pos rope; remove them"
            )
        if foreign:
            raise ConfigError(
                f"got attention mha with {foreign}; expected "
                "none of them; set --model.attention mla"
            )
        if self.rotary_width % 2:
            raise ConfigError(
                f"got rope_width {self.rotary_width}; expected an even one; set --model.rope-width"
            )
        if self.padded_vocab < self.n_ids:
            raise ConfigError(
                f"got rows {self.rows}; expected at least "
                f"vocab_size + n_tags = {self.n_ids}; leave it out"
            )
        if self.rope_scaling is not None:
            factor, low, high, context = self.rope_scaling
            if not (factor >= 1 and 0 < low < high and context >= 1):
                raise ConfigError(
                    f"got rope_scaling {self.rope_scaling}; "
                    "expected factor >= 1, 0 < low < high, context >= 1; take the four of config.json"
                )

    def _foreign(self) -> str:
        """Settings of the other kind of attention that differ from their neutral value, as text;
        empty = none."""
        neutral = NEUTRAL_OF_HEADS if self.attention == "mla" else NEUTRAL_OF_LATENTS
        values = {name: getattr(self, name) for name in neutral}
        return ", ".join(
            f"{name} {value}" for name, value in values.items() if value != neutral[name]
        )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        return self.head_width or self.n_embd // self.n_head

    @property
    def hidden_width(self) -> int:
        return self.mlp_width or 4 * self.n_embd

    @property
    def latent_width(self) -> int:
        """Width of the vector from which mla makes keys and values."""
        return self.kv_rank or 4 * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Width of the rotated part of a query and a key."""
        return self.rope_width or self.head_dim // 2 if self.attention == "mla" else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of one head's query and key."""
        return self.head_dim + (self.rotary_width if self.attention == "mla" else 0)

    @property
    def cached(self) -> tuple[int, int, int]:
        """(tensors, heads, width) that the cache keeps per token and block. Two tensors are keys
        and values; mla keeps one, whose keys contain the values."""
        if self.attention == "mla":
            return 1, 1, self.latent_width + self.rotary_width
        return 2, self.kv_heads, self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a value in the cache. In mla the values are the first numbers of the keys."""
        return self.latent_width if self.attention == "mla" else self.head_dim

    @property
    def cache_width(self) -> int:
        """Numbers that the cache keeps per token and block."""
        return math.prod(self.cached)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """{name: (in, out)} of the matrices of one block, from which FLOPs, memory, LoRA and
        `LatentAttention` follow. A further kind of attention begins here."""
        width = self.n_embd
        values = self.n_head * self.head_dim
        sizes: dict[str, tuple[int, int]] = {}
        if self.attention == "mla":
            queries = self.n_head * self.query_width
            if self.q_rank:
                sizes["q_a"] = (width, self.q_rank)
                sizes["q_b"] = (self.q_rank, queries)
            else:
                sizes["q"] = (width, queries)
            sizes["kv_a"] = (width, self.latent_width + self.rotary_width)
            sizes["kv_b"] = (self.latent_width, 2 * values)
        else:
            sizes["qkv"] = (width, (self.n_head + 2 * self.kv_heads) * self.head_dim)
        sizes["out"] = (values, width)
        if self.mlp == "swiglu":
            sizes["gate"] = (width, self.hidden_width)
        sizes["up"] = (width, self.hidden_width)
        sizes["down"] = (self.hidden_width, width)
        return sizes

    def lora_params(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of low-rank updates: rank x (in + out) of every target matrix."""
        chosen = lora_matrices(targets)
        return (
            self.depth
            * rank
            * sum(sum(sizes) for name, sizes in self.matrices.items() if name in chosen)
        )

    @property
    def n_ids(self) -> int:
        """Embedding rows of tokens and tags, without unused padding rows; only these can be
        sampled."""
        return self.vocab_size + self.n_tags

    @property
    def padded_vocab(self) -> int:
        return self.rows or -(-self.n_ids // 64) * 64

    @property
    def block_matmul_params(self) -> int:
        """Weights of one block that take part in a matrix product."""
        return sum(n_in * n_out for n_in, n_out in self.matrices.values())

    @property
    def matmul_params(self) -> int:
        """Weights that take part in a matrix product: all blocks and the head."""
        return self.depth * self.block_matmul_params + self.padded_vocab * self.n_embd

    @property
    def n_params(self) -> int:
        """All parameters; a tied head counts once."""
        embeddings = self.padded_vocab * self.n_embd * (1 if self.tied else 2)
        embeddings += self.block_size * self.n_embd if self.pos == "learned" else 0
        gains = self.n_embd * (2 * self.depth + 1) + (
            2 * self.head_dim * self.depth if self.qk_norm else 0
        )
        if self.attention == "mla":
            gains += self.depth * (self.latent_width + (self.q_rank or 0))
        biases = (
            self.depth * (self.n_head + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        )
        return embeddings + self.depth * self.block_matmul_params + gains + biases

    def flops_per_token(self, length: int, adapters: int = 0) -> int:
        """Forward and backward FLOPs per token at sequence length `length`: 6 per matrix weight
        (the head included, the embedding look-up not) plus 12 x depth x heads x head width x
        length for attention, uncut by causality (PaLM, arXiv:2204.02311, appendix B); with mla,
        of query and value widths apart.

        adapters: `lora_params`, if only they are trained. A frozen matrix has no gradient of its
        own: 4 per weight, and 6 per adapter weight."""
        scores_and_values = self.n_head * (self.query_width + self.head_dim)
        attention = 6 * self.depth * scores_and_values * length
        if adapters:
            return 4 * self.matmul_params + 6 * adapters + attention
        return 6 * self.matmul_params + attention


def by_depth(depth: int, build: Callable[..., Any], ranks: int = 1) -> Any:
    """A run from scratch by one number, as `config.Dials`; nanochat's rule
    (scripts/base_train.py), with heads and context for small models too.

    Width 64 x depth, up to a multiple of the head width: 64, from depth 12 on 128. Context 128
    x depth tokens, down to a power of two, at most 2048. 12 tokens per weight of a matrix
    product, the head included (Chinchilla: 20 per parameter, arXiv:2203.15556), in steps of
    2^19 (tokens / those of depth 12)^0.383 tokens (arXiv:2505.13738), to a power of two;
    grad_accum is what rows, length and ranks leave of a step. AdamW at 3e-3 (width / 768)^-0.5
    and Muon, whose update does not depend on the shape, at 0.02: not tuned here. The recipes
    nano and mini have about four times this AdamW rate and hundredths of these tokens."""
    head = 64 if depth < 12 else 128
    width = -(-64 * depth // head) * head
    context = min(2048, 2 ** ((128 * depth).bit_length() - 1))
    chosen: dict[str, Any] = {
        "model": dict(depth=depth, n_embd=width, n_head=width // head, block_size=context),
        "lr": 3e-3 * (width / 768) ** -0.5,
        "muon_lr": 0.02,
    }
    cfg = build(chosen)
    weights = cfg.model.matmul_params
    reference = GPTConfig(**PRESETS["d12"], vocab_size=cfg.model.vocab_size).matmul_params
    rows = cfg.device_batch_size * cfg.length * ranks  # tokens of one microbatch of all ranks
    step = 2 ** round(19 + 0.383 * math.log2(weights / reference))
    chosen["grad_accum"] = max(1, round(step / rows))
    cfg = build(chosen)
    return build(chosen | {"max_steps": max(1, round(12 * weights / (cfg.grad_accum * rows)))})
