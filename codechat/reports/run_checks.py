"""Which runs a report may use: finished, evaluated with the same settings, and no checkpoint chosen on a test split.

Left out: training settings. Runs that are compared may differ in everything but how they were evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """RunError if a run is not finished, evaluated weights that were trained again since, or uses a checkpoint chosen
    on a test split, or if two runs of one kind were evaluated with different settings."""
    for run in runs:
        require_finished(run)
        require_current(run)
        require_not_chosen_on_test(run)
    require_same_settings(runs)


def require_finished(run: Run) -> None:
    """A report reads finished runs only."""
    state, reason = run.status["status"], run.status.get("reason")
    if state != "finished":
        remedy = "wait until it ends" if state == "running" else "continue it with --resume"
        why = f" ({reason})" if reason else ""
        raise RunError(f"run {run.name} is {state}{why}; a report reads finished runs only; {remedy}")


def require_current(run: Run) -> None:
    """The weights that a run evaluated must not have been trained again since."""
    for name, trained in _evaluated(run):
        if (started := trained.status["started"]) > run.status["started"]:
            raise RunError(
                f"run {run.name} evaluated an earlier {name}, which was trained again on {started}; evaluate it again"
            )


def _evaluated(run: Run) -> Iterable[tuple[str, Run]]:
    """The runs whose checkpoints an evaluation read. A run that was deleted since is skipped: the scores still hold."""
    refs = run.config.get("ckpt", ()) if run.status["kind"] in ("evaluate", "swaps", "anatomy") else ()
    names = dict.fromkeys(_run_of(ref) for ref in ([refs] if isinstance(refs, str) else refs))
    yield from ((name, Run.open(name)) for name in names if paths.exists(name))


def _run_of(checkpoint: Any) -> str:
    return str(checkpoint).partition("@")[0]


def require_not_chosen_on_test(run: Run) -> None:
    """A score on a test split belongs to one checkpoint per run, and that one was chosen on another split."""
    if run.status["kind"] != "evaluate" or not QUOTED & set(run.config.get("split", ())):
        return
    checkpoints = {str(checkpoint) for checkpoint in run.evals().get("checkpoint", ())}
    for name in sorted({_run_of(c) for c in checkpoints}):
        if (count := sum(_run_of(c) == name for c in checkpoints)) > 1:
            raise RunError(
                f"run {run.name} evaluated {count} checkpoints of {name} on {', '.join(run.config['split'])}: the one that is quoted would be "
                "chosen on test; choose with --all-checkpoints --split select and evaluate that one"
            )
    for ref in (ref for ref in run.config.get("ckpt", ()) if str(ref).endswith("@best")):
        for chooser in _choosers(_run_of(ref)):
            if splits := QUOTED & set(chooser.config.get("split", ())):
                raise RunError(
                    f"run {run.name} evaluated {ref}, which {chooser.name} chose on {', '.join(sorted(splits))}; choose it on select, then "
                    "evaluate it again"
                )


def _choosers(name: str) -> list[Run]:
    """The evaluations that chose the best checkpoint of a run."""
    found = [Run.open(path) for path in paths.run_paths()]
    return [
        r for r in found if r.config.get("all_checkpoints") and [_run_of(c) for c in r.config.get("ckpt", ())] == [name]
    ]


def require_same_settings(runs: Sequence[Run]) -> None:
    """Runs of one kind have the same evaluation settings; evaluations that choose a checkpoint are a kind of their
    own."""
    first: dict[tuple[str, bool], Run] = {}
    for run in runs:
        kind = run.status["kind"]
        other = first.setdefault((kind, bool(run.config.get("all_checkpoints"))), run)
        for setting in SETTINGS.get(kind, ()):
            a, b = _plain(other.config.get(setting)), _plain(run.config.get(setting))
            if a != b:
                raise RunError(
                    f"runs {other.name} and {run.name} were evaluated with different {setting}: {a} and {b}; a report compares runs with the "
                    "same evaluation settings; evaluate one of them again"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
