"""Counterfactual (minimal-pair) evaluation: swap one thing in a prompt; does the answer follow,
ignore the swap, or break?

    python tools/counterfactuals.py --ckpt nano/sft nano/rl@best --data-dir data/nano/sft

    tools_off       a neutral system prompt replaces the one with tools: a call is now wrong
    tools_on        tools are offered with a request for code: code is still right
    tool_swapped    an unsuitable tool replaces the requested one: a call to it is now wrong
    tool_renamed    the requested tool has another name in the list: the call must use the new name
    value_swapped   a value of the request is replaced: the call must carry the new value

Each case is answered greedily before and after its swap. It counts only if the first answer was
as expected, so the flip rate measures the effect of the swap, not the model's skill.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from codechat import tasks
from codechat.cli import guarded
from codechat.core import config
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import DataError
from codechat.distributed import hardware
from codechat.evaluation.intervals import wilson_interval
from codechat.evaluation.settings import SamplingSettings
from codechat.models import loading
from codechat.runs.paths import reference_of
from codechat.runs.run import Run
from codechat.tasks.base import Message, Problem
from codechat.text import tool_calls, tool_lists
from codechat_lab.instruments.behaviour_probes import answers, behaviour, read_probes
from codechat_lab.tasks.toolbox import catalogue, sampler

OUTCOMES = ("follows", "ignores", "other")
SWAPS = ("tools_off", "tools_on", "tool_swapped", "tool_renamed", "value_swapped")
SHOWN = 3  # cases of each swap among the samples


@dataclass(frozen=True, kw_only=True)
class SwapsConfig(SamplingSettings):
    """Which checkpoints answer which cases."""

    run_name: str = "swaps"
    ckpt: tuple[str, ...] = opt(
        REQUIRED,
        "checkpoints: run name, run@best, run@STEP, run directory or checkpoint",
        reads="run",
    )
    data_dir: str = opt(
        REQUIRED, "directory with funcall.SPLIT.jsonl problems and probes.SPLIT.jsonl", reads="path"
    )
    split: Literal["select", "test"] = opt("test", "split of the requests")
    limit: int = opt(100, "requests per swap", least=1)
    temperature: float = 0.0


Reading = Callable[[str], bool]  # what an answer does


@dataclass(frozen=True)
class Case:
    """One swap. valid: the answer before the swap is as expected, so that the case counts.
    ignores, follows: what the answer after it does."""

    swap: str
    id: str
    before: list[Message]
    after: list[Message]
    valid: Reading
    ignores: Reading
    follows: Reading

    def outcome(self, text: str) -> str:
        return "ignores" if self.ignores(text) else "follows" if self.follows(text) else "other"


# ---- the cases


def cases(
    problems: Sequence[Problem],
    probes: Sequence[dict[str, Any]],
    limit: int,
    seed: int = 0,
) -> list[Case]:
    """At most `limit` cases of each swap. problems: requests that one of the offered tools
    serves. probes: hold the requests for code."""
    rng = random.Random(f"swaps {seed}")
    served = [p for p in problems if p.gold is not None]
    code = [p for p in probes if p["asked"] == "code" and not p["tools_present"]]
    candidates: dict[str, Iterable[Case | None]] = {  # the order of the draws
        "tools_off": (tools_off(p, rng) for p in served),
        "tool_swapped": (tool_swapped(p, rng) for p in served),
        "tool_renamed": map(tool_renamed, served),
        "value_swapped": (value_swapped(p, served, rng) for p in served),
        "tools_on": (tools_on(p, i, rng) for i, p in enumerate(code)),
    }
    swaps: list[Case] = []
    for swap, some in candidates.items():
        kept = list(islice((case for case in some if case is not None), limit))
        if not kept:
            raise DataError(
                f"no request can be used for {swap}; make data with `codechat data calls`"
            )
        swaps += kept
    return swaps


def tools_off(problem: Problem, rng: random.Random) -> Case:
    after = _system(problem.messages, sampler.neutral_system(rng))
    neither = lambda text: behaviour(text) == "neither"  # noqa: E731
    return Case("tools_off", problem.id, problem.messages, after, calls(), calls(), neither)


def tools_on(probe: dict[str, Any], number: int, rng: random.Random) -> Case:
    offered = sampler.tools_system(rng)
    messages = probe["messages"]
    after = _system(messages if messages[0]["role"] == "system" else [{}, *messages], offered)
    code = lambda text: behaviour(text) == "code"  # noqa: E731
    return Case("tools_on", f"code-{number}", messages, after, code, calls(), code)


def tool_swapped(problem: Problem, rng: random.Random) -> Case | None:
    """The line of the requested tool becomes that of a tool of another family that is not
    offered yet."""
    name = problem.gold["name"]
    lines = problem.messages[0]["content"].splitlines()
    at = _line_of(name, lines)
    taken = {n for n in catalogue.TOOLS if _line_of(n, lines) is not None} | catalogue.family(name)
    others = [t.name for t in catalogue.SEEN if t.name not in taken]
    if at is None or not others:
        return None
    style = "compact" if lines[at].startswith(name) else "described"
    lines[at] = tool_lists.tools_prompt([catalogue.TOOLS[rng.choice(others)].schema], style).splitlines()[
        1
    ]
    after = _system(problem.messages, "\n".join(lines))
    same = calls(name)
    return Case(
        "tool_swapped",
        problem.id,
        problem.messages,
        after,
        same,
        same,
        lambda text: not calls()(text),
    )


def tool_renamed(problem: Problem) -> Case | None:
    """The requested tool keeps its description and arguments under another name: its words in
    reverse order (area_circle), or add_it."""
    name = problem.gold["name"]
    lines = problem.messages[0]["content"].splitlines()
    at = _line_of(name, lines)
    if at is None:
        return None
    new = "_".join(reversed(name.split("_"))) if "_" in name else f"{name}_it"
    lines[at] = lines[at].replace(f"{name}(", f"{new}(", 1)
    after = _system(problem.messages, "\n".join(lines))
    same = calls(name)
    return Case("tool_renamed", problem.id, problem.messages, after, same, same, calls(new))


def value_swapped(problem: Problem, problems: Sequence[Problem], rng: random.Random) -> Case | None:
    """A value that stands once in the request becomes that of another request for the same tool."""
    name = problem.gold["name"]
    request = problem.messages[-1]["content"]
    spelled = {k: _spelled(v) for k, v in problem.gold["arguments"].items()}
    usable = [k for k, text in spelled.items() if text and len(_places(text, request)) == 1]
    if not usable:
        return None
    key = rng.choice(usable)
    old = problem.gold["arguments"][key]
    values = [p.gold["arguments"].get(key) for p in problems if p.gold["name"] == name]
    donors = [
        v
        for v in values
        if type(v) is type(old) and _spelled(v) and not _places(_spelled(v), request)
    ]
    if not donors:
        return None
    new = rng.choice(donors)
    start, end = _places(spelled[key], request)[0]
    after = [
        *problem.messages[:-1],
        {"role": "user", "content": request[:start] + _spelled(new) + request[end:]},
    ]
    same = lambda text: _argument(text, name, key) == old  # noqa: E731
    other = lambda text: (value := _argument(text, name, key)) == new and type(value) is type(new)  # noqa: E731
    return Case("value_swapped", problem.id, problem.messages, after, same, same, other)


def _spelled(value: Any) -> str:
    """A text or integer as a request spells it; "" for values that it spells in other ways."""
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _places(text: str, request: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(rf"(?<![\w.-]){re.escape(text)}(?![\w-]|\.\d)", request)]


def _system(messages: Sequence[Message], content: str) -> list[Message]:
    return [{"role": "system", "content": content}, *messages[1:]]


def _line_of(name: str, lines: Sequence[str]) -> int | None:
    return next(
        (i for i, line in enumerate(lines) if line.startswith(f"{name}(") or f": {name}(" in line),
        None,
    )


def calls(name: str | None = None) -> Reading:
    """Whether an answer calls a function; with `name`, whether its first call is readable and
    to that one."""
    if name is None:
        return lambda text: behaviour(text) == "call"
    return lambda text: any(call.name == name for call in tool_calls.parse_calls(text)[:1])


def _argument(text: str, name: str, key: str) -> Any:
    """The argument of the first call, None where it is to another tool or has none."""
    return (tool_calls.parse_calls(text)[0].arguments or {}).get(key) if calls(name)(text) else None


# ---- answers


def flips(
    swaps: Sequence[Case], before: Sequence[str], after: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per swap: asked (cases), n (cases that count), and the share of each outcome among
    those with its Wilson interval."""
    rows = []
    for swap in SWAPS:
        same = [(c, a, b) for c, a, b in zip(swaps, before, after, strict=True) if c.swap == swap]
        outcomes = Counter(c.outcome(b) for c, a, b in same if c.valid(a))
        row: dict[str, Any] = dict(swap=swap, asked=len(same), n=outcomes.total())
        for outcome in OUTCOMES if row["n"] else ():
            row |= wilson_interval(outcomes[outcome], row["n"]).row(outcome)
        rows.append(row)
    return rows


