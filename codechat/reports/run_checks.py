"""Which runs a report may rest on: finished ones, evaluated alike, of checkpoints that were not chosen on test.

Left out: judging settings of training; two runs that are compared may differ in anything but how they were evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from codechat.core.errors import RunError
from codechat.runs import paths
from codechat.runs.run import Run

# Settings that decide what an evaluation of a kind of run measures; seeds may differ.
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
QUOTED = {"test", "test_hard"}  # splits whose figures are quoted, so that nothing may be chosen on them


def admit(runs: Sequence[Run]) -> None:
    """RunError where one of the runs is not finished, speaks of weights that were trained anew since, rests on a checkpoint that was chosen on
    a test split, or was evaluated with another setting than a run of its kind."""
    for run in runs:
        require_finished(run)
        require_current(run)
        require_unpicked(run)
    require_alike(runs)


def require_finished(run: Run) -> None:
    state, reason = run.status["status"], run.status.get("reason")
    if state == "finished":
        return
    remedy = "wait until it ends" if state == "running" else "continue it with --resume"
    why = f" ({reason})" if reason else ""
    raise RunError(f"run {run.name} is {state}{why}; a report reads finished runs only; {remedy}")


def require_current(run: Run) -> None:
    """An evaluation speaks of weights that may have been trained anew since."""
    for name, judged in _judged(run):
        if judged.status["started"] > run.status["started"]:
            raise RunError(
                f"run {run.name} evaluated an earlier {name}, which was trained again on {judged.status['started']}; evaluate it again"
            )


def _judged(run: Run) -> Iterable[tuple[str, Run]]:
    """The runs whose checkpoints an evaluation read; one that was removed since is left out: the figures are still true of it."""
    refs = run.config.get("ckpt", ()) if run.status["kind"] in ("evaluate", "swaps", "anatomy") else ()
    names = dict.fromkeys(str(ref).partition("@")[0] for ref in ([refs] if isinstance(refs, str) else refs))
    yield from ((name, Run.open(name)) for name in names if paths.exists(name))


def require_unpicked(run: Run) -> None:
    """A figure on a test split is of one checkpoint per run, and that one was chosen elsewhere."""
    if run.status["kind"] != "evaluate" or not QUOTED & set(run.config.get("split", ())):
        return
    seen: dict[str, set[str]] = {}
    for checkpoint in run.evals().get("checkpoint", ()):
        seen.setdefault(str(checkpoint).partition("@")[0], set()).add(str(checkpoint))
    for name, checkpoints in seen.items():
        if len(checkpoints) > 1:
            raise RunError(
                f"run {run.name} evaluated {len(checkpoints)} checkpoints of {name} on {', '.join(run.config['split'])}: whichever is quoted was "
                "chosen on test; choose with --all-checkpoints --split select and evaluate that one"
            )
    for ref in run.config.get("ckpt", ()):
        name, _, which = str(ref).partition("@")
        for chooser in _choosers(name) if which == "best" else ():
            if splits := QUOTED & set(chooser.config.get("split", ())):
                raise RunError(
                    f"run {run.name} evaluated {ref}, which {chooser.name} chose on {', '.join(sorted(splits))}; choose it on select, then "
                    "evaluate it again"
                )


def _choosers(name: str) -> list[Run]:
    """The evaluations that chose the best checkpoint of a run."""
    found = [Run.open(path) for path in paths.run_paths()]
    return [
        r
        for r in found
        if r.config.get("all_checkpoints") and [str(c).partition("@")[0] for c in r.config.get("ckpt", ())] == [name]
    ]


def require_alike(runs: Sequence[Run]) -> None:
    """Runs of one kind were evaluated with the same settings; those that choose a checkpoint are a kind of their own."""
    first: dict[tuple[str, bool], Run] = {}
    for run in runs:
        kind = run.status["kind"]
        other = first.setdefault((kind, bool(run.config.get("all_checkpoints"))), run)
        for setting in SETTINGS.get(kind, ()):
            a, b = _plain(other.config.get(setting)), _plain(run.config.get(setting))
            if a != b:
                raise RunError(
                    f"runs {other.name} and {run.name} were evaluated with different {setting}: {a} and {b}; a report compares what was "
                    "evaluated alike; evaluate one of them again"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
