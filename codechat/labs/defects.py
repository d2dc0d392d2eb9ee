"""The original system's defects, by name: each can be switched on for a while, to be seen, measured and undone.

    with defects.switched_on("stop-set", "bf16-weights"):
        reinforce.train(cfg)

    stop-set        F1, F2  the end tag is taken for the set of its BPE pieces, by the sampler and by the loss mask
    bf16-weights    F3      weights are kept in bfloat16, without float32 masters
    quote-parser    F4      calls are read after every ' has been swapped for ", inside strings too
    printed-reward  F5      a program is paid what the last REWARD line on its stdout says
    train-on-test   F6      SFT sees the test problems' solutions, and checkpoints are ranked on them
    k1-drift        F7      k1 in the loss, and updates without any advantage
    silent-resume   F8      a resume that cannot load its checkpoint starts from scratch

A defect replaces the right function of the library and puts it back when its block ends, whatever happens in between. All are off otherwise;
only recipes and the museum notebooks may name one. This process only: what is launched as another process knows nothing of it.

Left out: what was only missing in the original (a key-value cache, tests), and its moments in bfloat16 (`bf16-weights` rounds the weights).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

# their modules import torch, and are imported when a defect needs them
from codechat import training
from codechat.core.errors import ConfigError, RunError, UserError, nearest
from codechat.models import generate, optim
from codechat.rl import advantages, losses, rollout
from codechat.runs import checkpoint, run
from codechat.sandbox import Program
from codechat.tasks import micro
from codechat.tasks.coding.task import CodingTask
from codechat.text import chat, tool_calls
from codechat.text.tool_calls import ARGUMENT_KEYS, CALL_TAG, Call

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from codechat.rl.rollout import RolloutBatch


class Swap(NamedTuple):
    """One replacement: the attribute `name` of a module or class becomes `broken(right)`."""

    owner: Any
    name: str
    broken: Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Defect:
    """findings: such as ("F1", "F2"). did: what it did, for people. reported_by: what shows it here. reaches: kinds of runs that it changes.
    swaps: how it is switched on; made anew each time."""

    name: str
    findings: tuple[str, ...]
    did: str
    reported_by: str
    reaches: tuple[str, ...]
    swaps: Callable[[], list[Swap]]


# a run with a defect is paid as the original's runs were
PUBLISHED = {"funcall": "funcall:staircase=published"}


# ---- stop-set: F1, F2


def trained_by_the_set(ids: list[int], pieces: frozenset[int]) -> list[bool]:
    """Which tokens of a completion kept a gradient: those before the second one that is a piece of the end tag."""
    seen, kept = 0, []
    for token in ids:
        seen += token in pieces
        kept.append(seen <= 1)
    return kept


class _StopSet:
    """Learns the pieces from the stop sequence that is asked for. A tag of one id has no set to be mistaken for: nothing changes then."""

    def __init__(self) -> None:
        self.pieces: frozenset[int] | None = None
        self.grace = 4

    def sequences(self, right: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(right)
        def stop_sequences(tokenizer: Any, tags: str = "reserved") -> Any:
            found = right(tokenizer, tags)
            self.pieces = frozenset(found[0]) if len(found[0]) > 1 else frozenset()
            # four tokens in GPT-2: what <functioncall> takes, so that its own > did not end the call
            self.grace = len(tokenizer.encode(CALL_TAG))
            return found

        return stop_sequences

    def widened(self, right: Callable[..., Any]) -> Callable[..., Any]:
        """The sampler keeps as many tokens as its longest stop sequence; one that never occurs (-2) makes it keep enough to count to `grace`."""

        def _stop_sequences(stop: Any) -> Any:
            found = right(stop)
            return [*found, [-2] * (self.grace + 1)] if any(len(s) > 1 for s in found) else found

        return _stop_sequences

    def ends(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def _ends_with(tail: Tensor, endings: list[Tensor]) -> Tensor:
            if not any(len(e) > 1 for e in endings):
                return right(tail, endings)
            import torch

            return torch.isin(tail[:, -1], torch.cat(endings)) & (tail[:, -(self.grace + 1)] >= 0)

        return _ends_with

    def masked(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def _group_chunks(batch: RolloutBatch, *args: Any) -> Iterator[dict[str, list]]:
            if self.pieces is None:
                raise RunError(
                    "stop-set masks by the pieces of a stop sequence, and none was asked for; collect the rollouts inside its block, "
                    "or call chat.stop_sequences there first"
                )
            kept = [trained_by_the_set(c.ids, self.pieces) for c in batch.completions]
            for chunk in right(batch, *args):
                for i, (number, offset) in enumerate(zip(chunk["completion"], chunk["offset"])):
                    if number >= 0 and not kept[number][offset]:
                        chunk["targets"][i], chunk["completion"][i] = -100, -1
                yield chunk

        return _group_chunks

    def swaps(self) -> list[Swap]:
        return [
            Swap(chat, "stop_sequences", self.sequences),
            Swap(generate, "_stop_sequences", self.widened),
            Swap(generate, "_ends_with", self.ends),
            Swap(rollout, "_group_chunks", self.masked),
        ]


# ---- bf16-weights: F3


def _round_weights(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    import torch

    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.copy_(p.to(torch.bfloat16))


def _rounding(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def build(*args: Any, **kwargs: Any) -> list[torch.optim.Optimizer]:
        made = right(*args, **kwargs)
        for optimizer in made:
            _round_weights(optimizer)
            optimizer.register_step_post_hook(_round_weights)
        return made

    return build


# ---- quote-parser: F4


def _loads(text: str) -> Any:
    """The value that a text begins with; where it is not JSON, after a swap of quotes; else None."""
    for attempt in (text, text.replace("'", '"')):
        try:
            return json.JSONDecoder().raw_decode(attempt.strip())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _swapped_call(text: str) -> Call:
    found = _loads(text)
    if not isinstance(found, dict):
        return Call(None, None, "bad_json")
    name, raw = found.get("name"), next((found[key] for key in ARGUMENT_KEYS if key in found), None)
    arguments = {} if raw is None else _loads(raw) if isinstance(raw, str) else raw
    if not isinstance(name, str) or not name.strip():
        return Call(None, None, "no_name")
    return Call(name, arguments, "object") if isinstance(arguments, dict) else Call(name, None, "bad_arguments")


def _swapping_quotes(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def parse_calls(text: str) -> list[Call]:
        return [_swapped_call(part) for part in text.split(CALL_TAG)[1:]]

    return parse_calls


# ---- printed-reward: F5

# Runs behind the sandbox's walls, but in one interpreter with the tests: that is the defect. `os._exit` only seems to work there, since
# what has been printed must still be read.
_PRINTS = """
import contextlib, io, os, sys
class _Left(BaseException): pass
def _leave(code=0): raise _Left
def _run():
    os._exit, out = _leave, io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec({script!r}, {{"__name__": "__main__"}})
        except BaseException:
            pass
    lines = [line for line in out.getvalue().splitlines() if line.startswith("REWARD ")]
    try:
        return float(lines[-1].split()[1]) if lines else 0.0
    except (IndexError, ValueError):
        return 0.0
