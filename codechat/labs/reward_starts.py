"""Does a dense reward help, and when? REINFORCE with each reward shape from policies that are never, hardly, sometimes and mostly correct.

    python -m codechat.labs.reward_starts --out reports/frozen/thesis.jsonl
    python -m codechat.labs.reward_starts --out reports/frozen/thesis.jsonl --starts weak --baselines zscore

A model of two layers learns calls of eight tools of the toolbox whose arguments are two whole numbers below 100. The
starts are one SFT run at four of its steps. From each, every reward trains the same number of steps on the same
requests with the same settings; only the reward differs. Held-out requests use pairs of numbers that training never
has. Each finished run appends one row to `out`, and a second start of the command skips it.

A constant factor of the reward does nothing here: AdamW divides it out. What remains is how the rewards weigh groups
against each other; the baseline "zscore" gives every group with variance the same weight.

Left out: tools in the prompt (the policy knows the eight by heart), negatives, KL, entropy, a learning rate per reward.

Shapes: P problems, G completions each.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest
from codechat.data import conversations
from codechat.labs.resumed_rows import Row, thinned, train_missing
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import losses, rollout
from codechat.rl.advantages import group_advantages, zero_variance
from codechat.tasks.base import Problem, Score
from codechat.tasks.funcall.task import FuncallTask
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import Tokenizer

SHAPES = ("binary", "fractional", "tiered", "staircase")
CALLED = ("add", "modulo", "percentage", "tip", "discount", "multiply", "gcd", "power")
STARTS = ("base", "poor", "weak", "strong")
TRAINING_REQUESTS, VOCABULARY, TAGS = 4000, 512, "reserved"
SFT_ROWS, SFT_TOKENS, SFT_LR = 8, 128, 1e-2
CURVE_EVERY = 5
ROW_TOKENS, ROWS = 512, 8


@dataclass(frozen=True, kw_only=True)
class StartsConfig(config.Settings):
    """Which runs, and their budget."""

    out: str = opt("reports/frozen/thesis.jsonl", "file of rows; runs that it has are skipped", identity=False)
    seeds: tuple[int, ...] = opt((0, 1, 2, 3, 4), "seeds, the outermost loop", identity=False)
    starts: tuple[str, ...] = opt(STARTS, "starts of the policy: base, poor, weak, strong", identity=False)
    rewards: tuple[str, ...] = opt(SHAPES, "shapes of the reward", identity=False)
    baselines: tuple[str, ...] = opt(("mean",), "baselines of the advantage: mean, zscore", identity=False)
    steps: int = opt(200, "updates of REINFORCE", least=1)
    sft_steps: tuple[int, ...] = opt((35, 60, 150, 400), "SFT steps of base, poor, weak and strong")
    lr: float = opt(5e-4, "learning rate of REINFORCE")
    problems: int = opt(6, "requests per update", least=1)
    group_size: int = opt(8, "completions per request", least=2)
    held_out: int = opt(128, "held-out requests", least=1)
    samples: int = opt(8, "completions of each at temperature 1, the k of pass@k", least=1)
    width: int = opt(64, "width of the model", least=16)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("starts", STARTS), ("rewards", SHAPES), ("baselines", ("mean", "zscore"))):
            for got in getattr(self, name):
                if got not in known:
                    raise ConfigError(f"{name} has {got!r}{nearest(got, known)}; required: {', '.join(known)}")
        if len(self.sft_steps) != len(STARTS) or list(self.sft_steps) != sorted(set(self.sft_steps)):
            raise ConfigError(f"sft_steps {self.sft_steps}; required: {len(STARTS)} rising numbers, one per start")


# ---------------------------------------------------------------- the task


def requests(split: str, n: int, seed: int = 0) -> list[Problem]:
    """n requests of the toolbox for the tools in CALLED, whose two numbers are whole and below 100. A pair of numbers
    belongs to one split."""
    rng, made = random.Random(f"reward starts {split} {seed}"), []
    while len(made) < n:
        tool = TOOLS[rng.choice(CALLED)]
        arguments = tool.sample(rng, split)
        if all(isinstance(value, int) and value < 100 for value in arguments.values()):
            gold = {"name": tool.name, "arguments": arguments}
            messages = [{"role": "user", "content": tool.ask(rng, arguments)}]
            made.append(Problem(f"{split}-{seed}-{len(made)}", messages, gold, split))
    return made


@lru_cache(maxsize=1)
def vocabulary() -> Tokenizer:
    """Byte-pair encoding of the training texts: calls half as long as in a vocabulary for code, so runs cost half."""
    from tokenizers import Tokenizer as Made
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Made(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters, end = pre_tokenizers.ByteLevel.alphabet(), tokenizer.END_OF_TEXT
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[end], initial_alphabet=sorted(letters), show_progress=False
    )
    texts = [text for p in requests("train", TRAINING_REQUESTS) for text in (p.messages[0]["content"], _answer(p))]
    made.train_from_iterator([text.removeprefix(chat.CALL_TAG) for text in texts], trainer)
    return tokenizer.from_dict({"spec": "toolbox", "json": made.to_str(), "special": {"eos_token": end}})


def _answer(problem: Problem) -> str:
    return chat.format_call(problem.gold["name"], problem.gold["arguments"])


class Setting:
    """The task, its requests and the vocabulary, which all runs share."""

    def __init__(self, cfg: StartsConfig) -> None:
        self.cfg, self.task, self.tokenizer = cfg, FuncallTask(), vocabulary()
        self.train, self.held_out = requests("train", TRAINING_REQUESTS), requests("test", cfg.held_out)
        self.starts: dict[int, dict[str, GPT]] = {}  # of one seed
        self.before: dict[tuple[int, str], Row] = {}  # scores of a seed's start, the same for every reward

    @cached_property
    def most_tokens(self) -> int:
        """The longest correct answer, and room to go wrong."""
        return max(len(chat.completion_ids(_answer(p), self.tokenizer, TAGS)) for p in self.train) + 2

    @cached_property
    def model(self) -> GPTConfig:
        width = self.cfg.width
        return GPTConfig(
            depth=2, n_embd=width, n_head=width // 16, block_size=SFT_TOKENS, vocab_size=self.tokenizer.n_vocab
        )

    def sampled(self, policy: GPT, problems: Sequence[Problem], **how: Any) -> rollout.RolloutBatch:
        how = dict(max_new_tokens=self.most_tokens) | how
        with torch.no_grad():
            return rollout.collect(policy, self.task, problems, self.tokenizer, TAGS, **how)


# ---------------------------------------------------------------- the runs


def reshaped(score: Score, shape: str) -> float:
    """The reward of a scored call under a shape.

    binary: 1 for the exact call, else 0. fractional: the share of arguments that match if the name is correct. tiered:
    as for programs, 0.05 for a call that cannot be parsed, 0.15 for one that parses and is wrong, 0.15 + 0.85 f for a
    share f of its arguments. staircase: the task's score."""
    if shape == "staircase":
        return score.reward
    f = 1.0 if score.correct else min(0.99, score.parts.get("f", 0.0))
    if shape == "binary":
        return float(score.correct)
    if shape == "fractional":
        return f
    if shape != "tiered":
        raise ConfigError(f"shape {shape!r} is unknown{nearest(shape, SHAPES)}; shapes: {', '.join(SHAPES)}")
    if score.tier == "no_tag" or score.reward == 0:
        return 0.0
    return 0.05 if score.tier in ("bad_json", "no_name") else 0.15 + 0.85 * f


