"""Hugging Face in and out: the same logits, ids and rendered conversations on both sides;
errors leave nothing behind."""

import json
import random
import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from raising import Bomb
from random_models import randomise
from safetensors import SafetensorError
from safetensors.torch import save_file

from codechat import cli, sft
from codechat.core.errors import CheckpointError, ConfigError, MissingFile, RunError, UserError
from codechat.formats import exchange, hf_format
from codechat.models import generate, loading
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.text import chat, tokenizer

pytestmark = pytest.mark.usefixtures("home")
SPEC = "gpt2:400"
FOREIGN = json.loads(Path(__file__).with_name("foreign.json").read_text(encoding="utf-8"))
LLAMA3 = dict(rope_theta=500000.0, rope_scaling=(8.0, 1.0, 4.0, 32))
ARCHITECTURES = {
    "ArceeForCausalLM": [dict(), dict(n_kv_head=2, tied=False, mlp_width=40)],
    "LlamaForCausalLM": [
        dict(mlp="swiglu", n_kv_head=1, mlp_width=40),
        dict(mlp="swiglu", **LLAMA3),
    ],
    "Qwen3ForCausalLM": [
        dict(mlp="swiglu", qk_norm=True, tied=False),
        dict(mlp="swiglu", qk_norm=True, head_width=20, n_kv_head=2, **LLAMA3),
        dict(qk_norm=True),
        dict(
            qk_norm=True,
            n_kv_head=2,
            head_width=6,
            mlp_width=40,
            tied=False,
            norm_eps=1e-6,
            **LLAMA3,
        ),
    ],
}
CASES = [(name, options) for name, many in ARCHITECTURES.items() for options in many]


def saved(tags: str = "reserved", spec: str = SPEC, name: str = "r", **options: Any) -> GPT:
    """A random model, saved as the run `name`."""
    tok = tokenizer.load(spec)
    shape = dict(depth=2, n_embd=32, n_head=4, block_size=96, vocab_size=tok.n_vocab) | options
    model = randomise(GPT(GPTConfig(**shape)))
    run = Run.create(name, {}, kind="test", overwrite=paths.exists(name))
    checkpoint.save(run.path, 1, model=model, meta={"tokenizer": tok.to_dict(), "tags": tags})
    run.finish()
    return model


def exported(tmp_path: Path, ckpt: str = "r", **more: Any) -> Path:
    cfg = exchange.ExportConfig(**(dict(ckpt=ckpt, out=tmp_path / "out", dtype="float32") | more))
    exchange.export(cfg)
    return cfg.out


