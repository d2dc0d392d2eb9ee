"""Hugging Face in and out: the same logits, ids and rendered conversations on both sides;
errors leave nothing behind."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jsonl
import pytest
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from raising import Bomb
from random_models import randomise
from safetensors import SafetensorError
from safetensors.torch import save_file
from shapes import preset

from codechat import cli, sft
from codechat.core.errors import CheckpointError, ConfigError, MissingFile, RunError, UserError
from codechat.formats import exchange, hf_format
from codechat.models import generate, loading
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.text import chat, tokenizer, tool_calls

pytestmark = pytest.mark.usefixtures("home")
SPEC = "gpt2:400"
FOREIGN = json.loads(Path(__file__).with_name("foreign.json").read_text(encoding="utf-8"))
LLAMA3 = (8.0, 1.0, 4.0, 32)
SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, block_size=96, vocab_size=400)
GATED = replace(SHAPE, mlp="swiglu")
NORMED = replace(SHAPE, qk_norm=True)
# a class of transformers and a shape that is exported to it
ARCHITECTURES = {
    "arcee": ("ArceeForCausalLM", SHAPE),
    "arcee, untied": (
        "ArceeForCausalLM",
        replace(SHAPE, n_kv_head=2, tied=False, mlp_width=40),
    ),
    "llama": ("LlamaForCausalLM", replace(GATED, n_kv_head=1, mlp_width=40)),
    "llama 3": ("LlamaForCausalLM", replace(GATED, rope_theta=500000.0, rope_scaling=LLAMA3)),
    "qwen3, untied": ("Qwen3ForCausalLM", replace(GATED, qk_norm=True, tied=False)),
    "qwen3, wide heads": (
        "Qwen3ForCausalLM",
        replace(
            GATED,
            qk_norm=True,
            head_width=20,
            n_kv_head=2,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
        ),
    ),
    "qwen3, squared relu": ("Qwen3ForCausalLM", NORMED),
    "qwen3, narrow heads": (
        "Qwen3ForCausalLM",
        replace(
            NORMED,
            n_kv_head=2,
            head_width=6,
            mlp_width=40,
            tied=False,
            norm_eps=1e-6,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
        ),
    ),
}


def saved(
    tags: str = "reserved", spec: str = SPEC, name: str = "r", shape: GPTConfig = SHAPE
) -> GPT:
    """A random model, saved as the run `name`."""
    tok = tokenizer.load(spec)
    model = randomise(GPT(replace(shape, vocab_size=tok.n_vocab)))
    run = Run.create(name, {}, kind="test", overwrite=paths.exists(name))
    checkpoint.save(run.path, 1, model=model, meta={"tokenizer": tok.to_dict(), "tags": tags})
    run.finish()
    return model


def exported(
    tmp_path: Path,
    ckpt: str = "r",
    *,
    out: Path | None = None,
    form: str = "huggingface",
    overwrite: bool = False,
) -> Path:
    out = out or tmp_path / "out"
    exchange.export(
        exchange.ExportConfig(ckpt=ckpt, out=out, format=form, dtype="float32", overwrite=overwrite)
    )
    return out


def ids_below(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(0))


class Exchanged(NamedTuple):
    """A model, its export, and the run "theirs" below `root`, which was imported from it."""

    root: Path
    kind: str
    model: GPT
    out: Path
    back: loading.LoadedModel


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exchanged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Exchanged:
    kind, shape = ARCHITECTURES[request.param]
    root = tmp_path_factory.mktemp("exchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        model = saved(shape=shape)
        out = exported(root)
        return Exchanged(root, kind, model, out, imported(out))


@torch.no_grad()
def test_transformers_computes_the_same_logits(transformers: Any, exchanged: Exchanged) -> None:
    ids = ids_below(406, 2, 96)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exchanged.out)
    ours = exchanged.model(ids)
    assert type(theirs).__name__ == exchanged.kind
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(theirs(ids).logits, ours, atol=1e-4, rtol=1e-4)
    assert ours.std() > 0.1, "a comparison of silent models shows nothing"


def test_the_tokenizer_that_transformers_chooses_gives_our_ids(
    transformers: Any, exchanged: Exchanged
) -> None:
    """AutoTokenizer chooses by model_type: for qwen2 it would ignore the file's own splitting."""
    ours = tokenizer.load(SPEC)
    theirs = transformers.AutoTokenizer.from_pretrained(exchanged.out)
    for text in AWKWARD:
        assert theirs(text)["input_ids"] == ours.encode(text)


