"""`codechat export`: a checkpoint as a directory that transformers and vLLM load with no code of ours, a file for
llama.cpp, or a run to give away. `codechat import`: weights trained elsewhere as a run (docs/commands.md, "Out and
in").

    codechat export --ckpt nano/rl --out nano-rl-hf
    codechat export --ckpt nano/sft --out my-model --format run
    codechat export --ckpt smollm2/sft --out tools --format gguf --dtype q8_0
    codechat export --ckpt smollm2/sft --out tools --format adapter   what it adds to the pretrained model, at rank
    --rank
    codechat import qwen --run-name qwen                            after `codechat download Qwen/Qwen2.5-0.5B-Instruct
    --out qwen`
    codechat import old/latest.pt --run-name old
    vllm serve nano-rl-hf --model-impl transformers

Squared ReLU with QK-norm becomes Qwen3 with hidden_act relu; its gate projection repeats the up projection, which
import drops. Weights become float32. An imported model keeps its tokenizer and chat template (tags "template");
--tags text, reserved and raw replace it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from codechat.core.atomic_files import atomic_directory, file_record, read_json, write_json
from codechat.core.config import REQUIRED, Settings, opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.runs import paths
from codechat.text import chat, tokenizer
from codechat.text.chat import END_TAG, TAG_OF
from codechat.text.tokenizer import END_OF_TEXT, ImportedTokenizer, Tokenizer
from codechat.text.tool_calls import CALL_TAG, TAGS
from codechat.text.tool_lists import WITH_TOOLS

if TYPE_CHECKING:
    from codechat.runs.checkpoint import Checkpoint
    from codechat.runs.run import Run

CUT = "\ufdd0\ufdd1"  # two Unicode noncharacters, which occur in no text
SMOLLM2 = "smollm2"  # what `codechat download` knows by this name
OF_THE_MACHINE = {"argv", "cwd", "host", "launch", "parent", "resumed"}  # entries of env.json


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which checkpoint goes where."""

    ckpt: str = opt(REQUIRED, "checkpoint: a run, RUN@best, RUN@STEP or its directory", reads="run")
    out: Path = opt(REQUIRED, "directory to make")
    dtype: Literal["bfloat16", "float32", "float16", "q8_0", "float8_e4m3fn"] = opt(
        "bfloat16", "type of the weights; float32 is exact; float16 and q8_0 for gguf, float8_e4m3fn for adapters"
    )
    format: Literal["huggingface", "run", "adapter", "gguf"] = opt(
        "huggingface",
        "run: a run directory for CodeChat, weights only; adapter: the same, as what was added to a pretrained model; "
        "gguf: OUT/model.gguf, for llama.cpp",
    )
    rank: int = opt(16, "rank of the adapter's matrices", least=1)
    overwrite: bool = opt(False, "replace --out if it holds an earlier export")


def export(cfg: ExportConfig) -> str:
    """Write the directory; returns what it holds. ConfigError where no Hugging Face class fits or --out is in use."""
    from codechat.runs import checkpoint  # imports torch, which --help does not need

    out = cfg.out.resolve()
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (cfg.overwrite and _is_export(out)))):
        raise ConfigError(f"--out {out} exists; required is a free name, or an earlier export and --overwrite")
    needed = {"float16": "gguf", "q8_0": "gguf", "float8_e4m3fn": "adapter"}.get(cfg.dtype, cfg.format)
    if cfg.format != needed:
        raise ConfigError(f"--dtype {cfg.dtype} is for --format {needed}; required here is bfloat16 or float32")
    ckpt = checkpoint.load(cfg.ckpt, optimizer=False, mmap=True)
    if ckpt.path.resolve().is_relative_to(out):
        raise ConfigError(f"--out {out} holds the checkpoint that --ckpt {cfg.ckpt} reads; choose another --out")
    with atomic_directory(out) as folder:
        about, size = (_write_run if cfg.format in ("run", "adapter") else _write_model)(cfg, ckpt, folder)
    return f"{cfg.out}: {about}, {size / 2**20:.1f} MiB of {cfg.dtype}, from {ckpt.path}"


