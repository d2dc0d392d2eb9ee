"""Who samples the rollouts of a training run: this process, or a server that gets the weights after each step.

    local   `generate.sample` on the policy itself
    http    `codechat serve`; its draws are those of `local`, since seed and keys travel with each request
    vllm    vLLM's OpenAI server on GPUs; it draws by its own generator, so the curve is another of the same distribution

    codechat serve --ckpt nano/sft --reload-from runs/weights
    codechat grpo --init-from nano/sft --engine http --engine-url http://127.0.0.1:8000 --engine-dir runs/weights ...

    codechat export --ckpt nano/sft --out runs/weights/hf         vLLM reads the directory again after each step; the endpoint for that needs DEV_MODE
    VLLM_SERVER_DEV_MODE=1 vllm serve runs/weights/hf --generation-config vllm --logprobs-mode processed_logprobs
    codechat grpo --init-from nano/sft --engine vllm --engine-url http://127.0.0.1:8000 --engine-dir runs/weights ...

The weights go through --engine-dir, which trainer and server both see: a checkpoint (of vLLM: an export made from it) that is whole or not
there. Our server says of every completion which weights drew it; one of others, from a server that was started anew, is not used: the server
gets the weights again and is asked again. While nobody answers, what a step has got is kept and the rest is asked for again, for
--engine-patience-s; then EngineLost, at which a loop saves and stops.

DEV_MODE lets whoever reaches vLLM run its methods: keep such a server on a trusted network. A run that is resumed begins with fresh weights,
so with --max-off-policy above 0 its curve is not that of the uninterrupted one.

Left out: weights over the network (NCCL), sampling while the step before is still being learned.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from codechat.core.errors import ConfigError, RunError, UserError
from codechat.core.http_client import Link, NoAnswer, Refused, check_url
from codechat.distributed import dist, sharding
from codechat.models import export, generate, lora
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.checkpoint import fingerprint
from codechat.text.tokenizer import Tokenizer

Kind = Literal["local", "http", "vllm"]
BUSY = (408, 429, 502, 503, 504)  # statuses after which the same request may well be answered
PARALLEL = 32  # requests on their way at a time
HF = "hf"  # name of the export below --engine-dir that vLLM serves
NEVER = -100.0  # logit bias, vLLM's least
PAUSES_S = (0.05, 0.5)  # before asking again: the first time, and at most

T = TypeVar("T")


class EngineLost(RunError):
    """The server did not come back in time. Nothing of the run is lost: it can be resumed at this step."""


class EngineSettings(Protocol):
    """What a loop's configuration says about its engine."""

    run_name: str
    engine: Kind
    engine_url: str
    engine_dir: Path | None
    engine_key_file: Path | None
    engine_patience_s: float
    max_off_policy: int
    importance_cap: float
    tags: str
    model: GPTConfig


def check(cfg: EngineSettings) -> None:
    """ConfigError for settings that do not go together."""
    if cfg.importance_cap and not 1 <= cfg.importance_cap < math.inf:
        raise ConfigError(
            f"importance_cap {cfg.importance_cap}; it must be 0 (no weights) or at least 1, the weight where both agree"
        )
    if cfg.max_off_policy < 0 or not cfg.engine_patience_s > 0:
        raise ConfigError(
            f"max_off_policy {cfg.max_off_policy} must not be negative, engine_patience_s {cfg.engine_patience_s} must be above 0"
        )
    if cfg.engine == "local":
        if cfg.max_off_policy:
            raise ConfigError(
                f"max_off_policy {cfg.max_off_policy}, but --engine local samples from the newest weights; set 0, or another --engine"
            )
        return
    check_url(cfg.engine_url, "--engine-url")
    if cfg.engine_dir is None:
        raise ConfigError(
            f"--engine {cfg.engine} needs --engine-dir, which the server sees too: its --reload-from, or where vLLM's {HF} lies"
        )


class Engine(Protocol):
    """Where completions come from. `sample` takes what `generate.sample` takes."""

    def policy(self, model: GPT) -> Any:
        """A context with what `sample` gets as its policy; a refusal within it on one rank leaves it on all of them. A collective, at its ends."""

    def push(self, model: GPT, step: int) -> None:
        """The policy is at `step`: let the engine have its weights, if those that it has are older than it may use. A collective."""

    def sample(self, policy: GPT, prompts: Sequence[Sequence[int]], **how: Any) -> list[generate.Completion]:
        """Completions in the order of `generate.sample`. No collective: ranks may call it unequally often."""

    def metrics(self, step: int) -> dict[str, float]:
        """What to log of the step; counts begin anew."""