def test_an_import_is_bit_for_bit(exchanged: Exchanged) -> None:
    back = exchanged.back.model.state_dict()
    here = exchanged.model.state_dict()
    assert back.keys() == here.keys()
    assert all(torch.equal(weight, here[name]) for name, weight in back.items())


def test_an_export_of_an_import_has_the_same_bytes(
    exchanged: Exchanged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", exchanged.root)
    again = exported(tmp_path, "theirs") / hf_format.ONE_FILE
    assert again.read_bytes() == (exchanged.out / hf_format.ONE_FILE).read_bytes()


def test_an_import_renders_conversations_as_ours(exchanged: Exchanged) -> None:
    talk = turns(("user", "\n x"), ("assistant", "ok <functioncall> {}"))
    there = chat.render(talk, exchanged.back.tokenizer, exchanged.back.tags)
    here = chat.render(talk, tokenizer.load(SPEC))
    assert there.ids == here.ids
    assert there.loss_mask == here.loss_mask


REQUESTS = ["What is 12 squared?", "write quicksort", "hi", "  x\n\n", "héé 漢字"]


class Nano(NamedTuple):
    """A model in the shape of preset nano of which some answers end, and its export."""

    tags: str
    model: GPT
    out: Path
    prompts: list[list[int]]  # of REQUESTS
    stop: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=chat.MODES)
