"""Hugging Face's format: which class computes what a `GPTConfig` describes, its config.json, its tensors; and the
original system's .pt files. transformers is never imported.

    Arcee    squared ReLU (our default)
    Llama    swiglu; with qkv_bias attention_bias, where the output projection's bias is zero
    Qwen2    swiglu, qkv_bias, with an imported tokenizer: wherever model_type is qwen2, AutoTokenizer splits as Qwen does
    Qwen3    swiglu, qk_norm; or squared ReLU, qk_norm (preset nano): hidden_act relu, the gate projection repeats the up
             projection, exact since relu(Wx) * Wx = relu(Wx)^2; import drops the second copy
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Family(NamedTuple):
    """A class of transformers with one activation: the options of GPTConfig that make it, and its default epsilon."""

    model_type: str
    architecture: str
    mlp: str
    qkv_bias: bool = False
    qk_norm: bool = False
    act: str = "silu"
    eps: float = 1e-6
    attention_bias: bool = False  # also on the output projection, where it must be zero


FAMILIES = (
    Family("arcee", "ArceeForCausalLM", "relu2", act="relu2", eps=1e-5),
    Family("llama", "LlamaForCausalLM", "swiglu"),
    Family("llama", "LlamaForCausalLM", "swiglu", qkv_bias=True, attention_bias=True),
    Family("qwen2", "Qwen2ForCausalLM", "swiglu", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", "swiglu", qk_norm=True),
    Family("qwen3", "Qwen3ForCausalLM", "relu2", qk_norm=True, act="relu"),
)
REQUIRED = dict(pos="rope", causal=True, attention="mha")  # of every class
# Settings of a config.json that our model does not have, and the values that change nothing.
UNSUPPORTED = {
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
}
ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")  # buffers of older files, and the copy of a tied head
OUT_BIAS = "self_attn.o_proj.bias"


def family_of(cfg: GPTConfig, *, imported: bool = False) -> Family:
    """The entry of FAMILIES that computes cfg, or ConfigError; imported: the tokenizer is not one of ours."""
    fitting = [f for f in FAMILIES if f[2:5] == (cfg.mlp, cfg.qkv_bias, cfg.qk_norm)]
    wrong = [name for name, value in REQUIRED.items() if getattr(cfg, name) != value]
    if not fitting:
        wrong.append("mlp" if cfg.mlp == "gelu" else "qkv_bias")
    elif not cfg.qk_norm and cfg.n_embd % cfg.n_head:
        wrong.append("n_embd")
    if wrong:
        words = ", ".join(f"model.{name} {getattr(cfg, name)}" for name in wrong)
        raise ConfigError(f"no Hugging Face class computes {words}; train such a model, or use this one through --ckpt")
    return fitting[-1 if imported else 0]


class Piece(NamedTuple):
    """Their tensor `theirs` is rows [start, stop) of our tensor `ours`; stop None = to the end."""

    theirs: str
    ours: str
    start: int = 0
    stop: int | None = None


def pieces(cfg: GPTConfig) -> Iterator[Piece]:
    """Every tensor of their model, in the order of the layers."""
    q, kv = cfg.n_head * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    gate = "gate" if cfg.mlp == "swiglu" else "up" if cfg.mlp == "relu2" and cfg.qk_norm else None
    yield Piece("model.embed_tokens.weight", "wte.weight")
    for layer in range(cfg.depth):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield Piece(theirs + "input_layernorm.weight", ours + "attn_norm.weight")
        for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
            for letter, start, stop in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
                yield Piece(f"{theirs}self_attn.{letter}_proj.{kind}", f"{ours}attn.qkv.{kind}", start, stop)
        for letter in "qk" if cfg.qk_norm else "":
            yield Piece(f"{theirs}self_attn.{letter}_norm.weight", f"{ours}attn.{letter}_norm.weight")
        yield Piece(theirs + "self_attn.o_proj.weight", ours + "attn.out.weight")
        yield Piece(theirs + "post_attention_layernorm.weight", ours + "mlp_norm.weight")
        for name, source in (("gate", gate), ("up", "up"), ("down", "down")):
            if source:
                yield Piece(f"{theirs}mlp.{name}_proj.weight", f"{ours}mlp.{source}.weight")
    yield Piece("model.norm.weight", "norm.weight")
    if not cfg.tied:
        yield Piece("lm_head.weight", "head.weight")


def tensors(cfg: GPTConfig, state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Our weights under their names; views of ours."""
    out = {p.theirs: state[p.ours][p.start : p.stop] for p in pieces(cfg)}
    for layer in range(cfg.depth if family.attention_bias else 0):
        out[f"model.layers.{layer}.{OUT_BIAS}"] = torch.zeros(cfg.n_embd)
    return out


