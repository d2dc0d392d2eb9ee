"""GGUF files (llama.cpp) of the Llama, Qwen2 and Qwen3 families: read into the names of Hugging Face, and written.

A file holds weights in F32, F16, BF16 or quantized blocks, the architecture, the tokenizer and the chat template. The
`gguf` package reads its layout and its quantizations. The rows of Llama's query and key projections are in the order of
interleaved rotary positions. Tokenizers are byte-level ("gpt2"); SentencePiece ones ("llama") are not read.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.formats import hf_format

FILE = "model.gguf"
FAMILIES = ("llama", "qwen2", "qwen3")
READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# theirs -> Hugging Face's; {} is the layer
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm", "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj", "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj", "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm", "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}  # fmt: skip
# keys of the architecture: config.json's
KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
}  # fmt: skip
WRITTEN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # our names of theirs
SPECIAL = dict(bos_token="bos", eos_token="eos", pad_token="padding", unk_token="unknown")
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # kinds of tokens
# How a byte-level vocabulary of this name splits a text before it merges.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"gpt-2": GPT2, "default": GPT2, "smollm": GPT2, "llama-bpe": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", "")}


def file_in(source: Path) -> Path | None:
    """The GGUF file that `source` is, or the first of a directory without config.json; None where there is none."""
    inside = sorted(source.glob("*.gguf")) if not (source / "config.json").exists() else []
    return source if source.suffix == ".gguf" else next(iter(inside), None)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingFile("GGUF files need the package gguf; pip install gguf") from None
    return gguf


def _names(about: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face's name of each tensor that a file of this config.json may hold."""
    stems = {a.format(i): b.format(i) for a, b in NAMES.items() for i in range(about["num_hidden_layers"])}
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in stems.items() for kind in ("weight", "bias")}


def _reordered(name: str, weight: Tensor, about: Mapping[str, Any], order: tuple[int, int]) -> Tensor:
    """A tensor of Hugging Face's name with the rows of a Llama's query and key heads in the other order: 2 x half in
    Hugging Face's files, half x 2 in llama.cpp's. order: the one that it has."""
    queries = about["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": about.get("num_key_value_heads", queries)}.get(name.split(".")[-2])
    if about["model_type"] != "llama" or heads is None:
        return weight
    return weight.view(heads, *order, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def read(path: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]], dict[str, Any]]:
    """(config.json, tensors in float32 by Hugging Face's names, `saved` of an ImportedTokenizer) of a file.

    MissingFile without the file or the `gguf` package, CheckpointError for a file that is not whole, ConfigError for
    another architecture, quantization or vocabulary."""
    gguf = _package()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        family, split = fields["general.architecture"], fields.get("tokenizer.ggml.pre", "default")
        scaling = fields.get(f"{family}.rope.scaling.type", "none")
        for what, found, readable in (
            ("architecture", {family}, FAMILIES),
            ("position scaling", {"by frequency" if "rope_freqs.weight" in tensors else scaling}, ("none",)),
            ("tensors in", {tensor.tensor_type.name for tensor in reader.tensors}, READ),
            ("tokenizer", {fields["tokenizer.ggml.model"]}, ("gpt2",)),
            ("tokenizer split", {split}, SPLITS),
        ):
            if unread := found - set(readable):
                raise ConfigError(f"{path} has {what} {', '.join(unread)}; required: {', '.join(readable)}")
        about = {ours: fields[name] for key, ours in KEYS.items() if (name := f"{family}.{key}") in fields}
        about |= dict(model_type=family, tie_word_embeddings="output.weight" not in tensors)
        about["vocab_size"] = int(tensors["token_embd.weight"].shape[1])  # rows beyond the tokens are padding
        # 1e-6, not 9.99999997e-07
        about = {name: float(str(np.float32(x))) if isinstance(x, float) else x for name, x in about.items()}
        names, saved = _names(about), _tokenizer(path.stem, split, fields)
    except ConfigError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is no whole GGUF file ({str(error)[:120]}); download it again") from None

    def weights() -> Iterator[tuple[str, Tensor]]:
        for theirs, tensor in tensors.items():
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            values, name = values.reshape(tuple(map(int, reversed(tensor.shape)))), names.get(theirs, theirs)
            yield name, _reordered(name, torch.from_numpy(values), about, (-1, 2))

    return about, weights(), saved


# ---- tokenizer


