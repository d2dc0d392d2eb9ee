"""Hugging Face's format: which class computes what a `GPTConfig` describes, its config.json,
its tensors. transformers is never imported.

    Arcee    squared ReLU (our default)
    Llama    swiglu
    Qwen2    swiglu, qkv_bias, with an imported tokenizer: wherever model_type is qwen2, AutoTokenizer splits as Qwen
             does
    Qwen3    swiglu, qk_norm; or squared ReLU, qk_norm (preset nano): hidden_act relu, the gate projection repeats the
             up projection, exact since relu(Wx) * Wx = relu(Wx)^2; import drops the second copy"""

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from codechat.core.atomic_files import read_json
from codechat.core.errors import CheckpointError, ConfigError, RunError
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Family(NamedTuple):
    """A class of transformers with one activation: the options of GPTConfig that make it, and
    its default epsilon."""

    model_type: str
    architecture: str
    mlp: Literal["relu2", "swiglu"]
    qkv_bias: bool = False
    qk_norm: bool = False
    act: str = "silu"
    eps: float = 1e-6


FAMILIES = (
    Family("arcee", "ArceeForCausalLM", "relu2", act="relu2", eps=1e-5),
    Family("llama", "LlamaForCausalLM", "swiglu"),
    Family("qwen2", "Qwen2ForCausalLM", "swiglu", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", "swiglu", qk_norm=True),
    Family("qwen3", "Qwen3ForCausalLM", "relu2", qk_norm=True, act="relu"),
)
# Settings of a config.json that our model does not have, and the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "quantization": (None,),  # of mlx
    "layer_types": (None, set()),  # but for full attention
    "partial_rotary_factor": (None, 1.0),
    "rope_type": ("default", "llama3"),
}
# Of config.json: our fields; sizes are integers, but for KINDS.
KEYS = dict(
    vocab_size="rows",
    hidden_size="n_embd",
    intermediate_size="mlp_width",
    num_hidden_layers="depth",
    num_attention_heads="n_head",
    num_key_value_heads="n_kv_head",
    head_dim="head_width",
    rms_norm_eps="norm_eps",
    max_position_embeddings="block_size",
    rope_theta="rope_theta",
    tie_word_embeddings="tied",
)
KINDS = dict(rms_norm_eps=float, rope_theta=float, tie_word_embeddings=bool)
# The properties that resolve those of our fields that may be None.
RESOLVED = dict(
    rows="padded_vocab",
    mlp_width="hidden_width",
    n_kv_head="kv_heads",
    head_width="head_dim",
)
ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
IGNORED = ("rotary_emb.inv_freq", HEAD)  # buffers of older files, and the copy of a tied head
# narrower ones need a scale beside them
FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)


def family_of(cfg: GPTConfig, *, imported: bool = False) -> Family:
    """The entry of FAMILIES that computes cfg, or ConfigError; imported: the tokenizer is not
    one of ours."""
    wanted = (cfg.mlp, cfg.qkv_bias, cfg.qk_norm)
    family = next((f for f in FAMILIES if (f.mlp, f.qkv_bias, f.qk_norm) == wanted), None)
    problems = dict(
        attention=cfg.attention != "mha",
        pos=cfg.pos != "rope",
        causal=not cfg.causal,
        mlp=cfg.mlp == "gelu",
        qkv_bias=cfg.mlp != "gelu" and (family is None or (cfg.qkv_bias and not imported)),
        n_embd=not cfg.qk_norm and cfg.n_embd % cfg.n_head != 0,
    )
    wrong = ", ".join(f"model.{name} {getattr(cfg, name)}" for name, bad in problems.items() if bad)
    if wrong or family is None:
        raise ConfigError(
            f"no Hugging Face class computes {wrong}; train such "
            "a model, or use this one through --ckpt"
        )
    return family


class Piece(NamedTuple):
    """Their tensor `theirs` is rows [start, stop) of our tensor `ours`; stop None = to the end."""

    theirs: str
    ours: str
    start: int = 0
    stop: int | None = None


