"""One step of the character laboratory: draws, their rewards, the loss of each objective;
validation.

Per-token rewards: G draws at each of T places of a window. A draw reads the policy's own
symbols, as in sampling (G rows for each window), or the text's, as in supervised training: then
the G draws of a place share one row, and a draw's own reward is its whole return. The expected
reward of such a place is p, the probability of its correct symbol, and its gradient p times
that of log p.

Masked denoising: a bidirectional model fills in masked symbols, in any order, several at a
time. Training masks m of a window's T symbols, m uniform in 1..T, and multiplies their mean
cross-entropy by T: order-agnostic autoregression (arXiv:2110.02037, eq. 4), which is masked
diffusion with its noise level integrated out (LLaDA, arXiv:2502.09992, eq. 14). Its mean over m
and positions is an upper bound on the negative log-likelihood. The mask is the last used id of
the model.

Shapes: W windows of P given symbols (one, in training) and T learned ones, G draws; R rows of S
draws: (W G, 1, T) for `own`, (W, G, T) for `text`; V vocabulary, D width. Log-probabilities and
entropies in nats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.distributed import dist, numerics, sharding
from codechat.models import draws, generate
from codechat.models.gpt import GPT
from codechat.rl import advantages, engines, losses
from codechat_lab.chars import task as chars

if TYPE_CHECKING:
    from codechat_lab.chars.lab import CharsConfig

CLIP = 0.2  # of ratios and values
LAMBDA = 0.95  # decay of PPO's advantages
VALUE_COEF = 0.1  # of PPO's value loss, whose gradient reaches the policy's body too
FILL_PASSES = 32  # of a denoising model over a sample
VAL_SYMBOLS = 16_384  # held-out symbols per validation
VAL_DRAWS = 4  # masks of each window in the bound of denoising


class Learner:
    """The model, PPO's value head, the reference policy and this rank's part of the windows of
    a step."""

    def __init__(self, cfg: CharsConfig, text: chars.Text, world: dist.World) -> None:
        self.cfg = cfg
        self.text = text
        self.world = world
        self.model = sharding.build(lambda: GPT(cfg.model), seed=cfg.seed, shard_it=False)
        self.head = advantages.ValueHead(cfg.model.n_embd).to(world.device)
        self.bigram = chars.Bigram(text.train, cfg.model.n_ids).to(world.device)
        self.untrained: GPT | None = None  # the model as built, in a resumed run too
        if cfg.kl_coef and cfg.reference == "random":
            self.untrained = sharding.build(lambda: GPT(cfg.model), seed=cfg.seed, shard_it=False)
            self.untrained.requires_grad_(False).eval()
        self.total = cfg.device_batch_size * world.size  # windows of all ranks
        self.mine = torch.arange(self.total).chunk(world.size)[world.rank]

    def losses(self, step: int, tokens: int, row: dict[str, float]) -> Iterator[Tensor]:
        """The loss of each update of a step after `tokens` places, divided by the places of all
        ranks; none if no draw is better than another.

        row: gets the metrics of the step. Randomness depends on seed and step; ranks take parts
        of the same draws."""
        rng = torch.Generator().manual_seed(engines.step_seed(self.cfg.seed, step))
        windows = self.text.draw_windows(self.total, 1 + self.cfg.horizon, rng)[self.mine].to(
            self.world.device
        )
        if self.cfg.objective in ("grpo", "ppo"):
            yield from self._rewarded(step, tokens, windows, rng, row)
            return
        with numerics.autocast():
            if self.cfg.objective == "supervised":
                nats = self.model.loss(windows[:, :-1], windows[:, 1:], reduction="sum")
            else:
                nats = self._denoising_nats(windows, rng)
        loss = nats / (self.total * self.cfg.horizon)
        row["train_loss"] = float(loss.detach()) * self.world.size
        yield loss

    def _denoising_nats(self, windows: Tensor, rng: torch.Generator) -> Tensor:
        # of masks that all ranks draw together
        offset = float(torch.rand((), generator=rng, dtype=torch.float64))
        ranks = random_ranks(self.total, self.cfg.horizon, rng)[self.mine].to(windows.device)
        counts = mask_counts(self.mine, self.total, self.cfg.horizon, offset).to(windows.device)
        return denoising_bound(self.model, windows, counts, ranks).sum()

    def _rewarded(
        self,
        step: int,
        tokens: int,
        windows: Tensor,
        rng: torch.Generator,
        row: dict[str, float],
    ) -> Iterator[Tensor]:
        """Draw symbols and reward each; then minibatches of the clipped policy loss with KL and
        value terms, means over their draws."""
        cfg = self.cfg
        batch = self._draw(step, windows, rng)
        rewards = self._rewards(batch)
        credit = self._credit(batch, rewards)
        if credit.targets:
            row["explained_variance"] = advantages.explained_variance(
                credit.targets.returns, credit.targets.values
            )
        right = (batch.drawn == batch.truth).float()
        uniform_places = advantages.zero_variance(group_by_place(right, cfg.group_size))
        row["reward_mean"] = float(rewards.mean())
        row["symbol_accuracy"] = float(right.mean())
        row["adv_abs_mean"] = float(credit.advantages.abs().mean())
        row["frac_zero_std_groups"] = float(uniform_places.float().mean())
        row["kl_weight"] = chars.annealed(cfg.kl_coef, tokens, cfg.kl_warmup_tokens)
        # without a better draw neither a KL term nor the value's errors nor momentum may move
        # the policy
        if not any(dist.gather(self._differ(rewards, credit))):
            return
        updates = cfg.inner_epochs * cfg.minibatches
        rows = torch.arange(len(batch.inputs)).view(len(windows), -1)
        for update in range(updates):
            at = rows[update % cfg.minibatches :: cfg.minibatches].flatten()
            part = batch.part(at)
            loss, logprobs, terms = self._minibatch(part, credit.part(at), row["kl_weight"])
            if update == 0:
                row["logprob_mismatch"] = float((logprobs.detach() - part.logprobs).abs().max())
            for name, value in terms.items():
                row[name] = row.get(name, 0.0) + float(value) / updates
            yield loss / self.world.size

    def _rewards(self, batch: Draws) -> Tensor:
        """(R, S, T) rewards of the draws."""
        return chars.dense_rewards(
            batch.drawn,
            batch.truth,
            wrong=-1.0 if self.cfg.reward_mode == "±1" else 0.0,
            partial=self.cfg.partial_logprob,
            credit=batch.truth_logprobs,
        )

    def _credit(self, batch: Draws, rewards: Tensor) -> Credit:
        if self.cfg.objective == "grpo":
            return Credit(place_advantages(rewards, self.cfg.group_size))
        with torch.no_grad(), numerics.autocast():
            values = self._values(self.model.hidden(batch.inputs), batch)
        flat = rewards.flatten(0, 1)
        advantage, returns = advantages.estimate_gae(
            flat,
            values.flatten(0, 1),
            torch.ones_like(flat),
            gamma=0.0,
            lam=LAMBDA,
        )
        return Credit(advantage.view_as(rewards), Targets(values, returns.view_as(rewards)))

    def _differ(self, rewards: Tensor, credit: Credit) -> bool:
        """Whether some draw of this rank is better than another."""
        moves = (
            credit.advantages != 0 if self.cfg.objective == "grpo" else rewards != rewards[0, 0, 0]
        )
        return bool(moves.any())

    def _minibatch(self, part: Draws, credit: Credit, kl_weight: float) -> Minibatch:
        cfg = self.cfg
        with numerics.autocast():
            hidden = self.model.hidden(part.inputs)
            logprobs, entropy = symbol_logprobs(self.model, part.inputs, hidden, part.drawn)
        every = torch.ones_like(logprobs)
        ratio = losses.policy_ratio(logprobs, part.logprobs, every)
        loss = losses.clipped_policy_loss(ratio, credit.advantages, CLIP, CLIP).mean()
        stats = losses.clip_statistics(
            ratio, logprobs, part.logprobs, credit.advantages, every, CLIP, CLIP
        )
        clipped = stats["clipped_low"] + stats["clipped_high"]
        terms = {
            "policy_loss": loss.detach(),
            "entropy": entropy.mean(),
            "clip_frac": clipped / logprobs.numel(),
        }
        if cfg.kl_coef:
            kl = losses.kl_estimate(logprobs, self._reference_logprobs(part)).mean()
            loss = loss + kl_weight * kl
            terms["kl_ref"] = kl.detach()
        if credit.targets:
            values = self._values(hidden, part)
            error = losses.value_loss(
                values, credit.targets.values, credit.targets.returns, CLIP
            ).mean()
            loss = loss + VALUE_COEF * error
            terms["value_loss"] = error.detach()
        return Minibatch(loss, logprobs, terms)

    @torch.no_grad()
    def _draw(self, step: int, windows: Tensor, rng: torch.Generator) -> Draws:
        cfg = self.cfg
        T = cfg.horizon
        G = cfg.group_size
        self.model.eval()
        with numerics.autocast():
            if cfg.feed == "own":
                seed = engines.step_seed(cfg.seed, step)
                batch = draw_fed_by_itself(
                    self.model, windows, T, G, seed=seed, first=int(self.mine[0])
                )
            else:
                uniforms = torch.rand(self.total, G, T, generator=rng, dtype=torch.float64)[
                    self.mine
                ]
                batch = draw_fed_by_text(self.model, windows, T, G, uniforms.to(windows.device))
        self.model.train()
        return batch

    @torch.no_grad()
    def _reference_logprobs(self, batch: Draws) -> Tensor:
        """(R, S, T) log-probabilities of the draws under the reference policy."""
        if self.untrained is None:
            before = batch.inputs[:, None, -self.cfg.horizon :].expand_as(batch.drawn)
            return self.bigram.logprobs(before, batch.drawn)
        with numerics.autocast():
            hidden = self.untrained.hidden(batch.inputs)
            return symbol_logprobs(self.untrained, batch.inputs, hidden, batch.drawn)[0]

    def _values(self, hidden: Tensor, batch: Draws) -> Tensor:
        """(R, S, T): the value of the state before each draw."""
        return self.head(hidden[:, -self.cfg.horizon :])[:, None].expand_as(batch.drawn)


# ---- per-token rewards


class Draws(NamedTuple):
    """The draws of some windows."""

    inputs: Tensor  # (R, P + T - 1) of the model, whose last T states predict
    drawn: Tensor  # (R, S, T)
    logprobs: Tensor  # (R, S, T)
    truth: Tensor  # (R, 1, T) the text's symbols
    truth_logprobs: Tensor  # (R, 1, T) theirs in the contexts of the rows

    def part(self, at: Tensor) -> Draws:
        """The draws of the rows `at`."""
        return Draws(*(x[at] for x in self))


class Targets(NamedTuple):
    """What PPO's value loss needs."""

    values: Tensor  # (R, S, T) before the step
    returns: Tensor  # (R, S, T)


