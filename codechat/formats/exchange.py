"""`codechat export`: a checkpoint as a directory that transformers and vLLM load with no code
of ours, a file for llama.cpp, or a run to give away. `codechat import`: weights trained
elsewhere as a run (docs/commands.md, "Out and in").

    codechat export --ckpt released/nano --out nano-hf
    codechat export --ckpt released/nano --out my-model --format run
    codechat export --ckpt smollm2/sft --out tools --format gguf --dtype q8_0
    codechat export --ckpt smollm2/sft --out tools --format adapter    what it adds to the pretrained model
    codechat import qwen --run-name qwen    after `codechat download Qwen/Qwen2.5-0.5B-Instruct --out qwen`
    codechat import old/latest.pt --run-name old
    vllm serve nano-hf --model-impl transformers

Squared ReLU with QK-norm becomes Qwen3 with hidden_act relu; its gate projection repeats the up
projection, which import drops. Weights become float32. An imported model keeps its tokenizer
and chat template (tags "template"); --tags text, reserved and raw replace it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from codechat.core.atomic_files import atomic_directory, file_record, read_json, write_json
from codechat.core.errors import ConfigError, MissingFile
from codechat.formats import exported_tokenizer
from codechat.formats.exported_tokenizer import own_template, without_messages
from codechat.formats.settings import ExportConfig, ImportConfig
from codechat.runs import paths
from codechat.text import chat, tokenizer
from codechat.text.chat import END_TAG
from codechat.text.native_template import Unproven
from codechat.text.tokenizer import ImportedTokenizer, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from codechat.models.gpt import GPT
    from codechat.runs.checkpoint import Checkpoint
    from codechat.runs.run import Run

PRETRAINED = ("smollm2", "qwen-coder")  # what `codechat download` knows by these names
FLOAT8 = "float8_e4m3fn"
LARGEST_FACTOR = 256.0  # of an adapter in float8
# the others fit every format
FORMAT_OF_DTYPE = {
    "float16": "gguf",
    "q8_0": "gguf",
    FLOAT8: "adapter",
}
OF_THE_MACHINE = {"argv", "cwd", "host", "launch", "parent", "resumed"}  # entries of env.json


class Written(NamedTuple):
    """What an export holds, in words, and the bytes of its weights."""

    about: str
    size: int


def export(cfg: ExportConfig) -> str:
    """Write the directory; returns what it holds. ConfigError where no Hugging Face class fits
    or --out is in use."""
    from codechat.formats.export_card import export_card
    from codechat.runs import checkpoint  # imports torch, which --help does not need

    out = cfg.out.resolve()
    if not _may_be_written(out, cfg.overwrite):
        raise ConfigError(
            f"--out {out} exists; required is a free name, or an earlier export and --overwrite"
        )
    needed = FORMAT_OF_DTYPE.get(cfg.dtype, cfg.format)
    if cfg.format != needed:
        raise ConfigError(
            f"--dtype {cfg.dtype} is for --format {needed}; required here is bfloat16 or float32"
        )
    ckpt = checkpoint.load(cfg.ckpt, optimizer=False, mmap=True)
    if ckpt.path.resolve().is_relative_to(out):
        raise ConfigError(
            f"--out {out} holds the checkpoint that --ckpt {cfg.ckpt} reads; choose another --out"
        )
    write = {"run": _write_run, "adapter": _write_adapter}.get(cfg.format, _write_model)
    with atomic_directory(out) as folder:
        written = write(cfg, ckpt, folder)
        card = export_card(ckpt, format=cfg.format, dtype=cfg.dtype, about=written.about)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return (
        f"{cfg.out}: {written.about}, {written.size / 2**20:.1f} "
        f"MiB of {cfg.dtype}, from {ckpt.path}"
    )


def _may_be_written(out: Path, overwrite: bool) -> bool:
    """Whether nothing is there, or an empty directory, or with `overwrite` an earlier export."""
    if not out.exists():
        return True
    return out.is_dir() and (not any(out.iterdir()) or (overwrite and _is_export(out)))


def _is_export(out: Path) -> bool:
    """Whether it holds an export: its files, no metrics, and no checkpoint but released ones."""
    released = all(
        any(step.glob("*.safetensors")) and not (step / "ranks.pt").exists()
        for step in paths.checkpoint_paths(out).values()
    )
    named = any((out / name).is_file() for name in ("config.json", "model.gguf"))
    return named and released and not (out / "metrics.jsonl").exists()


def _write_model(cfg: ExportConfig, ckpt: Checkpoint, folder: Path) -> Written:
    """A directory for transformers and vLLM, or a file for llama.cpp."""
    from codechat.formats import gguf_format, hf_format
    from codechat.models import loading

    shape, tok, tags = loading.describe(ckpt.path, ckpt.meta)
    family = hf_format.family_of(shape, imported=isinstance(tok, ImportedTokenizer))
    tensors = hf_format.tensors(shape, ckpt.model_state)
    config = hf_format.to_hf(
        shape,
        family,
        dtype=cfg.dtype,
        bos_id=tok.eot_id,
        eos_ids=exported_tokenizer.end_ids(tok, tags),
    )
    about = (
        f"{family.architecture} with {family.act}, {sum(t.numel() for t in tensors.values()):,} "
        "parameters"
    )
    if family.act == "relu":
        about += (
            f" ({shape.n_params:,} here; the gate projection "
            "repeats the up projection; not for llama.cpp)"
        )
    if cfg.format == "gguf" and (not isinstance(tok, ImportedTokenizer) or tags == "reserved"):
        got = f"tokenizer {tok.spec} with tags {tags}"
        raise ConfigError(
            f"{got}; --format gguf takes an imported model with tags native, template, text or raw"
        )
    files = exported_tokenizer.tokenizer_files(
        tok,
        tags,
        block_size=shape.block_size,
        rows=shape.padded_vocab,
        tools_style=loading.tools_style(ckpt.meta),
    )
    if cfg.format == "gguf":
        path = folder / gguf_format.FILE
        template = files["chat_template.jinja"]
        return Written(
            about, gguf_format.write(path, config, tensors, tok.to_dict(), cfg.dtype, template)
        )
    files = {"config.json": exported_tokenizer.json_text(config)} | files
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Written(about, hf_format.save(folder / hf_format.ONE_FILE, tensors, cfg.dtype))


def _write_run(cfg: ExportConfig, ckpt: Checkpoint, folder: Path) -> Written:
    """A run directory with the weights alone."""
    from codechat.formats import hf_format

    path = _checkpoint_path(folder, ckpt, hf_format.ONE_FILE)
    size = hf_format.save(path, ckpt.model_state, cfg.dtype)
    _describe_run(folder, ckpt, path, {})
    return Written(_parameters(ckpt), size)


def _write_adapter(cfg: ExportConfig, ckpt: Checkpoint, folder: Path) -> Written:
    """A run directory with what was added to a pretrained model, at a low rank."""
    from codechat.formats import hf_format
    from codechat.models import lora
    from codechat.runs import checkpoint

    first = ckpt.meta["lineage"][0]
    pretrained = first.get("source")
    if first["kind"] != "import" or pretrained not in PRETRAINED:
        raise ConfigError(
            f"{ckpt.path} began as {first['run']}; "
            f"--format adapter takes what began as {' or '.join(PRETRAINED)}"
        )
    if first.get("own_rows") and not cfg.base:
        raise ConfigError(
            f"{first['run']} was imported with --own-rows true, and users of an adapter import "
            "without; set --base to such an import"
        )
    base = checkpoint.load(cfg.base or first["run"], optimizer=False, mmap=True)
    if base.path.resolve().is_relative_to(cfg.out.resolve()):
        raise ConfigError(
            f"--out {cfg.out} holds {first['run']}, which the "
            "adapter is made from; choose another --out"
        )
    tensors, lost = lora.low_rank(base.model_state, ckpt.model_state, cfg.rank)
    about = f"rank {cfg.rank} of {_parameters(ckpt)} leaves out {lost:.2%} of the squared change"
    adapter = dict(base=pretrained, rank=cfg.rank, lost=round(lost, 4), dtype=cfg.dtype)
    wider = []
    if cfg.dtype == FLOAT8:
        # it has numbers from 2^-6 to 448; what a short training adds is smaller
        adapter["scale"] = lora.scale_to(tensors, LARGEST_FACTOR)
        for name, tensor in tensors.items():
            # a row of the embedding is a logit where the head is tied: in float8 those of call
            # tags moved by half a nat
            if not name.startswith("blocks.") or not hf_format.holds(tensor, cfg.dtype):
                wider.append(name)
    if wider:
        about += (
            f"; {len(wider)} of {len(tensors)} tensors in bfloat16: "
            "those outside the blocks, and those whose numbers float8 does not hold"
        )
    path = _checkpoint_path(folder, ckpt, checkpoint.ADAPTER)
    size = hf_format.save(path, tensors, cfg.dtype, wider)
    _describe_run(folder, ckpt, path, adapter)
    return Written(about, size)


def _parameters(ckpt: Checkpoint) -> str:
    return f"{sum(tensor.numel() for tensor in ckpt.model_state.values()):,} parameters"


def _checkpoint_path(folder: Path, ckpt: Checkpoint, name: str) -> Path:
    """Where the weights go, in a directory that is made."""
    path = folder / "checkpoints" / ckpt.path.name / name
    path.parent.mkdir(parents=True)
    return path


def _describe_run(folder: Path, ckpt: Checkpoint, weights: Path, adapter: dict[str, Any]) -> None:
    """The files beside the weights: those of the run without what is of one machine. adapter:
    entries of meta.json."""
    changed = adapter | dict(
        optimizers=[], sharded=False, files={weights.name: file_record(weights)}
    )
    about = {key: value for key, value in ckpt.meta.items() if key != "base"}  # of adapters
    write_json(weights.with_name("meta.json"), about | changed)
    run = ckpt.path.parent.parent
    write_json(folder / "config.json", read_json(run / "config.json"))
    env = {
        key: value
        for key, value in read_json(run / "env.json").items()
        if key not in OF_THE_MACHINE
    }
    env.get("hardware", {}).pop("system", None)
    write_json(folder / "env.json", env)
    status = read_json(run / "status.json")
    ended = dict(kind=status.get("kind"), ended=status.get("ended"))
    write_json(
        folder / "status.json", ended | dict(status="finished", reason=None, summary={}, pid=None)
    )


def main(cfg: ExportConfig) -> None:
    """`codechat export`."""
    print(export(cfg))


# ---- import


def _tags_of(tok: Tokenizer) -> str:
    """The form of turns that its template writes; an export of ours with tags text or raw says
    so by its template."""
    template = getattr(tok, "template", None) or ""
    if template.endswith(own_template(chat.RAW)):  # the beginning of the text may stand before it
        return chat.RAW
    ours = template == own_template("text") and END_TAG not in tok.special_tokens
    return "template" if template and not ours else "text"


class ChatForm(NamedTuple):
    """How an imported model converses."""

    tags: str
    tools_style: str
    reason: str = ""  # why its own words are not used for tools


def _chat_form(cfg: ImportConfig, tok: Tokenizer, exported: bool) -> ChatForm:
    """exported: its template is an export of ours, which says how tools were listed in
    training. ConfigError for settings that contradict one another."""
    native = [given == chat.NATIVE for given in (cfg.tags, cfg.tools_form) if given]
    if any(native):
        if not all(native):
            got = f"got --tags {cfg.tags} with --tools-form {cfg.tools_form}"
            raise ConfigError(f"{got}; expected native for both; leave one out")
        return ChatForm(chat.NATIVE, "json")
    tags = cfg.tags or _tags_of(tok)
    if native or exported or tags != chat.TEMPLATE:
        return ChatForm(tags, cfg.tools_form or "compact")
    try:
        chat.stop_sequences(tok, chat.NATIVE)
    except Unproven as error:
        return ChatForm(tags, "compact", error.reason)
    return ChatForm(chat.NATIVE, "json")


class Source(NamedTuple):
    """What is read of weights trained elsewhere, before their run is made. config and weights
    are None for a .pt file of the original system, whose shape is known only with the tags.
    sha256: of a GGUF file; an adapter belongs to these weights alone."""

    tokenizer: Tokenizer
    config: dict[str, Any] | None  # of a config.json
    weights: Iterable[tuple[str, Tensor]] | None
    note: str = ""
    sha256: str = ""


def _read_source(cfg: ImportConfig) -> Source:
    """MissingFile where there is nothing; what the readers of the formats raise."""
    # these import torch, which --help does not need
    from codechat.formats import (
        gguf_format,
        hf_format,
    )

    source = cfg.source
    if not source.exists():
        raise MissingFile(
            f"{source} does not exist; give a Hugging Face directory, a GGUF file or an original .pt file; "
            "`codechat download MODEL` fetches one"
        )
    gguf = gguf_format.file_in(source)
    if gguf:
        file = gguf_format.read(gguf)
        tok = tokenizer.load(cfg.tokenizer) if cfg.tokenizer else tokenizer.from_dict(file.saved)
        sha256 = file_record(gguf)["sha256"]
        return Source(tok, file.about, file.weights, file.note, sha256)
    if not source.is_dir():
        return Source(tokenizer.load(cfg.tokenizer or "gpt2"), None, None)
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json; expected a Hugging Face directory")
    config = read_json(source / "config.json")
    tok = tokenizer.load(cfg.tokenizer or f"hf:{source}")
    tensors = hf_format.read_weights(source)
    config, note = hf_format.with_own_head(config, tensors)
    return Source(tok, config, tensors.items(), note)


def _read_model(read: Source, tok: Tokenizer, tags: str, path: Path) -> tuple[GPT, int]:
    """The model, and its step. ConfigError for tags that a .pt file has no rows for."""
    from codechat.formats import hf_format, original_format

    if read.config is not None and read.weights is not None:
        n_tags = chat.N_TAGS if tags == "reserved" else 0
        shape = hf_format.from_hf(read.config, vocab_size=tok.n_vocab, n_tags=n_tags)
        return hf_format.read_model(shape, read.weights), 0
    if tags not in ("text", chat.RAW):
        raise ConfigError(
            f"--tags {tags} with a .pt file; required is text or raw; leave --tags out"
        )
    return original_format.read(path, tok.n_vocab)


def _marks_note(model: GPT, tok: Tokenizer, tags: str, own_rows: bool) -> str:
    """What to say of tokens around calls that were never trained; with `own_rows` they get rows
    of their own, in place."""
    from codechat.formats import call_marks

    marks = call_marks.untrained_marks(model, tok) if tags == chat.NATIVE else {}
    named = " and ".join(marks.values())
    if not marks:
        return ""
    if own_rows:
        call_marks.give_rows(model, marks)
        return f"{named} were never trained: they have rows of their own now"
    return (
        f"{named} were never trained: their rows are those of unused tokens, so it cannot write them, and "
        "adapters cannot learn to; --own-rows true gives them rows of their own"
    )


def import_model(cfg: ImportConfig) -> Run:
    """The finished run, whose one checkpoint holds the weights. Everything is read before the
    run is made."""
    from codechat.runs import checkpoint, run

    read = _read_source(cfg)
    tok = read.tokenizer
    exported = False
    if isinstance(tok, ImportedTokenizer) and tok.template:
        theirs = without_messages(tok.template)
        exported = theirs != tok.template
        tok = tokenizer.from_dict(tok.to_dict() | {"template": theirs})
    form = _chat_form(cfg, tok, exported)
    # a template that cannot be masked fails here rather than in training
    chat.stop_sequences(tok, form.tags)
    model, step = _read_model(read, tok, form.tags, cfg.source)
    about_marks = _marks_note(model, tok, form.tags, cfg.own_rows)
    origin: dict[str, Any] = dict(run=cfg.run_name, kind="import", source=cfg.source.resolve().name)
    if cfg.own_rows:
        origin["own_rows"] = True
    if read.sha256:
        origin["sha256"] = read.sha256
    if form.tools_style != "compact":
        origin["tools_style"] = form.tools_style
    meta = dict(tokenizer=tok.to_dict(), tags=form.tags, lineage=[origin])
    with run.Run.create(cfg.run_name, cfg, kind="import", overwrite=cfg.overwrite) as created:
        path = checkpoint.save(created.path, step, model=model, meta=meta)
    size = f"{model.cfg.n_params:,} parameters, block {model.cfg.block_size}"
    note = f"; {read.note}" if read.note else ""
    turns = f"tokenizer {tok.spec}, tags {form.tags}"
    print(f"run {created.name}: {size}, {turns}; {path}{note}")
    if about_marks:
        print(about_marks)
    if form.reason:
        where = f"in the system message, in style {form.tools_style}"
        print(f"tools are listed {where}: the model's own chat template {form.reason}")
    return created