def save(path: Path, tensors: Mapping[str, Tensor], dtype: str | None = None) -> int:
    """Write a safetensors file; returns its bytes. dtype: "float32" or "bfloat16", or none = that of each tensor."""
    kind = getattr(torch, dtype) if dtype else None
    # a copy: the format refuses tensors that share memory
    copies = {name: t.detach().to("cpu", kind or t.dtype, copy=True).contiguous() for name, t in tensors.items()}
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    return path.stat().st_size


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory by name, in one safetensors file or shards, mapped into memory."""
    names = {ONE_FILE}
    if not (directory / ONE_FILE).is_file():
        names = set(read_json_object(directory / INDEX).get("weight_map", {}).values())
    weights: dict[str, Tensor] = {}
    for path in sorted(directory / Path(name).name for name in names):  # never outside of it
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError) as error:
            got = f"{path} is no whole safetensors file ({error})"
            raise CheckpointError(f"{got}; `codechat download` fetches it again") from None
    return weights


@torch.no_grad()
def read_model(
    cfg: GPTConfig, weights: Mapping[str, Tensor], places: Iterable[Piece] | None = None, source: str = "config.json"
) -> GPT:
    """A float32 model of cfg whose `places` (default: `pieces`) are these weights and whose other rows are zero.

    CheckpointError for what does not fit, and for copies of the same rows that differ; source: where cfg was read."""
    places = list(pieces(cfg) if places is None else places)
    with torch.device("meta"):
        model = GPT(cfg)
    expected = {p.theirs: tuple(model.get_parameter(p.ours)[p.start : p.stop].shape) for p in places}
    given = {
        name: tuple(tensor.shape)
        for name, tensor in weights.items()
        if name in expected or not _ignored(cfg, name, tensor)
    }
    if wrong := sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name)):
        shapes = f"{given.get(wrong[0], 'missing')}, required is {expected.get(wrong[0], 'no such tensor')}"
        got = f"{len(wrong)} weights do not fit {source}: {wrong[0]} is {shapes}"
        raise CheckpointError(f"{got}; use the files of one model")
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.zero_()
    first: dict[tuple[Any, ...], str] = {}  # the name under which each range of rows was read first
    for p in places:
        rows, tensor = model.get_parameter(p.ours)[p.start : p.stop], weights[p.theirs]
        if (other := first.setdefault(p[1:], p.theirs)) == p.theirs:
            rows.copy_(tensor)
        elif not torch.equal(rows, tensor.to(rows)):
            got = f"{p.theirs} and {other} differ"
            raise CheckpointError(f"{got}; a gated ReLU is ours only with equal projections; choose another model")
    return model.eval()


def _ignored(cfg: GPTConfig, name: str, tensor: Tensor) -> bool:
    return name.endswith(IGNORED) or (name.endswith(OUT_BIAS) and cfg.qkv_bias and not tensor.any())


def to_hf(cfg: GPTConfig, family: Family, *, dtype: str, bos_id: int, eos_ids: list[int]) -> dict[str, Any]:
    """config.json. transformers 4 and 5, vLLM and llama.cpp read rope_theta and rope_scaling."""
    about = dict(architectures=[family.architecture], model_type=family.model_type, hidden_act=family.act)
    about |= dict(vocab_size=cfg.padded_vocab, hidden_size=cfg.n_embd, intermediate_size=cfg.hidden_width)
    about |= dict(num_hidden_layers=cfg.depth, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.kv_heads)
    about |= dict(head_dim=cfg.head_dim, max_position_embeddings=cfg.block_size, rms_norm_eps=cfg.norm_eps)
    about |= dict(attention_bias=family.attention_bias, attention_dropout=0.0, tie_word_embeddings=cfg.tied)
    about |= {"mlp_bias": False} if family.model_type in ("arcee", "llama") else {"use_sliding_window": False}
    about |= dict(rope_theta=cfg.rope_theta, rope_scaling=None, initializer_range=0.02, use_cache=True)
    about |= dict(bos_token_id=bos_id, eos_token_id=eos_ids[0] if len(eos_ids) == 1 else eos_ids, pad_token_id=None)
    if cfg.rope_scaling:
        *factors, context = cfg.rope_scaling
        about["rope_scaling"] = dict(zip(ROPE_KEYS, (*factors, int(context)))) | {"rope_type": "llama3"}
    return about | {"torch_dtype": dtype}


def read_json_object(path: Path) -> dict[str, Any]:
    """A json file of a downloaded directory."""
    if not path.is_file():
        raise MissingFile(f"{path} is missing; `codechat download MODEL` fetches a directory that has it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not json ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object is required; download it again")
    return value


def from_hf(config: Mapping[str, Any], *, vocab_size: int, n_tags: int = 0) -> GPTConfig:
    """The GPTConfig of a config.json; ConfigError for a class or a setting that our model does not have.

    vocab_size: ids of its tokenizer; embedding rows beyond them stay as unused padding."""
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}  # of transformers 5, and of 4
    positions = positions if isinstance(positions, dict) else {"rope_type": positions}
    scaled = positions.get("rope_type", positions.get("type", "default"))
    family = _family_in(config, scaled, positions)
    try:
        rows, heads, width = (int(config[key]) for key in ("vocab_size", "num_attention_heads", "hidden_size"))
        hidden, depth = int(config["intermediate_size"]), int(config["num_hidden_layers"])
        block = int(config["max_position_embeddings"])
        theta = float(positions.get("rope_theta", config.get("rope_theta", 10000.0)))
        scaling = None if scaled == "default" else tuple(float(positions[key]) for key in ROPE_KEYS)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json lacks a number ({error!r}); use the file that came with the weights") from None
    if vocab_size + n_tags > rows:
        got = f"the tokenizer has {vocab_size} ids and {n_tags} tags, the embedding {rows} rows"
        raise ConfigError(f"{got}; use its own tokenizer")
    head_dim = config.get("head_dim") or (128 if family.model_type == "qwen3" else width // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    shape = dict(depth=depth, n_embd=width, n_head=heads, block_size=block, vocab_size=vocab_size, n_tags=n_tags)
    shape |= dict(n_kv_head=None if kv_heads == heads else kv_heads, mlp_width=None if hidden == 4 * width else hidden)
    shape |= dict(rows=None if rows == -(-(vocab_size + n_tags) // 64) * 64 else rows, rope_theta=theta)
    shape |= dict(head_width=None if head_dim * heads == width else head_dim, rope_scaling=scaling, mlp=family.mlp)
    shape |= dict(norm_eps=config.get("rms_norm_eps", family.eps), tied=config.get("tie_word_embeddings", False))
    return GPTConfig(**shape, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm)


def _family_in(config: Mapping[str, Any], scaled: str, positions: Mapping[str, Any]) -> Family:
    """The entry of a config.json's class, activation and biases; ConfigError names what has none."""
    families = [family for family in FAMILIES if family.model_type == config.get("model_type")]
    act = config.get("hidden_act", families[0].act if families else "silu")  # the first has the class's default
    key = act, bool(config.get("attention_bias"))
    wrong = {name: config[name] for name, harmless in UNSUPPORTED.items() if config.get(name) not in harmless}
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        wrong["layer_types"] = config["layer_types"]
    if scaled not in ("default", "llama3") or positions.get("partial_rotary_factor", 1.0) != 1.0:
        wrong["positions"] = positions
    family = next((f for f in families if (f.act, f.attention_bias) == key), None)
    if family is None or wrong:
        names = ("model_type", "hidden_act", "attention_bias")
        got = ", ".join(
            f"{k}={str(v)[:60]}" for k, v in (wrong or dict(zip(names, (config.get(names[0]), *key)))).items()
        )
        known = ", ".join(dict.fromkeys(f"{f.model_type} with {f.act}" for f in FAMILIES))
        raise ConfigError(f"config.json has {got}; required is one of {known}; choose another model")
    return family