class Credit(NamedTuple):
    """What draws earn."""

    advantages: Tensor  # (R, S, T)
    targets: Targets | None = None

    def part(self, at: Tensor) -> Credit:
        """The credit of the rows `at`."""
        targets = (
            Targets(self.targets.values[at], self.targets.returns[at]) if self.targets else None
        )
        return Credit(self.advantages[at], targets)


class Minibatch(NamedTuple):
    """A minibatch's loss, the log-probabilities (R, S, T) of its draws, and the terms of the
    loss to log."""

    loss: Tensor
    logprobs: Tensor
    terms: dict[str, Tensor]


def symbol_logprobs(
    model: GPT, inputs: Tensor, hidden: Tensor, drawn: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (R, S, T) of symbols drawn at the last T places, given states (R, P + T
    - 1, D), and the entropy of each place (R, T)."""
    R, S, T = drawn.shape
    wide = hidden[:, None, -T:].expand(R, S, T, hidden.shape[-1]).flatten(0, 1)
    logprobs, entropy = model.token_logprobs(inputs, drawn.flatten(0, 1), hidden=wide)
    return logprobs.view(R, S, T), entropy.view(R, S, T)[:, 0]


@torch.no_grad()
def draw_fed_by_text(
    model: GPT, windows: Tensor, places: int, group_size: int, uniforms: Tensor
) -> Draws:
    """G draws at each of the last `places` symbols of windows (W, P + T), in the text's
    context. uniforms: (W, G, T)."""
    inputs = windows[:, :-1]
    truth = windows[:, None, -places:]
    hidden = model.hidden(inputs)
    logits = F.linear(hidden[:, -places:].flatten(0, 1), model.head_weight()).float()  # (W T, V)
    logits[:, model.cfg.n_ids :] = -torch.inf
    drawn = [
        draws.draw(logits.clone(), draws.Truncation(), uniforms[:, g].flatten())
        for g in range(group_size)
    ]
    ids, logprobs = (
        torch.stack(x).view(group_size, len(windows), places).transpose(0, 1) for x in zip(*drawn)
    )
    return Draws(inputs, ids, logprobs, truth, symbol_logprobs(model, inputs, hidden, truth)[0])


@torch.no_grad()
def draw_fed_by_itself(
    model: GPT,
    windows: Tensor,
    places: int,
    group_size: int,
    *,
    seed: int,
    first: int = 0,
) -> Draws:
    """G continuations of each window's first P symbols by `places` symbols, compared with its
    last T.

    Sampling depends on seed and first + the window's index."""
    done = generate.sample(
        model,
        windows[:, :-places].tolist(),
        max_new_tokens=places,
        samples_per_prompt=group_size,
        seed=seed,
        keys=range(first, first + len(windows)),
    )
    drawn = torch.tensor([c.ids for c in done], device=windows.device)  # (W G, T)
    logprobs = torch.tensor([c.logprobs for c in done], device=windows.device)
    rows = windows.repeat_interleave(group_size, 0)
    inputs = torch.cat((rows[:, :-places], drawn[:, :-1]), dim=1)
    truth = rows[:, None, -places:]
    truth_logprobs, _ = symbol_logprobs(model, inputs, model.hidden(inputs), truth)
    return Draws(inputs, drawn[:, None], logprobs[:, None], truth, truth_logprobs)


def group_by_place(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards (R, S, T) as (W T, G): the G draws of one place of one window in a row."""
    return rewards.view(-1, group_size, rewards.shape[-1]).transpose(1, 2).flatten(0, 1)


def place_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Advantages (R, S, T) of rewards (R, S, T): each draw minus the mean of the draws of its
    place."""
    advantage = advantages.group_advantages(group_by_place(rewards, group_size), "mean")  # (W T, G)
    return advantage.view(-1, rewards.shape[-1], group_size).transpose(1, 2).reshape(rewards.shape)


# ---- validation


@torch.no_grad()
def validate(
    model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device
) -> dict[str, Any]:
    """Cross-entropy of held-out windows (for a denoising model its bound), in nats per symbol
    and bits per byte of text; and the chance that a draw is right, the reward that a policy fed
    by the text can expect. Sums over ranks."""
    T = cfg.horizon
    causal = model.cfg.causal
    windows = text.val_windows(1 + T, T, -(-VAL_SYMBOLS // T))
    mine = torch.arange(dist.rank(), len(windows), dist.world_size())
    rng = torch.Generator().manual_seed(cfg.seed)
    orders = [] if causal else [random_ranks(len(windows), T, rng) for _ in range(VAL_DRAWS)]
    size = text.symbol_bytes()
    sums = torch.zeros(4, dtype=torch.float64)
    for rows in mine.split(cfg.device_batch_size):
        ids = windows[rows].to(device)
        nats = 0.0
        right = 0.0
        with numerics.autocast(device):
            if causal:
                before = ids[:, :-1]
                logprobs, _ = symbol_logprobs(
                    model, before, model.hidden(before), ids[:, None, -T:]
                )
                logprobs = logprobs.double()
                nats = -float(logprobs.sum())
                right = float(logprobs.exp().sum())
            for i, order in enumerate(orders):
                counts = mask_counts(rows, len(windows), T, (i + 0.5) / VAL_DRAWS).to(device)
                bound = denoising_bound(model, ids, counts, order[rows].to(device))
                nats += float(bound.double().sum()) / VAL_DRAWS
        n_bytes = int(size[windows[rows, -T:]].sum())
        sums += torch.tensor((nats, right, len(rows) * T, n_bytes), dtype=torch.float64)
    nats, right, symbols, n_bytes = dist.sum_(sums.to(device)).tolist()
    values = {"val_loss": nats / symbols, "val_bpb": nats / math.log(2) / n_bytes}
    if causal:
        values["val_accuracy"] = right / symbols
    return values


@torch.no_grad()
def write_samples(
    model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device
) -> list[dict[str, str]]:
    """Texts of one horizon after held-out prompts."""
    T = cfg.horizon
    prompts = text.val_windows(1, 1 + T, cfg.samples).to(device)
    with numerics.autocast(device):
        if model.cfg.causal:
            drawn = [
                c.ids
                for c in generate.sample(model, prompts.tolist(), max_new_tokens=T, seed=cfg.seed)
            ]
        else:
            rng = torch.Generator().manual_seed(cfg.seed)
            drawn = fill_in(model, prompts, T, passes=min(T, FILL_PASSES), rng=rng)[:, 1:].tolist()
    decode = text.tokenizer.decode
    return [{"prompt": decode(p), "completion": decode(d)} for p, d in zip(prompts.tolist(), drawn)]


# ---- masked denoising


def mask_counts(numbers: Tensor, total: int, places: int, offset: float) -> Tensor:
    """(W,) masked symbols, 1..places, of the windows `numbers` out of `total`, evenly spread
    from `offset` in [0, 1), which lowers the variance of a batch (arXiv:2107.00630, appendix
    I.1)."""
    level = (offset + numbers.double() / total) % 1
    return 1 + (level * places).long()


def random_ranks(count: int, places: int, rng: torch.Generator) -> Tensor:
    """(W, T) for each window the rank of each position in a random order."""
    return torch.rand(count, places, generator=rng, dtype=torch.float64).argsort(1)


def denoising_bound(model: GPT, windows: Tensor, counts: Tensor, ranks: Tensor) -> Tensor:
    """(W,) nats of each window's last T symbols: T x the mean cross-entropy of those with a
    rank below counts (W,), which are masked."""
    masked = torch.zeros_like(windows, dtype=torch.bool)
    masked[:, -ranks.shape[1] :] = ranks < counts[:, None]
    inputs = windows.masked_fill(masked, model.cfg.n_ids - 1)
    targets = windows.masked_fill(~masked, -100)
    return model.loss(inputs, targets, reduction="none").sum(1) * (ranks.shape[1] / counts)


@torch.no_grad()
def fill_in(
    model: GPT, prompts: Tensor, places: int, *, passes: int, rng: torch.Generator
) -> Tensor:
    """(W, P + T) ids: T = `places` symbols after each prompt (W, P), in random order, `passes`
    at about equal size.

    With as many passes as symbols they are drawn from the model's own distribution; symbols of
    one pass do not see each other."""
    mask = model.cfg.n_ids - 1
    W, P = prompts.shape
    ids = torch.cat((prompts, prompts.new_full((W, places), mask)), dim=1)
    ranks = random_ranks(W, places, rng).to(prompts.device)
    edges = [places * i // passes for i in range(passes + 1)]
    for low, high in zip(edges, edges[1:]):
        w, t = ((ranks >= low) & (ranks < high)).nonzero(as_tuple=True)
        logits = F.linear(model.hidden(ids)[w, P + t], model.head_weight()).float()
        logits[:, mask:] = -torch.inf
        u = torch.rand(len(logits), generator=rng, dtype=torch.float64).to(prompts.device)
        ids[w, P + t] = draws.draw(logits, draws.Truncation(), u)[0]
    return ids
