"""GGUF files as others write them: every quantization, how texts are split and begun, one
matrix or two, what is refused."""

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from test_hf_format import imported

from codechat.core.errors import CheckpointError, ConfigError, UserError
from codechat.formats import exchange, exported_tokenizer, gguf_format, gguf_tokenizer
from codechat.models import loading
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer

gguf = pytest.importorskip("gguf", reason="files are written by it: pip install -e '.[test]'")
regex = pytest.importorskip("regex", reason="splits are compared with it; tiktoken needs it too")
tokenizers = pytest.importorskip("tokenizers", reason="imported models need it")
pytestmark = pytest.mark.usefixtures("home")
WIDTH, ROWS, HEADS = 256, 320, 4  # a block of the K quants is 256 numbers
CORPUS = (
    "def add(a, b):\n    return a + b  # 1234 it's WE'LL don't "
    "x=1.0 <=> caf\u00e9 \u6f22\u5b57 ()[]{}==!= $5\n"
) * 3


def types() -> list[Any]:
    """Those of which the package makes numbers."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    assert {"Q5_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL"} <= {kind.name for kind in found}
    return found


def bpe() -> Any:
    """A byte-level BPE of 300 ids."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS.replace("\n", " ")] * 3, trainer)
    return made


def numbers(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)


def file(
    path: Path,
    tensors: dict[str, Any] | None = None,
    *,
    arch: str = "llama",
    pre: str | None = "gpt-2",
    keys: dict[str, Any] | None = None,
    ids: dict[str, int] | None = None,
    flags: dict[str, bool] | None = None,
    tokens: list[str] | None = None,
    templates: list[dict[str, str]] | None = None,
) -> Path:
    """A model of one layer as llama.cpp's converter would write it. tensors: {name: array,
    (type, bytes) or None} over random ones; keys of the architecture; ids of special tokens;
    flags of the tokenizer; chat templates with names."""
    writer = gguf.GGUFWriter(path, arch)
    made = json.loads(bpe().to_str())
    sizes = dict(
        embedding_length=WIDTH, feed_forward_length=WIDTH, context_length=64, block_count=1
    )
    about: dict[str, Any] = sizes | {
        "attention.head_count": HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (about | (keys or {})).items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            kinds[type(value)](f"{arch}.{key}", value)
    vocab = made["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens or sorted(vocab, key=vocab.get))
    writer.add_token_types([3, 3, *[1] * (len(vocab) - 2)])
    writer.add_token_merges([" ".join(merge) for merge in made["model"]["merges"]])
    for name, i in ({"bos": 0, "eos": 1} | (ids or {})).items():
        if i >= 0:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    for name, on in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", on)
    if templates:
        writer.add_chat_template(templates)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = {f"blk.0.{name}.weight": numbers(i, WIDTH, WIDTH) for i, name in enumerate(square)}
    names |= {
        f"{name}.weight": np.ones(WIDTH, np.float32)
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    for name, value in (
        names | {"token_embd.weight": numbers(9, ROWS, WIDTH)} | (tensors or {})
    ).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=value[0])
        elif value is not None:
            writer.add_tensor(name, value)
    for finish in (
        "write_header_to_file",
        "write_kv_data_to_file",
        "write_tensors_to_file",
        "close",
    ):
        getattr(writer, finish)()
    return path


def quantized(values: np.ndarray, name: str) -> tuple[Any, np.ndarray]:
    kind = gguf.GGMLQuantizationType[name]
    return kind, gguf.quants.quantize(values, kind)


def loaded(path: Path, name: str = "theirs") -> loading.LoadedModel:
    return imported(path, name, overwrite=True)


# ---- weights


@pytest.mark.parametrize("kind", types(), ids=lambda kind: kind.name)
def test_every_quantization_that_the_package_reads_is_read(tmp_path: Path, kind: Any) -> None:
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    # scales are finite
    raw = np.random.default_rng(0).integers(
        0,
        64,
        (WIDTH, WIDTH // size * n_bytes),
        dtype=np.uint8,
    )
    data = raw.view(dict(F32=np.float32, F16=np.float16).get(kind.name, np.uint8))
    model = loaded(file(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (kind, data)})).model
    expected = gguf.quants.dequantize(data, kind).reshape(WIDTH, WIDTH)
    assert torch.equal(model.blocks[0].mlp.up.weight, torch.from_numpy(expected.copy()))
    assert expected.any(), "a file of zeros shows nothing"


def q4_k(block: np.ndarray) -> np.ndarray:
    """A super-block of Q4_K, as ggml's block_q4_K lays it out: 8 scales and minima of 6 bits,
    256 numbers of 4."""
    d, least = block[:4].view(np.float16).astype(np.float32)
    packed = block[4:16].astype(int)
    nibbles = block[16:]
    out = []
    for j in range(8):
        if j < 4:
            scale = packed[j] & 63
            offset = packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            offset = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        numbers = nibbles[32 * (j // 2) : 32 * (j // 2 + 1)] >> 4 * (j % 2) & 15
        out.append(d * np.float32(scale) * numbers - least * np.float32(offset))
    return np.concatenate(out)


def q6_k(block: np.ndarray) -> np.ndarray:
    """A super-block of Q6_K: 256 numbers of 4 + 2 bits, 16 scales of 8 bits, one in float16."""
    low = block[:128]
    high = block[128:192]
    scales = block[192:208].view(np.int8)
    d = block[208:].view(np.float16).astype(np.float32)[0]
    out = np.empty(256, np.float32)
    for i in range(256):
        half = i // 128
        part = i % 128 // 32
        at = i % 32
        nibble = low[64 * half + 32 * (part % 2) + at] >> (4 if part > 1 else 0) & 15
        pair = high[32 * half + at] >> 2 * part & 3
        out[i] = d * np.float32(scales[i // 16]) * np.float32(int(nibble | pair << 4) - 32)
    return out


@pytest.mark.parametrize(
    "name, written_out, scale_at", [("Q4_K", q4_k, (0, 2)), ("Q6_K", q6_k, (208,))]
)
def test_k_quants_are_their_closed_form(
    tmp_path: Path,
    name: str,
    written_out: Any,
    scale_at: tuple[int, ...],
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (WIDTH, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in scale_at:
        blocks[:, at : at + 2] = (rng.random((WIDTH, 1)) * 0.01).astype(np.float16).view(np.uint8)
    model = loaded(file(tmp_path / "x.gguf", {"blk.0.ffn_down.weight": (kind, blocks)})).model
    expected = torch.from_numpy(np.stack([written_out(block) for block in blocks]))
    torch.testing.assert_close(model.blocks[0].mlp.down.weight, expected, atol=0, rtol=1e-6)


def test_rows_that_are_no_multiple_of_256_have_the_smaller_blocks_beside_k_quants(
    tmp_path: Path,
) -> None:
    """As llama-quantize writes Q4_K_M of Qwen2.5-0.5B, whose rows have 896 numbers."""
    gate = numbers(3, 96, WIDTH)
    square = dict(embedding_length=WIDTH, feed_forward_length=96)
    tensors = {
        "blk.0.ffn_gate.weight": gate,
        "blk.0.ffn_up.weight": quantized(gate, "Q8_0"),
        "blk.0.ffn_down.weight": quantized(numbers(4, WIDTH, 96), "Q5_0"),
    }
    model = loaded(file(tmp_path / "x.gguf", tensors, keys=square)).model
    assert (
        model.blocks[0].mlp.down.weight - torch.from_numpy(numbers(4, WIDTH, 96))
    ).abs().max() < 0.02
    assert torch.equal(model.blocks[0].mlp.gate.weight, torch.from_numpy(gate))


EMBEDDING = numbers(9, ROWS, WIDTH)


@pytest.mark.parametrize(
    "embedding, head, kept",
    [
        ("Q5_0", "Q8_0", "Q8_0"),
        ("Q4_0", "Q8_0", "Q8_0"),
        ("Q8_0", "Q5_1", "Q8_0"),
        ("F16", "Q8_0", "F16"),
        ("Q4_1", "F32", "F32"),
        ("BF16", "F16", "F16"),
        ("F32", "F32", "F32"),
    ],
)
def test_a_head_that_is_the_embedding_up_to_quantization_is_tied(
    tmp_path: Path,
    embedding: str,
    head: str,
    kept: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = {
        "token_embd.weight": quantized(EMBEDDING, embedding),
        "output.weight": quantized(EMBEDDING, head),
    }
    model = loaded(file(tmp_path / "x.gguf", tensors)).model
    expected = gguf.quants.dequantize(*reversed(quantized(EMBEDDING, kept)))
    assert model.cfg.tied
    assert model.head is None
    assert torch.equal(model.wte.weight, torch.from_numpy(np.array(expected, np.float32)))
    assert "tied" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, embedding, head",
    [
        (lambda x: numbers(5, ROWS, WIDTH), "F32", "F32"),
        (lambda x: numbers(5, ROWS, WIDTH), "Q4_0", "Q8_0"),
        (lambda x: x + 0.2 * numbers(5, ROWS, WIDTH), "Q5_0", "Q8_0"),
        (lambda x: x + 1e-3 * numbers(5, ROWS, WIDTH), "F32", "F32"),
        (lambda x: x + 0.05 * numbers(5, ROWS, WIDTH), "Q8_0", "Q8_0"),
        (lambda x: np.concatenate([x[:-1], -x[-1:]]), "Q5_0", "Q8_0"),
        (lambda x: x[::-1].copy(), "Q5_0", "Q8_0"),
    ],
    ids=[
        "other",
        "other, coarse",
        "a fifth",
        "a thousandth, exact",
        "tuned, same type",
        "one row",
        "reversed",
    ],
)
def test_a_head_that_differs_stays_a_matrix_of_its_own(
    tmp_path: Path,
    change: Any,
    embedding: str,
    head: str,
) -> None:
    tensors = {
        "token_embd.weight": quantized(EMBEDDING, embedding),
        "output.weight": quantized(change(EMBEDDING), head),
    }
    model = loaded(file(tmp_path / "x.gguf", tensors)).model
    expected = gguf.quants.dequantize(*reversed(tensors["output.weight"]))
    assert not model.cfg.tied
    assert torch.equal(model.head.weight, torch.from_numpy(np.array(expected, np.float32)))


def test_a_config_json_beside_the_file_says_whether_the_head_is_tied(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": quantized(EMBEDDING, "Q5_0"),
        "output.weight": quantized(EMBEDDING, "Q8_0"),
    }
    path = file(tmp_path / "x.gguf", tensors)
    for says, tied in (
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True}, True),
        ({}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(says))
        assert loaded(path).model.cfg.tied is tied


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    up = numbers(1, WIDTH, WIDTH)
    up[3, 5] = bad
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds 1 numbers"):
        loaded(file(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": up}))


# ---- tokenizers


# What llama.cpp's llama-vocab.cpp splits by, in the syntax of the package regex. A blank that
# no expression takes is a piece too.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CUTS = {
    None: [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
CUTS |= {
    "default": CUTS[None],
    "llama3": CUTS["llama-bpe"],
    "deepseek-r1-qwen": CUTS["qwen2"],
    "dbrx": CUTS["llama-bpe"],
}
RNG = np.random.default_rng(0)
TEXTS = [
    "it's  WE'LL 12345 x==1.0",
    "a+b<=c $5 ~^|`",
    "((x))!?",
    "\t\n x\r\n\n y",
    "caf\u00e9 \u6f22\u5b57 aBcD\u00c9e",
    "def add(a, b):\n    return a + b",
]
TEXTS += [
    "".join(RNG.choice(list("ab \n\t19'\u00e9\u03bb\u6f22AB_.<|>=+$(){}`s"), 30))
    for _ in range(120)
]


def pieces(text: str, patterns: list[str]) -> list[str]:
    some = [text]
    for pattern in patterns:
        some = [part for piece in some for part in _cut(piece, pattern)]
    return some


def _cut(text: str, pattern: str) -> list[str]:
    """Matches and what is between them."""
    at = 0
    out = []
    for match in regex.finditer(pattern, text):
        out += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in (*out, text[at:]) if part]


@pytest.mark.parametrize("pre", CUTS, ids=str)
def test_texts_are_split_as_the_name_says(tmp_path: Path, pre: str | None) -> None:
    tok = loaded(file(tmp_path / "x.gguf", pre=pre)).tokenizer
    whole = bpe()
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    whole.model.ignore_merges = pre in ("llama-bpe", "llama3", "tekken")
    for text in TEXTS:
        assert tok.encode(text) == [
            i for piece in pieces(text, CUTS[pre]) for i in whole.encode(piece).ids
        ], text
        assert tok.decode(tok.encode(text)) == text


def test_a_file_without_a_name_is_not_split_as_gpt_2_is(tmp_path: Path) -> None:
    without, gpt2 = (
        loaded(file(tmp_path / "x.gguf", pre=pre)).tokenizer for pre in (None, "gpt-2")
    )
    assert sum(without.encode(text) != gpt2.encode(text) for text in TEXTS) > 10


@pytest.mark.parametrize("pre", ["deepseek-v3", "gemma4", "o200k-of-tomorrow", ""])
def test_a_way_to_split_that_is_not_known_is_refused_by_name(tmp_path: Path, pre: str) -> None:
    path = file(tmp_path / "x.gguf", pre="gpt-2")
    path.write_bytes(path.read_bytes().replace(b"gpt-2", b"gpt-9"))
    with pytest.raises(ConfigError, match="tokenizer.ggml.pre gpt-9"):
        loaded(path)
    if pre:
        with pytest.raises(ConfigError, match=f"tokenizer.ggml.pre {pre}"):
            loaded(file(tmp_path / "y.gguf", pre=pre))


@pytest.mark.parametrize(
    "pre, flags, begins",
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("tekken", {}, True),
        ("llama3", {}, True),
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("qwen2", {}, False),
        ("smollm", {}, False),
        (None, {}, False),
        ("dbrx", {}, False),
    ],
)
def test_a_text_begins_with_the_bos_token_where_the_file_or_its_kind_says_so(
    tmp_path: Path,
    pre: str | None,
    flags: dict[str, bool],
    begins: bool,
) -> None:
    model = loaded(file(tmp_path / "x.gguf", pre=pre, flags=flags))
    assert model.tokenizer.beginning == ((0,) if begins else ())
    assert model.tokenizer.encode("ab")[:1] != [0], "ordinary text is not a beginning"
    again = tmp_path / "again"
    exchange.export(exchange.ExportConfig(ckpt="theirs", out=again, format="gguf", dtype="float32"))
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(again / "model.gguf").fields.items()
    }
    assert fields["tokenizer.ggml.add_bos_token"] is begins
    assert loaded(again / "model.gguf", "again").tokenizer.beginning == model.tokenizer.beginning


def test_of_two_templates_the_one_for_tools_is_read_too(tmp_path: Path) -> None:
    texts = {"default": "{{ 'plain' }}\n", "tool_use": "{{ 'tools' }}\n"}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    reader = gguf.GGUFReader(file(tmp_path / "x.gguf", templates=named))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    saved = gguf_tokenizer.read(tmp_path / "x.gguf", "gpt-2", fields)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    read = environment.from_string(saved["template"])
    assert (read.render(tools=None), read.render(tools=[{}])) == ("plain", "tools")


def test_a_beginning_without_its_token_is_refused(tmp_path: Path) -> None:
    for flags, ids in (({}, {"bos": -1}), ({"add_bos_token": True}, {"bos": -1})):
        with pytest.raises(ConfigError, match="bos_token"):
            loaded(file(tmp_path / "x.gguf", pre="llama-bpe", flags=flags, ids=ids))


def test_qwen2_composes_characters_and_its_double_does_not(tmp_path: Path) -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    for pre, same in (("qwen2", True), ("stablelm2", False), ("gpt-2", False)):
        tok = loaded(file(tmp_path / "x.gguf", pre=pre)).tokenizer
        assert (tok.encode(composed) == tok.encode(apart)) is same


def test_a_token_that_stands_twice_is_refused(tmp_path: Path) -> None:
    vocab = json.loads(bpe().to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    with pytest.raises(ConfigError, match="token '!' twice"):
        loaded(file(tmp_path / "x.gguf", tokens=[*tokens[:-1], "!"]))


# ---- what our model does not compute


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window 4096"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "position scaling yarn"),
        ({"rope.scaling.type": "linear"}, "position scaling linear"),
        ({"rope.scale_linear": 4.0}, "llama.rope.scale_linear 4.0"),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count 32"),
        ({"attention.value_length": 32}, "llama.attention.value_length 32"),
        ({"expert_count": 8}, "llama.expert_count 8"),
        ({"logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv 8.0"),
        ({"attention.causal": False}, None),
        ({"a_key_of_tomorrow": 1}, "llama.a_key_of_tomorrow 1"),
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], named: str | None
) -> None:
    with pytest.raises(ConfigError, match=named or "llama.attention.causal"):
        loaded(file(tmp_path / "x.gguf", keys=keys))


def test_keys_that_change_nothing_are_read_over(tmp_path: Path) -> None:
    keys = {
        "vocab_size": ROWS,
        "rope.dimension_count": 64,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    keys |= {
        "attention.sliding_window": 0,
        "expert_count": 0,
        "rope.scaling.factor": 1.0,
        "rope.scaling.type": "none",
    }
    assert loaded(file(tmp_path / "x.gguf", keys=keys)).model.cfg.head_dim == 64


@pytest.mark.parametrize(
    "tensors, named",
    [
        ({"blk.0.attn_q.bias": np.zeros(WIDTH, np.float32)}, "q_proj.bias"),
        ({"blk.0.attn_output.bias": np.zeros(WIDTH, np.float32)}, "o_proj.bias"),
        ({"blk.0.ffn_up.bias": np.zeros(WIDTH, np.float32)}, "up_proj.bias"),
        ({"rope_freqs.weight": np.ones(32, np.float32)}, "by frequency"),
        ({"blk.0.ffn_up_exps.weight": np.zeros((2, 32, 32), np.float32)}, "ffn_up_exps"),
        ({"blk.0.ffn_up.weight": np.zeros((WIDTH, WIDTH), np.float64)}, "F64"),
        ({"blk.0.ffn_up.weight": np.zeros((WIDTH, WIDTH), np.int8)}, "I8"),
        ({"blk.0.ffn_up.weight": None}, "up_proj"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_biases_frequencies_experts_and_other_numbers_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named) as caught:
        loaded(file(tmp_path / "x.gguf", tensors))
    assert "\n" not in str(caught.value)


def test_a_directory_with_two_files_is_not_guessed_at(tmp_path: Path) -> None:
    for name in ("a", "b"):
        file(tmp_path / f"{name}.gguf")
    with pytest.raises(ConfigError, match="2 GGUF files"):
        loaded(tmp_path)


# ---- writing


@pytest.mark.parametrize("tags", ["text", "raw"])
def test_the_template_of_the_file_is_the_one_that_was_trained(tmp_path: Path, tags: str) -> None:
    """With tags text or raw, the original's template would ask for turns that training never
    had."""
    path = file(tmp_path / "x.gguf")
    reader = loaded(path)
    saved = reader.tokenizer.to_dict() | {"template": "{{ 'the original' }}"}
    with Run.create("tuned", {}, kind="test") as run:
        checkpoint.save(run.path, 1, model=reader.model, meta={"tokenizer": saved, "tags": tags})
    for form in ("gguf", "huggingface"):
        exchange.export(
            exchange.ExportConfig(ckpt="tuned", out=tmp_path / form, format=form, dtype="float32")
        )
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    found = fields["tokenizer.chat_template"].contents()
    assert (
        found
        == (tmp_path / "huggingface" / "chat_template.jinja").read_text()
        == exported_tokenizer.chat_template(tags)
    )
    assert (
        loaded(tmp_path / "gguf" / "model.gguf").tags
        == loaded(tmp_path / "huggingface").tags
        == tags
    )


def saved_as(tmp_path: Path, change: Any) -> None:
    """The run `odd`: a model whose tokenizer.json is changed."""
    reader = loaded(file(tmp_path / "x.gguf", pre="gpt-2"))
    saved = reader.tokenizer.to_dict()
    made = tokenizers.Tokenizer.from_str(saved["json"])
    change(made)
    meta = {"tokenizer": saved | {"json": made.to_str()}, "tags": "text"}
    with Run.create("odd", {}, kind="test", overwrite=True) as run:
        checkpoint.save(run.path, 1, model=reader.model, meta=meta)


def lowercases(made: Any) -> None:
    made.normalizer = tokenizers.normalizers.Lowercase()


def takes_blanks(made: Any) -> None:
    made.add_special_tokens([tokenizers.AddedToken("</s>", rstrip=True, normalized=False)])


def begins_twice(made: Any) -> None:
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> <s> $A", special_tokens=[("<s>", 0)]
    )


def ignores_merges(made: Any) -> None:
    made.model.ignore_merges = True


@pytest.mark.parametrize(
    "change", [lowercases, takes_blanks, begins_twice, ignores_merges], ids=lambda f: f.__name__
)
def test_a_tokenizer_that_no_file_describes_is_not_written(tmp_path: Path, change: Any) -> None:
    saved_as(tmp_path, change)
    with pytest.raises(ConfigError, match="GGUF"):
        exchange.export(
            exchange.ExportConfig(ckpt="odd", out=tmp_path / "out", format="gguf", dtype="float32")
        )
    assert not (tmp_path / "out").exists()


def test_ends_of_texts_are_written_and_read(tmp_path: Path) -> None:
    loaded(file(tmp_path / "x.gguf", flags={"add_bos_token": True, "add_eos_token": True}))
    exchange.export(
        exchange.ExportConfig(ckpt="theirs", out=tmp_path / "out", format="gguf", dtype="float32")
    )
    again = tokenizer.from_dict(gguf_format.read(tmp_path / "out" / "model.gguf").saved)
    whole = tokenizers.Tokenizer.from_str(again.to_dict()["json"]).encode("ab").ids
    assert (whole[0], whole[-1], again.beginning) == (0, 1, (0,))


@pytest.mark.parametrize("dtype, largest", [("float16", 7e4), ("q8_0", 1e7)])
def test_numbers_that_a_type_does_not_hold_are_refused_by_name(
    tmp_path: Path, dtype: Any, largest: float
) -> None:
    """They would be infinite in the file."""
    up = numbers(1, WIDTH, WIDTH)
    up[0, 0] = largest
    loaded(file(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": up}))
    with pytest.raises(ConfigError, match=r"up_proj.weight reaches .*--dtype bfloat16"):
        exchange.export(
            exchange.ExportConfig(ckpt="theirs", out=tmp_path / "out", format="gguf", dtype=dtype)
        )
    assert not (tmp_path / "out").exists()
