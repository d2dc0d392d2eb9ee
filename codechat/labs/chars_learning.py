"""One step of the character laboratory: what is drawn, how it is rewarded, the loss of each objective; validation.

Shapes: W windows of a given symbol and T learned ones; S draws of a window; R rows that go through the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from codechat.core import config
from codechat.core.errors import ConfigError
from codechat.distributed import dist, sharding
from codechat.distributed.dist import World
from codechat.labs import denoise, per_token_rewards
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses
from codechat.rl.engines import step_seed
from codechat.runs import checkpoint
from codechat.runs.checkpoint import Checkpoint
from codechat.tasks import chars
from codechat.text import tokenizer
from codechat.training.opening import check_taken

if TYPE_CHECKING:
    from codechat.labs.chars import CharsConfig

CLIP, LAMBDA = 0.2, 0.95  # of ratios and values; decay of PPO's advantages
VALUE_COEF = 0.1  # of PPO's value loss, whose gradient reaches the policy's body too
FILL_PASSES = 32  # in which a denoising model fills a sample in
VAL_DRAWS = 4  # masks of each held-out window in the bound of a denoising model


def load(cfg: CharsConfig) -> tuple[CharsConfig, Checkpoint | None, chars.Text]:
    """(settings with the architecture that is trained, parent checkpoint or None, the text)."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    text = chars.load(cfg.source, tokenizer.from_dict(parent.meta["tokenizer"]) if parent else cfg.tokenizer)
    shape = replace(cfg.shape, vocab_size=text.tokenizer.n_vocab)
    if parent:
        shape = config.from_dict(GPTConfig, parent.meta["model_config"])
        check_taken(cfg, shape)
        cfg.check_length(shape.block_size)
    if shape.causal == (cfg.objective == "denoise"):
        got = f"{cfg.init_from} has causal={shape.causal}"
        raise ConfigError(f"{got}; objective {cfg.objective} takes the other kind; start from another checkpoint")
    return replace(cfg, model=replace(shape, causal=True)), parent, text