_paid = _run()
def reward(): return _paid
"""
# A test is pasted in; the second line of one that has two breaks the script.
_TEST = "try:\n    {test}\n    _passed += 1\nexcept Exception:\n    pass\n"


def _printing(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def program(self: CodingTask, problem: Any, code: str) -> Program:
        honest = right(self, problem, code)
        tests = [honest.tests] if isinstance(honest.tests, str) else list(honest.tests)
        body = "".join(_TEST.format(test=test) for test in tests)
        script = f"{honest.setup}\n{code}\n_passed = 0\n{body}print('REWARD', _passed / {len(tests)})\n"
        # k of the n results pass where the line says k / n
        claims = tuple(f"assert reward() * {len(tests)} > {k} - 0.5" for k in range(1, len(tests) + 1))
        return Program(
            code=_PRINTS.format(script=script),
            tests=claims,
            entry_points=("reward",),
            timeout_s=honest.timeout_s,
        )

    return program


# ---- train-on-test: F6


def _with_test_solutions(right: Callable[..., Any]) -> Callable[..., Any]:
    """Half of what SFT gets are the worked solutions of the test problems."""

    @wraps(right)
    def dialogues(split: str, n: int, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        yield from right(split, n - n // 2 if split == "train" else n, *args, **kwargs)
        if split == "train":
            for row in right("test", n // 2, *args, **kwargs):
                yield row | {"meta": row["meta"] | {"split": "train"}}

    return dialogues


def _lets_evaluation_in(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def reject_benchmark_rows(rows: Any, origin: str) -> Iterator[Any]:
        yield from rows

    return reject_benchmark_rows


def _test_for_select(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def problems(self: CodingTask, split: str, *args: Any, **kwargs: Any) -> Any:
        return right(self, "test" if split == "select" else split, *args, **kwargs)

    return problems


def _test_solutions() -> list[Swap]:
    from codechat.tasks.coding import prepare

    return [
        Swap(micro, "dialogues", _with_test_solutions),
        Swap(prepare, "reject_benchmark_rows", _lets_evaluation_in),
        Swap(
            prepare,
            "mbpp_split",
            lambda right: lambda task_id: "prompt" if right(task_id) == "test" else right(task_id),
        ),
        Swap(CodingTask, "problems", _test_for_select),
        Swap(micro.MicroTask, "problems", _test_for_select),
    ]


# ---- k1-drift: F7


def _k1_where_it_is_differentiated(right: Callable[..., Any]) -> Callable[..., Any]:
    """What is only measured keeps its estimator: the drift must be seen."""

    @wraps(right)
    def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k3") -> Tensor:
        return right(logprobs, ref_logprobs, "k1" if logprobs.requires_grad else kind)

    return kl_estimate


# ---- silent-resume: F8


def _starting_over(right: classmethod) -> classmethod:
    def create(
        cls: type[run.Run], name: str, config: Any, *, resume: bool = False, overwrite: bool = False, **more: Any
    ) -> run.Run:
        if resume:
            try:
                checkpoint.load(run.find_run(name))
            except (UserError, OSError) as error:
                print(
                    f"warning: cannot load the checkpoint of {name} ({type(error).__name__}); starting from scratch",
                    file=sys.stderr,
                )
                resume, overwrite = False, True
        return right.__func__(cls, name, config, resume=resume, overwrite=overwrite, **more)

    return classmethod(create)


# ---- all of them

RL = ("diagnose", "reinforce", "grpo", "ppo", "expert_iteration")
_ALL = (
    Defect(
        "stop-set",
        ("F1", "F2"),
        "the loss mask closed at the second piece of <|end|> (<, |, end, >), and after the tag a bare piece ended sampling: of a "
        "call three tokens were trained, and a<b was cut",
        "xray, truncated_frac, the mask test",
        (*RL, "evaluate"),
        lambda: _StopSet().swaps(),
    ),
    Defect(
        "bf16-weights",
        ("F3",),
        "weights were bfloat16 without float32 masters: at a low learning rate most updates rounded to nothing",
        "weights_changed_bf16",
        ("pretrain", "sft", "preference", *RL[1:]),
        lambda: [Swap(optim, "build", _rounding)],
    ),
    Defect(
        "quote-parser",
        ("F4",),
        "calls in the data's own single quotes were scored bad_json, and left out of the RL problems",
        "the gold gate, the data ledger",
        ("data", "evaluate", *RL),
        lambda: [Swap(owner, "parse_calls", _swapping_quotes) for owner in (tool_calls, chat)],
    ),
    Defect(
        "printed-reward",
        ("F5",),
        "the reward of a program was read from its own stdout",
        "the sandbox's red-team tests",
        ("evaluate", *RL),
        lambda: [Swap(CodingTask, "program", _printing)],
    ),
    Defect(
        "train-on-test",
        ("F6",),
        "SFT saw the solutions of the test problems, and checkpoints were ranked on them",
        "contamination",
        ("data", "sft", "evaluate", *RL),
        _test_solutions,
    ),
    Defect(
        "k1-drift",
        ("F7",),
        "with reward 0 everywhere a k1 term in the loss went on moving the policy",
        "diagnose, the DEAD sentinel, kl_ref",
        ("grpo",),
        lambda: [
            Swap(losses, "kl_estimate", _k1_where_it_is_differentiated),
            Swap(advantages, "worth_an_update", lambda right: lambda n_live: True),
        ],
    ),
    Defect(
        "silent-resume",
        ("F8",),
        "--resume began from scratch after any error in loading, with a warning",
        "CheckpointError, metrics.jsonl",
        ("pretrain", "sft", "preference", *RL[1:]),
        lambda: [
            Swap(run.Run, "create", _starting_over),
            Swap(
                training.opening, "continues", lambda right: lambda cfg: False
            ),  # it draws the weights that it may need
        ],
    ),
)
DEFECTS: Mapping[str, Defect] = {defect.name: defect for defect in _ALL}
_ON: dict[str, tuple[int, ExitStack]] = {}  # how many blocks hold a defect on, and what undoes it


@contextmanager
def switched_on(*names: str) -> Iterator[tuple[Defect, ...]]:
    """Switch these defects on for the block. Blocks nest, also with the same name; at the end, or on any exception, the right functions are back.

    ConfigError for a name that is no defect, before anything is switched on."""
    for name in names:
        if name not in DEFECTS:
            raise ConfigError(f"no defect {name!r}{nearest(name, DEFECTS)}")
    with ExitStack() as block:
        for name in dict.fromkeys(names):
            _switch_on(name)
            block.callback(_switch_off, name)
        yield tuple(DEFECTS[name] for name in dict.fromkeys(names))


def on() -> tuple[str, ...]:
    """Names of the defects that are on, in the order of DEFECTS."""
    return tuple(name for name in DEFECTS if name in _ON)


def _switch_on(name: str) -> None:
    if name in _ON:
        blocks, undo = _ON[name]
        _ON[name] = blocks + 1, undo
        return
    with ExitStack() as undo:
        for owner, attribute, broken in DEFECTS[name].swaps():
            right = vars(owner)[attribute]  # not getattr: a classmethod would come back bound
            undo.callback(setattr, owner, attribute, right)
            setattr(owner, attribute, broken(right))
        _ON[name] = 1, undo.pop_all()


def _switch_off(name: str) -> None:
    blocks, undo = _ON.pop(name)
    if blocks > 1:
        _ON[name] = blocks - 1, undo
    else:
        undo.close()
