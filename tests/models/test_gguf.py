"""GGUF in and out: the logits and ids of the Hugging Face directory with these weights; foreign and damaged files are one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_hf_format import foreign, ids_below, imported

from codechat.core.errors import UserError
from codechat.models import exchange, gguf_format

gguf = pytest.importorskip("gguf", reason="files are written by it: pip install -e '.[test]'")
pytestmark = pytest.mark.usefixtures("runs_root")

BACK = {theirs: name for name, theirs in gguf_format.NAMES.items()}  # Hugging Face's -> the file's


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = "".join(part for part in stem.split(".") if part.isdigit())
    return BACK[stem.replace(f".{layer}.", ".{}.", 1) if layer else stem].format(layer) + f".{kind}"


def written(directory: Path, model: Any, kind: str = "F32", architecture: str = "", **fields: Any) -> Path:
    """The model of a Hugging Face directory as a GGUF file; matrices in `kind`. fields: replace its own."""
    cfg, path = model.config, directory.with_suffix(".gguf")
    family = architecture or cfg.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_key_length(getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(cfg.rope_parameters["rope_theta"])
    write_tokenizer(writer, directory, fields)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and cfg.tie_word_embeddings:
            continue
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = cfg.num_attention_heads if "q_proj" in name else cfg.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        sort = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        data = gguf.quants.quantize(tensor.numpy().astype(np.float32), sort)
        writer.add_tensor(gguf_name(name), data, raw_dtype=sort)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: Any, directory: Path, fields: dict[str, Any]) -> None:
    file = json.loads((directory / "tokenizer.json").read_text())
    about = json.loads((directory / "tokenizer_config.json").read_text())
    special = {t["content"] for t in file["added_tokens"]}
    tokens = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    writer.add_tokenizer_model(fields.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "qwen2"))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf_format.CONTROL if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in file["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(about["eos_token"]))
    writer.add_chat_template(about["chat_template"])


TEXTS = ["", " ", "a  b\t\tc\n\n\n  x = 12345", "héé 漢字 🙂\u200b", "<|im_end|> it's  WE'LL", "\r\n\n a1b2"]
ALPHABET = "ab \n\t19'éλ漢🙂_.<|>"
TEXTS += ["".join(random.Random(i).choices(ALPHABET, k=40)) for i in range(200)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2-grouped", "qwen3", "qwen3-tied"])
@torch.no_grad()
def test_a_file_gives_the_logits_ids_and_template_of_its_directory(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    theirs = foreign(transformers, tmp_path / "in", name)
    ours, other = imported(written(tmp_path / "in", theirs), "file"), imported(tmp_path / "in", "directory")
    ids = ids_below(400, 2, 64)
    assert torch.equal(ours.model(ids), other.model(ids))
    torch.testing.assert_close(ours.model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert (ours.tags, ours.tokenizer.template) == (other.tags, other.tokenizer.template)
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == other.tokenizer.encode(text), text
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind, error", [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.2), ("Q4_1", 0.2)])
def test_quantized_weights_are_what_the_file_says(transformers: Any, tmp_path: Path, kind: str, error: float) -> None:
    theirs = foreign(transformers, tmp_path / "in", "llama", intermediate_size=64)
    path = written(tmp_path / "in", theirs, kind)
    weights = dict(gguf_format.read(path)[1])
    for name, weight in theirs.state_dict().items():
        if name in weights:
            found = weights[name]
            assert found.dtype == torch.float32 and found.shape == weight.shape
            assert (found - weight).abs().max() <= error * weight.abs().max(), name
    assert imported(path, "quantized").model.cfg == imported(tmp_path / "in", "whole").model.cfg


@pytest.mark.parametrize("name", ["llama", "qwen2-grouped", "qwen3-tied"])
@torch.no_grad()
def test_an_exported_file_reads_back_bit_for_bit(transformers: Any, tmp_path: Path, name: str) -> None:
    foreign(transformers, tmp_path / "in", name)
    ours, ids = imported(tmp_path / "in", "ours"), ids_below(400, 2, 64)
    for dtype, cast in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        out = tmp_path / dtype
        exchange.export(exchange.ExportConfig(ckpt="ours", out=out, format="gguf", dtype=dtype))
        back = imported(out, f"back-{dtype}")
        for (which, weight), again in zip(ours.model.named_parameters(), back.model.parameters()):
            assert torch.equal(again, weight.to(cast).float() if weight.ndim == 2 else weight), which
        assert dtype != "float32" or torch.equal(back.model(ids), ours.model(ids))
        assert back.tokenizer.template == ours.tokenizer.template
        assert all(back.tokenizer.encode(text) == ours.tokenizer.encode(text) for text in TEXTS)


def test_models_that_no_gguf_holds_are_refused(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "arcee", "arcee")
    imported(tmp_path / "arcee", "arcee")
    wide = foreign(transformers, tmp_path / "wide", "llama", intermediate_size=72)
    assert wide.config.intermediate_size % 32
    imported(tmp_path / "wide", "wide")
    for ckpt, dtype, named in (("arcee", "float16", "arcee"), ("wide", "q8_0", "down_proj")):
        with pytest.raises(UserError, match=named):
            exchange.export(exchange.ExportConfig(ckpt=ckpt, out=tmp_path / "out", format="gguf", dtype=dtype))
        assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_imported_are_one_line(transformers: Any, tmp_path: Path) -> None:
    theirs = foreign(transformers, tmp_path / "in", "llama", intermediate_size=64)
    whole = written(tmp_path / "in", theirs).read_bytes()
    for i, text in enumerate((b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"\0" * 500)):
        (tmp_path / f"{i}.gguf").write_bytes(text)
        with pytest.raises(UserError) as caught:
            imported(tmp_path / f"{i}.gguf", f"cut{i}")
        assert "\n" not in str(caught.value)
    for how, named in (
        (dict(architecture="gemma"), "gemma"),
        (dict(kind="Q5_0"), "Q5_0"),
        (dict(tokenizer="bert"), "bert"),
        (dict(pre="deepseek-llm"), "deepseek-llm"),
    ):
        with pytest.raises(UserError, match=named):
            imported(written(tmp_path / "in", theirs, **how), "foreign")