def _is_export(out: Path) -> bool:
    """Whether it holds an export: its files, no metrics, and no checkpoint but released ones."""
    released = all(any(step.glob("*.safetensors")) for step in paths.checkpoint_paths(out).values())
    named = any((out / name).is_file() for name in ("config.json", "model.gguf"))
    return named and released and not (out / "metrics.jsonl").exists()


def _write_model(cfg: ExportConfig, ckpt: Checkpoint, folder: Path) -> tuple[str, int]:
    """(What was written, its bytes.)"""
    from codechat.formats import gguf_format, hf_format
    from codechat.models import loading

    shape, tok, tags = loading.describe(ckpt.path, ckpt.meta)
    imported = isinstance(tok, ImportedTokenizer)
    family = hf_format.family_of(shape, imported=imported)
    tensors = hf_format.tensors(shape, ckpt.model_state)
    about = hf_format.to_hf(
        shape,
        family,
        dtype=cfg.dtype,
        bos_id=tok.eot_id,
        eos_ids=end_ids(tok, tags),
    )
    line = f"{family.architecture} with {family.act}, {sum(t.numel() for t in tensors.values()):,} parameters"
    if family.act == "relu":
        line += f" ({shape.n_params:,} here; the gate projection repeats the up projection; not for llama.cpp)"
    if cfg.format == "gguf" and (not imported or tags == "reserved"):
        got = f"tokenizer {tok.spec} with tags {tags}"
        raise ConfigError(f"{got}; --format gguf takes an imported model with tags template, text or raw")
    files = tokenizer_files(
        tok,
        tags,
        block_size=shape.block_size,
        rows=shape.padded_vocab,
        tools_style=loading.tools_style(ckpt.meta),
    )
    if cfg.format == "gguf":
        template = files["chat_template.jinja"]
        return line, gguf_format.write(folder / gguf_format.FILE, about, tensors, tok.saved, cfg.dtype, template)
    for name, text in {"config.json": _text(about), **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return line, hf_format.save(folder / hf_format.ONE_FILE, tensors, cfg.dtype)


def _write_run(cfg: ExportConfig, ckpt: Checkpoint, folder: Path) -> tuple[str, int]:
    from codechat.formats import hf_format
    from codechat.models import lora
    from codechat.runs import checkpoint

    run = ckpt.path.parent.parent
    tensors = ckpt.model_state
    more = {}
    wider = list[str]()
    about = f"{sum(v.numel() for v in tensors.values()):,} parameters"
    if cfg.format == "adapter":
        first = ckpt.meta["lineage"][0]
        if (first["kind"], first.get("source")) != ("import", SMOLLM2):
            raise ConfigError(f"{ckpt.path} began as {first['run']}; --format adapter takes what began as {SMOLLM2}")
        base = checkpoint.load(first["run"], optimizer=False, mmap=True)
        if base.path.resolve().is_relative_to(cfg.out.resolve()):
            raise ConfigError(
                f"--out {cfg.out} holds {first['run']}, which the adapter is made from; choose another --out"
            )
        tensors, lost = lora.low_rank(base.model_state, tensors, cfg.rank)
        more = {"base": SMOLLM2, "rank": cfg.rank, "lost": round(lost, 4), "dtype": cfg.dtype}
        about = f"rank {cfg.rank} of {about}; {lost:.2%} of the squared change is lost"
        wider = [name for name, tensor in tensors.items() if not hf_format.holds(tensor, cfg.dtype)]
        if wider:
            about += (
                f"; {len(wider)} of {len(tensors)} tensors in bfloat16, since {cfg.dtype} does not hold their numbers"
            )
    weights = folder / "checkpoints" / ckpt.path.name / (checkpoint.ADAPTER if more else hf_format.ONE_FILE)
    weights.parent.mkdir(parents=True)
    size = hf_format.save(weights, tensors, cfg.dtype, wider)
    changed = more | {"optimizers": [], "sharded": False, "files": {weights.name: file_record(weights)}}
    write_json(weights.with_name("meta.json"), ckpt.meta | changed)
    config, env, status = (read_json(run / f"{name}.json") for name in ("config", "env", "status"))
    env = {key: value for key, value in env.items() if key not in OF_THE_MACHINE}
    env.get("hardware", {}).pop("system", None)
    status = {key: status.get(key) for key in ("kind", "ended")}
    status |= dict(status="finished", reason=None, summary={}, pid=None)
    for name, value in dict(config=config, env=env, status=status).items():
        write_json(folder / f"{name}.json", value)
    return about, size


# ---- the tokenizer's files


MESSAGES = "messages.jinja"  # turns OpenAI's messages and tools into messages that are text, as `codechat serve` does
_MESSAGES = re.compile(r"\{#- messages as text, by CodeChat #\}.*?\{#- end of messages as text #\}\n", re.DOTALL)


def chat_template(
    tags: str,
    tools_style: str = "compact",
    theirs: str | None = None,
    beginning: str = "",
) -> str:
    """The jinja template of what `codechat serve` renders: conversations with tools, calls and results. theirs: the
    template of an imported model, for tags template. beginning: what stands before raw text. It raises for what it
    cannot render so."""
    written = {
        "TOOLS_STYLE": tools_style,
        "DECLINED_WORDS": chat.DECLINED,
        "DECLINE_CALL": chat.DECLINE,
        "NOTHING_NAME": chat.NOTHING,
        "NOTHING_FITS": chat.NOTHING_FITS,
        "WITH_TOOLS": WITH_TOOLS,
        "ALL_TAGS": json.dumps(TAGS),
        "CALL_TAG": CALL_TAG,
    }
    text = Path(__file__).with_name(MESSAGES).read_text(encoding="utf-8")
    for name, value in written.items():
        text = text.replace(name, value)
    if tags == chat.RAW and beginning:
        text += f"{{{{- {json.dumps(beginning)} -}}}}"
    return text + (own_template(tags) if theirs is None else without_messages(theirs))


def without_messages(template: str) -> str:
    """A chat template without what `chat_template` puts before it."""
    return _MESSAGES.sub("", template)


def own_template(tags: str) -> str:
    """The jinja template of `chat`'s layout for messages of text: one for both tag modes; of raw text without tags."""
    text = Path(__file__).with_name(f"{'raw' if tags == chat.RAW else 'chat'}_template.jinja").read_text()
    heads = {**TAG_OF, "tool": TAG_OF["function"]}
    turns = [t for t in TAGS if t != CALL_TAG]
    text = text.replace("HEADS", json.dumps(heads)).replace("ROLES", ", ".join(TAG_OF))
    return text.replace("TURN_TAGS", json.dumps(turns)).replace("CALL_TAG", CALL_TAG).replace("END_TAG", END_TAG)


def end_ids(tok: Tokenizer, tags: str) -> list[int]:
    """Single ids that end a completion: <|end|> where it is one, then the end of text."""
    (stop,) = chat.stop_sequences(tok, tags)
    return [*dict.fromkeys((*(stop if len(stop) == 1 else ()), tok.eot_id))]


def tokenizer_files(
    tok: Tokenizer,
    tags: str,
    *,
    block_size: int,
    rows: int,
    tools_style: str = "compact",
) -> dict[str, str]:
    """{file name: text} of tokenizer and conversations. rows: of the embedding; rows without an id are never generated.

    The ids equal those of `tok.encode`, `chat.render` and `chat.prompt`, which tokenise tags, line ends and
    contents apart, while a template yields one text. So the normaliser puts the mark `CUT` where `chat` begins a
    new piece, and the pre-tokeniser splits there and drops the mark; not in raw text of several turns, where
    nothing marks the places, so a token may hold the end of one turn and the beginning of the next. The template
    raises where one text is ambiguous: content that spells a turn tag or, outside assistant turns, <functioncall>.
    In text mode <|end|> is several tokens: `generate` needs stop_strings=["<|end|>"] and its tokenizer."""
    imported = isinstance(tok, ImportedTokenizer)
    reserved = tags == "reserved"
    ends = end_ids(tok, tags)
    if imported and reserved:  # its ids keep their meaning only with its own template, or with tags as text
        raise ConfigError(f"tags reserved with the imported {tok.spec}; required are tags template or text")
    special = dict(
        bos_token=END_OF_TEXT,
        eos_token=END_TAG if reserved else END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=block_size,
        add_bos_token=False,
    )
    config |= {"clean_up_tokenization_spaces": False} | (tok.saved["special"] if imported else special)
    generation = {"bos_token_id": tok.eot_id, "eos_token_id": ends, "pad_token_id": tok.eot_id}
    unnamed = list(range(tok.n_vocab + (len(TAGS) if reserved else 0), rows))
    if unnamed:
        generation["suppress_tokens"] = unnamed
    theirs = (getattr(tok, "template", None) or "") if tags == chat.TEMPLATE else None
    beginning = tok.decode(tok.beginning) if tok.beginning else ""
    return {
        "tokenizer.json": _with_cuts(tok.saved["json"], tags) if imported else _text(tokenizer_json(tok, tags)),
        "chat_template.jinja": chat_template(tags, tools_style, theirs, beginning),
        "tokenizer_config.json": _text(config),
        "generation_config.json": _text(generation),
    }


def tokenizer_json(tok: Tokenizer, tags: str) -> dict[str, Any]:
    """The `tokenizers` package's own file."""
    if not isinstance(tok, (tokenizer.BpeTokenizer, tokenizer.TableTokenizer)):
        raise ConfigError(f"tokenizer {tok.spec} has no tokenizer.json; gpt2, gpt2:N, python:N, chars, bytes do")
    bpe = isinstance(tok, tokenizer.BpeTokenizer)
    letters = tokenizer.byte_letters()
    plain = not bpe and tok.alphabet is not None
    merges = tok.merges if bpe else []
    tokens = [*(sorted(letters) if bpe else tok.alphabet or letters), *(merge.replace(" ", "") for merge in merges)]
    special = [(tok.eot_id, END_OF_TEXT), *(enumerate(TAGS, tok.n_vocab) if tags == "reserved" else ())]
    # normalized: matched after the normaliser ran, which looks for tags beside line ends
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": True,
    }
    marks = [{"type": "Replace", "pattern": {"String": text}, "content": by} for text, by in _cuts(tags)]
    cut = {"type": "Split", "pattern": {"String": CUT}, "behavior": "Removed", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": bpe}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": content, **flags} for i, content in special],
        "normalizer": {"type": "Sequence", "normalizers": marks},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut] if plain else [cut, byte_level]},
        "decoder": {"type": "Fuse"} if plain else byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def _with_cuts(text: str, tags: str) -> str:
    """An imported tokenizer.json that splits where `chat` does. Without it a token may hold the end of a content
    and the line end behind it, as Qwen's `.\\n` does. Where a blank stands before each piece it stays as it is."""
    about = json.loads(text)
    if tags != "text" or '"add_prefix_space": true' in json.dumps(about["pre_tokenizer"]):
        return text
    marks = [{"type": "Replace", "pattern": {"String": found}, "content": by} for found, by in _cuts(tags)]
    cut = {"type": "Split", "pattern": {"String": CUT}, "behavior": "Removed", "invert": False}
    normalizers = [*marks, *([about["normalizer"]] if about["normalizer"] else [])]
    splits = [cut, *([about["pre_tokenizer"]] if about["pre_tokenizer"] else [])]
    about["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    about["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
    return _text(about)


def _cuts(tags: str) -> list[tuple[str, str]]:
    """(text, the same text with marks where `chat` cuts); reserved tags are cut out anyway. Raw text has no tags."""
    if tags == "reserved":
        return [*((f"{tag}\n", f"{tag}\n{CUT}") for tag in TAG_OF.values()), (f"\n{END_TAG}", f"{CUT}\n{END_TAG}")]
    heads = [(f"{tag}\n", f"{CUT}{tag}{CUT}\n{CUT}") for tag in TAG_OF.values()]
    ends = [(f"\n{END_TAG}", f"{CUT}\n{CUT}{END_TAG}{CUT}"), (CALL_TAG, f"{CUT}{CALL_TAG}{CUT}")]
    return [] if tags == chat.RAW else heads + ends


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def main(cfg: ExportConfig) -> None:
    """`codechat export`."""
    print(export(cfg))


# ---- import


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Settings):
    """Which weights become which run."""

    source: Path = opt(
        REQUIRED,
        "directory of a Hugging Face model, a GGUF file, or an original .pt file",
        positional=True,
        reads="path",
    )
    run_name: str = opt(REQUIRED, "name of the run to make", identity=False)
    tokenizer: str | None = opt(None, "tokenizer; none = the model's own, gpt2 for a .pt file", reads="path")
    tags: Literal["template", "reserved", "text", "raw"] | None = opt(
        None,
        "turns: the model's chat template, our tags in unused padding rows, or as text; raw = no turns; none = the "
        "template if there is one, else text",
    )
    overwrite: bool = opt(False, "replace a run of this name", identity=False)


