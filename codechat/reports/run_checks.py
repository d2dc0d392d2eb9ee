"""Which runs a report may use: finished, evaluated with the same settings, and no checkpoint chosen on a test split.

Runs that are compared may differ in everything but how they were evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from codechat.core.errors import RunError
from codechat.runs import paths
from codechat.runs.run import Run

# Settings that decide what an evaluation of each kind of run measures; seeds may differ.
SAMPLED = ("task", "temperature", "top_k", "max_new_tokens")
SETTINGS = {
    "pretrain": ("data_dir", "seq_len", "eval_tokens"),
    "sft": ("eval_examples", "probe_examples"),
    "reinforce": (*SAMPLED, "eval_examples", "ks"),
    "grpo": ("task", "temperature", "max_new_tokens", "eval_examples", "ks"),
    "evaluate": (*SAMPLED, "data_dir", "split", "limit", "n", "ks", "probe_examples"),
    "swaps": ("data_dir", "split", "limit", "max_new_tokens"),
    "anatomy": (*SAMPLED, "data_dir", "problems", "group_size"),
}
QUOTED = {"test", "test_hard"}  # splits whose scores are quoted: no checkpoint may be chosen on them


def check(runs: Sequence[Run]) -> None:
    """RunError if a run is not finished, evaluated weights that were trained again since, or uses a checkpoint chosen on a test split, or if two runs of
    one kind were evaluated with different settings."""
    for run in runs:
        if run.status["status"] != "finished":
            state, reason = run.status["status"], run.status.get("reason", "no end yet")
            raise RunError(f"run {run.name} is {state} ({reason}); a report reads finished runs; wait, or use --resume")
        if run.status["kind"] in ("evaluate", "swaps", "anatomy"):
            _check_current(run)
        if run.status["kind"] == "evaluate" and QUOTED & set(run.config.get("split", ())):
            _check_choice(run)
    _check_settings(runs)


def _check_current(run: Run) -> None:
    """The weights that a run evaluated must not have been trained again since. A run that was deleted is skipped: the scores still hold."""
    for name in _trained(run):
        if paths.exists(name) and (started := Run.open(name).status["started"]) > run.status["started"]:
            raise RunError(f"run {run.name} evaluated {name}, which was trained again on {started}; evaluate it again")


def _trained(run: Run) -> list[str]:
    """The runs whose checkpoints an evaluation read."""
    refs = run.config.get("ckpt", ())
    return list(dict.fromkeys(_name(ref) for ref in ([refs] if isinstance(refs, str) else refs)))


def _name(checkpoint: Any) -> str:
    return str(checkpoint).partition("@")[0]


def _check_choice(run: Run) -> None:
    """A score on a test split belongs to one checkpoint per run, and that one was chosen on another split."""
    names = [_name(c) for c in {*run.evals().get("checkpoint", ())}]
    for name in sorted(set(names)):
        if (count := names.count(name)) > 1:
            raise RunError(
                f"run {run.name} evaluated {count} checkpoints of {name} on test: the best one would be chosen there; "
                "choose with --all-checkpoints --split select and evaluate that one"
            )
    choosers = [r for r in map(Run.open, paths.run_paths()) if r.config.get("all_checkpoints")]
    for ref in (ref for ref in run.config.get("ckpt", ()) if str(ref).endswith("@best")):
        for chooser in choosers:
            splits = QUOTED & set(chooser.config.get("split", ()))
            if splits and _trained(chooser) == [_name(ref)]:
                raise RunError(
                    f"run {run.name} evaluated {ref}, which {chooser.name} chose on {', '.join(sorted(splits))}; "
                    "choose it on select, then evaluate it again"
                )


def _check_settings(runs: Sequence[Run]) -> None:
    """Runs of one kind have the same evaluation settings; evaluations that choose a checkpoint are a kind of their own."""
    first: dict[tuple[str, bool], Run] = {}
    for run in runs:
        kind = run.status["kind"]
        other = first.setdefault((kind, bool(run.config.get("all_checkpoints"))), run)
        for setting in SETTINGS.get(kind, ()):
            a, b = (_plain(r.config.get(setting)) for r in (other, run))
            if a != b:
                raise RunError(
                    f"runs {other.name} and {run.name} were evaluated with different {setting}: {a} and {b}; evaluate one again"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
