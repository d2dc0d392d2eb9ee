"""What a loop opens before its first step: the checkpoint it starts from, its policy and reference model, its task, what it is evaluated on."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from codechat import tasks
from codechat.core import config
from codechat.core.errors import ConfigError, MissingFile
from codechat.data import conversations
from codechat.distributed import dist, sharding
from codechat.evaluation import evaluate
from codechat.models import lora
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.checkpoint import Checkpoint
from codechat.tasks.base import Problem, Task
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import Tokenizer

C = TypeVar("C")


def load_parent(
    cfg: C, *, tok: Tokenizer | None = None, keep_tags: bool = False
) -> tuple[C, Checkpoint | None, Tokenizer]:
    """(settings, parent checkpoint or None, tokenizer). The settings take architecture and tags from the parent, or the vocabulary from the tokenizer.
    ConfigError where they were set to something else than the parent has. tok: the tokenizer of the data, where those decide it."""
    if not cfg.init_from:
        tok = tok or tokenizer.load(cfg.tokenizer)
        return replace(cfg, model=replace(cfg.model, vocab_size=tok.n_vocab)), None, tok
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True)
    shape = config.from_dict(GPTConfig, parent.meta["model_config"])
    theirs = tokenizer.from_dict(parent.meta["tokenizer"])
    keep_tags = keep_tags or getattr(cfg, "tags", chat.RAW) == chat.RAW
    tags = {} if keep_tags else {"tags": parent.meta["tags"]}
    check_taken(cfg, shape, tokenizer=theirs.spec, **tags)
    if tok and tok.spec != theirs.spec:
        got = f"{cfg.data_dir} has the tokenizer {tok.spec}, {cfg.init_from} has {theirs.spec}"
        raise ConfigError(f"{got}; prepare the data with --tokenizer {theirs.spec}")
    return replace(cfg, model=shape, **tags), parent, theirs


def check_taken(cfg: Any, shape: GPTConfig, **settings: Any) -> None:
    """ConfigError where a setting that a run takes from its parent checkpoint was set to something else."""
    settings |= {f"model.{name}": value for name, value in config.plain(shape).items()}
    for name, (_, value) in config.changed(cfg).items():
        if (there := settings.get(name, value)) != value:
            remedy = "leave the flag, or the --preset that sets it, out"
            raise ConfigError(
                f"{config.flag_of(name)} {value}: with --init-from {cfg.init_from} it is {there}; {remedy}"
            )


def build_model(cfg: Any, parent: Checkpoint | None) -> GPT:
    """The model of `cfg.model` on this rank's device, whole or sharded: the parent's weights, or new ones of the seed."""
    # random weights of 8b take over a minute per rank: none where others are read
    seed = None if parent else cfg.seed
    model = sharding.build(lambda: GPT(cfg.model), seed=seed, shard_it=cfg.shard, over=cfg.shard_over)
    if parent:
        checkpoint.restore(parent, model)
    return model


def build_policy(cfg: Any, parent: Checkpoint | None) -> GPT:
    """The model that is trained, with LoRA adapters where cfg.lora_rank is not 0."""
    model = build_model(cfg, parent)
    return lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)


def load_task(cfg: Any, tok: Tokenizer) -> tuple[Task, list[Problem], Callable[[GPT, int], dict[str, Any]]]:
    """(task, its training problems, evaluate). evaluate(model, step) gives a row of eval.jsonl: `evaluate_policy` on validation problems."""
    task = tasks.load(cfg.task, source=cfg.data_dir)
    held_out, probes = task.problems("select", limit=cfg.eval_examples), read_probes(cfg)
    training_problems = task.problems("train", seed=cfg.seed)
    return task, training_problems, lambda model, step: evaluate_policy(cfg, model, tok, task, held_out, probes)


def evaluate_policy(
    cfg: Any, model: GPT, tok: Tokenizer, task: Task, problems: Sequence[Problem], probes: Sequence[Any] = ()
) -> dict[str, Any]:
    """A row of eval.jsonl: pass@k and tiers on validation problems, and the behaviour matrix where there are probes."""
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    with sharding.whole(model) as policy:
        scores = evaluate.evaluate_task(policy, tok, cfg.tags, task, problems, n=max(cfg.ks), ks=cfg.ks, **how)
        matrix = evaluate.behaviour_matrix(policy, tok, cfg.tags, probes, seed=cfg.seed).metrics() if probes else {}
    return scores.row() | matrix


def read_probes(cfg: Any) -> list[Any]:
    """Behaviour probes of cfg.data_dir, cfg.probe_examples a cell; none, and a note, where the directory has no probes."""
    if not cfg.probe_examples:
        return []
    try:
        return evaluate.read_probes(cfg.data_dir or "", "select", cfg.probe_examples)
    except MissingFile as absent:
        print(f"no behaviour probes: {absent}", file=sys.stderr)
        return []


def check_tags(cfg: Any, tok: Tokenizer, parent: Checkpoint | None) -> None:
    """ConfigError where the model has no embedding rows for the reserved tags that --tags asks for."""
    if cfg.tags == "reserved" and cfg.model.n_ids < tok.n_vocab + chat.N_TAGS:
        advice = f"--tags {parent.meta['tags']}, or import it with --tags reserved" if parent else "--tags text"
        raise ConfigError(
            f"the model of {cfg.init_from or 'these settings'} has no rows for reserved tags; set {advice}"
        )


class HeldOut:
    """What SFT is evaluated on: held-out loss of each domain, behaviour probes, and problems of --eval-task. Its state is the losses so far."""

    def __init__(self, cfg: Any, tok: Tokenizer) -> None:
        self.cfg, self.tok, self.history = cfg, tok, list[dict[str, float]]()
        where = (cfg.data_dir, "select", tok, cfg.tags, cfg.model.block_size)
        try:
            read = conversations.load_domains(*where, limit=cfg.eval_examples)
        except MissingFile as absent:
            print(f"no held-out loss: {absent}", file=sys.stderr)
            read = {}
        rows = (cfg.device_batch_size, cfg.length)
        self.domains = {domain: conversations.held_out(examples, *rows) for domain, examples in read.items()}
        self.probes = read_probes(cfg)
        self.task = tasks.load(cfg.eval_task, source=cfg.eval_task_data) if cfg.eval_task else None
        self.problems = self.task.problems("select", limit=cfg.eval_examples) if self.task else []

    def evaluate(self, model: GPT, step: int) -> dict[str, Any]:
        """A row of eval.jsonl; says which losses have risen three times in a row."""
        cfg = self.cfg
        with sharding.whole(model) as reader:
            policy = (reader, self.tok, cfg.tags)
            losses = evaluate.held_out_losses(reader, self.domains)
            row = dict(losses)
            if self.probes:
                row |= evaluate.behaviour_matrix(*policy, self.probes, seed=cfg.seed).metrics()
            if self.task:
                how = dict(n=1, temperature=0.0, max_new_tokens=cfg.eval_new_tokens, seed=cfg.seed)
                row |= evaluate.evaluate_task(*policy, self.task, self.problems, **how).row()
                row |= dict(task=cfg.eval_task, split="select")
        self.history.append(losses)
        for name in regressed(self.history) if dist.is_main() else ():
            risen = f"{name} rose three evaluations in a row, to {losses[name]:.3f} at step {step}"
            remedy = "this domain is being overwritten: raise its --mix share or lower --lr"
            print(f"{cfg.run_name}: {risen}; {remedy}", file=sys.stderr)
        return row

    def state(self) -> list[dict[str, float]]:
        return list(self.history)

    def load_state(self, state: list[dict[str, float]]) -> None:
        self.history = list(state)


def regressed(history: list[dict[str, float]], rises: int = 3) -> list[str]:
    """Names of held-out losses that rose in each of the last `rises` evaluations."""
    recent = history[-(rises + 1) :]
    if len(recent) <= rises:
        return []
    return [k for k in recent[-1] if all(a.get(k, math.inf) < b[k] for a, b in zip(recent, recent[1:]))]