@torch.no_grad()
def nano(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Nano:
    tags = request.param
    root = tmp_path_factory.mktemp("nano")
    tok = tokenizer.load("gpt2:4096")
    # the export ends at the end of text too
    stop = [*chat.stop_sequences(tok, tags), (tok.eot_id,)]
    prompts = [chat.prompt(turns(("user", text)), tok, tags) for text in REQUESTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        n_tags = chat.N_TAGS if tags == "reserved" else 0
        shape = preset("nano")
        model = saved(tags, "gpt2:4096", shape=replace(shape, n_tags=n_tags))
        (answer,) = generate.sample(model, prompts[:1], max_new_tokens=8, temperature=0)
        # both make some answers end
        model.wte.weight[stop[0][-1]] *= 3
        model.wte.weight[tok.eot_id] = 1.1 * model.wte.weight[answer.ids[-1]]
        # the largest logits by far, never generated
        model.wte.weight[model.cfg.n_ids :] *= 50
        about = {"tokenizer": tok.to_dict(), "tags": tags}
        checkpoint.save(paths.find_run("r"), 2, model=model, meta=about)
        return Nano(tags, model, exported(root), prompts, stop)


@torch.no_grad()
def test_the_template_of_an_export_gives_our_prompts_and_its_model_our_logits(
    transformers: Any, nano: Nano
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(nano.out)
    reader = transformers.AutoTokenizer.from_pretrained(nano.out)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    for text, prompt in zip(REQUESTS, nano.prompts, strict=True):
        ids = asked(reader, text)
        assert ids.tolist() == [prompt]
        n_ids = nano.model.cfg.n_ids
        ours = nano.model(ids)[..., :n_ids]
        torch.testing.assert_close(theirs(ids).logits[..., :n_ids], ours, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_transformers_generates_our_greedy_tokens(transformers: Any, nano: Nano) -> None:
    """The end of a turn ends the answer on both sides."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(nano.out)
    reader = transformers.AutoTokenizer.from_pretrained(nano.out)
    ours = generate.sample(
        nano.model, nano.prompts, max_new_tokens=40, temperature=0, stop=nano.stop
    )
    for text, prompt, expected in zip(REQUESTS, nano.prompts, ours, strict=True):
        ids = asked(reader, text)
        found = theirs.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            stop_strings=[chat.END_TAG] if nano.tags == "text" else None,
            tokenizer=reader,
        )
        assert found[0, len(prompt) :].tolist() == expected.ids
    assert {c.stop for c in ours} == {"stop", "length"}, "some answers end, and some are cut"


def asked(reader: Any, text: str) -> torch.Tensor:
    """Ids (1, T) of a request in transformers' own rendering of the template."""
    given = reader.apply_chat_template(
        turns(("user", text)),
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    return given["input_ids"]


AWKWARD = [
    "",
    "\n",
    "  ",
    "\n\n  def f():\n    return 1\n",
    "a<b | c>",
    ")\n\n)",
    "'s 'll\t\t x  ",
    "12345 67",
    "héé 漢字 🙂 \u00a0\u2028",
    "<|endof",
    "|>",
    "<",
]


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


CALLS = [
    '<functioncall> {"name": "f"}',
    "well: <functioncall>",
    ">><functioncall>x<functioncall>\n",
]


def conversations() -> list[list[dict[str, str]]]:
    """Of awkward texts, and of calls where an assistant speaks."""
    rng = random.Random(0)
    out = [turns(("system", "s"), ("user", text), ("assistant", text)) for text in AWKWARD]
    for _ in range(60):
        talk = []
        for role in [*rng.choices(chat.ROLES, k=rng.randrange(1, 6)), "assistant"]:
            pieces = AWKWARD + CALLS if role == "assistant" else AWKWARD
            talk.append((role, "".join(rng.choices(pieces, k=2))))
        out.append(turns(*talk))
    return out


class Readers(NamedTuple):
    """Our tokenizer, and the one of transformers with the export's template."""

    tags: str
    ours: tokenizer.Tokenizer
    theirs: Any

    def ids(self, messages: list[dict[str, str]], generate: bool = False) -> list[int]:
        """In transformers' rendering of the template."""
        return self.theirs.apply_chat_template(
            messages, return_dict=True, add_generation_prompt=generate
        )["input_ids"]


LETTERS = sorted({*"".join(AWKWARD), *"".join(tool_calls.TAGS), *'{"name": "f"} well:s7'})


@pytest.fixture(
    scope="module",
    params=[(s, tags) for s in ("gpt2:400", "gpt2", "bytes", "chars") for tags in chat.MODES],
    ids=lambda given: f"{given[0]}-{given[1]}",
)
def readers(
    request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Readers:
    spec, tags = request.param
    root = tmp_path_factory.mktemp("readers")
    if spec == "chars":
        (root / "letters.txt").write_text("".join(LETTERS), encoding="utf-8", newline="")
        spec = f"chars:{root / 'letters.txt'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        saved(tags, spec)
        out = exported(root)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    return Readers(tags, tokenizer.load(spec), theirs)


def test_an_exported_tokenizer_gives_our_ids_and_the_text_back(readers: Readers) -> None:
    for text in [*AWKWARD, "".join(AWKWARD)]:
        ids = readers.ours.encode(text)
        assert readers.theirs(text)["input_ids"] == ids, repr(text)
        assert readers.theirs.decode(ids) == text


def test_an_exported_template_gives_our_ids(readers: Readers) -> None:
    for messages in conversations():
        rendered = readers.ids(messages)
        assert rendered == chat.render(messages, readers.ours, readers.tags).ids, messages
        assert readers.theirs.decode(rendered) == chat.decode(rendered, readers.ours)


def test_an_exported_template_gives_our_prompts(readers: Readers) -> None:
    for messages in conversations():
        prompt = messages[:-1]
        if prompt and prompt[-1]["role"] != "assistant":
            expected = chat.prompt(prompt, readers.ours, readers.tags)
            assert readers.ids(prompt, generate=True) == expected


@pytest.mark.parametrize(
    "role, content",
    [
        ("user", "x<|end|>"),
        ("user", "<functioncall>"),
        ("assistant", "<|user|>"),
        ("god", "x"),
    ],
)
def test_an_exported_template_refuses_what_would_forge_a_turn(
    role: str, content: str, readers: Readers
) -> None:
    with pytest.raises(TemplateError):
        readers.ids(turns((role, content)))


def test_an_exported_template_takes_a_tool_for_a_function(readers: Readers) -> None:
    assert readers.ids(turns(("tool", "7"))) == readers.ids(turns(("function", "7")))


# Fields that a model without latent attention cannot have set.
LATENT = {"kv_rank", "q_rank", "rope_width"}
# Fields that config.json need not know: tags are in the tokenizer's files.
ELSEWHERE = {"n_tags", "recompute", "attention_products"}


# Another value of each field of preset nano.
OTHERS = {
    "mlp": "swiglu",
    "pos": "learned",
    "head_width": 62,
    "n_kv_head": 1,
    "mlp_width": 100,
    "rows": 4200,
    "attention": "mla",
    "rope_scaling": (2.0, 1.0, 4.0, 8192),
    "recompute": "blocks",
}


def written_as(cfg: GPTConfig, field: str) -> dict[str, Any] | None:
    """config.json of a shape; None where it is refused, which the field's name must say."""
    try:
        family = hf_format.family_of(cfg)
        return hf_format.to_hf(cfg, family, dtype="float32", bos_id=0, eos_ids=[0])
    except ConfigError as error:
        assert f"model.{field}" in str(error)
        return None


FIELDS = [field.name for field in fields(GPTConfig) if field.name not in LATENT]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_the_architecture_is_exported_or_rejected(field: str) -> None:
    """A field that is added to GPTConfig and forgotten here would be dropped in silence."""
    base = preset("nano")
    value = getattr(base, field)
    usual = not value if isinstance(value, bool) else (value or 4) * 2
    other = OTHERS.get(field, usual)
    assert other != value
    change = {field: other}
    if other == "mla":
        change["qk_norm"] = False
    changed = written_as(replace(base, **change), field) != written_as(base, field)
    assert changed == (field not in ELSEWHERE)


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, qkv_bias=True),
        replace(GATED, qkv_bias=True),
        replace(GATED, qkv_bias=True, qk_norm=True),
        replace(SHAPE, n_embd=30, head_width=8),
    ],
    ids=["bias", "gated bias", "gated bias and norm", "odd width"],
)
def test_a_shape_that_no_class_of_transformers_has_is_refused(shape: GPTConfig) -> None:
    with pytest.raises(ConfigError):
        hf_format.family_of(shape)


def bytes_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["out", "free"])
def test_a_full_disk_leaves_what_was_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved()
    exported(tmp_path)
    before = bytes_below(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(hf_format, "save_file", full)
    with pytest.raises(RunError):
        exported(tmp_path, overwrite=True, out=tmp_path / place)
    assert bytes_below(tmp_path) == before


@pytest.mark.parametrize("form", ["run", "huggingface"])
def test_an_export_is_not_replaced_without_being_asked(form: str, tmp_path: Path) -> None:
    saved()
    exported(tmp_path)
    before = bytes_below(tmp_path)
    with pytest.raises(ConfigError):
        exported(tmp_path, form=form)
    assert bytes_below(tmp_path) == before


@pytest.mark.parametrize("form", ["run", "huggingface"])
@pytest.mark.parametrize("place", ["file", "mine", "runs/other"])
def test_nothing_but_an_export_is_replaced(place: str, form: str, tmp_path: Path) -> None:
    saved()
    saved(name="other")
    (tmp_path / "mine").mkdir()
    for file in ("file", "mine/thesis.tex"):
        (tmp_path / file).write_text("years of work")
    before = bytes_below(tmp_path)
    with pytest.raises(ConfigError):
        exported(tmp_path, out=tmp_path / place, form=form, overwrite=True)
    assert bytes_below(tmp_path) == before


def test_an_export_is_replaced_whatever_its_format(tmp_path: Path) -> None:
    saved()
    exported(tmp_path)
    for form in ("run", "huggingface", "run"):
        exported(tmp_path, form=form, overwrite=True)
    assert not (tmp_path / "out" / hf_format.ONE_FILE).exists()


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def chatml_tokenizer() -> str:
    """tokenizer.json of a byte-level BPE of 400 ids with Qwen's pre-tokeniser and ChatML's
    special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return made.to_str()


def write_tokenizer(folder: Path, template: str | None) -> None:
    (folder / "tokenizer.json").write_text(chatml_tokenizer())
    about: dict[str, Any] = {
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def foreign(
    transformers: Any,
    folder: Path,
    name: str = "llama",
    template: str | None = FOREIGN["chatml"],
    change: dict[str, Any] | None = None,
) -> Any:
    """A random model of transformers, saved in shards to `folder` with a tokenizer."""
    options = FOREIGN["shape"] | FOREIGN["foreign"][name] | (change or {})
    kind = getattr(transformers, options.pop("kind") + "Config")
    model = randomise(transformers.AutoModelForCausalLM.from_config(kind.from_dict(options)))
    model.save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, template)
    return model


def imported(
    source: Path,
    name: str = "theirs",
    *,
    tags: Any = None,
    tools_form: Any = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> loading.LoadedModel:
    exchange.import_model(
        exchange.ImportConfig(
            source=source,
            run_name=name,
            tags=tags,
            tools_form=tools_form,
            tokenizer=tokenizer,
            overwrite=overwrite,
        )
    )
    return loading.load_model(name)


class Foreign(NamedTuple):
    """A model of transformers, its folder, and the run "theirs" below `root`, its import."""

    root: Path
    model: Any
    folder: Path
    loaded: loading.LoadedModel


@pytest.fixture(scope="module", params=FOREIGN["foreign"])
def theirs(
    request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Foreign:
    root = tmp_path_factory.mktemp("theirs")
    model = foreign(transformers, root / "in", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        return Foreign(root, model, root / "in", imported(root / "in"))


@torch.no_grad()
def test_imported_weights_compute_the_same_logits(theirs: Foreign) -> None:
    ids = ids_below(411, 2, 128)
    assert len(list(theirs.folder.glob("*.safetensors"))) > 2, "in shards"
    torch.testing.assert_close(
        theirs.loaded.model(ids), theirs.model(ids).logits, atol=1e-4, rtol=1e-4
    )


def test_an_import_keeps_the_rows_of_the_embedding_and_the_template(theirs: Foreign) -> None:
    assert theirs.loaded.model.cfg.vocab_size == 400
    assert theirs.loaded.model.cfg.padded_vocab == 411
    assert theirs.loaded.tags == "template"


@torch.no_grad()
def test_an_export_of_an_import_is_a_model_of_the_same_class_and_logits(
    transformers: Any, theirs: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", theirs.root)
    ids = ids_below(411, 2, 128)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "theirs"))
    assert type(again) is type(theirs.model)
    torch.testing.assert_close(again(ids).logits, theirs.model(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def gated_relu(transformers: Any, folder: Path, different: float = 0.0) -> Any:
    """A model with a gated ReLU whose projections are equal but for one number of the last
    layer."""
    model = foreign(transformers, folder, "qwen3", change={"hidden_act": "relu"})
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.copy_(layer.mlp.up_proj.weight)
    model.model.layers[1].mlp.gate_proj.weight[3, 4] += different
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


@torch.no_grad()
def test_a_gated_relu_of_equal_projections_is_our_squared_relu(
    transformers: Any, tmp_path: Path
) -> None:
    theirs = gated_relu(transformers, tmp_path / "in")
    loaded = imported(tmp_path / "in")
    ids = ids_below(411, 2, 128)
    assert loaded.model.cfg.mlp == "relu2"
    assert loaded.model.blocks[0].mlp.gate is None
    torch.testing.assert_close(loaded.model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_gated_relu_of_different_projections_is_refused(
    transformers: Any, tmp_path: Path
) -> None:
    gated_relu(transformers, tmp_path / "in", different=1e-6)
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path / "in")
    assert "model.layers.1.mlp.gate_proj.weight" in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert not paths.exists("theirs")


@pytest.fixture
def untold(transformers: Any, tmp_path: Path) -> Path:
    """The folder of a model without a template."""
    foreign(transformers, tmp_path / "in", template=None)
    return tmp_path / "in"


def test_a_model_without_a_template_has_its_tags_as_text(untold: Path) -> None:
    assert imported(untold).tags == "text"


def test_a_model_without_a_template_may_get_tags_in_spare_rows_of_its_embedding(
    untold: Path,
) -> None:
    loaded = imported(untold, tags="reserved")
    assert loaded.model.cfg.n_tags == 6
    assert loaded.model.cfg.n_ids == 406
    assert loaded.model.cfg.padded_vocab == 411
    assert max(chat.prompt(turns(("user", "a")), loaded.tokenizer, loaded.tags)) == 404


def test_a_model_without_a_template_cannot_be_asked_in_one(untold: Path) -> None:
    with pytest.raises(ConfigError):
        imported(untold, tags="template")
    assert not paths.exists("theirs")


@pytest.fixture(scope="module")
def llama(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of transformers."""
    folder = tmp_path_factory.mktemp("llama") / "in"
    foreign(transformers, folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "in"))


def edit_config(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize("change", FOREIGN["wrong config.json"], ids=str)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    change: dict[str, Any], folder: Path
) -> None:
    edit_config(folder, change)
    with pytest.raises((ConfigError, CheckpointError)):
        imported(folder)
    assert not paths.exists("theirs")


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def cut_shard(folder: Path) -> str:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-5])
    return shard(folder).name