def pieces(cfg: GPTConfig) -> Iterator[Piece]:
    """Every tensor of their model."""
    q = cfg.n_head * cfg.head_dim
    kv = cfg.kv_heads * cfg.head_dim
    # rows of our one matrix
    fused = {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
    }
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn.out",
        "post_attention_layernorm": "mlp_norm",
    }
    if cfg.qk_norm:
        parts |= {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
    if cfg.mlp == "swiglu":
        parts["mlp.gate_proj"] = "mlp.gate"
    elif cfg.mlp == "relu2" and cfg.qk_norm:  # Qwen3 with relu: relu(Wx) * Wx = relu(Wx)^2
        parts["mlp.gate_proj"] = "mlp.up"
    parts |= {"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
    yield Piece("model.embed_tokens.weight", "wte.weight")
    for layer in range(cfg.depth):
        theirs = f"model.layers.{layer}."
        ours = f"blocks.{layer}."
        for kind in ("weight", "bias") if cfg.qkv_bias else ("weight",):
            for letter, rows in fused.items():
                yield Piece(
                    f"{theirs}self_attn.{letter}_proj.{kind}",
                    f"{ours}attn.qkv.{kind}",
                    rows.start,
                    rows.stop,
                )
        for name, part in parts.items():
            yield Piece(f"{theirs}{name}.weight", f"{ours}{part}.weight")
    yield Piece("model.norm.weight", "norm.weight")
    if not cfg.tied:
        yield Piece("lm_head.weight", "head.weight")


def tensors(cfg: GPTConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names; views of ours."""
    return {p.theirs: state[p.ours][p.start : p.stop] for p in pieces(cfg)}


def holds(tensor: Tensor, dtype: str) -> bool:
    """Whether a type of torch holds these numbers: none lies beyond its largest, where float8
    would become that one silently, and rounding moves the tensor by at most 1/16 of its root
    mean square, as one number of float8_e4m3fn moves by. Numbers far below its smallest normal
    one, 2^-6, lose more."""
    kind = getattr(torch, dtype)
    wide = tensor.detach().float()
    if wide.abs().max() > torch.finfo(kind).max:
        return False
    return bool((wide.to(kind).float() - wide).norm() <= wide.norm() / 16)


def save(path: Path, tensors: Mapping[str, Tensor], dtype: str, wider: Container[str] = ()) -> int:
    """Write a safetensors file in a type of torch, such as "bfloat16", and the tensors named in
    `wider` in bfloat16; returns its bytes. CheckpointError for NaN and infinity."""
    copies = {}
    for name, tensor in tensors.items():
        check_finite(name, tensor)
        kind = torch.bfloat16 if name in wider else getattr(torch, dtype)
        # the format refuses shared memory
        copies[name] = tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(
            f"{path} cannot be written ({error}); free space or change permissions"
        ) from error
    return path.stat().st_size


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory by name, in one safetensors file or shards, mapped into memory."""
    whole = (directory / ONE_FILE).is_file()
    weights = dict[str, Tensor]()
    for name in (
        [ONE_FILE]
        if whole
        else sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
    ):
        path = directory / Path(name).name  # never outside of it
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError) as error:
            got = f"{path} is no whole safetensors file ({error})"
            raise CheckpointError(f"{got}; `codechat download` fetches it again") from None
    return weights


def check_finite(name: str, weight: Tensor) -> None:
    """CheckpointError for a weight with NaN or infinity in it: a model with one computes
    nothing else."""
    if not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        got = f"{name} holds {bad:,} numbers of {weight.numel():,} that are NaN or infinite"
        raise CheckpointError(
            f"{got}; required are finite ones; choose another checkpoint of this model"
        )


def with_own_head(about: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    """config.json, untied where it calls the head the embedding and the file holds another one,
    and what to say of it.

    A head alone is the embedding of a tied model: safetensors' save_model keeps one name of a
    shared tensor."""
    if not about.get("tie_word_embeddings") or HEAD not in weights:
        return about, ""
    head = weights[HEAD]
    embedding = weights.setdefault(EMBEDDING, head)
    if head.shape == embedding.shape and torch.equal(head, embedding.to(head.dtype)):
        return about, ""
    note = (
        f"{HEAD} differs from the embedding though config.json "
        "has them tied: kept, as a matrix of its own"
    )
    return about | {"tie_word_embeddings": False}, note


@torch.no_grad()
def read_model(cfg: GPTConfig, weights: Iterable[tuple[str, Tensor]]) -> GPT:
    """A float32 model of cfg of Hugging Face's weights by name.

    CheckpointError for what does not fit, what is no finite number, and for copies of the same
    rows that differ."""
    with torch.device("meta"):
        model = GPT(cfg)
    model.to_empty(device="cpu")
    absent = {p.theirs: p for p in pieces(cfg)}
    first: dict[tuple[Any, ...], str] = {}  # the name under which each range of rows was read first
    for name, tensor in weights:
        place = absent.pop(name, None)
        if place is None:
            if name.endswith(IGNORED):
                continue
            raise CheckpointError(
                f"{name} is no weight of such a model; use the files of one model"
            )
        rows = model.get_parameter(place.ours)[place.start : place.stop]
        if rows.shape != tensor.shape:
            got = f"{name} is {tuple(tensor.shape)}, required is {tuple(rows.shape)}"
            raise CheckpointError(f"{got}; use the files of one model")
        if tensor.dtype not in FLOATS:
            got = (
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, "
                "required is float16, bfloat16 or float32"
            )
            raise CheckpointError(f"{got}; choose the model that is not quantized")
        other = first.setdefault((place.ours, place.start, place.stop), name)
        if other == name:
            rows.copy_(tensor)
            check_finite(name, rows)
        elif not torch.equal(rows, tensor.to(rows)):
            got = f"{name} and {other} differ"
            raise CheckpointError(
                f"{got}; a gated ReLU is ours only with equal projections; choose another model"
            )
    if absent:
        raise CheckpointError(
            f"{len(absent)} weights are missing, as {min(absent)}; use the files of one model"
        )
    return model.eval()


def to_hf(
    cfg: GPTConfig,
    family: Family,
    *,
    dtype: str,
    bos_id: int,
    eos_ids: list[int],
) -> dict[str, Any]:
    """config.json. transformers 4 and 5, vLLM and llama.cpp read rope_theta and rope_scaling."""
    scaling = None
    if cfg.rope_scaling:
        *factors, context = cfg.rope_scaling
        scaling = dict(zip(ROPE_KEYS, (*factors, int(context)))) | {"rope_type": "llama3"}
    about: dict[str, Any] = dict(
        architectures=[family.architecture],
        model_type=family.model_type,
        hidden_act=family.act,
    )
    about |= {theirs: getattr(cfg, RESOLVED.get(ours, ours)) for theirs, ours in KEYS.items()}
    about |= dict(
        attention_bias=False, attention_dropout=0.0, initializer_range=0.02, use_cache=True
    )
    about["mlp_bias" if family.model_type in ("arcee", "llama") else "use_sliding_window"] = False
    eos = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    return about | dict(
        bos_token_id=bos_id,
        eos_token_id=eos,
        pad_token_id=None,
        rope_scaling=scaling,
        torch_dtype=dtype,
    )


def from_hf(config: Mapping[str, Any], *, vocab_size: int, n_tags: int = 0) -> GPTConfig:
    """The GPTConfig of a config.json; ConfigError for a class or a setting that our model does
    not have.

    vocab_size: ids of its tokenizer; embedding rows beyond them stay as unused padding."""
    # of transformers 5, and of 4
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(positions, dict):
        positions = {"rope_type": positions}
    scaled = positions.get("rope_type", positions.get("type", "default"))
    given = {"rope_theta": 10000.0, **config, **positions, "rope_type": scaled}
    family = _family_in(
        given, [kind for kind, value in positions.items() if isinstance(value, dict)]
    )
    try:
        heads = given["num_attention_heads"]
        usual = dict(
            num_key_value_heads=heads,
            head_dim=128 if family.model_type == "qwen3" else given["hidden_size"] // heads,
            rms_norm_eps=family.eps,
            tie_word_embeddings=False,
        )
        given = usual | {name: value for name, value in given.items() if value is not None}
        shape: dict[str, Any] = {
            ours: KINDS.get(theirs, int)(given[theirs]) for theirs, ours in KEYS.items()
        }
        scaling = None
        if scaled != "default":
            factor, low, high, context = (float(positions[key]) for key in ROPE_KEYS)
            scaling = (factor, low, high, context)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"config.json lacks a number ({error!r}); use the file that came with the weights"
        ) from None
    if vocab_size + n_tags > shape["rows"]:
        got = (
            f"the tokenizer has {vocab_size} ids and {n_tags} "
            f"tags, the embedding {shape['rows']} rows"
        )
        raise ConfigError(f"{got}; use its own tokenizer")
    return GPTConfig(
        **shape,
        mlp=family.mlp,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        vocab_size=vocab_size,
        n_tags=n_tags,
    )


def _family_in(given: Mapping[str, Any], by_kind: list[str]) -> Family:
    """The family of a config.json with its rope_type. by_kind: kinds of layers that have
    positions of their own. ConfigError for another class, and for a setting that our model does
    not have."""
    settings = {**given, "layer_types": set(given.get("layer_types") or ()) - {"full_attention"}}
    if by_kind:
        settings["rope_type"] = f"one for each of {', '.join(by_kind)}"
    kind = given.get("model_type")
    act = given.get("hidden_act")
    family = next((f for f in FAMILIES if (f.model_type, f.act) == (kind, act or f.act)), None)
    wrong = {
        name: settings[name]
        for name, harmless in UNSUPPORTED.items()
        if settings.get(name) not in harmless
    }
    if wrong or family is None:
        got = ", ".join(
            f"{name}={str(value)[:60]}"
            for name, value in (wrong or dict(model_type=kind, hidden_act=act)).items()
        )
        known = ", ".join(dict.fromkeys(f"{f.model_type} with {f.act}" for f in FAMILIES))
        raise ConfigError(
            f"config.json has {got}; required is one of {known}; choose another model"
        )
    return family
