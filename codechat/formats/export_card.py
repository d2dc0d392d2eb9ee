"""README.md of an export: a model card of the Hugging Face hub, from the checkpoint and its run.

Its head (YAML) names the library, the pretrained base where it is known, and what the run's own
evaluations measured. A licence is named only for a base whose licence is known; for a model of one's
own its owner adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from codechat import __version__
from codechat.core.atomic_files import read_json, read_rows

if TYPE_CHECKING:
    from codechat.runs.checkpoint import Checkpoint


class Base(NamedTuple):
    """A pretrained model: its name on the hub, and the licence by its makers."""

    name: str | None
    licence: str | None


KNOWN = {  # by what `codechat download` calls it
    "smollm2": Base("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "qwen-coder": Base("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0"),
}
UNKNOWN = Base(None, None)
LIBRARIES = {
    "huggingface": "transformers",
    "gguf": "gguf",
    "run": "codechat",
    "adapter": "codechat",
}
METRICS = ("pass@1", "reward_mean", "val_bpb", "val_loss")


def export_card(ckpt: Checkpoint, *, format: str, dtype: str, about: str) -> str:
    """The Markdown of README.md. about: what was written, in words."""
    lineage = ckpt.meta.get("lineage", ())
    name = str(ckpt.meta.get("run", ckpt.path.name))
    base = base_of(lineage)
    results = _results(ckpt)
    head = ModelCardData(
        language="en",
        library_name=LIBRARIES[format],
        pipeline_tag="text-generation",
        tags=["codechat", *dict.fromkeys(str(entry["kind"]) for entry in lineage)],
        base_model=base.name,
        license=base.licence,
        model_name=name,
        eval_results=results or None,
    )
    rows = [
        f"| {entry['run']} | {entry['kind']} | {entry['step']:,} | {_shown(entry.get('data_dir'))} |"
        for entry in lineage
    ]
    measured = [
        f"| {result.dataset_name} | {result.metric_type} | {result.metric_value:.4g} |"
        for result in results
    ]
    return "\n".join(
        [
            "---",
            head.to_yaml(),
            "---",
            "",
            f"# {name}",
            "",
            f"{about}, weights in {dtype}, written by CodeChat {__version__} from step "
            f"{ckpt.step:,}.",
            "",
            "## Training",
            "",
            "| run | loop | steps | data |",
            "|---|---|---|---|",
            *rows,
            "",
            *_taught(lineage),
            *(["## Figures", "", *_table(measured)] if measured else []),
            "It is an object of study, not an assistant: nothing protects from harmful requests.",
            "",
        ]
    )


def base_of(lineage: Sequence[Mapping[str, Any]]) -> Base:
    """The pretrained model that a lineage began with, as far as it is known."""
    source = lineage[0].get("source") if lineage else None
    return KNOWN.get(str(source), UNKNOWN)


def _taught(lineage: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each domain of the training data that a model wrote, as its manifest says."""
    for data_dir in dict.fromkeys(entry.get("data_dir") for entry in lineage):
        file = Path(data_dir or "") / "manifest.json"
        manifest = read_json(file) if data_dir and file.is_file() else {}
        domains = manifest.get("domains", {})
        whole = sum(counts["supervised_tokens"] for counts in domains.values())
        for domain, teacher in manifest.get("teachers", {}).items():
            share = domains.get(domain, {}).get("supervised_tokens", 0) / max(1, whole)
            yield (
                f"{share:.0%} of the supervised tokens in {_shown(data_dir)} (domain {domain}) are "
                f"right answers of {teacher['model']}, licence {teacher['licence']}."
            )
            yield ""


def _shown(data_dir: str | None) -> str:
    """A folder of data without the machine's own path to it."""
    folder = Path(data_dir or "")
    return folder.name if folder.is_absolute() else str(data_dir or "")


def _table(rows: list[str]) -> list[str]:
    return [
        "Measured during training, on held-out rows of the same kind of data.",
        "",
        "| data | metric | value |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _results(ckpt: Checkpoint) -> list[EvalResult]:
    """The last evaluation of each split that the run made of these weights."""
    file = ckpt.path.parent.parent / "eval.jsonl"  # RUN/checkpoints/STEP
    if not file.is_file():
        return []
    last: dict[str, dict[str, Any]] = {}
    for row in read_rows(file):
        if row.get("step") == ckpt.step and not row.get("checkpoint"):
            last[str(row.get("split", "held out"))] = row
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=split,
            dataset_name=split,
            metric_type=metric,
            metric_value=row[metric],
        )
        for split, row in last.items()
        for metric in METRICS
        if row.get(metric) is not None
    ]