def lose_shard(folder: Path) -> str:
    name = shard(folder).name
    shard(folder).unlink()
    return name


def point_outside(folder: Path) -> str:
    index = folder / hf_format.INDEX
    index.write_text(index.read_text().replace(shard(folder).name, "../elsewhere.safetensors"))
    return "elsewhere"


def lose_index(folder: Path) -> str:
    (folder / hf_format.INDEX).unlink()
    return hf_format.INDEX


def empty_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


def lose_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


@pytest.mark.parametrize(
    "spoil",
    [cut_shard, lose_shard, point_outside, lose_index, empty_tokenizer, lose_config],
)
def test_a_damaged_directory_is_refused_by_the_name_of_the_file(
    spoil: Callable[[Path], str], folder: Path
) -> None:
    named = spoil(folder)
    with pytest.raises(UserError, match=named):
        imported(folder)
    assert not paths.exists("theirs")


NOT_COMPUTED = [
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
]


@pytest.mark.parametrize("change, named", NOT_COMPUTED, ids=str)
def test_what_our_model_does_not_compute_is_refused_by_name(
    change: dict[str, Any], named: str, folder: Path
) -> None:
    edit_config(folder, change)
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        imported(folder)
    assert "\n" not in str(caught.value)


def one_file(
    transformers: Any, folder: Path, change: dict[str, torch.Tensor | None] | None = None
) -> dict[str, torch.Tensor]:
    """The weights of a tied model in one file, rewritten with changes; None takes a weight out."""
    foreign(transformers, folder, "qwen3-tied")
    weights = hf_format.read_weights(folder) | (change or {})
    for path in (*folder.glob("*.safetensors"), folder / hf_format.INDEX):
        path.unlink()
    weights = {name: value.clone() for name, value in weights.items() if value is not None}
    save_file(weights, folder / hf_format.ONE_FILE)
    return weights