def backward(model: GPT, batch: rollout.RolloutBatch, advantages: Tensor) -> None:
    """Add the gradient of REINFORCE's loss on the batch."""
    device = model.wte.weight.device
    for packed in rollout.pack(batch, advantages != 0, row_tokens=ROW_TOKENS, rows=ROWS):
        packed = packed.to(device)
        logprobs, _ = model.token_logprobs(packed.ids, packed.targets, **packed.where())
        advantage = advantages.view(-1, 1).to(device)[packed.numbers]  # (B, 1)
        losses.policy_gradient_loss(packed.unpack(logprobs), advantage, packed.mask(), batch.n_tokens).backward()


def start_policies(setting: Setting, seed: int) -> dict[str, GPT]:
    """The starts of a seed: one SFT run on correct calls, at some of its steps; its learning rate falls from weak
    to strong."""
    if seed in setting.starts:
        return setting.starts[seed]
    policy, found = GPT(setting.model, seed=seed), {}
    told = [p.messages + [{"role": "assistant", "content": _answer(p)}] for p in setting.train]
    rows = [conversations.encode({"messages": m, "domain": "calls"}, setting.tokenizer, TAGS, SFT_TOKENS) for m in told]
    loader = conversations.PackedLoader({"calls": rows}, None, batch=SFT_ROWS, T=SFT_TOKENS, seed=seed)
    optimizers = optim.build(policy, lr=SFT_LR, optimizer="muon", weight_decay=0.0)
    *_, decay_from, last = setting.cfg.sft_steps
    for step in range(1, last + 1):
        optim.set_lr(optimizers, min(1.0, (last + 1 - step) / (last - decay_from)))
        batch = loader.next()
        where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs))
        policy.loss(batch.ids, batch.targets, **where).backward()
        _update(optimizers)
        if step in setting.cfg.sft_steps:
            found[STARTS[setting.cfg.sft_steps.index(step)]] = copy.deepcopy(policy)
    setting.starts = {seed: found}
    return found


