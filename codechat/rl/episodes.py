"""Episodes: a policy and an environment in turns, tokens in and tokens out.

A completion is the whole continuation of the prompt: what the policy sampled and, between its turns, what the environment said, with a mask that
tells them apart. Earlier turns are never tokenised again: the ids of an answer are those that were drawn, and only the environment's messages are
encoded, once, behind them. All live episodes of a batch sample their next turn together; a draw hangs on seed, problem, sample, turn and position,
so an episode does not depend on who shares its batch. The first turn draws what the single-turn path would.

An episode ends where its environment says so ("stop"), after `task.max_turns` answers ("turns"), where an answer was cut ("length"), and where the
model's block has no room for what was said and one more token ("context"). It always ends with what the policy wrote.

A group's prompt is read once a turn for all its episodes, what came behind it by each.

Left out: keeping the key-value cache between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from codechat.models import generate
from codechat.models.gpt import GPT
from codechat.tasks.base import Environment, Message, Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """One answer: ids [start, end) of the completion, its text, the reward it gained, what was said to it, what the episode had changed by then."""

    start: int
    end: int
    text: str
    reward: float
    told: list[Message]
    diff: list[Any]

    def row(self) -> dict[str, Any]:
        """For records that people read."""
        return dict(
            text=self.text,
            tokens=self.end - self.start,
            reward=self.reward,
            told=[m["content"] for m in self.told],
            diff=self.diff,
        )


@dataclass(frozen=True)
class Episode:
    """What was played. text: the completion as text, tags and what the environment said included."""

    problem: Problem
    prompt: list[int]
    completion: generate.Completion
    text: str
    turns: list[Turn]
    score: Score


def made_by(task: Task) -> bool:
    """Whether the task's problems are episodes."""
    return hasattr(task, "environment")


def play(
    policy: GPT,
    task: Any,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    tags: str,
    *,
    group_size: int = 1,
    max_new_tokens: int,
    seed: int = 0,
    keys: Sequence[int | str] | None = None,
    sampler: Callable[..., list[generate.Completion]] = generate.sample,
    **sampling: Any,
) -> list[Episode]:
    """`group_size` episodes of every problem, problem-major. max_new_tokens: of one answer. sampler: `generate.sample`, or that of
    `engines`; sampling: its further settings."""
    stops = () if getattr(task, "no_stop", False) else chat.stop_sequences(tokenizer, tags)
    how = dict(sampling, max_new_tokens=max_new_tokens, stop=stops, seed=seed, on_overflow="stop")
    names = list(range(len(problems))) if keys is None else list(keys)
    most = max(
        1, getattr(task, "episodes_at_once", len(problems) * group_size) // group_size
    )  # groups that the task has worlds for
    if len(problems) > most:
        how = dict(sampling, max_new_tokens=max_new_tokens, seed=seed, sampler=sampler, group_size=group_size)
        return [
            e
            for at in range(0, len(problems), most)
            for e in play(policy, task, problems[at : at + most], tokenizer, tags, keys=names[at : at + most], **how)
        ]
    played = [
        _Playing(task.environment(), problem, seed, f"{names[p]} {g}", tokenizer, tags)
        for p, problem in enumerate(problems)
        for g in range(group_size)
    ]
    live = played
    for turn in range(1, task.max_turns + 1):
        if turn == 1:  # a group's first turn is sampled as one: its prompt is read once
            sampled = sampler(
                policy, [e.prompt for e in played[::group_size]], samples_per_prompt=group_size, keys=names, **how
            )
        else:
            sampled = sampler(
                policy,
                [e.prompt + e.ids for e in live],
                keys=[f"{e.name} {turn}" for e in live],
                prefix_tokens=[len(e.prompt) for e in live],
                **how,
            )
        for episode, answer in zip(live, sampled, strict=True):
            episode.take(answer, last=turn == task.max_turns, room=policy.cfg.block_size)
        live = [e for e in live if not e.stop]
        if not live:
            break
    return [e.finished() for e in played]


def replay(
    task: Any,
    problem: Problem,
    answers: Sequence[str],
    tokenizer: Tokenizer,
    tags: str = "reserved",
    *,
    block_size: int = 2**30,
) -> Episode:
    """The episode in which these are the policy's answers, one a turn, as ids and mask; what comes after the episode's end is not played.
    Log-probabilities are 0: nobody drew these."""
    playing = _Playing(task.environment(), problem, 0, "replay", tokenizer, tags)
    for number, text in enumerate(answers, 1):
        ids = chat.completion_ids(text, tokenizer, tags)
        playing.take(generate.Completion(ids, [0.0] * len(ids), "stop"), last=number == len(answers), room=block_size)
        if playing.stop:
            break
    return playing.finished()


@dataclass
class _Playing:
    """An episode in progress."""

    world: Environment
    problem: Problem
    seed: int
    name: str
    tokenizer: Tokenizer
    tags: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    stop: str = ""

    def __post_init__(self) -> None:
        self.prompt = chat.prompt(self.world.reset(self.problem, self.seed), self.tokenizer, self.tags)

    def take(self, answer: generate.Completion, *, last: bool, room: int) -> None:
        """Carry out an answer; append it, and what is said to it if the episode goes on."""
        start = len(self.ids)
        self.ids, self.logprobs, self.mask = (
            self.ids + answer.ids,
            self.logprobs + answer.logprobs,
            self.mask + [True] * len(answer.ids),
        )
        text = chat.completion_text(answer.ids, self.tokenizer, self.tags)
        told, reward, done = self.world.step({"role": "assistant", "content": text})
        self.turns.append(Turn(start, len(self.ids), text, reward, told, self.world.state_diff()))
        if done or last or answer.stop != "stop":
            self.stop = answer.stop if done or answer.stop != "stop" else "turns"
            return
        said = chat.between_turns(told, self.tokenizer, self.tags)
        if len(self.prompt) + len(self.ids) + len(said) >= room:
            self.stop = "context"
            return
        self.ids, self.logprobs, self.mask = (
            self.ids + said,
            self.logprobs + [0.0] * len(said),
            self.mask + [False] * len(said),
        )

    def finished(self) -> Episode:
        completion = generate.Completion(self.ids, self.logprobs, self.stop, self.mask)
        return Episode(
            self.problem,
            self.prompt,
            completion,
            chat.completion_text(self.ids, self.tokenizer, self.tags),
            self.turns,
            self.world.score(),
        )