def sample(checkpoint: str, case: Case, before: str, after: str) -> dict[str, Any]:
    """A pair of answers for people."""
    return dict(
        checkpoint=checkpoint,
        swap=case.swap,
        problem=case.id,
        outcome=case.outcome(after),
        request=case.after[-1]["content"],
        system=case.after[0]["content"],
        before=before,
        after=after,
    )


def run_swaps(cfg: SwapsConfig) -> Run:
    """Answer every case with every checkpoint; a row of eval.jsonl per checkpoint and swap, and
    a few pairs of answers as samples."""
    problems = tasks.load("funcall", source=cfg.data_dir).problems(cfg.split, seed=cfg.seed)
    probes = read_probes(Path(cfg.data_dir) / f"probes.{cfg.split}.jsonl", cfg.limit)
    swaps = cases(problems, probes.rows, cfg.limit, cfg.seed)
    models = [loading.load_model(ref, device=hardware.device()) for ref in cfg.ckpt]
    conversations = [m for case in swaps for m in (case.before, case.after)]
    how = dict(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
    )
    with Run.create(
        cfg.run_name, cfg, kind="swaps", parent=cfg.ckpt[0], overwrite=cfg.overwrite
    ) as run:
        for loaded in models:
            step = int(loaded.meta["step"])
            name = reference_of(Path(loaded.path))
            texts = answers(loaded.model, loaded.tokenizer, loaded.tags, conversations, **how)
            for row in flips(swaps, texts[::2], texts[1::2]):
                run.log_eval(step, dict(row, checkpoint=name, split=cfg.split))
                shares = ", ".join(f"{o} {row[o]:.2f}" for o in OUTCOMES if o in row)
                words = shares or "never as expected before the swap"
                print(f"{name} {row['swap']}: {words} (n={row['n']} of {row['asked']})")
            counted = [
                (c, a, b)
                for c, a, b in zip(swaps, texts[::2], texts[1::2], strict=True)
                if c.valid(a)
            ]
            for _, same in groupby(counted, lambda one: one[0].swap):
                run.log_samples(step, [sample(name, *one) for one in islice(same, SHOWN)])
    return run


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    run_swaps(
        config.parse(SwapsConfig, words, prog="python tools/counterfactuals.py", epilog=__doc__)
    )


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