# ---- the original system's .pt files

KEYS = ("vocab_size", "depth", "n_embd", "n_head", "block_size")
NAME = re.compile(r"(?:_orig_mod\.|module\.|transformer\.)*(?:(?:blocks|h)\.(\d+)\.)?(.+)\.weight")
# theirs -> ours; every second line has GPT-2's spelling
OURS = dict(tok_emb="wte", pos_emb="wpe", ln_f="norm", head="head", ln1="attn_norm", ln2="mlp_norm")
OURS |= dict(wte="wte", wpe="wpe", lm_head="head", ln_1="attn_norm", ln_2="mlp_norm")
OURS |= {"attn.qkv": "attn.qkv", "attn.proj": "attn.out", "mlp.fc": "mlp.up", "mlp.proj": "mlp.down"}
OURS |= {"attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}


def read_original(path: Path, n_vocab: int) -> tuple[GPT, int]:
    """The model of {"model": state, "cfg": {...}, "step": n}, with learned positions and GELU, and its step; no code in
    the file is executed. n_vocab: ids of its tokenizer."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        cfg = {key: int(saved["cfg"][key]) for key in KEYS}
        state, step = dict(saved["model"]), int(saved.get("step") or 0)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        needed = f"{{'model': state, 'cfg': {{{', '.join(KEYS)}}}, 'step': int}} of tensors and plain values"
        got = f"{path} is no checkpoint of the original system ({str(error)[:200]})"
        raise CheckpointError(f"{got}; required is {needed}") from None
    rows = cfg.pop("vocab_size")
    if rows < n_vocab:
        raise ConfigError(f"{path} has {rows} embedding rows, the tokenizer {n_vocab} ids; set its own by --tokenizer")
    eps = torch.finfo(torch.float32).eps  # of nn.RMSNorm(width), in whatever dtype it runs
    about = dict(cfg, vocab_size=n_vocab, n_tags=0, rows=rows if rows > n_vocab else None, norm_eps=eps)
    shape = GPTConfig(**about, mlp="gelu", pos="learned")
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = NAME.fullmatch(name)
        ours = (f"blocks.{match[1]}." if match[1] else "") + OURS.get(match[2], match[2]) + ".weight" if match else name
        weights[ours] = tensor
    head = weights.pop("head.weight", None)
    if head is not None and not torch.equal(head, weights["wte.weight"]):
        raise CheckpointError(f"{path}: head and embedding differ; the original's are one tensor")
    with torch.device("meta"):
        names = [name for name, _ in GPT(shape).named_parameters()]
    places = [Piece(name, name, 0, rows if name == "wte.weight" else None) for name in names]
    return read_model(shape, weights, places, f"the cfg of {path}"), step