def ids_below(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "architecture, options", CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x)
)
@torch.no_grad()
def test_transformers_computes_the_same_logits_and_an_import_is_bit_for_bit(
    transformers: Any,
    tmp_path: Path,
    architecture: str,
    options: dict[str, Any],
) -> None:
    model = saved(**options)
    ids = ids_below(406, 2, 96)
    out = exported(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    ours = model(ids)
    assert type(theirs).__name__ == architecture
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(theirs(ids).logits, ours, atol=1e-4, rtol=1e-4)
    assert ours.std() > 0.1, "a comparison of silent models shows nothing"
    # AutoTokenizer chooses by model_type: for qwen2 it would ignore the file's own splitting
    tok = tokenizer.load(SPEC)
    their_tok = transformers.AutoTokenizer.from_pretrained(out)
    assert all(their_tok(text)["input_ids"] == tok.encode(text) for text in AWKWARD)
    back = imported(out)
    here = model.state_dict()
    first = (out / hf_format.ONE_FILE).read_bytes()
    assert all(torch.equal(p, here.pop(name)) for name, p in back.model.state_dict().items())
    assert not here
    assert (exported(tmp_path, "theirs", overwrite=True) / hf_format.ONE_FILE).read_bytes() == first
    talk = turns(("user", "\n x"), ("assistant", "ok <functioncall> {}"))
    there = chat.render(talk, back.tokenizer, back.tags)
    here = chat.render(talk, tok)
    assert there.ids == here.ids
    assert there.loss_mask == here.loss_mask


REQUESTS = ["What is 12 squared?", "write quicksort", "hi", "  x\n\n", "héé 漢字"]


@pytest.mark.parametrize("tags", chat.MODES)
@torch.no_grad()
def test_transformers_generates_our_greedy_tokens(
    transformers: Any, tmp_path: Path, tags: str
) -> None:
    """In the shape of preset nano: prompts through the chat template, and the end of a turn
    ends the answer on both sides."""
    tok = tokenizer.load("gpt2:4096")
    model = saved(
        tags, "gpt2:4096", **PRESETS["nano"], n_tags=chat.N_TAGS if tags == "reserved" else 0
    )
    # the export ends at the end of text too
    stop = [
        *chat.stop_sequences(tok, tags),
        (tok.eot_id,),
    ]
    prompts = [chat.prompt([{"role": "user", "content": text}], tok, tags) for text in REQUESTS]
    (answer,) = generate.sample(model, prompts[:1], max_new_tokens=8, temperature=0)
    model.wte.weight[stop[0][-1]] *= 3
    # both make some answers end
    model.wte.weight[tok.eot_id] = 1.1 * model.wte.weight[answer.ids[-1]]
    model.wte.weight[model.cfg.n_ids :] *= 50  # the largest logits by far, never generated
    checkpoint.save(
        paths.find_run("r"),
        2,
        model=model,
        meta={"tokenizer": tok.to_dict(), "tags": tags},
    )
    out = exported(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    reader = transformers.AutoTokenizer.from_pretrained(out)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ours = generate.sample(model, prompts, max_new_tokens=40, temperature=0, stop=stop)
    for text, prompt, expected in zip(REQUESTS, prompts, ours, strict=True):
        turn = turns(("user", text))
        given = reader.apply_chat_template(
            turn,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert given["input_ids"].tolist() == [prompt]
        logits = (
            x[..., : model.cfg.n_ids] for x in (theirs(**given).logits, model(given["input_ids"]))
        )
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        ends = {} if tags == "reserved" else dict(stop_strings=[chat.END_TAG], tokenizer=reader)
        found = theirs.generate(**given, max_new_tokens=40, do_sample=False, **ends)[
            0, len(prompt) :
        ].tolist()
        assert found == expected.ids
    assert {c.stop for c in ours} == {"stop", "length"}, "some answers end, and some are cut"


AWKWARD = [
    "",
    "\n",
    "  ",
    "\n\n  def f():\n    return 1\n",
    "a<b | c>",
    ")\n\n)",
    "'s 'll\t\t x  ",
    "12345 67",
]
AWKWARD += ["héé 漢字 🙂 \u00a0\u2028", "<|endof", "|>", "<"]


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def conversations() -> list[list[dict[str, str]]]:
    rng = random.Random(0)
    calls = [
        '<functioncall> {"name": "f"}',
        "well: <functioncall>",
        ">><functioncall>x<functioncall>\n",
    ]
    out = [turns(("system", "s"), ("user", text), ("assistant", text)) for text in AWKWARD]
    for _ in range(60):
        roles = rng.choices(chat.ROLES, k=rng.randrange(1, 6)) + ["assistant"]
        texts = (
            "".join(rng.choices(AWKWARD + calls * (role == "assistant"), k=2)) for role in roles
        )
        out.append(turns(*zip(roles, texts)))
    return out


@pytest.mark.parametrize("spec", ["gpt2:400", "gpt2", "bytes", "chars"])
@pytest.mark.parametrize("tags", chat.MODES)
def test_the_tokenizer_and_its_template_give_our_ids(
    transformers: Any,
    tmp_path: Path,
    spec: str,
    tags: str,
) -> None:
    """Content that would forge a turn raises."""
    letters = "".join(sorted({*"".join(AWKWARD), *"".join(chat.TAGS), *'{"name": "f"} well:s7'}))
    (tmp_path / "letters.txt").write_text(letters, encoding="utf-8", newline="")
    spec = f"chars:{tmp_path / 'letters.txt'}" if spec == "chars" else spec
    saved(tags, spec)
    ours = tokenizer.load(spec)
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tmp_path))

    def ids(messages: list[dict[str, str]], **how: bool) -> list[int]:
        return theirs.apply_chat_template(messages, return_dict=True, **how)["input_ids"]

    for text in [*AWKWARD, "".join(AWKWARD)]:
        assert theirs(text)["input_ids"] == ours.encode(text), repr(text)
        assert theirs.decode(ours.encode(text)) == text
    for messages in conversations():
        rendered = ids(messages)
        assert rendered == chat.render(messages, ours, tags).ids, messages
        assert theirs.decode(rendered) == chat.decode(rendered, ours)
        if messages[1:] and messages[-2]["role"] != "assistant":
            assert ids(messages[:-1], add_generation_prompt=True) == chat.prompt(
                messages[:-1], ours, tags
            )
    for turn in (
        ("user", "x<|end|>"),
        ("user", "<functioncall>"),
        ("assistant", "<|user|>"),
        ("god", "x"),
    ):
        with pytest.raises(TemplateError):
            ids(turns(turn))
    assert ids(turns(("tool", "7"))) == ids(turns(("function", "7")))


# Fields that a model without latent attention cannot have set.
LATENT = {"kv_rank", "q_rank", "rope_width"}
# Fields that config.json need not know: tags are in the tokenizer's files.
ELSEWHERE = {"n_tags", "recompute", "bf16_residual", "attention_products"}


def test_every_field_of_the_architecture_is_exported_or_rejected() -> None:
    """A field that is added to GPTConfig and forgotten here would be dropped in silence."""
    values = dict(mlp="swiglu", pos="learned", head_width=62, n_kv_head=1, mlp_width=100, rows=4200)
    values |= dict(attention="mla", rope_scaling=(2.0, 1.0, 4.0, 8192), recompute="blocks")
    for field in (f.name for f in fields(GPTConfig) if f.name not in LATENT):
        base = GPTConfig(**PRESETS["nano"])
        value = getattr(base, field)
        other = values.get(field, not value if isinstance(value, bool) else (value or 4) * 2)

        def about(cfg: GPTConfig) -> Any:
            try:
                return hf_format.to_hf(
                    cfg, hf_format.family_of(cfg), dtype="float32", bos_id=0, eos_ids=[0]
                )
            except ConfigError as error:
                assert f"model.{field}" in str(error)

        without = {"qk_norm": False} if other == "mla" else {}
        changed = about(replace(base, **{field: other} | without)) != about(base)
        assert other != value and changed == (field not in ELSEWHERE), field
    for options in (
        *(
            dict(qkv_bias=True),
            dict(mlp="swiglu", qkv_bias=True),
            dict(mlp="swiglu", qkv_bias=True, qk_norm=True),
        ),
        dict(n_embd=30, head_width=8),
    ):
        with pytest.raises(ConfigError):
            hf_format.family_of(GPTConfig(**dict(n_embd=32, n_head=4) | options))


def test_an_export_is_whole_and_replaces_only_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved()
    saved(name="other")
    out = exported(tmp_path)
    other = Run.open("other").path
    (tmp_path / "mine").mkdir()
    for file in ("file", "mine/thesis.tex"):
        (tmp_path / file).write_text("years of work")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf_format, "save_file", full)
        for place in (out, tmp_path / "free"):
            with pytest.raises(RunError):
                exported(tmp_path, overwrite=True, out=place)
    for place, more in (
        (out, {}),
        *((p, {"overwrite": True}) for p in (tmp_path / "file", tmp_path / "mine", other)),
    ):
        for form in ("run", "huggingface"):
            with pytest.raises(ConfigError):
                exported(tmp_path, out=place, format=form, **more)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    for form in ("run", "huggingface", "run"):
        # an export is replaced, whatever its format
        exported(tmp_path, format=form, overwrite=True)


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
)
QWEN_PATTERN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tokenizer(folder: Path, template: str | None) -> None:
    """A byte-level BPE of 400 ids with Qwen's pre-tokeniser and ChatML's special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    made.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<|endoftext|>"}
    about = {
        "eos_token": "<|im_end|>",
        "bos_token": bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(about | ({"chat_template": template} if template else {}))
    )


def foreign(
    transformers: Any,
    folder: Path,
    name: str = "llama",
    template: str | None = FOREIGN["chatml"],
    **more: Any,
) -> Any:
    """A random model of transformers, saved in shards to `folder` with a tokenizer."""
    options = FOREIGN["shape"] | FOREIGN["foreign"][name] | more
    cfg = getattr(transformers, options.pop("kind") + "Config")(**options)
    model = randomise(transformers.AutoModelForCausalLM.from_config(cfg))
    model.save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, template)
    return model


def imported(source: Path, name: str = "theirs", **more: Any) -> loading.LoadedModel:
    exchange.import_model(exchange.ImportConfig(source=source, run_name=name, **more))
    return loading.load_model(name)


@pytest.mark.parametrize("name", FOREIGN["foreign"])
@torch.no_grad()
def test_imported_weights_compute_the_same_logits(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    theirs = foreign(transformers, tmp_path / "in", name)
    ids = ids_below(411, 2, 128)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2, "in shards"
    loaded = imported(tmp_path / "in")
    expected = theirs(ids).logits
    assert (loaded.model.cfg.vocab_size, loaded.model.cfg.padded_vocab, loaded.tags) == (
        400,
        411,
        "template",
    )
    torch.testing.assert_close(loaded.model(ids), expected, atol=1e-4, rtol=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "theirs"))
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(ids).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_gated_relu_is_ours_only_where_its_projections_are_equal(
    transformers: Any, tmp_path: Path
) -> None:
    theirs = foreign(transformers, tmp_path / "in", "qwen3", hidden_act="relu")
    for layer in theirs.model.layers:
        layer.mlp.gate_proj.weight.copy_(layer.mlp.up_proj.weight)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    loaded = imported(tmp_path / "in")
    ids = ids_below(411, 2, 128)
    assert loaded.model.cfg.mlp == "relu2"
    assert loaded.model.blocks[0].mlp.gate is None
    torch.testing.assert_close(loaded.model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    theirs.model.layers[1].mlp.gate_proj.weight[3, 4] += 1e-6  # a single number, in the last layer
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path / "in", "other")
    assert all(
        f"model.layers.1.mlp.{name}_proj.weight" in str(caught.value) for name in ("gate", "up")
    )
    assert not paths.exists("other")


def test_tags_of_an_imported_model_without_template(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "in", template=None)
    assert imported(tmp_path / "in").tags == "text"
    loaded = imported(tmp_path / "in", overwrite=True, tags="reserved")
    assert (loaded.model.cfg.n_tags, loaded.model.cfg.n_ids, loaded.model.cfg.padded_vocab) == (
        6,
        406,
        411,
    )
    assert max(chat.prompt(turns(("user", "a")), loaded.tokenizer, loaded.tags)) == 404
    with pytest.raises(ConfigError):
        imported(tmp_path / "in", "other", tags="template")
    assert not paths.exists("other")


def test_a_directory_that_does_not_fit_raises(transformers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    foreign(transformers, folder)
    path = folder / "config.json"
    whole = path.read_text()
    for change in FOREIGN["wrong config.json"]:
        path.write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises((ConfigError, CheckpointError)):
            imported(folder)
    path.write_text(whole)
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / hf_format.INDEX
    outside = index.read_text().replace(shards[1].name, "../elsewhere.safetensors")
    for spoil, named in (
        (lambda: shards[1].write_bytes(shards[1].read_bytes()[:-5]), shards[1].name),
        (shards[1].unlink, shards[1].name),
        (lambda: index.write_text(outside), "elsewhere"),
        (index.unlink, hf_format.INDEX),
        (lambda: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (path.unlink, "config.json"),
    ):
        spoil()
        with pytest.raises(UserError, match=named):
            imported(folder)
    assert not paths.exists("theirs")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types={'sliding_attention'}",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config={'quant_method': 'gptq'",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization={'group_size': 64"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type=linear",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type=dynamic",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_type=longrope",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_type=one for each of full_attention",
        ),
        ({"model_type": "mistral"}, "model_type=mistral"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
    ids=str,
)
def test_what_our_model_does_not_compute_is_refused_by_name(
    transformers: Any,
    tmp_path: Path,
    change: dict[str, Any],
    named: str,
) -> None:
    foreign(transformers, tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        imported(tmp_path / "in")
    assert "\n" not in str(caught.value)


def one_file(transformers: Any, folder: Path, **change: Any) -> dict[str, torch.Tensor]:
    """The weights of a tied model in one file, rewritten with changes; None takes a weight out."""
    foreign(transformers, folder, "qwen3-tied")
    weights = hf_format.read_weights(folder)
    for path in (*folder.glob("*.safetensors"), folder / hf_format.INDEX):
        path.unlink()
    named = {name.replace("__", "."): value for name, value in change.items()}
    weights = {name: value for name, value in (weights | named).items() if value is not None}
    save_file({name: value.clone() for name, value in weights.items()}, folder / hf_format.ONE_FILE)
    return weights


@torch.no_grad()
def test_a_head_that_config_json_calls_tied_and_the_file_holds_apart_is_kept(
    transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = torch.randn(411, 32, generator=torch.Generator().manual_seed(3))
    weights = one_file(transformers, tmp_path / "in", lm_head__weight=head)
    loaded = imported(tmp_path / "in")
    assert not loaded.model.cfg.tied
    assert torch.equal(loaded.model.head.weight, head)
    assert torch.equal(loaded.model.wte.weight, weights[hf_format.EMBEDDING])
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "theirs"))
    ids = ids_below(400, 2, 32)
    torch.testing.assert_close(again(ids).logits, loaded.model(ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_copy_of_the_embedding_is_no_head_of_its_own(transformers: Any, tmp_path: Path) -> None:
    """Whole, in fewer bits, or under the name of the head alone, as safetensors' save_model
    keeps one of two names."""
    embedding = one_file(transformers, tmp_path / "first")[hf_format.EMBEDDING]
    for i, change in enumerate(
        (
            dict(lm_head__weight=embedding),
            dict(lm_head__weight=embedding.bfloat16()),
            dict(lm_head__weight=embedding, model__embed_tokens__weight=None),
        )
    ):
        one_file(transformers, tmp_path / str(i), **change)
        model = imported(tmp_path / str(i), f"run{i}").model
        assert model.cfg.tied
        assert torch.equal(model.wte.weight, embedding)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(
    transformers: Any,
    tmp_path: Path,
    name: str,
    bad: float,
) -> None:
    weights = one_file(transformers, tmp_path / "in")
    weights[name].view(-1)[7] = bad
    save_file(weights, tmp_path / "in" / hf_format.ONE_FILE)
    with pytest.raises(CheckpointError, match=f"{name} holds 1 numbers"):
        imported(tmp_path / "in")
    assert not paths.exists("theirs")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
def test_weights_that_need_a_scale_are_refused_by_name(
    transformers: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A quantized file without a quantization_config."""
    weights = one_file(transformers, tmp_path / "in")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, tmp_path / "in" / hf_format.ONE_FILE)
    with pytest.raises(CheckpointError, match=f"{name} is {str(dtype).removeprefix('torch.')}"):
        imported(tmp_path / "in")


