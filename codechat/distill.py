"""Distillation: a student learns to write what a larger teacher would write, on the prompts of
a task.

    codechat distill --teacher released/mini --init-from released/nano --task examples/my_task.py:MyTask \\
        --run-name nano-taught
    torchrun --standalone --nproc-per-node 8 -m codechat distill --teacher d20-sft \\
        --init-from d12-sft --task my_task.py

--samples student: on-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543).
The student samples, and the teacher's log-probability of each sampled token less the student's
is that token's advantage: its expected gradient is that of the reverse KL divergence of this
token, KL(student || teacher), without its influence on later tokens. --samples teacher: the
teacher samples, and the student maximises
the likelihood: the forward KL, KL(teacher || student), up to a constant. Both take one sample
of the vocabulary where GKD sums over it.

Teacher and student have one tokenizer. The task gives prompts and evaluations; its reward is
logged and does not train."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError
from codechat.runs.run import Run
from codechat.training.rl_settings import TOY_ONE_UPDATE, RLSettings
from codechat.training.settings import run_presets


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RLSettings):
    """Settings of one distillation."""

    run_name: str = "distill"
    teacher: str = opt(REQUIRED, "checkpoint of the teacher", reads="run")
    samples: Literal["student", "teacher"] = opt(
        "student", "who writes what is learned from: reverse KL or forward KL"
    )
    group_size: int = 4
    diagnose_groups: int = 0
    dead_patience: int = 1_000_000  # the reward trains nothing


Meta = Mapping[str, Any]  # of meta.json
RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE)


def check_same_text(cfg: DistillConfig, theirs: Meta, ours: Meta) -> None:
    """ConfigError if teacher and student have another tokenizer or other tags. theirs, ours: as
    in `check_room`."""
    differing = [name for name in ("tokenizer", "tags") if theirs[name] != ours[name]]
    if differing == ["tokenizer"] and theirs["tokenizer"].get("json", 0) == ours["tokenizer"].get(
        "json"
    ):
        return  # one tokenizer under two names
    if differing:
        raise ConfigError(
            f"got teacher {cfg.teacher} with other {' and '.join(differing)} than the student; expected the same; "
            "choose another --teacher, or another --init-from"
        )


def check_room(cfg: DistillConfig, theirs: Meta, ours: Meta) -> None:
    """ConfigError if the teacher's block is shorter than prompts and completions may become: it
    has learned no position behind its block. theirs, ours: meta.json of teacher and student."""
    from codechat import tasks
    from codechat.rl import episodes
    from codechat.text import chat, tokenizer

    block = theirs["model_config"]["block_size"]
    needed = ours.get("model_config", {}).get("block_size", cfg.model.block_size)
    if block >= needed:
        return
    task = tasks.load(cfg.task, source=cfg.data_dir)
    if not episodes.has_environment(task):  # an episode is as long as it becomes
        tok = tokenizer.from_dict(theirs["tokenizer"])
        prompts = [
            chat.prompt(task.prompt(p), tok, theirs["tags"])
            for p in task.problems("train", seed=cfg.seed)
        ]
        needed = min(needed, max(map(len, prompts), default=0) + cfg.max_new_tokens)
    if block < needed:
        got = f"teacher {cfg.teacher} has a block of {block} tokens"
        needs = f"prompts and completions of {cfg.task} have up to {needed}"
        raise ConfigError(
            f"{got}; {needs}; lower --max-new-tokens, or take a teacher with a longer block"
        )


def train(cfg: DistillConfig) -> Run:
    """Distil the teacher; returns the finished run. UserError, before anything is written, for
    bad settings or another tokenizer."""
    import torch

    from codechat.distributed import hardware
    from codechat.models import loading
    from codechat.rl.losses import masked_sum, policy_gradient_loss
    from codechat.runs import checkpoint
    from codechat.training.rl_session import rl_session
    from codechat.training.session import weights_hash

    theirs = checkpoint.read_meta(cfg.teacher)
    ours: Meta = {"tokenizer": {"spec": cfg.tokenizer}, "tags": cfg.tags or "reserved"}
    if cfg.init_from:
        ours = checkpoint.read_meta(cfg.init_from)
    check_same_text(cfg, theirs, ours)
    check_room(cfg, theirs, ours)
    with rl_session(cfg, "distill", data=weights_hash(cfg.teacher, theirs)) as session:
        teacher = loading.load_model(cfg.teacher, hardware.device()).model
        if cfg.samples == "teacher":
            session.sampler.model = teacher
        for _ in session.steps():
            batch = session.sample()  # P problems x G completions
            sampled, mask = session.to_device(batch.logprobs(), batch.mask())  # (N, C)
            if cfg.samples == "student":
                advantage = session.score(teacher, batch) - sampled  # (N, C)
            else:
                advantage = torch.ones_like(sampled)
            # every completion is learned from: no reward decides here
            live = torch.ones_like(batch.rewards, dtype=torch.bool)  # (P, G)
            for update in session.updates(batch, live):
                for micro in update.microbatches():
                    # the teacher's text is learned by likelihood; the student's, as it was drawn
                    logprobs, _ = micro.logprobs(whole=cfg.samples == "teacher")  # (B, C)
                    advantages = micro.rows_of(advantage)  # (B, C)
                    micro.backward(
                        policy_gradient_loss(logprobs, advantages, micro.mask, update.n_tokens)
                    )
                update.apply()
            kl = {"teacher_kl": -masked_sum(advantage, mask)} if cfg.samples == "student" else {}
            session.log(batch, sums=kl)
    return session.run
