"""The engine that samples rollouts: this process, or a server that gets new weights after each
step.

    local   `generate.sample` on the policy itself
    http    `codechat serve --reload-from DIR`; draws the tokens of `local`: seed and keys travel with each request
    vllm    vLLM's OpenAI server on GPUs; its own random generator: another curve of the same distribution

Weights travel through --engine-dir, which trainer and server both see. Our server reports with
every completion which weights sampled it; completions of other weights, as after a restart, are
discarded, and weights and request are sent again. While no server answers, the rest of a batch
is retried for --engine-patience-s; then EngineLost is raised, on which a loop saves and stops.
docs/engines.md has the commands.

`RolloutSampler` takes the rollouts of a step from an engine."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from codechat.core import processes
from codechat.core.errors import ConfigError, EngineLost, RunError
from codechat.core.http_client import BUSY, Link, NoAnswer, Refused
from codechat.distributed import dist, hardware, numerics, sharding
from codechat.formats import exchange
from codechat.models import draws, generate, lora
from codechat.models.config import GPTConfig
from codechat.models.fast.device import on_cpu
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import episodes, rollout
from codechat.rl.rollout import RolloutBatch
from codechat.runs import checkpoint, paths
from codechat.tasks.base import Problem, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

HF = "hf"  # directory below --engine-dir with the export that vLLM serves
PARALLEL = 32  # concurrent requests
BANNED = -100.0  # logit bias of an id that must not be sampled, vLLM's smallest
PAUSES_S = (0.05, 0.5)  # before a retry: the first pause, and the longest

T = TypeVar("T")


class Engine:
    """Samples in this process; the interface of the others."""

    @contextmanager
    def policy(self, model: GPT) -> Iterator[Any]:
        """The policy to pass to `sample`. A UserError inside on one rank is raised on all.
        Collectives at both ends."""
        with sharding.whole(model) as policy, torch.no_grad(), numerics.autocast():
            with generate.weights_stay(policy):
                yield policy

    def push(self, model: GPT, step: int) -> None:
        """Send the weights of `step`. A collective."""

    def sample(
        self, policy: GPT, prompts: Sequence[Sequence[int]], **sampling: Any
    ) -> list[Completion]:
        """Completions in the order of `generate.sample`, whose arguments it takes. No
        collective."""
        return generate.sample(policy, prompts, **sampling)

    def metrics(self) -> dict[str, float]:
        """What to log of a step; resets the counts."""
        return {}


class EngineSettings(Protocol):
    """What an engine reads of a loop's settings."""

    @property
    def engine(self) -> Literal["local", "http", "vllm"]: ...
    @property
    def engine_url(self) -> str: ...
    @property
    def engine_dir(self) -> Path | None: ...
    @property
    def engine_patience_s(self) -> float: ...
    @property
    def run_name(self) -> str: ...
    @property
    def model(self) -> GPTConfig: ...
    @property
    def chosen_tags(self) -> str: ...


def open_engine(cfg: EngineSettings, tokenizer: Tokenizer) -> Engine:
    if cfg.engine == "local":
        return Engine()
    return Http(cfg, tokenizer) if cfg.engine == "http" else VLLM(cfg, tokenizer)