def open_engine(cfg: EngineSettings, tokenizer: Tokenizer, give_up: Callable[[], bool] = lambda: False) -> Engine:
    """The engine of a run. give_up: asked while a server is waited for; true ends the waiting with EngineLost."""
    return Local() if cfg.engine == "local" else (Http if cfg.engine == "http" else VLLM)(cfg, tokenizer, give_up)


class Local:
    """This process."""

    sample = staticmethod(generate.sample)

    @contextmanager
    def policy(self, model: GPT) -> Iterator[GPT]:
        with sharding.whole(model) as policy, torch.no_grad(), dist.autocast():
            yield policy

    def push(self, model: GPT, step: int) -> None:
        pass

    def metrics(self, step: int) -> dict[str, float]:
        return {}


class Http:
    """A `codechat serve --reload-from`."""

    def __init__(self, cfg: EngineSettings, tokenizer: Tokenizer, give_up: Callable[[], bool]) -> None:
        assert cfg.engine_dir is not None
        self.link = Link(cfg.engine_url, cfg.engine_key_file, flag="--engine-url")
        self.folder, self.run_name, self.shape = Path(cfg.engine_dir), cfg.run_name, cfg.model
        self.meta = {"tokenizer": tokenizer.to_dict(), "tags": cfg.tags}
        self.patience_s, self.max_off_policy, self.give_up = cfg.engine_patience_s, cfg.max_off_policy, give_up
        self.step: int | None = None  # of the weights that the server is to have
        self.version, self.path = "", Path()
        self.model = ""  # the server's name of it
        self.pushed_s, self.retries = 0.0, 0
        self._handing = threading.Lock()
        self._lost = threading.Event()  # one request was given up: the others need not wait

    @contextmanager
    def policy(self, model: GPT) -> Iterator[GPT]:
        with _together():
            yield model

    def push(self, model: GPT, step: int) -> None:
        if self.step is not None and step - self.step <= self.max_off_policy:
            return
        began = time.perf_counter()
        self.path = checkpoint.save(self.folder / self.run_name, step, model=lora.merged(model), meta=self.meta)
        self.step, self.version = step, fingerprint(checkpoint.read_meta(self.path))
        self._lost.clear()
        with _together():
            if dist.is_main():
                self._patiently(self._hand_over)
        self.pushed_s += time.perf_counter() - began

    def sample(
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
        prefix_tokens: Sequence[int] | None = None,
        on_overflow: generate.OnOverflow = "stop",
    ) -> list[generate.Completion]:
        """As `generate.sample`, from the weights that were pushed last; `policy` is not used, nor is prefix_tokens: the server sees for itself.

        EngineLost where the server stays away."""
        self._lost.clear()
        common = {
            "n": samples_per_prompt,
            "temperature": temperature,
            "return_token_ids": True,
            "logprobs": 0,
            "ignore_eos": True,
            **self._how(stop, top_k),
        }

        def one(prompt: Sequence[int], key: int | str) -> list[generate.Completion]:
            room = self.shape.block_size - len(prompt)
            if room < max_new_tokens and on_overflow == "raise":
                raise ConfigError(
                    f"a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the block of {self.shape.block_size}"
                )
            if room < 1:
                return [generate.Completion([], [], "context")] * samples_per_prompt
            body = {**common, "prompt": list(prompt), "max_tokens": min(room, max_new_tokens), **self._draws(seed, key)}
            return [
                self._completion(choice, prompt, max_new_tokens) for choice in self._patiently(lambda: self._ask(body))
            ]

        names = range(len(prompts)) if keys is None else keys
        with ThreadPoolExecutor(PARALLEL) as pool:
            asked = [pool.submit(one, prompt, key) for prompt, key in zip(prompts, names, strict=True)]
            try:
                return [completion for answer in asked for completion in answer.result()]
            except BaseException:  # an interrupt too must not wait for the rest; raised again
                self._lost.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def metrics(self, step: int) -> dict[str, float]:
        found = {
            "off_policy_steps": float(step - (self.step or 0)),
            "push_s": self.pushed_s,
            "engine_retries": float(self.retries),
        }
        self.pushed_s, self.retries = 0.0, 0
        return found

    # ---- the wire

    def _how(self, stop: Sequence[Sequence[int]], top_k: int | None) -> dict[str, Any]:
        return {"stop_token_ids": [list(s) for s in stop], "top_k": top_k}

    def _draws(self, seed: int, key: int | str) -> dict[str, Any]:
        return {"seed": seed, "keys": [key]}

    def _hand_over(self) -> None:
        """Have the server load the weights at `self.path`."""
        try:
            answer = self.link.ask("/admin/weights", {"path": self.path.relative_to(self.folder).as_posix()})
        except Refused as error:
            if error.status in BUSY:
                raise
            raise Refused(
                f"{error}; it must serve the same model with --reload-from, the --engine-dir here", error.status
            ) from None
        if answer["version"] != self.version:
            raise RunError(
                f"the server at {self.link.url} loaded {answer['version']}, not {self.version}; its --reload-from must be --engine-dir"
            )

    def _ask(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, all drawn from the weights that were pushed last."""
        choices = self._choices(body)
        if strange := {str(c.get("weights_version")) for c in choices} - {self.version}:
            with self._handing:  # the first of many that notice
                if self.link.ask("/health")["version"] != self.version:
                    self._hand_over()
            raise NoAnswer(
                f"the server at {self.link.url} drew from {', '.join(sorted(strange))}, not {self.version}; does another run use it?"
            )
        return choices

    def _choices(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.model = self.model or self.link.model()
        return sorted(
            self.link.ask("/v1/completions", {"model": self.model, **body})["choices"],
            key=lambda choice: choice["index"],
        )

    def _completion(self, choice: Mapping[str, Any], prompt: Sequence[int], max_new_tokens: int) -> generate.Completion:
        """A choice of the answer, checked: what is trained on is exactly what was sampled."""
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logprobs or len(ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
            raise RunError(
                f"the server at {self.link.url} answers without ids or log-probabilities; it must know return_token_ids and logprobs"
            )
        if list(choice.get("prompt_token_ids") or prompt) != list(prompt):
            raise RunError(f"the server at {self.link.url} changed the prompt's ids; rollouts need them as they are")
        if not 0 <= min(ids) <= max(ids) < self.shape.owned or len(ids) > max_new_tokens:
            raise RunError(
                f"the server at {self.link.url} wrote ids up to {max(ids)} in {len(ids)} tokens; the policy knows "
                f"0..{self.shape.owned - 1}, at most {max_new_tokens} tokens were asked for; serve the same model"
            )
        stop = (
            "stop" if choice.get("finish_reason") == "stop" else "length" if len(ids) == max_new_tokens else "context"
        )
        return generate.Completion(list(ids), list(logprobs), stop)

    # ---- patience

    def _patiently(self, act: Callable[[], T]) -> T:
        """What `act` returns; tried again while nobody answers or the server is busy."""
        began, (pause, longest) = time.monotonic(), PAUSES_S
        while True:
            try:
                return act()
            except (NoAnswer, Refused) as error:
                if isinstance(error, Refused) and error.status not in BUSY:
                    raise
                self.model = ""  # who comes back may have another name for it
                waited = time.monotonic() - began
                if self._lost.is_set() or self.give_up() or waited > self.patience_s:
                    raise EngineLost(f"{error}; waited {waited:.0f} s for it") from None
            self.retries += 1
            time.sleep(pause)
            pause = min(2 * pause, longest)


@contextmanager
def _together() -> Iterator[None]:
    """A refusal on one rank is raised at the end of the block on all of them. A collective, there."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = error
    dist.raise_together(problem)


class VLLM(Http):
    """vLLM's OpenAI server. It does not say which weights answered: `logprob_mismatch` shows others."""

    def _how(self, stop: Sequence[Sequence[int]], top_k: int | None) -> dict[str, Any]:
        if any(len(s) != 1 for s in stop):
            raise ConfigError(
                "vLLM ends completions at single ids, this model's turns end with several; use --tags reserved, or --engine http"
            )
        nobodys = range(self.shape.owned, self.shape.padded_vocab)  # rows of the embedding that no token has
        return {
            "stop_token_ids": [s[0] for s in stop],
            "top_k": top_k or -1,
            "logit_bias": {str(i): NEVER for i in nobodys} or None,
        }

    def _draws(self, seed: int, key: int | str) -> dict[str, Any]:
        return {"seed": generate.row_key(seed, key, 0) & (2**63 - 1)}

    def _hand_over(self) -> None:
        dtype: Any = str(dist.compute_dtype()).removeprefix("torch.")
        export.write(export.ExportConfig(ckpt=str(self.path), out=self.folder / HF, dtype=dtype, overwrite=True))
        self.link.ask("/collective_rpc", {"method": "reload_weights"})
        self.link.ask("/reset_prefix_cache", {})

    def _ask(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._choices(body)