def _splitter(split: str) -> Any:
    parts = tokenizers.pre_tokenizers
    pieces = parts.Split(tokenizers.Regex(SPLITS[split]), "isolated")
    digits = [parts.Digits(individual_digits=True)] if split == "smollm" else []
    return parts.Sequence([*digits, pieces, parts.ByteLevel(add_prefix_space=False, use_regex=False)])


def _tokenizer(name: str, split: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`saved` of an ImportedTokenizer: a tokenizer.json made of the vocabulary, special tokens and the template."""
    parts = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens = parts["tokens"]
    kinds = parts.get("token_type") or [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in parts["merges"]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    made.pre_tokenizer, made.decoder = _splitter(split), tokenizers.decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, kinds) if kind in (CONTROL, USER_DEFINED)]
    made.add_tokens([tokenizers.AddedToken(t, normalized=False, special=kind == CONTROL) for t, kind in added])
    ids = {key: parts.get(f"{theirs}_token_id") for key, theirs in SPECIAL.items()}
    special = {key: tokens[i] for key, i in ids.items() if i is not None}
    if parts.get("add_bos_token") and (first := special.get("bos_token")):
        begins = tokenizers.processors.TemplateProcessing
        made.post_processor = begins(f"{first} $A", f"{first} $A $B", [(first, ids["bos_token"])])
    template = fields.get("tokenizer.chat_template")
    return {"spec": f"hf:{name}", "json": made.to_str(), "special": special, "template": template}


# ---- writing


def write(
    path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor], saved: Mapping[str, Any], dtype: str
) -> int:
    """A file of config.json's contents, tensors by Hugging Face's names and `saved` of an ImportedTokenizer; returns its
    bytes. Matrices are in `dtype` (a key of WRITTEN), vectors in float32. ConfigError for what no such file can hold."""
    gguf = _package()
    family, scaling = about["model_type"], about.get("rope_scaling")
    if family not in FAMILIES or about["hidden_act"] != "silu" or scaling:
        got = f"{family} with {about['hidden_act']} and rope_scaling {scaling}"
        raise ConfigError(f"this model is {got}; required: {', '.join(FAMILIES)} with silu, without rope_scaling")
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(saved["spec"].removeprefix("hf:"))
    for key, name in (KEYS | dict.fromkeys(("attention.value_length", "rope.dimension_count"), "head_dim")).items():
        (writer.add_float32 if name in hf_format.KINDS else writer.add_uint32)(f"{family}.{key}", about[name])
    _add_tokenizer(writer, saved, rows=about["vocab_size"])
    theirs = {ours: theirs for theirs, ours in _names(about).items()}
    for name, weight in tensors.items():
        weight = _reordered(name, weight, about, (2, -1))
        kind = gguf.GGMLQuantizationType[WRITTEN[dtype] if weight.ndim == 2 else "F32"]
        try:
            data = gguf.quants.quantize(weight.float().cpu().contiguous().numpy(), kind)
        except gguf.quants.QuantError as error:
            raise ConfigError(f"{name} does not fit {kind.name} ({error}); set --dtype float16") from None
        writer.add_tensor(theirs[name], data, raw_dtype=kind)
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()
    return path.stat().st_size


def _add_tokenizer(writer: Any, saved: Mapping[str, Any], rows: int) -> None:
    """Tokens, their kinds, merges, template, and the name of the way texts are split, found by trying the known ones.
    llama.cpp wants as many tokens as the embedding has rows."""
    probe = "it's  WE'LL 12345 x=1\n\n\t caf\u00e9 \u6f22\u5b57 \r\n"
    file, pre = json.loads(saved["json"]), tokenizers.Tokenizer.from_str(saved["json"]).pre_tokenizer
    model, added = file["model"], file["added_tokens"]
    pieces = pre and pre.pre_tokenize_str(probe)
    split = next((name for name in SPLITS if _splitter(name).pre_tokenize_str(probe) == pieces), None)
    if model["type"] != "BPE" or split is None:
        raise ConfigError(f"{saved['spec']} splits text in no way that GGUF is written with ({', '.join(SPLITS)})")
    kinds = dict.fromkeys(model["vocab"], 1)
    kinds |= {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in added}
    ids = model["vocab"] | {t["content"]: t["id"] for t in added}
    named = {i: token for token, i in ids.items()}
    tokens = [named.get(i, f"[PAD{i}]") for i in range(rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, UNUSED) for token in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    for name, theirs in SPECIAL.items():
        if (token := saved["special"].get(name)) in ids:
            writer.add_uint32(f"tokenizer.ggml.{theirs}_token_id", ids[token])
    writer.add_add_bos_token(False)
    if saved["template"]:
        writer.add_chat_template(saved["template"])
