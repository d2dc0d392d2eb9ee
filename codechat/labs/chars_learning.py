"""One step of the character laboratory: what is drawn, how it is rewarded, the loss of each objective; validation.

Masked denoising: a bidirectional model fills in masked symbols, in any order, several at a time. Training masks m of a
window's T symbols, m uniform in 1..T, and multiplies their mean cross-entropy by T: order-agnostic autoregression
(arXiv:2110.02037, eq. 4), which is masked diffusion with its noise level integrated out (LLaDA, arXiv:2502.09992, eq. 14).
Its mean over m and positions is an upper bound on the negative log-likelihood. The mask is the last used id of the model.

Shapes: W windows of P given symbols (one, in training) and T learned ones; S draws of a window; R rows of the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from codechat.distributed import dist, sharding
from codechat.distributed.dist import World
from codechat.labs import per_token_rewards
from codechat.models import generate
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses
from codechat.rl.engines import step_seed
from codechat.tasks import chars

if TYPE_CHECKING:
    from codechat.labs.chars import CharsConfig

CLIP, LAMBDA = 0.2, 0.95  # of ratios and values; decay of PPO's advantages
VALUE_COEF = 0.1  # of PPO's value loss, whose gradient reaches the policy's body too
FILL_PASSES = 32  # in which a denoising model fills a sample in
VAL_DRAWS = 4  # masks of each held-out window in the bound of a denoising model


class Learner:
    """The model with its value head, and the current step: windows, draws and what is logged of them (`row`)."""

    def __init__(self, cfg: CharsConfig, text: chars.Text, world: World) -> None:
        self.cfg, self.text, self.world = cfg, text, world
        self.model = sharding.build(lambda: GPT(cfg.model), seed=cfg.seed, shard_it=False)
        self.head = advantages.ValueHead(cfg.model.n_embd).to(world.device)
        self.bigram = chars.Bigram(text.train, cfg.model.n_ids).to(world.device)
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
        rewards = chars.dense_rewards(
            batch.drawn, batch.truth, partial=cfg.partial_logprob, credit=batch.truth_logprobs
        )
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
                # masks that all ranks draw together
                offset = float(torch.rand((), generator=self.rng, dtype=torch.float64))
                ranks = random_ranks(self.total, self.cfg.horizon, self.rng)[self.mine].to(self.world.device)
                counts = mask_counts(self.mine, self.total, self.cfg.horizon, offset).to(self.world.device)
                nats = denoising_bound(self.model, self.windows, counts, ranks).sum()
        loss = nats / (self.total * self.cfg.horizon)
        self._log(train_loss=float(loss.detach()) * self.world.size)
        return loss

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
    ranks = [random_ranks(len(windows), T, rng) for _ in range(VAL_DRAWS)] if not model.cfg.causal else []
    size = text.symbol_bytes()
    for rows in mine.split(cfg.device_batch_size):
        ids, nats, right = windows[rows].to(device), 0.0, 0.0
        with dist.autocast(device):
            if model.cfg.causal:
                states = per_token_rewards.states(model, ids[:, :-1], T)
                logprobs, _ = per_token_rewards.symbol_logprobs(model, ids[:, :-1], states, ids[:, None, -T:])
                nats, right = -float(logprobs.double().sum()), float(logprobs.double().exp().sum())
            for i, order in enumerate(ranks):
                counts = mask_counts(rows, len(windows), T, (i + 0.5) / VAL_DRAWS).to(device)
                nats += float(denoising_bound(model, ids, counts, order[rows].to(device)).double().sum()) / VAL_DRAWS
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
            drawn = fill_in(model, prompts, T, passes=min(T, FILL_PASSES), rng=rng)[:, 1:].tolist()
    decode = text.tokenizer.decode
    return [dict(prompt=decode(p), completion=decode(d)) for p, d in zip(prompts.tolist(), drawn)]


# ---- masked denoising


def mask_counts(numbers: Tensor, total: int, places: int, offset: float) -> Tensor:
    """(W,) masked symbols, 1..places, of the windows `numbers` out of `total`, evenly spread from `offset` in [0, 1),
    which lowers the variance of a batch (arXiv:2107.00630, appendix I.1)."""
    level = (offset + numbers.double() / total) % 1
    return 1 + (level * places).long()


def random_ranks(count: int, places: int, rng: torch.Generator) -> Tensor:
    """(W, T) for each window the rank of each position in a random order."""
    return torch.rand(count, places, generator=rng, dtype=torch.float64).argsort(1)


def mask_symbols(windows: Tensor, counts: Tensor, ranks: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (W, P + T): of the last T symbols those with a rank below counts (W,) are masked."""
    masked = torch.zeros_like(windows, dtype=torch.bool)
    masked[:, -ranks.shape[1] :] = ranks < counts[:, None]
    return windows.masked_fill(masked, mask), windows.masked_fill(~masked, -100)


def denoising_bound(model: GPT, windows: Tensor, counts: Tensor, ranks: Tensor) -> Tensor:
    """(W,) nats of each window's T symbols: T x the mean cross-entropy of the masked ones."""
    inputs, targets = mask_symbols(windows, counts, ranks, model.cfg.n_ids - 1)
    return model.loss(inputs, targets, reduction="none").sum(1) * (ranks.shape[1] / counts)


@torch.no_grad()
def fill_in(model: GPT, prompts: Tensor, places: int, *, passes: int, rng: torch.Generator) -> Tensor:
    """(W, P + T) ids: T = `places` symbols after each prompt (W, P), in random order, `passes` at about equal size.

    With as many passes as symbols they are drawn from the model's own distribution; symbols of one pass do not see each
    other."""
    mask, (W, P), device = model.cfg.n_ids - 1, prompts.shape, prompts.device
    ids = torch.cat((prompts, prompts.new_full((W, places), mask)), dim=1)
    ranks = random_ranks(W, places, rng).to(device)
    edges = [places * i // passes for i in range(passes + 1)]
    for low, high in zip(edges, edges[1:]):
        w, t = ((ranks >= low) & (ranks < high)).nonzero(as_tuple=True)
        logits = torch.nn.functional.linear(model.hidden(ids)[w, P + t], model.head_weight()).float()
        logits[:, mask:] = -torch.inf
        u = torch.rand(len(logits), generator=rng, dtype=torch.float64).to(device)
        ids[w, P + t] = generate.draw(logits, generate.Truncation(), u)[0]
    return ids