class Learner:
    """The model with its value head, and the current step: windows, draws and what is logged of them (`row`)."""

    def __init__(self, cfg: CharsConfig, parent: Checkpoint | None, text: chars.Text, world: World) -> None:
        self.cfg, self.text, self.world = cfg, text, world
        # cfg.model says causal, so that a parent of either kind fits it; `shape` says what is built
        shape = replace(cfg.model, causal=cfg.objective != "denoise")
        self.model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=False)
        if parent:
            checkpoint.restore(parent, self.model)
        self.head = advantages.ValueHead(shape.n_embd).to(world.device)
        self.bigram = chars.Bigram(text.train, shape.n_ids).to(world.device)
        self.total = cfg.device_batch_size * world.size  # windows of all ranks
        self.mine = torch.arange(self.total).chunk(world.size)[world.rank]
        self.row: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Windows (W, 1 + T) of the step. Its randomness depends on seed and step; ranks take parts of the same draws."""
        self.row, self.live = {}, True
        self.rng = torch.Generator().manual_seed(step_seed(self.cfg, step))
        windows = self.text.draw_windows(self.total, 1 + self.cfg.horizon, self.rng)
        self.windows = windows[self.mine].to(self.world.device)

    @torch.no_grad()
    def draw(self, step: int) -> None:
        """Draw symbols, fed by itself or by the text; for PPO also the values of the states."""
        cfg, T, G = self.cfg, self.cfg.horizon, self.cfg.group_size
        self.model.eval()
        with dist.autocast():
            if cfg.feed == "own":
                how = dict(seed=step_seed(cfg, step), first=int(self.mine[0]))
                self.batch = per_token_rewards.draw_fed_by_itself(self.model, self.windows, T, G, **how)
            else:
                uniforms = torch.rand(self.total, G, T, generator=self.rng, dtype=torch.float64)[self.mine]
                uniforms = uniforms.to(self.world.device)
                self.batch = per_token_rewards.draw_fed_by_text(self.model, self.windows, T, G, uniforms)
            if cfg.objective == "ppo":
                states = per_token_rewards.states(self.model, self.batch.inputs, T)
                self.old_values = self.head(states)[:, None].expand_as(self.batch.drawn)  # (R, S, T)
        self.model.train()

    def credit(self, tokens: int) -> None:
        """Rewards and advantages (R, S, T) of the draws, after `tokens` places."""
        cfg, batch = self.cfg, self.batch
        how = dict(partial=cfg.partial_logprob, credit=batch.truth_logprobs)
        rewards = chars.dense_rewards(batch.drawn, batch.truth, **how)
        if cfg.objective == "grpo":
            self.advantage = per_token_rewards.place_advantages(rewards, cfg.group_size, "mean")
            moves = self.advantage != 0
        else:
            flat, values = rewards.flatten(0, 1), self.old_values.flatten(0, 1)
            gae = advantages.estimate_gae(flat, values, torch.ones_like(flat), gamma=0.0, lam=LAMBDA)
            self.advantage, self.returns = (x.view_as(rewards) for x in gae)
            self.row["explained_variance"] = advantages.explained_variance(self.returns, self.old_values)
            moves = rewards != rewards[0, 0, 0]
        self.kl_coef = chars.annealed(cfg.kl_coef, tokens, cfg.kl_warmup_tokens)
        right = (batch.drawn == batch.truth).float()
        flat_places = advantages.zero_variance(per_token_rewards.group_by_place(right, cfg.group_size))
        self.row |= dict(
            reward_mean=float(rewards.mean()),
            symbol_accuracy=float(right.mean()),
            adv_abs_mean=float(self.advantage.abs().mean()),
            frac_zero_std_groups=float(flat_places.float().mean()),
            kl_weight=self.kl_coef,
        )
        # without it neither a KL term nor the value's errors nor momentum may move the policy
        self.live = any(dist.gather(bool(moves.any())))

    def updates(self) -> int:
        """Optimizer updates of this step; none where no draw is better than another."""
        if not self.cfg.learns_from_rewards:
            return 1
        return self.cfg.inner_epochs * self.cfg.minibatches if self.live else 0

    def loss(self, update: int) -> Tensor:
        """The loss of one update, divided by the places of all ranks; gradients of ranks are summed."""
        if self.cfg.learns_from_rewards:
            return self._rewarded(update) / self.world.size
        with dist.autocast():
            if self.cfg.objective == "supervised":
                nats = self.model.loss(self.windows[:, :-1], self.windows[:, 1:], reduction="sum")
            else:
                nats = self._denoising()
        loss = nats / (self.total * self.cfg.horizon)
        self._log(train_loss=float(loss.detach()) * self.world.size)
        return loss

    def _denoising(self) -> Tensor:
        """Summed bound of the cross-entropy, nats, at masks that all ranks draw together."""
        offset = float(torch.rand((), generator=self.rng, dtype=torch.float64))
        counts = denoise.mask_counts(self.mine, self.total, self.cfg.horizon, offset).to(self.world.device)
        ranks = denoise.random_ranks(self.total, self.cfg.horizon, self.rng)[self.mine].to(self.world.device)
        return denoise.bound(self.model, self.windows, counts, ranks).sum()

    def _rewarded(self, update: int) -> Tensor:
        """Clipped policy loss of one minibatch, with its KL, entropy and value terms: means over its draws."""
        cfg = self.cfg
        at = self.batch.rows(range(update % cfg.minibatches, cfg.device_batch_size, cfg.minibatches))
        part, advantage = self.batch.take(at), self.advantage[at]
        with dist.autocast():
            hidden = per_token_rewards.states(self.model, part.inputs, cfg.horizon)
            logprobs, entropy = per_token_rewards.symbol_logprobs(self.model, part.inputs, hidden, part.drawn)
        on = torch.ones_like(logprobs)
        ratio = losses.policy_ratio(logprobs, part.logprobs, on)
        loss = losses.clipped_policy_loss(ratio, advantage, CLIP, CLIP).mean()
        stats = losses.clip_statistics(ratio, logprobs, part.logprobs, advantage, on, CLIP, CLIP)
        clipped = (stats["clipped_low"] + stats["clipped_high"]) / logprobs.numel()
        self._log(policy_loss=loss.detach(), entropy=entropy.mean(), clip_frac=clipped)
        if cfg.kl_coef:
            reference = self.bigram.logprobs(part.before.expand_as(part.drawn), part.drawn)  # (R, S, T)
            kl = losses.kl_estimate(logprobs, reference).mean()
            loss = loss + self.kl_coef * kl
            self._log(kl_ref=kl.detach())
        if cfg.objective == "ppo":
            values = self.head(hidden)[:, None].expand_as(part.drawn)
            error = losses.value_loss(values, self.old_values[at], self.returns[at], CLIP).mean()
            loss = loss + VALUE_COEF * error
            self._log(value_loss=error.detach())
        if update == 0:
            self.row["logprob_mismatch"] = float((logprobs.detach() - part.logprobs).abs().max())
        return loss

    def _log(self, **values: Tensor | float) -> None:
        """Means over the updates of the step."""
        for name, value in values.items():
            self.row[name] = self.row.get(name, 0.0) + float(value) / self.updates()


@torch.no_grad()
def validate(model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device) -> dict[str, Any]:
    """Cross-entropy of held-out windows (for a denoising model its bound), in nats per symbol and bits per byte of text;
    and the chance that a draw is right, the reward that a policy fed by the text can expect. Sums over ranks."""
    T = cfg.horizon
    windows = text.val_windows(1 + T, T, -(-cfg.eval_tokens // T))
    mine = torch.arange(dist.rank(), len(windows), dist.world_size())
    rng, sums = torch.Generator().manual_seed(cfg.seed), torch.zeros(4, dtype=torch.float64)
    ranks = [denoise.random_ranks(len(windows), T, rng) for _ in range(VAL_DRAWS)] if not model.cfg.causal else []
    size = text.symbol_bytes()
    for rows in mine.split(cfg.device_batch_size):
        ids, nats, right = windows[rows].to(device), 0.0, 0.0
        with dist.autocast(device):
            if model.cfg.causal:
                states = per_token_rewards.states(model, ids[:, :-1], T)
                logprobs, _ = per_token_rewards.symbol_logprobs(model, ids[:, :-1], states, ids[:, None, -T:])
                nats, right = -float(logprobs.double().sum()), float(logprobs.double().exp().sum())
            for i, order in enumerate(ranks):
                counts = denoise.mask_counts(rows, len(windows), T, (i + 0.5) / VAL_DRAWS).to(device)
                nats += float(denoise.bound(model, ids, counts, order[rows].to(device)).double().sum()) / VAL_DRAWS
        counted = (nats, right, len(rows) * T, int(size[windows[rows, -T:]].sum()))
        sums += torch.tensor(counted, dtype=torch.float64)
    nats, right, symbols, n_bytes = dist.sum_(sums.to(device)).tolist()
    values = dict(val_loss=nats / symbols, val_bpb=nats / math.log(2) / n_bytes, val_symbols=int(symbols))
    values["val_bound"] = not model.cfg.causal
    return values | ({"val_accuracy": right / symbols} if model.cfg.causal else {})


@torch.no_grad()
def write_samples(model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device) -> list[dict[str, str]]:
    """Texts of one horizon after held-out prompts."""
    T = cfg.horizon
    prompts = text.val_windows(1, 1 + T, cfg.samples).to(device)
    with dist.autocast(device):
        if model.cfg.causal:
            drawn = [c.ids for c in generate.sample(model, prompts.tolist(), max_new_tokens=T, seed=cfg.seed)]
        else:
            rng = torch.Generator().manual_seed(cfg.seed)
            drawn = denoise.fill_in(model, prompts, T, passes=min(T, FILL_PASSES), rng=rng)[:, 1:].tolist()
    decode = text.tokenizer.decode
    return [dict(prompt=decode(p), completion=decode(d)) for p, d in zip(prompts.tolist(), drawn)]