HEAD = "lm_head.weight"


@torch.no_grad()
def test_a_head_that_config_json_calls_tied_and_the_file_holds_apart_is_kept(
    transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = torch.randn(411, 32, generator=torch.Generator().manual_seed(3))
    weights = one_file(transformers, tmp_path / "in", {HEAD: head})
    loaded = imported(tmp_path / "in")
    assert not loaded.model.cfg.tied
    assert torch.equal(loaded.model.head.weight, head)
    assert torch.equal(loaded.model.wte.weight, weights[hf_format.EMBEDDING])
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().out


@torch.no_grad()
def test_a_head_that_the_file_held_apart_is_exported_as_one(
    transformers: Any, tmp_path: Path
) -> None:
    head = torch.randn(411, 32, generator=torch.Generator().manual_seed(3))
    one_file(transformers, tmp_path / "in", {HEAD: head})
    loaded = imported(tmp_path / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path, "theirs"))
    ids = ids_below(400, 2, 32)
    torch.testing.assert_close(again(ids).logits, loaded.model(ids), atol=1e-4, rtol=1e-4)


def whole_copy(embedding: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {HEAD: embedding}


def copy_in_fewer_bits(embedding: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {HEAD: embedding.bfloat16()}


def head_alone(embedding: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """As safetensors' save_model keeps one of two names."""
    return {HEAD: embedding, hf_format.EMBEDDING: None}


@pytest.mark.parametrize("copied", [whole_copy, copy_in_fewer_bits, head_alone])
@torch.no_grad()
def test_a_copy_of_the_embedding_is_no_head_of_its_own(
    copied: Callable[[torch.Tensor], dict[str, torch.Tensor | None]],
    transformers: Any,
    tmp_path: Path,
) -> None:
    embedding = one_file(transformers, tmp_path / "first")[hf_format.EMBEDDING]
    one_file(transformers, tmp_path / "in", copied(embedding))
    model = imported(tmp_path / "in").model
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


def test_the_commands_end_to_end(tmp_path: Path) -> None:
    saved()
    assert cli.main(["export", "--ckpt", "r", "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["import", str(tmp_path / "out"), "--run-name", "again"]) == 0
    lineage = [{"run": "again", "kind": "import", "source": "out", "step": 0}]
    assert checkpoint.read_meta("again")["lineage"] == lineage


def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json; expected a Hugging Face directory"):
        exchange.import_model(exchange.ImportConfig(source=tmp_path, run_name="theirs"))


def test_an_import_under_a_name_in_use_is_refused(tmp_path: Path) -> None:
    saved()
    assert cli.main(["import", str(exported(tmp_path)), "--run-name", "r"]) == 2


@pytest.fixture
def talks(folder: Path, tmp_path: Path) -> list[list[dict[str, str]]]:
    """Conversations to tune the imported model "theirs" on, in files below tmp_path."""
    imported(folder)
    talks = [turns(("user", f"say {i % 3}"), ("assistant", "ok")) for i in range(40)]
    rows = [
        {"id": str(i), "domain": "code", "meta": {}, "messages": talk}
        for i, talk in enumerate(talks)
    ]
    for split in ("train", "select"):
        jsonl.write(tmp_path / f"code.{split}.jsonl", rows)
    return talks


def tuning(data_dir: Path) -> sft.SFTConfig:
    return sft.SFTConfig(
        data_dir=str(data_dir),
        init_from="theirs",
        run_name="tuned",
        device_batch_size=2,
        max_steps=30,
        log_every=10,
        probe_examples=0,
        lr=3e-3,
        warmup_steps=2,
        eval_every=30,
    )


def test_an_imported_model_is_tuned_in_its_own_template(
    talks: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    losses = sft.train(tuning(tmp_path)).evals()["heldout_loss/code"]
    assert losses.iloc[-1] < 0.5 * losses.iloc[0]
    tuned = loading.load_model("tuned")
    prompt = chat.prompt(talks[0][:1], tuned.tokenizer, tuned.tags)
    stop = chat.stop_sequences(tuned.tokenizer, tuned.tags)
    (answer,) = generate.sample(tuned.model, [prompt], max_new_tokens=8, temperature=0, stop=stop)
    assert chat.completion_text(answer.ids, tuned.tokenizer, tuned.tags) == "ok"
    assert answer.stop == "stop"


def test_an_imported_model_is_not_tuned_with_other_tags(
    talks: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        sft.train(replace(tuning(tmp_path), tags="reserved"))


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


SIZES = {"vocab_size": 257, "depth": 2, "n_embd": 16, "n_head": 2, "block_size": 24}


def original() -> dict[str, torch.Tensor]:
    """A random state under the original's names."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"tok_emb": (257, 16), "pos_emb": (24, 16), "ln_f": (16,)}
    for i in range(2):
        shapes |= {
            f"blocks.{i}.ln1": (16,),
            f"blocks.{i}.attn.qkv": (48, 16),
            f"blocks.{i}.attn.proj": (16, 16),
            f"blocks.{i}.ln2": (16,),
            f"blocks.{i}.mlp.fc": (64, 16),
            f"blocks.{i}.mlp.proj": (16, 64),
        }
    state = {}
    for name, shape in shapes.items():
        around = 1 if len(shape) == 1 else 0
        state[f"{name}.weight"] = torch.randn(shape, generator=rng) * 0.3 + around
    return state | {"head.weight": state["tok_emb.weight"]}


def original_logits(state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The original's forward pass, written out: pre-norm RMSNorm with torch's default epsilon,
    fused qkv, GELU, tied head."""
    B, T = ids.shape
    norm = partial(F.rms_norm, normalized_shape=(16,))
    x = state["tok_emb.weight"][ids] + state["pos_emb.weight"][:T]
    for i in range(2):
        w = {k.removeprefix(f"blocks.{i}.").removesuffix(".weight"): v for k, v in state.items()}
        qkv = (norm(x, weight=w["ln1"]) @ w["attn.qkv"].T).split(16, dim=2)
        q, k, v = [y.view(B, T, 2, 8).transpose(1, 2) for y in qkv]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(B, T, 16) @ w["attn.proj"].T
        x = x + F.gelu(norm(x, weight=w["ln2"]) @ w["mlp.fc"].T) @ w["mlp.proj"].T
    return norm(x, weight=state["ln_f.weight"]) @ state["tok_emb.weight"].T


def imported_original(
    folder: Path, change: dict[str, Any] | None = None, tags: Any = None
) -> loading.LoadedModel:
    content = {"model": original(), "cfg": SIZES | {"dropout": 0.0}, "step": 70}
    torch.save(content | (change or {}), folder / "latest.pt")
    return imported(folder / "latest.pt", "old", tokenizer="bytes", overwrite=True, tags=tags)


@pytest.mark.parametrize("place, given", [("latest.pt", "latest.pt"), ("hf/config.json", "hf")])
def test_weights_from_elsewhere_in_place_of_a_run_are_told_how_to_become_one(
    place: str, given: str, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / place).write_text("{}")
    with pytest.raises(CheckpointError, match=f"codechat import {tmp_path / given}"):
        checkpoint.load(tmp_path / given)


def original_in(dtype: torch.dtype, scale: float) -> dict[str, torch.Tensor]:
    """The original's state in another type, with smaller embeddings."""
    state = {}
    for name, weight in original().items():
        small = scale if "_emb" in name or "head" in name else 1
        state[name] = (weight * small).to(dtype)
    return state


@pytest.mark.parametrize(
    "prefix, dtype, scale",
    [
        ("", torch.float32, 1.0),
        ("_orig_mod.", torch.float32, 1.0),
        ("", torch.bfloat16, 1.0),
        # on activations near zero an epsilon of 1e-5 would give other logits
        ("", torch.float32, 1e-3),
    ],
    ids=["plain", "compiled", "bfloat16", "small"],
)
@torch.no_grad()
def test_a_checkpoint_of_the_original_computes_what_it_computed(
    prefix: str, dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    state = original_in(dtype, scale)
    stored = {f"{prefix}{name}": weight for name, weight in state.items()}
    found = imported_original(tmp_path, {"model": stored}).model(ids)
    expected = original_logits({name: weight.float() for name, weight in state.items()}, ids)
    torch.testing.assert_close(found[..., :257], expected, atol=1e-4 * scale, rtol=1e-4)


def test_a_checkpoint_of_the_original_has_its_step_and_text_for_tags(tmp_path: Path) -> None:
    loaded = imported_original(tmp_path)
    assert loaded.meta["step"] == 70
    assert loaded.tags == "text"
    assert loaded.model.cfg.n_tags == 0


@torch.no_grad()
def test_the_vocabulary_of_the_original_is_padded_with_zeros(tmp_path: Path) -> None:
    found = imported_original(tmp_path).model(ids_below(257, 2, 24))
    assert found.shape[-1] == 320
    assert not found[..., 257:].any()


@pytest.mark.parametrize(
    "cfg",
    [
        None,
        {"n_layer": 2},
        SIZES | {"depth": 3},
        SIZES | {"depth": 1},
        SIZES | {"n_embd": 32},
        SIZES | {"vocab_size": 200},
    ],
    ids=str,
)
def test_settings_of_the_original_that_do_not_fit_its_weights_are_refused(
    cfg: dict[str, int] | None, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        imported_original(tmp_path, {"cfg": cfg})
    assert not paths.exists("old")


@pytest.mark.parametrize(
    "name, weight",
    [
        ("blocks.0.ln1.bias", torch.zeros(16)),
        ("head.weight", torch.zeros(257, 16)),
        ("blocks.0.ln1.weight", torch.full((16,), float("nan"))),
    ],
    ids=["unknown", "untied head", "nan"],
)
def test_weights_that_the_original_does_not_have_are_refused(
    name: str, weight: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        imported_original(tmp_path, {"model": original() | {name: weight}})
    assert not paths.exists("old")


def test_tags_that_the_original_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        imported_original(tmp_path, tags="reserved")
    assert not paths.exists("old")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointError, ConfigError)):
        imported_original(tmp_path, {"model": Bomb()})
    assert not (tmp_path / "exploded").exists()
    assert not paths.exists("old")


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(CheckpointError):
        imported(tmp_path / "half.pt", "old", tokenizer="bytes")
    assert not paths.exists("old")


def test_a_file_with_no_checkpoint_in_it_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError):
        imported(tmp_path / "list.pt", "old", tokenizer="bytes")
    assert not paths.exists("old")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        imported(tmp_path / "none.pt", "old", tokenizer="bytes")
    assert not paths.exists("old")


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_latent_attention_has_no_class_to_be_exported_to(tmp_path: Path, form: str) -> None:
    saved(shape=replace(SHAPE, attention="mla"))
    with pytest.raises(ConfigError, match="model.attention mla|takes an imported model"):
        exported(tmp_path, form=form)
    assert not (tmp_path / "out").exists()
