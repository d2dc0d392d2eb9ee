"""Supervised fine-tuning on conversations: joint code, function calls and plain chat, mixed by
supervised tokens.

    codechat sft --init-from released/nano --data-dir data/mine --run-name my-sft
    torchrun --standalone --nproc-per-node 8 -m codechat sft --init-from d20 --data-dir data/sft \\
        --run-name d20-sft

Only assistant messages and their closing tag carry loss. Several conversations share a row but
do not attend to each other. Evaluations measure each domain's held-out loss (three rises in a
row are reported) and run the 2 x 2 behaviour probes: request for code or for a tool, tools
offered or not. --eval-task also samples validation problems of a task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.runs.run import Run
from codechat.training.settings import ChatSettings, SupervisedSettings, run_presets

if TYPE_CHECKING:  # settings and --help need no torch
    from codechat.data.conversations import Example


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ChatSettings, SupervisedSettings):
    """Settings of one supervised fine-tuning run."""

    run_name: str = "sft"
    data_dir: str = "data/sft"
    mix: tuple[str, ...] = opt(
        (),
        "share of each domain, such as calls=0.7 code=0.2 "
        "chat=0.1; empty = the proportions of the data",
    )
    mix_by: Literal["tokens", "rows"] = opt(
        "tokens", "unit of the --mix shares: supervised tokens, or conversations"
    )
    lr: float = 1e-3
    muon_lr: float = 0.01
    warmup_steps: int = 10
    eval_examples: int = opt(
        64, "held-out conversations per domain, and problems of --eval-task", least=1
    )
    probe_examples: int = opt(32, "behaviour probes per cell; 0 = none", least=0)
    eval_task: str | None = opt(
        None,
        "task whose validation problems are sampled greedily at each evaluation; none = off",
        reads="path",
    )
    eval_task_data: str | None = opt(
        None,
        "data of --eval-task: a directory, or hub; none = the task's own problems",
        reads="path",
    )
    eval_new_tokens: int = opt(256, "longest completion for --eval-task, tokens", least=1)

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
                raise ConfigError(
                    f"--mix {item!r}; required DOMAIN=SHARE, such as calls=0.7"
                ) from None
        if any(not (0 <= s < math.inf) for s in shares.values()) or (
            shares and sum(shares.values()) == 0
        ):
            raise ConfigError(
                f"--mix {' '.join(self.mix)}: shares must be finite, not negative, and not all 0"
            )
        return shares or None


RUN_PRESETS = run_presets()


def fitting_length(examples: "Mapping[str, Sequence[Example]]", most: int) -> int:
    """Tokens of a row that the longest conversation needs, in whole blocks of attention, at
    most `most`."""
    from codechat.models.fast import attention

    longest = max(
        (len(example) for domain in examples.values() for example in domain), default=most
    )
    return min(most, math.ceil(longest / attention.QUERIES) * attention.QUERIES)


def train(cfg: SFTConfig) -> Run:
    """Fine-tune on the conversations of cfg.data_dir; returns the finished run. UserError,
    before anything is written, for bad settings."""
    import torch

    from codechat.data import conversations
    from codechat.distributed import dist, hardware, numerics
    from codechat.training.held_out import HeldOut, domains_hash
    from codechat.training.session import Prefetched, SupervisedSession, build_policy, load_parent

    with dist.session(cfg) as world:
        cfg, parent, tok = load_parent(cfg)
        if cfg.length > cfg.model.block_size:  # known only with the model that is tuned
            raise ConfigError(
                f"seq_len {cfg.seq_len} exceeds block_size {cfg.model.block_size}; lower --seq-len"
            )
        length = cfg.length
        examples = conversations.load_domains(
            cfg.data_dir, "train", tok, cfg.chosen_tags, length, wanted=cfg.weights
        )
        if cfg.seq_len is None:
            # padding is computed too: rows of the block size would waste most of a step on short
            # talks
            cfg = replace(cfg, seq_len=fitting_length(examples, length))
        # read before the model is built: a row that cannot be read should cost no minute
        held_out = HeldOut(cfg, tok)
        shares = cfg.weights
        if shares and cfg.mix_by == "rows":
            # the loader counts tokens: a domain of long answers would get more than its rows
            shares = conversations.token_weights(examples, shares)
        rows = conversations.PackedLoader(
            examples,
            shares,
            batch=cfg.device_batch_size,
            T=cfg.length,
            seed=cfg.seed,
            rank=world.rank,
            world=world.size,
        )
        loader = Prefetched(rows, world.device, ahead=cfg.grad_accum)
        model = build_policy(cfg, parent)
        hardware.compile_blocks(model, cfg.compile)
        trained_on = {"data_dir": cfg.data_dir}
        style = conversations.tools_style(cfg.data_dir)
        if style != "compact":  # an evaluation lists tools as they were listed here
            trained_on["tools_style"] = style
        session = SupervisedSession(
            "sft",
            cfg,
            model,
            tok,
            parent=parent,
            evaluate=held_out.evaluate,
            max_steps=cfg.max_steps,
            tags=cfg.chosen_tags,
            trained_on=trained_on,
            kept={"loader": loader},
            data=domains_hash(cfg.data_dir, "train", rows.hashes) | held_out.hashes,
        )
        tokens_per_step = cfg.device_batch_size * cfg.length * cfg.grad_accum * world.size
        with session.running():
            for _ in session.steps():
                # the loss of a step is the mean over its supervised tokens, of all microbatches
                # and ranks
                batches = [loader.next() for _ in range(cfg.grad_accum)]
                # counted before the first backward pass: microbatches hold different numbers of
                # targets
                n_tokens = dist.total(sum(batch.supervised for batch in batches))
                # a GPU is not waited for in each microbatch
                nats = torch.zeros((), device=world.device)
                for batch in batches:
                    places = batch.places(world.device)  # of the targets, found on the host
                    batch = batch.to(world.device)
                    with numerics.autocast():
                        sum_of_nats = model.loss(
                            batch.ids,
                            batch.targets,
                            reduction="sum",
                            places=places,
                            positions=batch.positions,
                            mask=conversations.packed_mask(batch.docs),
                        )
                        loss = sum_of_nats / n_tokens
                    loss.backward()
                    nats += loss.detach()
                session.apply_gradients()
                supervised_tokens = session.counts.get("supervised_tokens", 0) + int(n_tokens)
                session.counts["supervised_tokens"] = supervised_tokens
                session.log_supervised(nats, tokens_per_step, supervised_tokens=supervised_tokens)
    return session.run
