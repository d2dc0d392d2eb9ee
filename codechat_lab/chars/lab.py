"""The character laboratory: one text, one model, four ways to learn it: supervised, GRPO, PPO,
masked denoising.

    codechat chars --objective supervised --run-name letters
    codechat chars --objective grpo --horizon 70 --partial-logprob 0.05 --kl-coef 0.001 \\
        --kl-warmup-tokens 200000
    codechat chars --objective ppo --feed text --source my_text.txt --tokenizer gpt2:1024
    torchrun --standalone --nproc-per-node 2 -m codechat chars --objective denoise

GRPO and PPO pretrain: the policy samples symbols, and each that matches the text earns a
reward. GRPO compares the samples at one position with each other, PPO with a learned value. The
weight of the KL divergence from a frozen --reference, a bigram model of the text or the random
policy of the start, rises from 0 to --kl-coef over --kl-warmup-tokens. All four objectives read
the same windows.

`tokens` counts positions in backward passes, over all ranks and epochs; --max-tokens ends every
objective at the same count. `epoch` counts passes over the text: a policy that reads its own
samples spends --group-size positions per symbol."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.models.config import GPTConfig
from codechat.training.settings import MinibatchSettings, RunSettings

if TYPE_CHECKING:
    from codechat.models.gpt import GPT
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class CharsConfig(MinibatchSettings, RunSettings):
    """Settings of one run of the character laboratory."""

    run_name: str = "chars"
    objective: Literal["supervised", "grpo", "ppo", "denoise"] = opt(
        "grpo", "how the text is learned"
    )
    source: str = opt(
        "embedded",
        "the text: embedded (the interpreter's help), hub (tiny-Shakespeare), or a text file",
        reads="path",
    )
    tokenizer: str = opt(
        "chars", "what a symbol is: chars (the text's own), bytes, gpt2, gpt2:N, python:N"
    )
    model: GPTConfig = opt(
        GPTConfig(depth=4, n_embd=128, n_head=4, block_size=128),
        "architecture; the text decides its vocabulary, the objective causal and n_tags",
    )
    horizon: int = opt(70, "symbols of a window that are learned, sampled and rewarded", least=1)
    device_batch_size: int = 32
    max_tokens: int = opt(
        1_000_000, "positions in backward passes over the whole run, all ranks and epochs", least=1
    )
    feed: Literal["own", "text"] = opt(
        "own", "what the policy reads while it samples: its own symbols, or the text's"
    )
    group_size: int = opt(8, "samples per position", least=1)
    reward_mode: Literal["+1", "±1"] = opt(
        "+1", "reward of a right and a wrong symbol: 1 and 0, or 1 and -1 (or +-1)"
    )
    partial_logprob: float = opt(
        0.0, "weight of partial credit: a log-probability under the policy, added to rewards"
    )
    kl_coef: float = opt(
        0.0, "final weight of the KL divergence from the reference; 0 = no reference", least=0
    )
    reference: Literal["bigram", "random"] = opt(
        "bigram",
        "what the divergence is from: the text's bigram counts, or the untrained policy, frozen",
    )
    kl_warmup_tokens: int = opt(200_000, "tokens over which that weight rises from 0", least=0)
    lr: float = 3e-3
    muon_lr: float = 0.02
    warmup_steps: int = 20
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    samples: int = opt(
        4, "texts of one horizon written at each validation, from held-out prompts", least=0
    )
    save_every: int = 200
    log_every: int = opt(10, "steps between logged metrics", least=1, identity=False)

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """±1 may be written without the sign that keyboards lack."""
        modes = {"+-1": "±1", "+/-1": "±1", "1": "+1"}
        given = dict(super().as_spelled(given, spelled))
        mode = str(given.get("reward_mode"))
        if mode in modes:
            given["reward_mode"] = modes[mode]
        return given

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from:
            raise ConfigError(
                "init_from: the character laboratory trains new weights; leave out --init-from"
            )
        if self.horizon >= self.model.block_size:
            raise ConfigError(
                f"horizon {self.horizon} + 1 exceed block_size {self.model.block_size}; "
                "lower --horizon"
            )
        if self.objective == "grpo" and self.group_size < 2:
            raise ConfigError(
                f"group_size {self.group_size}: the advantage is always 0; set --group-size 2"
            )

    def tokens_per_step(self, ranks: int = 1) -> int:
        """Places that go through a backward pass in one step."""
        places = self.device_batch_size * self.horizon * ranks
        if self.objective in ("supervised", "denoise"):
            return places
        return places * self.inner_epochs * (self.group_size if self.feed == "own" else 1)


def train(cfg: CharsConfig) -> Run:
    """Learn the text; returns the finished run. UserError, before anything is written, for bad
    settings."""
    from codechat.distributed import dist, sharding
    from codechat.rl.advantages import VALUE_LR
    from codechat.training.session import Session
    from codechat_lab.chars import learning
    from codechat_lab.chars import task as chars

    text = chars.load(cfg.source, cfg.tokenizer)
    masked = cfg.objective == "denoise"
    # the tag of a denoising model is its mask
    shape = replace(
        cfg.model, causal=not masked, n_tags=int(masked), vocab_size=text.tokenizer.n_vocab
    )
    cfg = replace(cfg, model=shape)
    with dist.session(cfg) as world:
        per_step = cfg.tokens_per_step(world.size)
        steps = cfg.max_tokens // per_step
        if not steps:
            got = f"max_tokens {cfg.max_tokens} is less than the {per_step} of one step"
            raise ConfigError(f"{got}; raise it, or lower --device-batch-size")
        learner = learning.Learner(cfg, text, world)

        def evaluate(model: GPT, step: int) -> dict[str, Any]:
            with sharding.whole(model) as reader:
                found = learning.validate(reader, text, cfg, world.device)
                # last, so that an evaluation which fails and is repeated writes them once
                if cfg.samples:
                    session.run.log_samples(
                        step, learning.write_samples(reader, text, cfg, world.device)
                    )
            return found | {"tokens": step * per_step}

        session = Session(
            "chars",
            cfg,
            learner.model,
            text.tokenizer,
            parent=None,
            evaluate=evaluate,
            heads={learner.head: VALUE_LR} if cfg.objective == "ppo" else {},
            max_steps=steps,
            tags="text",
            trained_on={"objective": cfg.objective},
            kept={"value_head": learner.head},
            data={f"text {cfg.source}": text.hash()},
        )
        with session.running():
            for step in session.steps():
                row: dict[str, float] = {}
                # none where the policy learns from rewards and no draw is better than another
                updates = 0
                for updates, loss in enumerate(learner.losses(step, step * per_step, row), 1):
                    loss.backward()
                    session.apply_gradients()
                session.bar.update(1)
                if (step + 1) % cfg.log_every == 0 or step + 1 == steps:
                    values = dist.mean(row)
                    values["tokens"] = (step + 1) * per_step
                    values["lr"] = session.lr
                    values["epoch"] = (
                        (step + 1)
                        * cfg.device_batch_size
                        * cfg.horizon
                        * world.size
                        / len(text.train)
                    )
                    values["grad_norm"] = session.grad_norm if updates else 0.0
                    session.run.log(step + 1, values, tok_per_s=session.tokens_per_second(per_step))
                    shown = ("train_loss", "reward_mean", "frac_zero_std_groups")
                    session.bar.set_postfix(
                        {name: f"{values[name]:.3f}" for name in shown if name in values}
                    )
    return session.run
