"""GGUF in and out: transformers reads what we write, we read it back; foreign and damaged files
are one line."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_hf_format import foreign, ids_below, imported

from codechat.core.errors import UserError
from codechat.formats import exchange, gguf_format
from codechat.models.loading import LoadedModel
from codechat.runs import paths

pytest.importorskip("gguf", reason="files are written by it: pip install -e '.[test]'")
pytestmark = pytest.mark.usefixtures("home")
TEXTS = [
    "",
    " ",
    "a  b\t\tc\n\n\n  x = 12345",
    "héé 漢字 🙂\u200b",
    "<|im_end|> it's  WE'LL",
    "\r\n\n a1b2",
    *("".join(random.Random(i).choices("ab \n\t19'éλ漢🙂_.<|>", k=40)) for i in range(200)),
]


DTYPES = ("bfloat16", "float16", "float32")


def written(tmp_path: Path, ckpt: str = "ours", dtype: Any = "float32") -> Path:
    """The run as a GGUF file."""
    out = tmp_path / f"{ckpt}-{dtype}"
    exchange.export(
        exchange.ExportConfig(ckpt=ckpt, out=out, format="gguf", dtype=dtype, overwrite=True)
    )
    return out / gguf_format.FILE


class Written(NamedTuple):
    """A model of transformers, our import of it, and its GGUF files by dtype, below a root."""

    name: str
    theirs: Any
    ours: LoadedModel
    files: dict[str, Path]
    root: Path


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen2-grouped", "qwen3", "qwen3-tied"])
def exchanged(
    request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    root = tmp_path_factory.mktemp("gguf")
    theirs = foreign(transformers, root / "in", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        ours = imported(root / "in", "ours")
        files = {dtype: written(root, dtype=dtype) for dtype in DTYPES}
    return Written(request.param, theirs, ours, files, root)


class Back(NamedTuple):
    """What we read of our file of a dtype."""

    dtype: str
    loaded: LoadedModel


@pytest.fixture(scope="module", params=DTYPES)
def back(request: pytest.FixtureRequest, exchanged: Written) -> Back:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", exchanged.root)
        return Back(request.param, imported(exchanged.files[request.param], request.param))


def test_we_read_our_file_in_the_precision_of_its_type(exchanged: Written, back: Back) -> None:
    found = back.loaded.model.state_dict()
    cast = getattr(torch, back.dtype)
    for name, weight in exchanged.ours.model.state_dict().items():
        expected = weight.to(cast).float() if weight.ndim == 2 else weight
        assert torch.equal(found[name], expected), name


def test_a_file_keeps_tags_and_template(exchanged: Written, back: Back) -> None:
    assert back.loaded.tags == exchanged.ours.tags
    assert back.loaded.tokenizer.template == exchanged.ours.tokenizer.template


def test_a_file_keeps_the_tokenizer(exchanged: Written, back: Back) -> None:
    theirs = back.loaded.tokenizer
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == exchanged.ours.tokenizer.encode(text)
        assert theirs.decode(ids) == text


def test_a_file_is_found_in_its_directory(exchanged: Written) -> None:
    assert imported(exchanged.files["float32"].parent).tags == exchanged.ours.tags


@torch.no_grad()
def test_transformers_computes_its_logits_from_our_file(
    transformers: Any, exchanged: Written
) -> None:
    ids = ids_below(400, 2, 64)
    path = exchanged.files["float32"]
    # transformers does not read the width of its heads
    config = exchanged.theirs.config if "qwen3" in exchanged.name else None
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config
    )
    expected = exchanged.theirs(ids).logits
    torch.testing.assert_close(whole(ids).logits, expected, atol=1e-4, rtol=1e-4)


def foreign_of_width(transformers: Any, folder: Path, kind: str, width: int) -> Any:
    return foreign(transformers, folder, kind, change={"intermediate_size": width})


@pytest.fixture(scope="module")
def narrow(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A llama whose rows are whole blocks of all quantizations."""
    root = tmp_path_factory.mktemp("narrow")
    theirs = foreign_of_width(transformers, root / "in", "llama", 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        ours = imported(root / "in", "ours")
        files = {"float32": written(root)}
    return Written("llama", theirs, ours, files, root)


@pytest.mark.parametrize(
    "kind, error",
    [
        ("F16", 1e-3),
        ("BF16", 1e-2),
        ("Q8_0", 1e-2),
        ("Q5_0", 0.1),
        ("Q5_1", 0.1),
        ("Q4_0", 0.2),
        ("Q4_1", 0.2),
    ],
)
def test_quantized_weights_are_what_the_file_says(
    kind: str, error: float, narrow: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", narrow.root)
    monkeypatch.setitem(gguf_format.WRITTEN, "float32", kind)
    expected = narrow.theirs.state_dict()
    for name, found in gguf_format.read(written(tmp_path))[1]:
        weight = expected[name]
        assert found.dtype == torch.float32
        assert found.shape == weight.shape
        assert (found - weight).abs().max() <= error * weight.abs().max(), name


@pytest.mark.parametrize(
    "kind, width, dtype, named",
    [("arcee", 64, "float16", "arcee"), ("llama", 72, "q8_0", "down_proj")],
    ids=["architecture", "rows that are no whole blocks"],
)
def test_what_no_gguf_holds_is_refused_by_name(
    kind: str, width: int, dtype: str, named: str, transformers: Any, tmp_path: Path
) -> None:
    foreign_of_width(transformers, tmp_path / "in", kind, width)
    imported(tmp_path / "in", "ours")
    with pytest.raises(UserError, match=named):
        written(tmp_path, dtype=dtype)
    assert not (tmp_path / f"ours-{dtype}").exists()


def refused(tmp_path: Path, content: bytes, named: str) -> None:
    """In one line that names what is wrong."""
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=named) as caught:
        imported(tmp_path / "x.gguf", "foreign")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 4, 200, "half"])
def test_a_file_that_is_cut_is_one_line(length: int | str, narrow: Written, tmp_path: Path) -> None:
    whole = narrow.files["float32"].read_bytes()
    kept = len(whole) // 2 if length == "half" else int(length)
    refused(tmp_path, whole[:kept], "whole")


def test_a_file_of_zeros_is_one_line(tmp_path: Path) -> None:
    refused(tmp_path, b"\0" * 500, "whole")


@pytest.mark.parametrize(
    "old, new", [(b"llama", b"gemma"), (b"stablelm2", b"stablelm3"), (b"gpt2", b"bert")]
)
def test_an_architecture_and_a_tokenizer_that_are_not_known_are_named(
    old: bytes, new: bytes, narrow: Written, tmp_path: Path
) -> None:
    whole = narrow.files["float32"].read_bytes()
    refused(tmp_path, whole.replace(old, new), new.decode())
