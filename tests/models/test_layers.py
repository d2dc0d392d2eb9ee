"""RMSNorm and squared ReLU: the slopes written out for a CPU are those of their formulas."""

from __future__ import annotations

import pytest
import torch
from on_gpu import as_on_a_gpu

from codechat.models import gpt


@pytest.mark.parametrize("weight", [(24,), (3, 1, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_slopes_of_its_formula(weight: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 3, 7, 24, generator=rng) * torch.logspace(-3, 3, 7)[:, None]).to(dtype).requires_grad_()
    w = torch.randn(weight, generator=rng).requires_grad_()
    up = torch.randn(x.shape, generator=rng).to(dtype)
    found = gpt.rms_norm(x, w, 1e-5)
    with as_on_a_gpu():
        want = gpt.rms_norm(x, w, 1e-5)
    assert found.grad_fn is not None and found.dtype == dtype and torch.equal(found, want)
    (dx, dw), (dx_, dw_) = (torch.autograd.grad(y, (x, w), up) for y in (found, want))
    near = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-3)
    scale = dx_.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(dx / scale, dx_ / scale, **near)
    torch.testing.assert_close(dw, dw_, **near)


def test_rms_norm_of_frozen_weights_and_of_weights_in_bfloat16_as_shards_are_gathered() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    frozen, w = torch.ones(8), torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    gpt.rms_norm(x, frozen, 1e-5).sum().backward()
    assert frozen.grad is None and (x.grad * x).sum(-1).abs().max() < 1e-4, "a norm does not see how long x is"
    gpt.rms_norm(x, w, 1e-5).square().sum().backward()
    assert w.grad.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and w.grad.abs().min() > 0


def test_squared_relu_is_bit_for_bit_its_formula() -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).requires_grad_()
    up = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = gpt.squared_relu(x)
    with as_on_a_gpu():
        want = gpt.squared_relu(x)
    assert torch.equal(found, want) and torch.equal(found, x.clamp(min=0) ** 2)
    assert torch.equal(*(torch.autograd.grad(y, x, up)[0] for y in (found, want)))
