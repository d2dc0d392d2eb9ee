"""Policies that are never, hardly, sometimes and mostly correct, and rewards of several shapes:
the lab of notebooks 06, 29 and 31.

A model of two layers learns calls of eight tools of the toolbox whose arguments are two whole
numbers below 100. The starts are one SFT run at four of its steps. Held-out requests use pairs
of numbers that training never has. No tools stand in the prompt. `tools/reward_rows.py` trains
the committed rows by REINFORCE.

Shapes: P problems, G completions each.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from codechat.data import conversations
from codechat.models import config, gpt, optim
from codechat.rl import losses, rollout
from codechat.tasks import base
from codechat.text import chat, tokenizer, tool_calls
from codechat_lab.tasks import funcall
from codechat_lab.tasks.toolbox.catalogue import TOOLS

SHAPES = ("binary", "fractional", "tiered", "staircase")
CALLED = ("add", "modulo", "percentage", "tip", "discount", "multiply", "gcd", "power")
STARTS = ("base", "poor", "weak", "strong")
TRAINING_REQUESTS = 4000
VOCABULARY = 512
TAGS = "reserved"
SFT_ROWS = 8
SFT_TOKENS = 128  # of a row
SFT_LR = 1e-2
ROW_TOKENS = 512  # of an RL batch's packed rows
ROWS = 8


def requests(split: str, n: int) -> list[base.Problem]:
    """n requests of the toolbox for the tools in CALLED. A pair of numbers belongs to one split."""
    rng = random.Random(f"reward starts {split} 0")
    problems: list[base.Problem] = []
    while len(problems) < n:
        tool = TOOLS[rng.choice(CALLED)]
        arguments = tool.sample(rng, split)
        if all(isinstance(value, int) and value < 100 for value in arguments.values()):
            gold = {"name": tool.name, "arguments": arguments}
            messages = [{"role": "user", "content": tool.ask(rng, arguments)}]
            problems.append(base.Problem(f"{split}-0-{len(problems)}", messages, gold, split))
    return problems


@lru_cache(maxsize=1)
def vocabulary() -> tokenizer.Tokenizer:
    """Byte-pair encoding of the training texts: calls half as long as in a vocabulary for code,
    so runs cost half."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    end = tokenizer.END_OF_TEXT
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end],
        initial_alphabet=sorted(letters),
        show_progress=False,
    )
    texts = [
        text
        for p in requests("train", TRAINING_REQUESTS)
        for text in (p.messages[0]["content"], _answer(p))
    ]
    bpe.train_from_iterator([text.removeprefix(tool_calls.CALL_TAG) for text in texts], trainer)
    return tokenizer.from_dict(
        {"spec": "toolbox", "json": bpe.to_str(), "special": {"eos_token": end}}
    )


def _answer(problem: base.Problem) -> str:
    return tool_calls.format_call(problem.gold["name"], problem.gold["arguments"])


@dataclass
class Setting:
    """The task, its requests and the model, which all runs share.

    sft_steps: rising, one per start. samples: completions of each held-out request at
    temperature 1."""

    held_out_requests: int = 128
    samples: int = 8
    sft_steps: tuple[int, ...] = (35, 60, 150, 400)
    width: int = 64

    def __post_init__(self) -> None:
        self.task = funcall.FuncallTask()
        self.tokenizer = vocabulary()
        self.train = requests("train", TRAINING_REQUESTS)
        self.held_out = requests("test", self.held_out_requests)
        self.model = config.GPTConfig(
            depth=2,
            n_embd=self.width,
            n_head=self.width // 16,
            block_size=SFT_TOKENS,
            vocab_size=self.tokenizer.n_vocab,
        )
        lengths = [len(chat.completion_ids(_answer(p), self.tokenizer, TAGS)) for p in self.train]
        self.most_tokens = max(lengths) + 2  # room to go wrong

    def sampled(
        self,
        policy: gpt.GPT,
        problems: Sequence[base.Problem],
        *,
        group_size: int,
        seed: int,
        temperature: float = 1.0,
    ) -> rollout.RolloutBatch:
        """Judged completions of the problems, group_size for each."""
        with torch.no_grad():
            return rollout.collect(
                policy,
                self.task,
                problems,
                self.tokenizer,
                TAGS,
                group_size=group_size,
                seed=seed,
                temperature=temperature,
                max_new_tokens=self.most_tokens,
            )


def reshaped(score: base.Score, shape: str) -> float:
    """The reward of a scored call under a shape.

    binary: 1 for the exact call. fractional: the share of arguments that match if the name is
    correct. tiered, as for
    programs: 0.05 for a call that cannot be parsed, 0.15 + 0.85 f for a share f of its
    arguments. staircase: the task's score."""
    if shape == "staircase":
        return score.reward
    f = 1.0 if score.correct else min(0.99, score.parts.get("f", 0.0))
    if shape == "binary":
        return float(score.correct)
    if shape == "fractional":
        return f
    if score.tier == "no_tag" or score.reward == 0:
        return 0.0
    return 0.05 if score.tier in ("bad_json", "no_name") else 0.15 + 0.85 * f


def backward(
    model: gpt.GPT, batch: rollout.RolloutBatch, advantages: Tensor, temperature: float = 1.0
) -> None:
    """Add the gradient of REINFORCE's loss on the batch, at the temperature of sampling.
    advantages (P, G)."""
    device = model.wte.weight.device
    for packed in rollout.pack(batch, advantages != 0, row_tokens=ROW_TOKENS, rows=ROWS):
        packed = packed.to(device)
        logprobs, _ = model.token_logprobs(
            packed.ids, packed.targets, temperature=temperature, **packed.where()
        )
        advantage = advantages.view(-1, 1).to(device)[packed.numbers]  # (B, 1)
        losses.policy_gradient_loss(
            packed.unpack(logprobs), advantage, packed.mask(), batch.n_tokens
        ).backward()


def start_policies(setting: Setting, seed: int) -> dict[str, gpt.GPT]:
    """The starts of a seed: one SFT run on correct calls at some of its steps; its rate falls
    from weak to strong."""
    policy = gpt.GPT(setting.model, seed=seed)
    starts = {}
    rows = [_example(problem, setting) for problem in setting.train]
    loader = conversations.PackedLoader(
        {"calls": rows}, None, batch=SFT_ROWS, T=SFT_TOKENS, seed=seed
    )
    optimizers = optim.build(policy, lr=SFT_LR, optimizer="muon", weight_decay=0.0)
    *_, decay_from, last = setting.sft_steps
    for step in range(1, last + 1):
        optim.set_lr(optimizers, min(1.0, (last + 1 - step) / (last - decay_from)))
        batch = loader.next()
        mask = conversations.packed_mask(batch.docs)
        policy.loss(batch.ids, batch.targets, positions=batch.positions, mask=mask).backward()
        update(optimizers)
        if step in setting.sft_steps:
            starts[STARTS[setting.sft_steps.index(step)]] = copy.deepcopy(policy)
    return starts


def _example(problem: base.Problem, setting: Setting) -> conversations.Example:
    messages = [*problem.messages, {"role": "assistant", "content": _answer(problem)}]
    row = {"messages": messages, "domain": "calls"}
    made = conversations.encode(row, setting.tokenizer, TAGS, SFT_TOKENS)
    assert not isinstance(made, str), made  # the reason why a row is skipped
    return made


def update(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