def test_the_commands_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved()
    assert cli.main(["export", "--ckpt", "r", "--out", str(tmp_path / "out")]) == 0
    words = ["import", str(tmp_path / "out"), "--run-name", "again"]
    assert (cli.main(words), cli.main(words)) == (0, 2), "the name is in use"
    assert checkpoint.read_meta("again")["lineage"] == [
        {"run": "again", "kind": "import", "source": "out", "step": 0}
    ]


def test_an_imported_model_is_tuned_in_its_own_template(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "in")
    imported(tmp_path / "in")
    talks = [turns(("user", f"say {i % 3}"), ("assistant", "ok")) for i in range(40)]
    rows = [
        json.dumps({"id": str(i), "domain": "code", "meta": {}, "messages": t}) + "\n"
        for i, t in enumerate(talks)
    ]
    for split in ("train", "select"):
        (tmp_path / f"code.{split}.jsonl").write_text("".join(rows))
    settings: dict[str, Any] = dict(
        data_dir=str(tmp_path), init_from="theirs", run_name="tuned", device_batch_size=2
    )
    settings |= dict(
        max_steps=30, log_every=10, probe_examples=0, lr=3e-3, warmup_steps=2, eval_every=30
    )
    with pytest.raises(ConfigError):
        sft.train(sft.SFTConfig(**settings, tags="reserved"))
    losses = sft.train(sft.SFTConfig(**settings)).evals()["heldout_loss/code"]
    assert losses.iloc[-1] < 0.5 * losses.iloc[0]
    tuned = loading.load_model("tuned")
    prompt = chat.prompt(talks[0][:1], tuned.tokenizer, tuned.tags)
    stop = chat.stop_sequences(tuned.tokenizer, tuned.tags)
    (answer,) = generate.sample(tuned.model, [prompt], max_new_tokens=8, temperature=0, stop=stop)
    assert (chat.completion_text(answer.ids, tuned.tokenizer, tuned.tags), answer.stop) == (
        "ok",
        "stop",
    )