def _update(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def evaluate(setting: Setting, policy: GPT) -> Row:
    """Per held-out request: whether the greedy answer is exact, and how many answers at temperature 1 are; their tiers."""
    greedy = setting.sampled(policy, setting.held_out, group_size=1, temperature=0.0, seed=0)
    drawn = setting.sampled(policy, setting.held_out, group_size=setting.cfg.samples, seed=0)
    tiers = Counter(score.tier for score in drawn.scores)
    return dict(
        greedy=[int(x) for x in greedy.correct[:, 0]], correct=drawn.correct.sum(1).tolist(), tiers=dict(sorted(tiers.items()))
    )  # fmt: skip


def reinforce(setting: Setting, policy: GPT, shape: str, baseline: str, seed: int) -> Iterator[dict[str, float]]:
    """REINFORCE in place; yields the mean reward, the share of exact answers and of groups with variance of each step.

    Requests and sampling seeds depend on seed and step only, so the rewards meet the same requests."""
    cfg, rng = setting.cfg, random.Random(f"reinforce {seed}")
    optimizers = optim.build(policy, lr=cfg.lr, weight_decay=0.0)
    for step in range(cfg.steps):
        asked = rng.sample(setting.train, cfg.problems)
        batch = setting.sampled(policy, asked, group_size=cfg.group_size, seed=seed * 1_000_003 + step)
        rewards = torch.tensor([reshaped(score, shape) for score in batch.scores]).view_as(batch.rewards)
        live = int((~zero_variance(rewards)).sum())
        if live:
            backward(policy, batch, group_advantages(rewards, baseline))
            _update(optimizers)
        yield dict(reward=float(rewards.mean()), exact=float(batch.correct.float().mean()), live=live / cfg.problems)


def train_one(setting: Setting, seed: int, start: str, shape: str, baseline: str = "mean") -> Row:
    """The row of one run."""
    first = start_policies(setting, seed)[start]
    began, policy = time.process_time(), copy.deepcopy(first)
    steps = list(reinforce(setting, policy, shape, baseline, seed))
    spent = time.process_time() - began
    curve = {name: thinned([step[name] for step in steps], CURVE_EVERY) for name in steps[0]}
    if (seed, start) not in setting.before:
        setting.before = {(seed, start): evaluate(setting, first)}
    about = dict(seed=seed, start=start, reward=shape, baseline=baseline, steps=setting.cfg.steps)
    measured = dict(before=setting.before[seed, start], after=evaluate(setting, policy), curve=curve)
    weights = sum(p.numel() for p in policy.parameters())
    how = dict(settings=config.config_hash(setting.cfg), samples=setting.cfg.samples, weights=weights)
    return about | how | measured | dict(seconds=round(spent, 2))


# ---------------------------------------------------------------- all of them


def name_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["seed"], row["start"], row["reward"], row["baseline"]


def planned(cfg: StartsConfig) -> list[tuple[Any, ...]]:
    """The runs as (seed, start, reward, baseline). Seeds are outermost, so that what is done so far is balanced."""
    return list(product(cfg.seeds, cfg.starts, cfg.rewards, cfg.baselines))


def compare_rewards(cfg: StartsConfig) -> list[Row]:
    """Train what `out` does not have yet, and append each run's row when it ends. Returns the rows of this plan.

    ConfigError where `out` has rows of other settings."""
    setting = cache(lambda: Setting(cfg))  # made where something is left to train
    return train_missing(
        cfg.out,
        config.config_hash(cfg),
        planned(cfg),
        name_of=name_of,
        train=lambda *run: train_one(setting(), *run),
        summary=summary,
    )


def summary(row: Row) -> str:
    """One line of a run: exact match before and after, greedy and at temperature 1."""
    shares = []
    for when in ("before", "after"):
        n = len(row[when]["greedy"])
        shares.append(f"{sum(row[when]['greedy']) / n:.2f} {sum(row[when]['correct']) / n / row['samples']:.2f}")
    live = row["curve"]["live"]
    name = " ".join(map(str, name_of(row)))
    return f"{name}: greedy and T=1 {' -> '.join(shares)}; live {live[0]:.2f} -> {live[-1]:.2f}; {row['seconds']:.0f} s"


def main(argv: list[str] | None = None) -> None:
    """`python -m codechat.labs.reward_starts`."""
    argv = sys.argv[1:] if argv is None else argv
    compare_rewards(config.parse(StartsConfig, argv, prog="python -m codechat.labs.reward_starts", epilog=__doc__))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
