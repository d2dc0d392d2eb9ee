"""GGUF files (llama.cpp) of the Llama, Qwen2 and Qwen3 families: read into the names of Hugging
Face, and written.

A file holds weights in F32, F16, BF16 or quantized blocks, the architecture, the tokenizer and
the chat template. The `gguf` package reads its layout and its quantizations. The rows of
Llama's query and key projections are in the order of interleaved rotary positions. Tokenizers
are byte-level ("gpt2"); SentencePiece ones ("llama") are not read."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from codechat.core.atomic_files import read_json
from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.formats import gguf_tokenizer, hf_format

FLOAT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
EXACT = (*FLOAT_BITS, "Q8_0")  # whoever writes these gets the same bytes of the same numbers
ROWS = 4096  # of a matrix that are compared at a time
FILE = "model.gguf"
FAMILIES = ("llama", "qwen2", "qwen3")
# theirs -> Hugging Face's; {} is the layer
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
# keys of the architecture: config.json's
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# further names of the width of a head
HEAD_WIDTHS = (
    "attention.value_length",
    "rope.dimension_count",
)
LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0}  # the scale of a block is in float16
# our names of theirs
WRITTEN = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "q8_0": "Q8_0",
}
# Of the architecture's keys: those that change nothing, whatever they say, and the values of
# others that change nothing. One that stands in no table and is set would be a computation that
# our model does not have.
HARMLESS = {"vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
HARMLESS_VALUES = {"attention.causal": (True,), "rope.scaling.type": ("none",)} | dict.fromkeys(
    (
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "logit_scale",
        "residual_scale",
        "embedding_scale",
    ),
    (0.0, 1.0),
)


def file_in(source: Path) -> Path | None:
    """The GGUF file that `source` is, or the one of a directory without config.json; None where
    there is none. ConfigError where there are several."""
    if source.is_dir() and (source / "config.json").exists():
        return None
    inside = (
        [source] if source.suffix == ".gguf" and source.is_file() else sorted(source.glob("*.gguf"))
    )
    if len(inside) > 1:
        names = ", ".join(path.name for path in inside[:4])
        raise ConfigError(
            f"{source} has {len(inside)} GGUF files ({names}); required is one; give its path"
        )
    return next(iter(inside), None)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingFile("GGUF files need the package gguf; pip install gguf") from None
    return gguf


def _dequantizes(gguf: Any, kind: Any) -> bool:
    """Whether the package makes numbers of blocks of this type."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _values(gguf: Any, tensor: Any, rows: slice = slice(None)) -> np.ndarray:
    """Rows of a matrix, or a vector, in float32."""
    return np.array(gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float32)


def _bits(kind: Any) -> int:
    """Of a number's precision in a type of tensor: Q5_0 has 5, IQ3_XXS 3."""
    return FLOAT_BITS.get(kind.name) or int(
        next(letter for letter in kind.name if letter.isdigit())
    )


def _same(gguf: Any, head: Any, embedding: Any) -> bool:
    """Whether two matrices are one that was quantized twice.

    An unbiased quantizer to b bits is off by 1 to 2 parts in 2^b of the root mean square, and
    by less than 4 in a row of few numbers; two matrices that were trained apart differ by more
    than they are large."""
    kinds = {head.tensor_type, embedding.tensor_type}
    if list(head.shape) != list(embedding.shape):
        return False
    if len(kinds) == 1 and head.tensor_type.name in EXACT:
        return bool(np.array_equal(head.data, embedding.data))
    step = sum(2.0 ** -_bits(tensor.tensor_type) for tensor in (head, embedding))
    wrong = []
    total = []
    for at in range(0, len(head.data), ROWS):
        a, b = (_values(gguf, tensor, slice(at, at + ROWS)) for tensor in (head, embedding))
        wrong.append(np.linalg.norm(a - b, axis=1))
        total.append(np.linalg.norm(a, axis=1))
        if np.linalg.norm(wrong[-1]) > 4 * step * np.linalg.norm(total[-1]):
            return False
    errors = np.concatenate(wrong)
    sizes = np.concatenate(total)
    least = 0.01 * sizes.mean()  # scales are in float16, which has no small numbers
    near = np.linalg.norm(errors) <= 2 * step * np.linalg.norm(sizes)
    return bool(near and np.all(errors <= 4 * step * sizes + least))