class Http(Engine):
    """A `codechat serve --reload-from`."""

    busy: tuple[int, ...] = BUSY

    def __init__(self, cfg: EngineSettings, tokenizer: Tokenizer) -> None:
        self.cfg = cfg
        self.shape = cfg.model
        self.link = Link(cfg.engine_url, flag="--engine-url")
        assert cfg.engine_dir is not None, "an engine that is a server has --engine-dir"
        self.folder = Path(cfg.engine_dir)
        self.meta = {"tokenizer": tokenizer.to_dict(), "tags": cfg.chosen_tags}
        self.path = Path()  # of the weights that were pushed last
        self.version = ""  # their fingerprint
        self.model = ""  # the server's name of the model
        self.pushed_s = 0.0
        self.retries = 0
        self._reload_lock = threading.Lock()
        processes.stop.clear()
        self._lost = threading.Event()  # one request has failed for good: the others stop waiting

    @contextmanager
    def policy(self, model: GPT) -> Iterator[GPT]:
        with dist.together():
            yield model

    def push(self, model: GPT, step: int) -> None:
        began = time.perf_counter()
        self.path = checkpoint.save(
            self.folder / self.cfg.run_name, step, model=lora.merged(model), meta=self.meta
        )
        self.version = paths.fingerprint(checkpoint.read_meta(self.path))
        self._lost.clear()
        with dist.together():
            if dist.is_main():
                self._retried(self._load_weights)
        self.pushed_s += time.perf_counter() - began

    def sample(  # type: ignore[override]
        self,
        policy: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop: Sequence[Sequence[int]] = (),
        seed: int = 0,
        samples_per_prompt: int = 1,
        keys: Sequence[int | str] | None = None,
        **local: Any,  # ignored: the server caches prefixes, and stops at the block's end
    ) -> list[Completion]:
        """From the weights that were pushed last. EngineLost if the server does not come back."""
        self._lost.clear()
        common = dict(
            n=samples_per_prompt,
            temperature=temperature,
            return_token_ids=True,
            logprobs=0,
            ignore_eos=True,  # the ends of a turn travel as stop_token_ids
        )

        def completions(prompt: Sequence[int], key: int | str) -> list[Completion]:
            room = min(self.shape.block_size - len(prompt), max_new_tokens)
            if room < 1:
                return [Completion([], [], "context")] * samples_per_prompt
            body = (
                common
                | self._draws(stop, top_k, seed, key)
                | {"prompt": list(prompt), "max_tokens": room}
            )
            choices = self._retried(lambda: self._choices(body))
            return [self._completion(choice, prompt, max_new_tokens) for choice in choices]

        names = range(len(prompts)) if keys is None else keys
        with ThreadPoolExecutor(PARALLEL) as pool:
            requests = [
                pool.submit(completions, prompt, key)
                for prompt, key in zip(prompts, names, strict=True)
            ]
            try:
                return [completion for request in requests for completion in request.result()]
            except BaseException:  # also an interrupt must not wait for the other requests
                # the other threads must not retry for --engine-patience-s after one has failed
                self._lost.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def metrics(self) -> dict[str, float]:
        row = dict(push_s=self.pushed_s, engine_retries=float(self.retries))
        self.pushed_s = 0.0
        self.retries = 0
        return row

    # ---- requests

    def _draws(
        self,
        stop: Sequence[Sequence[int]],
        top_k: int | None,
        seed: int,
        key: int | str,
    ) -> dict[str, Any]:
        """How the server is told what to draw, and where to stop."""
        return {"stop_token_ids": [list(s) for s in stop], "top_k": top_k, "seed": seed, "key": key}

    def _load_weights(self) -> None:
        """Make the server load the weights at `self.path`."""
        try:
            answer = self.link.ask(
                "/admin/weights", {"path": self.path.relative_to(self.folder).as_posix()}
            )
        except Refused as error:
            remedy = "serve the same model with --reload-from, the --engine-dir here"
            raise Refused(f"{error}; {remedy}", error.status) from None
        if answer["version"] != self.version:
            raise self._wrong(
                f"loaded {answer['version']}, not {self.version}; "
                "its --reload-from must be --engine-dir"
            )

    def _choices(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, all sampled from the weights that were pushed last."""
        choices = self._complete(body)
        others = {str(choice.get("weights_version")) for choice in choices} - {self.version}
        # another run may have loaded its weights into this server, or it was restarted: one
        # thread reloads, and all requests are sent again
        if others:
            with self._reload_lock:  # the first of many threads that notice
                if self.link.ask("/health")["version"] != self.version:
                    self._load_weights()
            named = ", ".join(sorted(others))
            raise NoAnswer(
                f"{self.link.url} sampled from {named}, not {self.version}; "
                "does another run use it?"
            )
        return choices

    def _complete(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.model = self.model or self.link.model()
        answer = self.link.ask("/v1/completions", {"model": self.model, **body})
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def _completion(
        self,
        choice: Mapping[str, Any],
        prompt: Sequence[int],
        max_new_tokens: int,
    ) -> Completion:
        """A checked choice: training needs exactly the ids that were sampled."""
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if (
            not ids
            or not logprobs
            or len(ids) != len(logprobs)
            or not all(map(math.isfinite, logprobs))
        ):
            raise self._wrong(
                "answers without token_ids or logprobs; it must "
                "support return_token_ids and logprobs"
            )
        if list(choice.get("prompt_token_ids") or prompt) != list(prompt):
            raise self._wrong("changed prompt_token_ids; rollouts need them unchanged")
        if not 0 <= min(ids) <= max(ids) < self.shape.n_ids or len(ids) > max_new_tokens:
            limits = (
                f"the policy has ids 0..{self.shape.n_ids - 1}, "
                f"and max_new_tokens is {max_new_tokens}"
            )
            raise self._wrong(
                f"sampled ids up to {max(ids)} in {len(ids)} tokens; {limits}; serve the same model"
            )
        stop: generate.StopReason = "length" if len(ids) == max_new_tokens else "context"
        if choice.get("finish_reason") == "stop":
            stop = "stop"
        return Completion(list(ids), list(logprobs), stop)

    def _wrong(self, problem: str) -> RunError:
        return RunError(f"the server at {self.link.url} {problem}")

    def _retried(self, request: Callable[[], T]) -> T:
        """The result of `request`, retried while no server answers or it is busy."""
        began = time.monotonic()
        pause, longest = PAUSES_S
        while True:
            try:
                return request()
            except (NoAnswer, Refused) as error:
                if isinstance(error, Refused) and error.status not in self.busy:
                    raise
                if not self.retries:
                    print(
                        f"{error}; trying again for {self.cfg.engine_patience_s:.0f} s",
                        file=sys.stderr,
                    )
                self.model = ""  # a restarted server may serve it under another name
                waited = time.monotonic() - began
                if (
                    self._lost.is_set()
                    or processes.stop.is_set()
                    or waited > self.cfg.engine_patience_s
                ):
                    raise EngineLost(f"{error}; waited {waited:.0f} s for it") from None
            self.retries += 1
            time.sleep(pause)
            pause = min(2 * pause, longest)


class VLLM(Http):
    """vLLM's OpenAI server. It does not report which weights it sampled from; other weights show as
    `logprob_mismatch`."""

    busy = (*BUSY, 500)  # when its core has died

    def _draws(
        self,
        stop: Sequence[Sequence[int]],
        top_k: int | None,
        seed: int,
        key: int | str,
    ) -> dict[str, Any]:
        single = [s[0] for s in stop if len(s) == 1]
        # endings of more tokens only save time: completions are cut at stop texts
        if stop and not single:
            problem = "vLLM stops at single ids, but a turn of this model ends with several"
            raise ConfigError(f"{problem}; use --tags reserved, or --engine http")
        bias = {str(i): BANNED for i in range(self.shape.n_ids, self.shape.padded_vocab)} or None
        seed = draws.row_key(seed, key, 0) & (2**63 - 1)
        return {"stop_token_ids": single, "top_k": top_k or -1, "logit_bias": bias, "seed": seed}

    def _load_weights(self) -> None:
        # one of the names that an export takes
        dtype: Any = str(numerics.compute_dtype()).removeprefix("torch.")
        exchange.export(
            exchange.ExportConfig(
                ckpt=str(self.path),
                out=self.folder / HF,
                dtype=dtype,
                overwrite=True,
            )
        )
        self.link.ask("/collective_rpc", {"method": "reload_weights"})
        self.link.ask("/reset_prefix_cache", {})

    _choices = Http._complete  # without a check of weights_version


# ---- rollouts of a step


class RolloutSettings(Protocol):
    """What sampling reads of a loop's settings."""

    @property
    def seed(self) -> int: ...
    @property
    def chosen_tags(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def device_batch_size(self) -> int: ...
    @property
    def grad_accum(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...


def step_seed(seed: int, step: int) -> int:
    """Seed of a step's draws. New weights take `seed` and the diagnosis `seed + 1`: no two draw
    alike."""
    return seed * 1_000_003 + step + 2


class RolloutSampler:
    """Samples and scores groups of a task's problems. The seed and each group's key decide the
    draws: a resumed run and another number of ranks draw the same."""

    def __init__(
        self,
        cfg: RolloutSettings,
        engine: Engine,
        model: GPT,
        task: Task,
        problems: list[Problem],
        tok: Tokenizer,
    ) -> None:
        self.cfg = cfg
        self.engine = engine
        self.model = model
        self.task = task
        self.problems = problems
        self.tok = tok

    def __call__(
        self,
        at: int,
        n: int,
        seed: int,
        key: int = 0,
        group_size: int | None = None,
    ) -> RolloutBatch:
        """Rollouts of n problems from number `at` on, wrapping around. key: the first group's
        number within its step over all ranks. One part is judged while the next one is sampled.
        A collective."""
        cfg = self.cfg
        # problems sampled together
        part = cfg.device_batch_size if cfg.grad_accum > 1 else max(n, 1)

        def sample(numbers: range) -> RolloutBatch:
            return rollout.draw(
                policy,
                self.task,
                [self.problems[(at + i) % len(self.problems)] for i in numbers],
                self.tok,
                cfg.chosen_tags,
                group_size=group_size or cfg.group_size,
                keys=[key + i for i in numbers],
                seed=seed,
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                # under --top-k the trainer's log-probabilities are over the ids that were kept
                note_kept=cfg.top_k is not None,
                sampler=self.engine.sample,
            )

        with self.engine.policy(self.model) as policy, ThreadPoolExecutor(1, "judging") as judging:
            drawn = (
                sample(range(first, min(first + part, n))) for first in range(0, max(n, 1), part)
            )
            waiting = [judging.submit(rollout.judged, self.task, batch) for batch in drawn]
            batch = rollout.join([batch.result() for batch in waiting])
        return replace(batch, longest_row=self.longest_row)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of a training row with the longest prompt and completion. 0 on a CPU, whose
        rows need no common shape, and for episodes, whose length is not known in advance."""
        if on_cpu(hardware.device()) or episodes.has_environment(self.task):
            return 0
        prompts = (
            chat.prompt(self.task.prompt(p), self.tok, self.cfg.chosen_tags) for p in self.problems
        )
        return min(max(map(len, prompts)) - 1 + self.cfg.max_new_tokens, self.model.cfg.block_size)