def _tags_of(tok: Tokenizer) -> str:
    """The form of turns that its template writes; an export of ours with tags text or raw says so by its template."""
    template = getattr(tok, "template", None) or ""
    if template.endswith(own_template(chat.RAW)):  # the beginning of the text may stand before it
        return chat.RAW
    ours = template == own_template("text") and END_TAG not in tok.special_tokens
    return "template" if template and not ours else "text"


def import_model(cfg: ImportConfig) -> Run:
    """The finished run, whose one checkpoint holds the weights. Everything is read before the run is made."""
    from codechat.formats import gguf_format, hf_format  # these import torch, which --help does not need
    from codechat.runs import checkpoint, run

    source = cfg.source
    step = 0
    weights = None
    note = ""
    if not source.exists():
        raise MissingFile(f"no {source}; give a directory or a .pt file; `codechat download MODEL` fetches one")
    gguf = gguf_format.file_in(source)
    if gguf:
        file = gguf_format.read(gguf)
        about = file.about
        weights = file.weights
        note = file.note
        tok = tokenizer.load(cfg.tokenizer) if cfg.tokenizer else tokenizer.from_dict(file.saved)
    elif source.is_dir():
        about = read_json(source / "config.json")
        tok = tokenizer.load(cfg.tokenizer or f"hf:{source}")
        tensors = hf_format.read_weights(source)
        about, note = hf_format.with_own_head(about, tensors)
        weights = tensors.items()
    else:
        tok = tokenizer.load(cfg.tokenizer or "gpt2")
    if isinstance(tok, ImportedTokenizer) and tok.template:  # an export of ours
        tok = tokenizer.from_dict(tok.to_dict() | {"template": without_messages(tok.template)})
    tags = cfg.tags or _tags_of(tok)
    chat.stop_sequences(tok, tags)  # a template that cannot be masked fails here rather than in training
    if weights is not None:
        shape = hf_format.from_hf(about, vocab_size=tok.n_vocab, n_tags=chat.N_TAGS if tags == "reserved" else 0)
        model = hf_format.read_model(shape, weights)
    elif tags in ("text", chat.RAW):
        model, step = hf_format.read_original(source, tok.n_vocab)
    else:
        raise ConfigError(f"--tags {tags} with a .pt file; required is text or raw; leave --tags out")
    origin = {"run": cfg.run_name, "kind": "import", "source": source.resolve().name}
    meta = {"tokenizer": tok.to_dict(), "tags": tags, "lineage": [origin]}
    with run.Run.create(cfg.run_name, cfg, kind="import", overwrite=cfg.overwrite) as created:
        path = checkpoint.save(created.path, step, model=model, meta=meta)
    size = f"{model.cfg.n_params:,} parameters, block {model.cfg.block_size}"
    print(f"run {created.name}: {size}, tokenizer {tok.spec}, tags {tags}; {path}{note and '; ' + note}")
    return created