HERMES = (
    (Path(__file__).parents[1] / "text/templates/tools_hermes.jinja").read_text().removesuffix("\n")
)


def test_a_model_whose_template_gives_calls_back_calls_in_its_own_words(
    transformers: Any, tmp_path: Path
) -> None:
    foreign(transformers, tmp_path / "in", template=HERMES)
    loaded = imported(tmp_path / "in")
    assert (loaded.tags, loaded.tools_style) == ("native", "json")


def test_a_model_whose_template_knows_no_tools_is_told_so(
    transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign(transformers, tmp_path / "in")
    loaded = imported(tmp_path / "in")
    assert (loaded.tags, loaded.tools_style) == ("template", "compact")
    printed = capsys.readouterr().out
    assert "in style compact: the model's own chat template knows no tools" in printed


def test_the_form_of_tools_that_is_asked_for_is_kept(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "in", template=HERMES)
    loaded = imported(tmp_path / "in", tools_form="described")
    assert (loaded.tags, loaded.tools_style) == ("template", "described")


def test_a_native_form_that_cannot_be_proven_is_refused(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "in")
    with pytest.raises(ConfigError, match="knows no tools; use tags template"):
        imported(tmp_path / "in", tools_form="native")


def test_tags_and_a_form_of_tools_that_contradict_are_refused(
    transformers: Any, tmp_path: Path
) -> None:
    foreign(transformers, tmp_path / "in", template=HERMES)
    with pytest.raises(ConfigError, match="expected native for both"):
        imported(tmp_path / "in", tags="template", tools_form="native")


@pytest.mark.parametrize(("form", "tags"), [("native", "native"), ("compact", "template")])
def test_an_export_says_how_its_run_lists_tools(
    transformers: Any, tmp_path: Path, form: str, tags: str
) -> None:
    foreign(transformers, tmp_path / "in", template=HERMES)
    imported(tmp_path / "in", tools_form=form)
    assert imported(exported(tmp_path, "theirs"), "again").tags == tags


def test_a_native_export_keeps_the_template_of_its_model(transformers: Any, tmp_path: Path) -> None:
    foreign(transformers, tmp_path / "in", template=HERMES)
    imported(tmp_path / "in")
    assert (exported(tmp_path, "theirs") / "chat_template.jinja").read_text() == HERMES


# ---- the original system's .pt files


SIZES = dict(vocab_size=257, depth=2, n_embd=16, n_head=2, block_size=24)


def original() -> dict[str, torch.Tensor]:
    """A random state under the original's names."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"tok_emb": (257, 16), "pos_emb": (24, 16), "ln_f": (16,)}
    block = {"ln1": (16,), "attn.qkv": (48, 16), "attn.proj": (16, 16), "ln2": (16,)}
    block |= {"mlp.fc": (64, 16), "mlp.proj": (16, 64)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    state = {
        f"{k}.weight": torch.randn(v, generator=rng) * 0.3 + (len(v) == 1)
        for k, v in shapes.items()
    }
    return state | {"head.weight": state["tok_emb.weight"]}


def original_logits(state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The original's forward pass, written out: pre-norm RMSNorm with torch's default epsilon,
    fused qkv, GELU, tied head."""
    (B, T), norm = ids.shape, partial(F.rms_norm, normalized_shape=(16,))
    x = state["tok_emb.weight"][ids] + state["pos_emb.weight"][:T]
    for i in range(2):
        w = {k.removeprefix(f"blocks.{i}.").removesuffix(".weight"): v for k, v in state.items()}
        qkv = (norm(x, weight=w["ln1"]) @ w["attn.qkv"].T).split(16, dim=2)
        y = F.scaled_dot_product_attention(
            *(y.view(B, T, 2, 8).transpose(1, 2) for y in qkv), is_causal=True
        )
        x = x + y.transpose(1, 2).reshape(B, T, 16) @ w["attn.proj"].T
        x = x + F.gelu(norm(x, weight=w["ln2"]) @ w["mlp.fc"].T) @ w["mlp.proj"].T
    return norm(x, weight=state["ln_f.weight"]) @ state["tok_emb.weight"].T


def imported_original(folder: Path, tags: Any = None, **changes: Any) -> loading.LoadedModel:
    torch.save(
        {"model": original(), "cfg": SIZES | {"dropout": 0.0}, "step": 70} | changes,
        folder / "latest.pt",
    )
    return imported(folder / "latest.pt", "old", tokenizer="bytes", overwrite=True, tags=tags)


def test_weights_from_elsewhere_in_place_of_a_run_are_told_how_to_become_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "hf").mkdir()
    for place, given in (("latest.pt", "latest.pt"), ("hf/config.json", "hf")):
        (tmp_path / place).write_text("{}")
        with pytest.raises(CheckpointError, match=f"codechat import {tmp_path / given}"):
            checkpoint.load(tmp_path / given)


