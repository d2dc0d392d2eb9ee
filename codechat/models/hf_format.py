"""Hugging Face's format: which class computes what a `GPTConfig` describes, its config.json, and which of its tensors is which of ours.

    Arcee    squared ReLU (our default)
    Llama    swiglu
    Qwen2    swiglu, qkv_bias, with an imported tokenizer
    Llama    swiglu, qkv_bias, with a tokenizer of ours: attention_bias, and the output projection's bias is zero
    Qwen3    swiglu, qk_norm
    Qwen3    squared ReLU, qk_norm (preset nano): hidden_act relu, and the gate projection repeats the up projection

The last one is exact, since relu(Wx) * Wx = relu(Wx)^2; its MLP is half as large again. Import drops the second copy.
A directory of model_type qwen2 gets Qwen's own splitting of texts from transformers' AutoTokenizer, whatever its tokenizer.json says. So a model
with our tokenizer is written as Llama, which computes the same.

All have rotary positions (Llama 3.1's scaling included); heads may be grouped and the output head tied. A `Piece` is a range of rows of one of
our tensors: export reads it and import fills it, so the two agree. Two pieces of the same rows are copies, and import requires them to be equal.
transformers is never imported: a directory is json and safetensors.

Left out: other classes, and settings that these do not have (learned positions, GELU, sliding windows, biases elsewhere, quantised weights);
an error names them. llama.cpp quantises and writes GGUF: `codechat export --help` has the commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.safetensors_files import Entry, Weights


class Family(NamedTuple):
    """A class of transformers with one activation: the options of GPTConfig that make it, and the epsilon that it takes where config.json has none.

    The first entry of a class has the activation that the class takes where config.json has none."""

    model_type: str
    architecture: str
    options: dict[str, Any]
    act: str = "silu"
    eps: float = 1e-6
    attention_bias: bool = False  # also on the output projection, where it must be zero


FAMILIES = (
    Family("arcee", "ArceeForCausalLM", dict(mlp="relu2", qkv_bias=False, qk_norm=False), "relu2", 1e-5),
    Family("llama", "LlamaForCausalLM", dict(mlp="swiglu", qkv_bias=False, qk_norm=False)),
    Family("llama", "LlamaForCausalLM", dict(mlp="swiglu", qkv_bias=True, qk_norm=False), attention_bias=True),
    Family("qwen2", "Qwen2ForCausalLM", dict(mlp="swiglu", qkv_bias=True, qk_norm=False)),
    Family("qwen3", "Qwen3ForCausalLM", dict(mlp="swiglu", qkv_bias=False, qk_norm=True)),
    Family("qwen3", "Qwen3ForCausalLM", dict(mlp="relu2", qkv_bias=False, qk_norm=True), "relu"),
)
REQUIRED = dict(pos="rope", causal=True, attention="mha")  # of every class
# Settings of a config.json that our model does not have, and the values that change nothing.
UNSUPPORTED = {
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
}
ROPE_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_block",
}
# Buffers that older files hold, and the copy of a tied head.
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
OUT_BIAS = "self_attn.o_proj.bias"


def family_of(cfg: GPTConfig, *, imported: bool = False) -> Family:
    """The entry of FAMILIES that computes what cfg describes. imported: its tokenizer is not one of ours. ConfigError names the fields for which
    there is none."""
    wrong = {k: (getattr(cfg, k), v) for k, v in REQUIRED.items() if getattr(cfg, k) != v}
    if cfg.mlp == "gelu":
        wrong["mlp"] = ("gelu", "relu2 or swiglu")
    elif cfg.qkv_bias and (cfg.mlp != "swiglu" or cfg.qk_norm):
        wrong["qkv_bias"] = (True, f"False with mlp {cfg.mlp} and qk_norm {cfg.qk_norm}")
    if wrong:
        raise ConfigError(
            "no Hugging Face class computes "
            + ", ".join(f"model.{k} {found}; required is {required}" for k, (found, required) in wrong.items())
            + "; train such a model, or use this one through --ckpt"
        )
    fitting = [f for f in FAMILIES if all(getattr(cfg, k) == v for k, v in f.options.items())]
    found = fitting[-1 if imported else 0]
    if found.model_type in ("arcee", "llama") and cfg.n_embd % cfg.n_head:
        raise ConfigError(
            f"model.n_embd {cfg.n_embd}; {found.architecture} requires a multiple of n_head {cfg.n_head}; train such a model"
        )
    return found


# ---------------------------------------------------------------- tensors


class Piece(NamedTuple):
    """Their tensor `theirs` is rows [start, stop) of our tensor `ours`; stop None = to the end."""

    theirs: str
    ours: str
    start: int = 0
    stop: int | None = None

    def rows(self, shape: torch.Size) -> int:
        """How many rows of our tensor, which has this shape, it is."""
        return len(range(*slice(self.start, self.stop).indices(shape[0])))


def pieces(cfg: GPTConfig) -> Iterator[Piece]:
    """Every tensor of their model, in the order of the layers."""
    yield Piece("model.embed_tokens.weight", "wte.weight")
    for layer in range(cfg.depth):
        yield from _block(cfg, f"model.layers.{layer}.", f"blocks.{layer}.")
    yield Piece("model.norm.weight", "norm.weight")
    if not cfg.tied:
        yield Piece("lm_head.weight", "head.weight")


def _block(cfg: GPTConfig, theirs: str, ours: str) -> Iterator[Piece]:
    q, kv = cfg.n_head * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    yield Piece(theirs + "input_layernorm.weight", ours + "attn_norm.weight")
    for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
        for letter, start, stop in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
            yield Piece(f"{theirs}self_attn.{letter}_proj.{kind}", f"{ours}attn.qkv.{kind}", start, stop)
    for letter in "qk" if cfg.qk_norm else "":
        yield Piece(f"{theirs}self_attn.{letter}_norm.weight", f"{ours}attn.{letter}_norm.weight")
    yield Piece(theirs + "self_attn.o_proj.weight", ours + "attn.out.weight")
    yield Piece(theirs + "post_attention_layernorm.weight", ours + "mlp_norm.weight")
    gate = "gate" if cfg.mlp == "swiglu" else "up" if cfg.mlp == "relu2" and cfg.qk_norm else None
    for name, source in (("gate", gate), ("up", "up"), ("down", "down")):
        if source:
            yield Piece(f"{theirs}mlp.{name}_proj.weight", f"{ours}mlp.{source}.weight")


def entries(cfg: GPTConfig, state: Mapping[str, Tensor], family: Family) -> Iterator[Entry]:
    """What `safetensors_files.write` takes: each tensor under their name, cut out of ours when its turn comes."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(cfg).named_parameters()}  # `state` would read every tensor
    for p in pieces(cfg):
        shape = (p.rows(shapes[p.ours]), *shapes[p.ours][1:])
        yield Entry(p.theirs, shape, lambda p=p: state[p.ours][p.start : p.stop])
    for layer in range(cfg.depth if family.attention_bias else 0):
        yield Entry(f"model.layers.{layer}.{OUT_BIAS}", (cfg.n_embd,), lambda: torch.zeros(cfg.n_embd))


