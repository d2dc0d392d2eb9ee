"""GGUF in and out: transformers reads what we write, we read it back; foreign and damaged files
are one line."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_format import foreign, ids_below, imported

from codechat.core.errors import UserError
from codechat.formats import exchange, gguf_format

pytest.importorskip("gguf", reason="files are written by it: pip install -e '.[test]'")
pytestmark = pytest.mark.usefixtures("home")
TEXTS = [
    "",
    " ",
    "a  b\t\tc\n\n\n  x = 12345",
    "héé 漢字 🙂\u200b",
    "<|im_end|> it's  WE'LL",
    "\r\n\n a1b2",
]
TEXTS += ["".join(random.Random(i).choices("ab \n\t19'éλ漢🙂_.<|>", k=40)) for i in range(200)]


def written(tmp_path: Path, ckpt: str = "ours", dtype: Any = "float32") -> Path:
    """The run as a GGUF file."""
    out = tmp_path / f"{ckpt}-{dtype}"
    exchange.export(
        exchange.ExportConfig(ckpt=ckpt, out=out, format="gguf", dtype=dtype, overwrite=True)
    )
    return out / gguf_format.FILE


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2-grouped", "qwen3", "qwen3-tied"])
@torch.no_grad()
def test_transformers_reads_our_file_and_so_do_we(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    theirs = foreign(transformers, tmp_path / "in", name)
    ids = ids_below(400, 2, 64)
    ours = imported(tmp_path / "in", "ours")
    for dtype in ("bfloat16", "float16", "float32"):
        path = written(tmp_path, dtype=dtype)
        back = imported(path.parent if dtype == "float32" else path, dtype)
        cast = getattr(torch, dtype)
        for (which, weight), again in zip(
            ours.model.named_parameters(), back.model.parameters(), strict=True
        ):
            assert torch.equal(again, weight.to(cast).float() if weight.ndim == 2 else weight), (
                which
            )
        assert (back.tags, back.tokenizer.template) == (ours.tags, ours.tokenizer.template)
        assert all(back.tokenizer.encode(text) == ours.tokenizer.encode(text) for text in TEXTS)
        assert all(back.tokenizer.decode(back.tokenizer.encode(text)) == text for text in TEXTS)
    # transformers does not read the width of its heads
    how = dict(config=theirs.config) if "qwen3" in name else {}
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, **how
    )
    torch.testing.assert_close(whole(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_quantized_weights_are_what_the_file_says(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = foreign(transformers, tmp_path / "in", "llama", intermediate_size=64).state_dict()
    imported(tmp_path / "in", "ours")
    coarse = (("Q5_0", 0.1), ("Q5_1", 0.1), ("Q4_0", 0.2), ("Q4_1", 0.2))
    for kind, error in (("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), *coarse):
        monkeypatch.setitem(gguf_format.WRITTEN, "float32", kind)
        for name, found in gguf_format.read(written(tmp_path))[1]:
            assert found.dtype == torch.float32
            assert found.shape == theirs[name].shape
            assert (found - theirs[name]).abs().max() <= error * theirs[name].abs().max(), name


def test_what_no_gguf_holds_and_files_that_cannot_be_read_are_one_line(
    transformers: Any, tmp_path: Path
) -> None:
    for name, kind, more in (("ours", "llama", 64), ("wide", "llama", 72), ("arcee", "arcee", 64)):
        foreign(transformers, tmp_path / name, kind, intermediate_size=more)
        imported(tmp_path / name, name)
    for ckpt, dtype, named in (("arcee", "float16", "arcee"), ("wide", "q8_0", "down_proj")):
        with pytest.raises(UserError, match=named):
            written(tmp_path, ckpt, dtype)
        assert not (tmp_path / f"{ckpt}-{dtype}").exists()
    whole = written(tmp_path).read_bytes()
    for text, named in (
        *(
            (part, "whole")
            for part in (b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"\0" * 500)
        ),
        *(
            (whole.replace(old, new), new.decode())
            for old, new in ((b"llama", b"gemma"), (b"stablelm2", b"stablelm3"))
        ),
        (whole.replace(b"gpt2", b"bert"), "bert"),
    ):
        (tmp_path / "x.gguf").write_bytes(text)
        with pytest.raises(UserError, match=named) as caught:
            imported(tmp_path / "x.gguf", "foreign")
        assert "\n" not in str(caught.value)
