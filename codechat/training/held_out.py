"""Evaluations of SFT: held-out loss of each domain and behaviour probes (`evaluation.held_out`
measures both), and greedy answers to problems of --eval-task."""

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codechat.core.errors import MissingFile
from codechat.data import conversations
from codechat.distributed import sharding
from codechat.evaluation import held_out
from codechat.evaluation.held_out import Probes
from codechat.models.gpt import GPT
from codechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from codechat.sft import SFTConfig
    from codechat.training.rl_settings import RLSettings


class HeldOut:
    """The conversations, probes and problems of one run, read once. hashes: their hashes, for
    --resume."""

    def __init__(self, cfg: "SFTConfig", tok: Tokenizer) -> None:
        self.cfg = cfg
        self.tok = tok
        read = self._read_domains()
        self.domains = {
            domain: conversations.held_out(examples, cfg.device_batch_size, cfg.length)
            for domain, examples in read.items()
        }
        self.probes = read_probes(cfg)
        self.task = _greedy_task(cfg, cfg.eval_task, tok) if cfg.eval_task else None
        hashes = {name: conversations.hash_examples(examples) for name, examples in read.items()}
        self.hashes = domains_hash(cfg.data_dir, "select", hashes) | probes_hash(
            cfg.data_dir, self.probes
        )
        if self.task:
            self.hashes |= self.task.hashes

    def _read_domains(self) -> dict[str, list[conversations.Example]]:
        """Held-out conversations by domain; none, and a note, where the directory has no such
        file."""
        cfg = self.cfg
        try:
            return conversations.load_domains(
                cfg.data_dir,
                "select",
                self.tok,
                cfg.chosen_tags,
                # not cfg.length: an evaluation leaves no conversation out that the model can read
                cfg.model.block_size,
                limit=cfg.eval_examples,
            )
        except MissingFile as absent:
            print(f"no held-out loss: {absent}", file=sys.stderr)
            return {}

    def evaluate(self, model: GPT, step: int) -> dict[str, Any]:
        """A row of eval.jsonl."""
        cfg = self.cfg
        # gathered once for all three: each forward pass of a sharded model gathers the root anew
        with sharding.whole(model) as policy:
            row: dict[str, Any] = dict(held_out.held_out_losses(policy, self.domains))
            if self.probes:
                matrix = self.probes.measure(policy, self.tok, cfg.chosen_tags, seed=cfg.seed)
                row |= matrix.metrics()
            if self.task:
                row |= self.task.evaluate(policy)
        return row


def _greedy_task(cfg: "SFTConfig", name: str, tok: Tokenizer) -> Any:
    """The `GreedyTask` of --eval-task. Its module is imported only for such a task: SFT itself
    needs no tasks."""
    return importlib.import_module("codechat.training.evaluations").GreedyTask(cfg, name, tok)


def read_probes(cfg: "SFTConfig | RLSettings") -> Probes | None:
    """Behaviour probes of cfg.data_dir, cfg.probe_examples of each kind; None, with a note on
    stderr, if the directory has no probes."""
    directory = cfg.data_dir or ""
    probes = held_out.read_probes(directory, "select", cfg.probe_examples)
    if cfg.probe_examples and probes is None:
        path = held_out.probes_file(directory, "select")
        remedy = "make it with `codechat data calls`, or set --probe-examples 0"
        print(f"no behaviour probes: {path} does not exist; {remedy}", file=sys.stderr)
    return probes


def probes_hash(source: str | None, probes: Probes | None) -> dict[str, str]:
    return {f"{source}/probes.select.jsonl": probes.hash} if probes else {}


def domains_hash(source: str, split: str, hashes: Mapping[str, str]) -> dict[str, str]:
    return {f"domain {domain} of {source} ({split})": found for domain, found in hashes.items()}
