"""What a loop says at its end: what it reached, where it lies, what to type next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from codechat.core.atomic_files import read_rows

if TYPE_CHECKING:
    from codechat.runs.run import Run

Rows = Sequence[Mapping[str, Any]]

# metric of an evaluation -> what people call it, in the order in which one is looked for
REACHED = {
    "pass@1": "right answers",
    "reward_mean": "reward",
    "val_bpb": "bits per byte",
    "val_loss": "held-out loss",
}
DOMAIN = "heldout_loss/"  # and the name of a domain
# without evaluations: of the steps of training themselves
TRAINED = {"reward_mean": "reward in training", "train_loss": "loss in training"}


def closing_lines(run: Run, commands: Mapping[str, Any]) -> str:
    """Three lines. commands: what can be typed, by name; a library alone cannot chat."""
    steps = run.checkpoints()
    count = f" after {steps[-1]} steps" if steps else ""
    return "\n".join(
        [
            f"{run.name}: finished{count}; {reached(run) or 'nothing was evaluated'}",
            f"  it lies in {run.path}",
            f"  next: {next_command(run, commands)}",
        ]
    )


def stopped_lines(run: Run, command: str) -> str:
    """Why a loop ended early, and where that makes sense the command that continues it."""
    reason = str(run.status.get("reason"))
    lines = [f"{run.name}: {reason}"]
    if "--resume" in reason:
        lines.append(f"  next: codechat {command} --config {run.path}/config.json --resume")
    return "\n".join(lines)


def reached(run: Run) -> str:
    """Held-out loss or reward at the first and the last evaluation; of training where there was
    none."""
    evaluated = _rows(run, "eval.jsonl")
    # "" without splits; later ones (test) may have been evaluated once only
    first_split = next((row.get("split") for row in evaluated), None)
    evaluated = [row for row in evaluated if row.get("split") == first_split]
    for metric, name in REACHED.items():
        values = _values(evaluated, metric)
        if values:
            count = evaluated[-1].get("n_problems")
            among = f" (problems: {count})" if count else ""
            return f"{name} {_at_evaluations(values)}{among}"
    domains = sorted(_domains(evaluated))
    if domains:
        told = [f"{name} {_at_evaluations(_values(evaluated, DOMAIN + name))}" for name in domains]
        return f"held-out loss {', '.join(told)}"
    trained = _rows(run, "metrics.jsonl")
    for metric, name in TRAINED.items():
        values = _values(trained, metric)
        if values:
            return f"{name} {values[0]} at the first step, {values[-1]} at the last"
    return ""


def _rows(run: Run, name: str) -> Rows:
    file = run.path / name
    return list(read_rows(file)) if file.is_file() else []


def _domains(rows: Rows) -> set[str]:
    """Of conversations that a held-out loss was measured on."""
    return {key.removeprefix(DOMAIN) for row in rows for key in row if key.startswith(DOMAIN)}


def _values(rows: Rows, metric: str) -> list[str]:
    """ "0.42", or "0.42 [0.31, 0.53]" where the row has the interval."""
    texts = []
    for row in rows:
        if row.get(metric) is None:
            continue
        text = f"{row[metric]:.3g}"
        if row.get(f"{metric}/lo") is not None:
            text += f" [{row[f'{metric}/lo']:.3g}, {row[f'{metric}/hi']:.3g}]"
        texts.append(text)
    return texts


def _at_evaluations(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    return f"{values[0]} before, {values[-1]} now"


def next_command(run: Run, commands: Mapping[str, Any]) -> str:
    """A command line for the run's newest checkpoint."""
    settings = run.config
    task = settings.get("task")
    if task:
        compared = " ".join(filter(None, [settings.get("init_from"), run.name]))
        source = settings.get("data_dir")
        problems = f" --data-dir {source}" if source else ""
        return f"codechat evaluate --ckpt {compared} --task {task}{problems}"
    if run.status.get("kind") == "pretrain":
        return f"codechat sft --init-from {run.name} --data-dir DIR"
    if "tools" in commands and _domains(_rows(run, "eval.jsonl")) == {"calls"}:
        return f"codechat tools --ckpt {run.name} --tools FILE.py"
    if "chat" in commands:
        return f"codechat chat --ckpt {run.name}"
    return f"codechat evaluate --ckpt {run.name} --task TASK"
