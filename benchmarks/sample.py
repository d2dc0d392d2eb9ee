"""Sampling: new tokens per second from random prompts of one length.

python -m benchmarks sample                       codechat beside transformers' generate and a
full forward pass per token python -m benchmarks sample --preset nano --prompts 16 --prompt-tokens
128 --max-new-tokens 64 python -m benchmarks sample --ckpt smollm2 --prompts 4 --vs arcee
beside transformers on the same weights
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.settings import SampleBench
from codechat.distributed import hardware, numerics
from codechat.models import generate, loading
from codechat.models.gpt import GPT


def contestants(cfg: SampleBench) -> list[measure.Contestant]:
    """codechat first, then the peers."""
    device, prompts, units = hardware.device(), _prompts(cfg), cfg.prompts * cfg.max_new_tokens
    model = _model(cfg)

    def ours() -> None:
        with numerics.autocast(device):
            generate.sample(
                model,
                prompts.tolist(),
                max_new_tokens=cfg.max_new_tokens,
                top_k=cfg.top_k,
                seed=0,
            )

    made = [measure.Contestant("codechat", ours, units)]
    if "arcee" in cfg.vs:
        peer = "transformers" if cfg.ckpt else "arcee"
        made.append(
            measure.Contestant(f"{peer}, generate", _huggingface(cfg, prompts.to(device)), units)
        )
    if "no-cache" in cfg.vs:
        made.append(
            measure.Contestant(
                "full forward per token", _without_cache(cfg, model, prompts.to(device)), units
            )
        )
    return made


def _model(cfg: SampleBench) -> GPT:
    model = loading.load_model(cfg.ckpt).model if cfg.ckpt else GPT(cfg.model)
    return model.to(hardware.device()).eval()


def _prompts(cfg: SampleBench) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(cfg.model.vocab_size, (cfg.prompts, cfg.prompt_tokens), generator=rng)


def _huggingface(cfg: SampleBench, prompts: torch.Tensor) -> Any:
    """transformers' generate with weights in the compute dtype, its fastest setting."""
    model = peers.exported(cfg.ckpt)[0] if cfg.ckpt else peers.huggingface("arcee", cfg.model)
    model = model.to(prompts.device, numerics.compute_dtype()).eval()
    model.generation_config.eos_token_id = None
    length = dict(
        max_new_tokens=cfg.max_new_tokens, min_new_tokens=cfg.max_new_tokens, pad_token_id=0
    )
    how = dict(do_sample=True, top_k=cfg.top_k or 0, **length)
    mask = torch.ones_like(prompts)

    def run() -> None:
        with torch.no_grad():
            out = model.generate(prompts, attention_mask=mask, **how)
        assert out.shape[1] == cfg.prompt_tokens + cfg.max_new_tokens

    return run


@torch.no_grad()
def _without_cache(cfg: SampleBench, model: GPT, prompts: torch.Tensor) -> Any:
    """A forward pass over the whole sequence per token; only the last position goes through the
    head."""

    def run() -> None:
        ids = prompts
        with torch.no_grad(), numerics.autocast(prompts.device):
            for _ in range(cfg.max_new_tokens):
                logits = torch.nn.functional.linear(model.hidden(ids)[:, -1], model.head_weight())
                logits = logits[:, : cfg.model.n_ids].float()
                if cfg.top_k:
                    least = logits.topk(cfg.top_k)[0][:, -1:]
                    logits = logits.masked_fill(logits < least, -torch.inf)
                ids = torch.cat((ids, logits.softmax(-1).multinomial(1)), 1)

    return run


def bench(cfg: SampleBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    cfg = replace(cfg, model=_model(cfg).cfg)
    timings = measure.race(contestants(cfg), cfg.rounds)
    shape = (
        f"{cfg.ckpt and cfg.ckpt + ', '}{cfg.model.depth} x {cfg.model.n_embd}, "
        f"vocabulary {cfg.model.vocab_size:,}"
    )
    tokens = (
        f"{cfg.prompts} prompts of {cfg.prompt_tokens} tokens, {cfg.max_new_tokens} "
        f"new, top-k {cfg.top_k}"
    )
    title = f"sampling: {shape}, {tokens}, {measure.dtype()}"
    measure.show(title, "tokens", timings)
    return {"title": title, "timings": measure.rows(timings)}
