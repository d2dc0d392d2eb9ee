"""Episodes: a policy and an environment take turns, as token ids.

A completion is the whole continuation of the prompt: what the policy sampled and, between its
turns, what the environment said, with a mask that separates the two. Earlier turns are never
tokenised again. All running episodes of a batch sample their next turn together. Sampling
depends on seed, problem, sample, turn and position alone.

An episode ends when its environment ends it ("stop"), after `task.max_turns` answers ("turns"),
when an answer was cut ("length"), and when the model's block has no room for one more token
("context"); always with what the policy wrote. Where the model's template cannot write how the
conversation goes on, such as behind two calls where it knows one, it ends too ("turns"), and
stderr says how many."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor

from codechat.core.errors import DataError
from codechat.models import generate
from codechat.models.gpt import GPT
from codechat.tasks.base import Environment, Message, Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

Sampler = Callable[..., list[generate.Completion]]  # `generate.sample`, or that of an engine


@dataclass(frozen=True)
class Turn:
    """One answer: ids [start, end) of the completion, its text, the reward it gained, the
    environment's reply, and what the episode has changed so far."""

    start: int
    end: int
    text: str
    reward: float
    replies: list[Message]
    diff: list[Any]

    def row(self) -> dict[str, Any]:
        """For records that people read."""
        return dict(
            text=self.text,
            tokens=self.end - self.start,
            reward=self.reward,
            told=[message["content"] for message in self.replies],
            diff=self.diff,
        )


class Episode:
    """A policy's answers and an environment's replies. `finished` adds the completion, its text
    with tags, and the score."""

    completion: generate.Completion
    text: str
    score: Score

    def __init__(
        self,
        task: Any,
        problem: Problem,
        seed: int,
        name: str,
        tokenizer: Tokenizer,
        tags: str,
    ) -> None:
        self.problem = problem
        self.world: Environment = task.environment()
        self.name = name
        self.tokenizer = tokenizer
        self.tags = tags
        self.asked = [*self.world.reset(problem, seed)]
        self.prompt = chat.prompt(self.asked, tokenizer, tags)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[bool] = []
        # tokens of each part, and their `Completion.kept`
        self.kept: list[tuple[int, Tensor | None]] = []
        self.turns: list[Turn] = []
        self.stop: generate.StopReason | None = None  # none = it goes on
        self.fault = ""  # why the template ended it

    def _append(
        self,
        ids: list[int],
        logprobs: list[float],
        written: bool,
        kept: Tensor | None = None,
    ) -> None:
        self.ids += ids
        self.kept.append((len(ids), kept))
        self.logprobs += logprobs
        self.mask += [written] * len(ids)

    def take(self, answer: generate.Completion, *, last: bool, room: int) -> None:
        """Carry out an answer and append it; append the environment's reply too if the episode
        goes on."""
        start = len(self.ids)
        self._append(answer.ids, answer.logprobs, True, answer.kept)
        text = chat.completion_text(
            answer.ids,
            self.tokenizer,
            self.tags,
            asked=self.asked,
        )
        replies, reward, done = self.world.step({"role": "assistant", "content": text})
        self.asked += replies
        self.turns.append(
            Turn(start, len(self.ids), text, reward, replies, self.world.state_diff())
        )
        # a cut answer has no end of turn, so no reply can follow it
        if done or answer.stop != "stop":
            self.stop = answer.stop
            return
        if last:
            self.stop = "turns"
            return
        try:
            reply = chat.between_turns(replies, self.tokenizer, self.tags, answer=text)
        except DataError as error:
            self.fault = str(error)
            self.stop = "turns"
            return
        if len(self.prompt) + len(self.ids) + len(reply) >= room:
            self.stop = "context"
            return
        # the environment's text is input, never a target
        self._append(reply, [0.0] * len(reply), False)

    def finished(self) -> Self:
        kept = generate.joined_kept(self.kept)
        self.completion = generate.Completion(
            self.ids, self.logprobs, self.stop or "turns", self.mask, kept
        )
        self.text = chat.transcript(self.ids, self.tokenizer, self.tags)
        self.score = self.world.score()
        return self


def has_environment(task: Task) -> bool:
    """Whether the task's problems are episodes."""
    return hasattr(task, "environment")