@torch.no_grad()
def test_a_checkpoint_of_the_original_computes_what_it_computed(tmp_path: Path) -> None:
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    for prefix, dtype, scale in (
        ("", torch.float32, 1.0),
        ("_orig_mod.", torch.float32, 1.0),
        ("", torch.bfloat16, 1.0),
        (
            "",
            torch.float32,
            1e-3,
        ),  # on activations near zero an epsilon of 1e-5 would give other logits
    ):
        state = {
            k: (v * (scale if "_emb" in k or "head" in k else 1)).to(dtype)
            for k, v in original().items()
        }
        loaded = imported_original(
            tmp_path, model={f"{prefix}{name}": p for name, p in state.items()}
        )
        found = loaded.model(ids)
        expected = original_logits({k: v.float() for k, v in state.items()}, ids)
        torch.testing.assert_close(found[..., :257], expected, atol=1e-4 * scale, rtol=1e-4)
        assert found.shape[-1] == 320 and not found[..., 257:].any(), "padding rows are zero"
        assert (loaded.meta["step"], loaded.tags, loaded.model.cfg.n_tags) == (70, "text", 0)


def test_files_of_another_system_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for change in (
        *(dict(cfg=cfg) for cfg in (None, {"n_layer": 2})),
        *(
            dict(cfg=SIZES | wrong)
            for wrong in (dict(depth=3), dict(depth=1), dict(n_embd=32), dict(vocab_size=200))
        ),
        *(
            dict(model=Bomb()),
            dict(model=original() | {"blocks.0.ln1.bias": torch.zeros(16)}),
            dict(tags="reserved"),
        ),
        dict(model=original() | {"head.weight": torch.zeros(257, 16)}),
        dict(model=original() | {"blocks.0.ln1.weight": torch.full((16,), float("nan"))}),
    ):
        with pytest.raises((CheckpointError, ConfigError)):
            imported_original(tmp_path, **change)
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04 half a file")
    torch.save([1], tmp_path / "list.pt")
    for name, error in (
        ("half", CheckpointError),
        ("list", CheckpointError),
        ("none", MissingFile),
    ):
        with pytest.raises(error):
            imported(tmp_path / f"{name}.pt", "old", tokenizer="bytes")
    assert not paths.exists("old")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_latent_attention_has_no_class_to_be_exported_to(tmp_path: Path, form: Any) -> None:
    saved(attention="mla")
    with pytest.raises(ConfigError, match="model.attention mla|takes an imported model"):
        exported(tmp_path, format=form)
    assert not (tmp_path / "out").exists()
