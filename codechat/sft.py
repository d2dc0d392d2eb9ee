"""Supervised fine-tuning on conversations: joint code, function calls and plain chat, mixed by supervised tokens.

    codechat sft --init-from my-pretrain --data-dir data/nano --run-name my-sft
    torchrun --standalone --nproc-per-node 8 -m codechat.sft --init-from d20 --data-dir data/sft --run-name d20-sft

Only assistant bodies and their closing tag carry loss. Several conversations share a row and cannot see each other. While it trains, the
loop watches each domain's held-out loss (three rises in a row are reported; --stop-on-regression ends the run) and the 2 x 2 behaviour
probes: code or a tool asked for, tools present or absent. --eval-task gsm8k also samples a task's validation problems at each evaluation, here
or on the server of --engine.

Same phases as pretrain: evaluate, save, learn, log. Left out: preference terms (`preference`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from codechat import training
from codechat.core.command import train_main
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.data import conversations, prefetch, prepared
from codechat.distributed import dist, sharding
from codechat.evaluation import domain_loss
from codechat.evaluation import evaluate as evaluate_module
from codechat.rl import engines
from codechat.runs import run as run_module
from codechat.text import chat
from codechat.training.settings import EngineSettings, PolicySettings, SupervisedSettings, run_presets

if TYPE_CHECKING:
    from codechat.runs.checkpoint import Checkpoint
    from codechat.runs.run import Run
    from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SFTConfig(EngineSettings, SupervisedSettings, PolicySettings):
    """Settings of one supervised fine-tuning run."""

    run_name: str = default("sft")
    data_dir: str = opt(
        "data/sft", "directory with DOMAIN.SPLIT.jsonl made by `codechat data sft` and `codechat data calls`"
    )
    mix: tuple[str, ...] = opt((), "share of each domain, such as calls=0.7 code=0.2 chat=0.1; empty = as the data are")
    mix_by: Literal["tokens", "rows"] = opt(
        "tokens", "what the shares of --mix are of: supervised tokens, or conversations"
    )
    tags: Literal["reserved", "text", "template", "raw"] = opt(
        "reserved",
        "turn tags as single reserved ids, as plain text, or by an imported model's template; raw = no turns",
    )
    lr: float = default(1e-3)
    muon_lr: float = default(0.01)
    warmup_steps: int = default(10)
    eval_examples: int = opt(64, "held-out conversations per domain", least=1)
    probe_examples: int = opt(32, "behaviour probes per cell; 0 = none", least=0)
    stop_on_regression: bool = opt(False, "end the run when a domain's held-out loss rises three evaluations in a row")
    compile: bool | None = opt(None, "torch.compile the step; none = on GPUs, and in bfloat16")
    eval_task: str | None = opt(
        None,
        "task whose validation problems are sampled greedily at each evaluation, such as gsm8k; none = no",
    )
    eval_task_data: str | None = opt(None, "its --data-dir: a directory, or hub; none = what the task has")
    eval_problems: int = opt(64, "its problems per evaluation", least=1)
    eval_new_tokens: int = opt(256, "longest completion there, tokens", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights  # noqa: B018  (validates)

    @property
    def weights(self) -> dict[str, float] | None:
        """Parsed --mix: domain -> share; None where the data's own shares stand."""
        shares = {}
        for item in self.mix:
            domain, _, share = item.partition("=")
            try:
                shares[domain] = float(share)
            except ValueError:
                raise ConfigError(f"--mix {item!r}; required DOMAIN=SHARE, such as calls=0.7") from None
        if any(not (0 <= s < math.inf) for s in shares.values()) or (shares and sum(shares.values()) == 0):
            raise ConfigError(f"--mix {' '.join(self.mix)}: shares must be finite, not negative, and not all 0")
        return shares or None


RUN_PRESETS = run_presets()


def regressed(history: list[dict[str, float]], rises: int = 3) -> list[str]:
    """Names of held-out losses that rose in each of the last `rises` evaluations."""
    recent = history[-(rises + 1) :]
    if len(recent) <= rises:
        return []
    return [k for k in recent[-1] if all(a.get(k, math.inf) < b[k] for a, b in zip(recent, recent[1:]))]


def check_tags(cfg: SFTConfig, tok: Tokenizer, parent: Checkpoint | None) -> None:
    """ConfigError where the model has no embedding rows for the reserved tags that --tags asks for."""
    if cfg.tags != "reserved" or cfg.model.n_ids >= tok.n_vocab + chat.N_TAGS:
        return
    advice = "leave --model.n-tags at 6, or set --tags text"
    if parent:
        advice = f"set --tags {parent.meta['tags']}, or import it with --tags reserved"
    raise ConfigError(f"the model of {cfg.init_from or 'these settings'} has no rows for reserved tags; {advice}")


def read_held_out(cfg: SFTConfig, tok: Tokenizer) -> dict[str, list[conversations.Example]]:
    """Validation conversations by domain; none, and a note, where the directory has none."""
    try:
        return conversations.load_domains(
            cfg.data_dir, "select", tok, cfg.tags, cfg.model.block_size, limit=cfg.eval_examples
        )
    except MissingFile as absent:
        print(f"no held-out loss: {absent}", file=sys.stderr)
        return {}