def stop_texts(task: Any, tags: str) -> tuple[str, ...]:
    """Texts behind which a completion is cut if its tags are raw: a base model writes on after
    its answer."""
    return tuple(getattr(task, "stop_texts", ())) if tags == chat.RAW else ()


def stop_sequences(task: Any, tokenizer: Tokenizer, tags: str) -> Sequence[Sequence[int]]:
    """Ids that end an answer; none for a task with `no_stop`. A stop text can be spelled by
    many token sequences: these are its likeliest, so that sampling ends early, and
    `rollout.draw` cuts at every other."""
    if getattr(task, "no_stop", False):
        return ()
    spelled = [space + text for text in stop_texts(task, tags) for space in ("", " ", "\n")]
    ids = dict.fromkeys(tuple(tokenizer.encode_inside(text)) for text in spelled)
    return (*chat.stop_sequences(tokenizer, tags), *ids)


def play(
    policy: GPT,
    task: Any,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    tags: str,
    *,
    group_size: int,
    max_new_tokens: int,
    seed: int = 0,
    keys: Sequence[int | str] | None = None,
    sampler: Sampler,
    **sampling: Any,
) -> list[Episode]:
    """`group_size` episodes of every problem, problem-major. max_new_tokens: of one answer.
    sampling: further settings of the sampler. A task whose environments are expensive to hold
    limits how many play at a time (`episodes_at_once`)."""
    sample = partial(
        sampler,
        policy,
        max_new_tokens=max_new_tokens,
        stop=stop_sequences(task, tokenizer, tags),
        seed=seed,
        on_overflow="stop",
        **sampling,
    )
    names = range(len(problems)) if keys is None else keys
    groups = list(zip(problems, names, strict=True))
    episodes_at_once = getattr(task, "episodes_at_once", len(problems) * group_size)
    # whole groups: the prompt of a group is run once, in its first turn
    groups_at_once = max(1, episodes_at_once // group_size)
    played: list[Episode] = []
    for at in range(0, len(groups), groups_at_once):
        part = groups[at : at + groups_at_once]
        running = [
            Episode(task, problem, seed, f"{key} {g}", tokenizer, tags)
            for problem, key in part
            for g in range(group_size)
        ]
        part_keys = [key for _, key in part]
        for turn in range(1, task.max_turns + 1):
            live = [episode for episode in running if episode.stop is None]
            if not live:
                break
            if turn == 1:
                answers = _first_answers(sample, live, part_keys, group_size)
            else:
                answers = _next_answers(sample, live, turn)
            for episode, answer in zip(live, answers, strict=True):
                episode.take(answer, last=turn == task.max_turns, room=policy.cfg.block_size)
        played += [episode.finished() for episode in running]
    faults = [episode.fault for episode in played if episode.fault]
    if faults:
        print(f"{len(faults)} of {len(played)} episodes end early: {faults[0]}", file=sys.stderr)
    return played


def _first_answers(
    sample: Sampler, episodes: Sequence[Episode], keys: Sequence[int | str], group_size: int
) -> list[generate.Completion]:
    """First turns of whole groups. A group is sampled as one, so that its prompt is run once."""
    prompts = [episode.prompt for episode in episodes[::group_size]]
    return sample(prompts, samples_per_prompt=group_size, keys=keys)


def _next_answers(
    sample: Sampler, episodes: Sequence[Episode], turn: int
) -> list[generate.Completion]:
    """Later turns. Episodes of a group share their prompt, and nothing after it."""
    return sample(
        [episode.prompt + episode.ids for episode in episodes],
        keys=[f"{episode.name} {turn}" for episode in episodes],
        prefix_tokens=[len(episode.prompt) for episode in episodes],
    )


def replay(
    task: Any,
    problem: Problem,
    answers: Sequence[str],
    tokenizer: Tokenizer,
) -> Episode:
    """The episode in which the policy gives these answers, one per turn, with log-probabilities
    0. Answers after its end are ignored, and no context ends it."""
    running = Episode(task, problem, 0, "replay", tokenizer, "reserved")
    for number, text in enumerate(answers, 1):
        if running.stop is None:
            ids = chat.completion_ids(text, tokenizer)
            answer = generate.Completion(ids, [0.0] * len(ids), "stop")
            running.take(answer, last=number == len(answers), room=2**30)
    return running.finished()