def _names(about: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face's name of each tensor that a file of this config.json may hold."""
    names = {}
    for theirs, ours in NAMES.items():
        for i in range(about["num_hidden_layers"]):  # a name without {} is of no layer
            for kind in ("weight", "bias"):
                names[f"{theirs.format(i)}.{kind}"] = f"{ours.format(i)}.{kind}"
    return names


def _reordered(
    name: str, weight: Tensor, about: Mapping[str, Any], order: tuple[int, int]
) -> Tensor:
    """A tensor of Hugging Face's name with the rows of a Llama's query and key heads in the
    other order: 2 x half in Hugging Face's files, half x 2 in llama.cpp's. order: the one that
    it has."""
    queries = about["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": about.get("num_key_value_heads", queries)}.get(
        name.split(".")[-2]
    )
    if about["model_type"] != "llama" or heads is None:
        return weight
    return weight.view(heads, *order, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class File(NamedTuple):
    """What a file holds: config.json, tensors in float32 by Hugging Face's names, `saved` of an
    ImportedTokenizer, and what to say of them."""

    about: dict[str, Any]
    weights: Iterator[tuple[str, Tensor]]
    saved: dict[str, Any]
    note: str


def read(path: Path) -> File:
    """The model of a file. The head and the embedding become one matrix, the finer one, where
    they are the same up to quantization, as in all three families' small models, unless a
    config.json beside the file has it otherwise.

    MissingFile without the file or the `gguf` package, CheckpointError for a file that is not
    whole, ConfigError for another architecture, quantization or vocabulary."""
    gguf = _package()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        _check_readable(gguf, path, fields, tensors)
        about = _config(path, fields["general.architecture"], fields)
        has_head = "output.weight" in tensors
        about["tie_word_embeddings"] = _tie(gguf, path, tensors)
        # rows beyond the tokens are padding
        about["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
        names = _names(about)
        saved = gguf_tokenizer.read(path, fields.get("tokenizer.ggml.pre", "default"), fields)
    except ConfigError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} is no whole GGUF file ({str(error)[:120]}); download it again"
        ) from None
    merged = has_head and about["tie_word_embeddings"]
    note = (
        "output.weight is token_embd.weight up to quantization: one tied matrix, the finer one"
        if merged
        else ""
    )
    return File(about, _weights(gguf, tensors, names, about), saved, note)


def _check_readable(
    gguf: Any, path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """ConfigError for a kind of file, of tokenizer or of numbers that is not read."""
    family = fields["general.architecture"]
    scaled = fields.get(f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        scaled = "by frequency"
    for what, found, known in (
        ("architecture", family, FAMILIES),
        ("position scaling", scaled, ("none",)),
        ("tokenizer", fields["tokenizer.ggml.model"], ("gpt2",)),
        (
            "tokenizer.ggml.pre",
            fields.get("tokenizer.ggml.pre", "default"),
            gguf_tokenizer.SPLIT_OF,
        ),
        ("files in all", str(fields.get("split.count", 1) or 1), ("1",)),
    ):
        if found not in known:
            raise ConfigError(f"{path} has {what} {found}; required: {', '.join(known)}")
    unread = {t.tensor_type.name for t in tensors.values() if not _dequantizes(gguf, t.tensor_type)}
    if unread:
        readable = ", ".join(
            kind.name for kind in gguf.GGMLQuantizationType if _dequantizes(gguf, kind)
        )
        raise ConfigError(
            f"{path} has tensors in {', '.join(sorted(unread))}; required: {readable}"
        )


def _weights(
    gguf: Any, tensors: Mapping[str, Any], names: Mapping[str, str], about: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in float32 by Hugging Face's names, one in memory at a time."""
    for theirs, tensor in tensors.items():
        values = _values(gguf, tensor).reshape(tuple(map(int, reversed(tensor.shape))))
        name = names.get(theirs, theirs)
        yield name, _reordered(name, torch.from_numpy(values), about, (-1, 2))


def _config(path: Path, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what the tensors say. ConfigError for a key that our model does not
    compute."""
    prefix = f"{family}."
    own = [key for key in fields if key.startswith(prefix)]
    keys = {key.removeprefix(prefix): fields[key] for key in own}
    width = keys["embedding_length"] // keys["attention.head_count"]
    # llama.cpp's default, which is not Qwen3's in Hugging Face
    keys.setdefault("attention.key_length", width)
    harmless = HARMLESS_VALUES | dict.fromkeys(HEAD_WIDTHS, (keys["attention.key_length"],))
    for key, value in keys.items():
        if key not in KEYS and key not in HARMLESS and value not in harmless.get(key, (0, "")):
            got = f"{path} has {family}.{key} {str(value)[:60]}"
            raise ConfigError(f"{got}, which our model does not compute; choose another model")
    about: dict[str, Any] = {}
    for key, ours in KEYS.items():
        value = keys.get(key)
        if isinstance(value, float):
            value = float(str(np.float32(value)))  # 1e-6, not 9.99999997e-07
        if value is not None:
            about[ours] = value
    return about | {"model_type": family}


def _tie(gguf: Any, path: Path, tensors: dict[str, Any]) -> bool:
    """Whether the head is the embedding; of two copies the coarser one leaves `tensors`."""
    head = tensors.get("output.weight")
    embedding = tensors["token_embd.weight"]
    if head is None:
        return True
    config = path.with_name("config.json")
    tied = read_json(config).get("tie_word_embeddings", True) if config.is_file() else True
    if not tied or not _same(gguf, head, embedding):
        return False
    del tensors["output.weight"]
    if _bits(head.tensor_type) > _bits(embedding.tensor_type):
        tensors["token_embd.weight"] = head
    return True


# ---- writing


def write(
    path: Path,
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    dtype: str,
    template: str,
) -> int:
    """A file of config.json's contents, tensors by Hugging Face's names, `saved` of an
    ImportedTokenizer and the chat template of the conversations that were trained ("" = none);
    returns its bytes. Matrices are in `dtype` (a key of WRITTEN), vectors in float32.
    ConfigError for what no such file can hold."""
    gguf = _package()
    family = about["model_type"]
    scaling = about.get("rope_scaling")
    if family not in FAMILIES or about["hidden_act"] != "silu" or scaling:
        got = f"{family} with {about['hidden_act']} and rope_scaling {scaling}"
        raise ConfigError(
            f"this model is {got}; required: {', '.join(FAMILIES)} with silu, without rope_scaling"
        )
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(saved["spec"].removeprefix("hf:"))
    for key, name in (KEYS | dict.fromkeys(HEAD_WIDTHS, "head_dim")).items():
        add = writer.add_float32 if name in hf_format.KINDS else writer.add_uint32
        add(f"{family}.{key}", about[name])
    gguf_tokenizer.add(writer, saved, rows=about["vocab_size"])
    if template:
        writer.add_chat_template(template)
    theirs = {ours: theirs for theirs, ours in _names(about).items()}
    for name, weight in tensors.items():
        kind = gguf.GGMLQuantizationType[WRITTEN[dtype] if weight.ndim == 2 else "F32"]
        data = _quantized(gguf, name, _reordered(name, weight, about, (2, -1)), kind)
        writer.add_tensor(theirs[name], data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def _quantized(gguf: Any, name: str, weight: Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in a type. ConfigError for one that the type cannot hold,
    CheckpointError for NaN."""
    hf_format.check_finite(name, weight)
    largest = weight.abs().max()
    if largest > LARGEST.get(kind.name, math.inf):
        raise ConfigError(
            f"{name} reaches {largest:.3g}, more than {kind.name} holds; set --dtype bfloat16"
        )
    numbers = weight.float().cpu().contiguous().numpy()
    try:
        quantized: np.ndarray = gguf.quants.quantize(numbers, kind)
    except gguf.quants.QuantError as error:
        raise ConfigError(
            f"{name} does not fit {kind.name} ({error}); set --dtype float16"
        ) from None
    return quantized