@torch.no_grad()
def read_model(
    cfg: GPTConfig, weights: Mapping[str, Tensor], places: Iterable[Piece] | None = None, source: str = "config.json"
) -> GPT:
    """A model of cfg in float32 whose `places` (default: `pieces`) are these weights and whose other rows are zero; it reads one tensor at a time.

    CheckpointError names what does not fit, and copies of the same rows that differ; source: where cfg was read."""
    places = list(pieces(cfg) if places is None else places)
    with torch.device("meta"):
        model = GPT(cfg)
    ours = {name: p.shape for name, p in model.named_parameters()}
    found = weights.shapes if isinstance(weights, Weights) else {name: tuple(t.shape) for name, t in weights.items()}
    expected = {p.theirs: (p.rows(ours[p.ours]), *ours[p.ours][1:]) for p in places}
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    foreign = [
        name
        for name in found.keys() - expected.keys()
        if not (name.endswith(IGNORED) or (name.endswith(OUT_BIAS) and cfg.qkv_bias and not weights[name].any()))
    ]
    problems += [f"{name} is not part of the architecture" for name in foreign]
    wrong = [name for name in expected.keys() & found.keys() if found[name] != expected[name]]
    problems += [f"{name} is {found[name]}, required is {expected[name]}" for name in wrong]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        shown = "; ".join(sorted(problems)[:3]) + more
        raise CheckpointError(f"the weights do not fit {source}: {shown}; use the files of one model")
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.zero_()
    read: dict[Piece, Piece] = {}
    for p in places:
        rows, tensor = parameters[p.ours][p.start : p.stop], weights[p.theirs]
        first = read.setdefault(p._replace(theirs=""), p)
        if first is p:
            rows.copy_(tensor)
        elif not torch.equal(rows, tensor.to(rows)):
            raise CheckpointError(
                f"{p.theirs} differs from {first.theirs} by up to {float((rows - tensor).abs().max()):.3g}; "
                "required are equal weights: only then is a gated ReLU our squared ReLU; choose another model"
            )
    return model.eval()


# ---------------------------------------------------------------- config.json