def train(cfg: SFTConfig) -> Run:
    """Fine-tune on the conversations of cfg.data_dir; returns the finished run. UserError, before anything is written, for bad settings."""
    with dist.session(cfg) as world, run_module.StopSignal() as interrupt:
        cfg, parent, tok = training.load_parent(cfg, keep_tags=True)
        check_tags(cfg, tok, parent)
        block = cfg.model.block_size
        length = min(cfg.length, block)
        examples = conversations.load_domains(cfg.data_dir, "train", tok, cfg.tags, length, wanted=cfg.weights)
        held = read_held_out(cfg, tok)
        probes = training.read_probes(cfg)
        shares = cfg.weights
        if shares and cfg.mix_by == "rows":
            shares = conversations.token_weights(examples, shares)
        rows = conversations.PackedLoader(
            examples, shares, cfg.device_batch_size, cfg.length, cfg.seed, world.rank, world.size
        )
        loader = prefetch.Prefetched(rows, world.device, ahead=cfg.grad_accum)
        held_out = {
            domain: conversations.held_out(some, cfg.device_batch_size, cfg.length) for domain, some in held.items()
        }
        model = training.build_policy(cfg, parent)
        optimizers = training.build_optimizers(cfg, model)
        sampled = training.open_eval_task(cfg, tok, interrupt)
        style = prepared.tools_style(cfg.data_dir)
        listed = {} if style == "compact" else {"tools_style": style}
        lineage = training.lineage(cfg, "sft", parent, data_dir=cfg.data_dir, **listed)
        run, last = training.open_run("sft", cfg, model, optimizers)
        start, supervised, history, regression = 0, 0, [], []
        if last:
            loader.load_state(last.extra["loader"])
            start, supervised, history = last.step, last.extra["supervised"], last.extra["history"]
        tokens_per_step = cfg.device_batch_size * cfg.length * cfg.grad_accum * world.size
        loss_of = training.compiled(cfg, model)

        def save(step: int, wait: bool) -> None:
            training.check_before_save(step, nats)
            extra = dict(loader=loader.state(), supervised=supervised, history=history)
            training.save(run, step, cfg, model, optimizers, tok=tok, lineage=lineage, wait=wait, **extra)

        def evaluate(step: int) -> tuple[list[dict[str, float]], list[str]]:
            """Held-out losses up to here, and the domains whose loss rises."""
            with sharding.whole(model) as reader:
                losses = domain_loss.held_out_losses(reader, held_out, world.device)
                found = (
                    evaluate_module.behaviour_matrix(reader, tok, cfg.tags, probes, seed=cfg.seed).metrics()
                    if probes
                    else {}
                )
            row = {**losses, **found}
            try:
                row |= sampled(model, step)
            finally:  # an engine that is lost takes no held-out loss with it
                run.log_eval(step, row)
            rising = regressed([*history, losses])
            for name in rising:
                bar.write(
                    f"{run.name}: {name} rose three evaluations in a row, to {losses[name]:.3f} at step {step}; "
                    "this domain is being overwritten: raise its --mix share or lower --lr"
                )
            return [*history, losses], rising

        with training.running(run, start, cfg.max_steps) as bar:
            pace, lost = training.Pace(start), None
            for step in range(start, cfg.max_steps + 1):
                turn = training.turn(cfg, step, start, run, stopping=interrupt.requested)
                if turn.evaluate:
                    try:
                        history, regression = evaluate(step)
                    except engines.EngineLost as error:
                        lost = error
                        if step > start:
                            save(step, wait=True)
                        break
                    turn = turn.also_stop_if(bool(regression and cfg.stop_on_regression), step > start)
                    pace.restart(step)
                if turn.save:
                    save(step, wait=turn.last)
                if turn.last:
                    break

                # learn: the loss of a step is the mean over its supervised tokens, of all microbatches and ranks
                lr = training.set_rate(cfg, optimizers, step)
                batches = [loader.next() for _ in range(cfg.grad_accum)]
                ((n_tokens,),) = training.totals([[sum(int((b.targets >= 0).sum()) for b in batches)]])
                nats = 0.0
                for micro, batch in enumerate(batches):
                    places = batch.places(world.device)
                    batch = batch.to(world.device)
                    where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs), places=places)
                    with dist.autocast():
                        total = loss_of(batch.ids, batch.targets, reduction="sum", **where)
                    training.backward(total / n_tokens, model, last=micro == cfg.grad_accum - 1)
                    nats += (total / n_tokens).detach()
                grad_norm = training.apply_gradients(cfg, optimizers, model)
                supervised += int(n_tokens)
                bar.update(1)

                # log
                row = dict(supervised_tokens=supervised, lr=lr, grad_norm=grad_norm)
                training.log_supervised(run, bar, cfg, step, nats, pace, tokens_per_step, **row)
            ended = regression and cfg.stop_on_regression
            why = f"{regression[0]} rose three evaluations in a row" if ended else ""
            training.stop(run, step, interrupted=turn.stopping, lost=lost, why=why)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat sft`, `python -m codechat.sft` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("sft", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