def to_hf(cfg: GPTConfig, family: Family, *, dtype: str, bos_id: int, eos_ids: list[int]) -> dict[str, Any]:
    """config.json. Positions are spelled rope_theta and rope_scaling, which transformers 4 and 5, vLLM and llama.cpp read."""
    scaling = {"rope_type": "llama3", **{theirs: getattr(cfg, ours) for theirs, ours in ROPE_KEYS.items()}}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": cfg.padded_vocab,
        "hidden_size": cfg.n_embd,
        "intermediate_size": cfg.hidden_width,
        "num_hidden_layers": cfg.depth,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": family.act,
        "max_position_embeddings": cfg.block_size,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None if cfg.rope_factor == 1 else scaling,
        "tie_word_embeddings": cfg.tied,
        "attention_bias": family.attention_bias,
        "attention_dropout": 0.0,
        **({"mlp_bias": False} if family.model_type in ("arcee", "llama") else {"use_sliding_window": False}),
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise MissingFile(f"{directory} holds no config.json; `codechat download MODEL` fetches a directory that does")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not json ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; an object is required; download it again")
    return found


def from_hf(config: Mapping[str, Any], *, vocab_size: int, n_tags: int = 0) -> GPTConfig:
    """The GPTConfig of a config.json. vocab_size: ids of its tokenizer; embedding rows beyond them stay as unused padding.

    ConfigError names a class or a setting that our model does not have."""
    family = _family_in(config)
    _check_supported(config, family)
    try:
        rows, heads, width = (int(config[key]) for key in ("vocab_size", "num_attention_heads", "hidden_size"))
        hidden, depth, block = (
            int(config[key]) for key in ("intermediate_size", "num_hidden_layers", "max_position_embeddings")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json lacks a number ({error!r}); use the file that came with the weights") from None
    if vocab_size + n_tags > rows:
        raise ConfigError(
            f"the tokenizer has {vocab_size} ids and {n_tags} tags, the embedding {rows} rows; use this model's tokenizer"
        )
    head_dim = config.get("head_dim") or (128 if config["model_type"] == "qwen3" else width // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    return GPTConfig(
        depth=depth,
        n_embd=width,
        n_head=heads,
        n_kv_head=None if kv_heads == heads else kv_heads,
        block_size=block,
        vocab_size=vocab_size,
        n_tags=n_tags,
        rows=None if rows == -(-(vocab_size + n_tags) // 64) * 64 else rows,
        mlp_width=None if hidden == 4 * width else hidden,
        head_width=None if head_dim * heads == width else head_dim,
        norm_eps=config.get("rms_norm_eps", family.eps),
        tied=config.get("tie_word_embeddings", False),
        **family.options,
        **_rope(config),
    )


def _family_in(config: Mapping[str, Any]) -> Family:
    """The entry of a config.json's class and activation; ConfigError names what has none."""
    kind = config.get("model_type")
    own = [family for family in FAMILIES if family.model_type == kind]
    if not own:
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise ConfigError(f"config.json has model_type {kind!r}; required is one of {known}; choose another model")
    act = config.get("hidden_act", own[0].act)
    for family in own:
        if family.act == act and family.attention_bias == bool(config.get("attention_bias")):
            return family
    if any(family.act == act for family in own):
        raise ConfigError(
            f"config.json sets attention_bias={config.get('attention_bias')}; our {own[0].architecture} with {act} has no such "
            "setting; choose another model"
        )
    known = " or ".join(family.act for family in own)
    raise ConfigError(f"config.json has hidden_act={act}; {own[0].architecture} requires {known}; choose another model")


def _check_supported(config: Mapping[str, Any], family: Family) -> None:
    unsupported = {key: config[key] for key, harmless in UNSUPPORTED.items() if config.get(key) not in harmless}
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        unsupported["layer_types"] = sorted(set(config["layer_types"]))
    if unsupported:
        shown = ", ".join(f"{key}={str(value)[:60]}" for key, value in unsupported.items())
        raise ConfigError(
            f"config.json sets {shown}; our {family.architecture} has no such setting; choose another model"
        )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling as transformers 4 writes them, or rope_parameters as 5 does."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = found.get("rope_theta", config.get("rope_theta", 10000.0)) if isinstance(found, dict) else None
    if not isinstance(base, int | float):
        raise ConfigError(
            f"config.json has positions {found!r} and rope_theta {base!r}; required are an object and a number; use the file that came with the weights"
        )
    kind, theta = found.get("rope_type", found.get("type", "default")), {"rope_theta": float(base)}
    if kind == "default" and found.get("partial_rotary_factor", 1.0) == 1.0:
        return theta
    if kind != "llama3":
        raise ConfigError(
            f"config.json has positions {found}; required is rope_type default or llama3; choose another model"
        )
    try:
        return theta | {ours: type(getattr(GPTConfig, ours))(found[theirs]) for theirs, ours in ROPE_KEYS.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json has rope_type llama3 and lacks a number ({error!r}); use the file that came with the weights"
        ) from None
