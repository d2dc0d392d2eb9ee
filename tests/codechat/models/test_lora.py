"""LoRA: only adapters learn, merging is exact, loops resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import resume_contract, weights
from random_models import IDS, made, moved

from codechat import grpo, preference, reinforce
from codechat.core import config
from codechat.core.errors import CheckpointError, ConfigError
from codechat.formats import peft_format
from codechat.models import loading, lora
from codechat.models.config import LORA_TARGETS
from codechat.models.fast import head
from codechat.models.gpt import GPT
from codechat.runs.run import Run


def test_it_starts_from_the_model_as_it_is_and_trains_the_adapters_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        head, "_add_product", None
    )  # the slope of the head's frozen weight is not computed
    before = made()(IDS)
    model = lora.attach(made(), 3, 6.0, LORA_TARGETS)
    torch.testing.assert_close(model(IDS), before)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 5
    assert all(3 in p.shape for p in trained)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    torch.optim.SGD(trained, lr=1.0).step()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert (model(IDS) - before).abs().max() > 1e-3
    model.token_logprobs(IDS[:, :-1], IDS[:, 1:])[0].sum().backward()


def test_the_formula_and_merging_by_hand() -> None:
    """W x + (alpha / r) B A x, and the merged matrix is W + (alpha / r) B A."""
    model = moved(lora.attach(made(), 2, 8.0, ("qkv", "down")))
    layer = model.blocks[0].attn.qkv
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        layer(x), x @ layer.base.weight.T + 4.0 * (x @ layer.a.T) @ layer.b.T
    )
    plain = lora.merged(model)
    assert type(plain) is GPT
    assert plain.state_dict().keys() == made().state_dict().keys()
    torch.testing.assert_close(plain(IDS), model(IDS), atol=1e-5, rtol=1e-5)
    assert (
        plain.wte.weight.data_ptr() == model.wte.weight.data_ptr()
    )  # only the adapted matrices are copies
    assert lora.merged(plain) is plain


NOT_LORA = (dict(lora_alpha=0.0), dict(lora_targets=("q",)), dict(lora_targets=()))


def test_adapters_that_do_not_fit_raise() -> None:
    with pytest.raises(CheckpointError):
        lora.load(lora.attach(made(), 4), lora.adapters(lora.attach(made(), 2)))
    for settings in (dict(lora_rank=-1), *(dict(lora_rank=2) | more for more in NOT_LORA)):
        with pytest.raises(ConfigError):
            grpo.GRPOConfig(task="toy", **settings)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(reinforce, marks=pytest.mark.slow),
        grpo,
        pytest.param(preference, marks=pytest.mark.slow),
    ],
)
def test_a_loop_with_adapters_resumes_bitwise_and_leaves_a_plain_model(
    loop: Any, home: Path
) -> None:
    cls = {
        reinforce: reinforce.ReinforceConfig,
        grpo: grpo.GRPOConfig,
        preference: preference.PreferenceConfig,
    }[loop]
    base = dict(
        max_steps=4, save_every=2, lora_rank=2, lora_targets=("qkv", "up"), init_from="start"
    )
    base |= dict(sample_groups=8) if loop is preference else dict(diagnose_groups=0)
    first = dict(max_steps=1, diagnose_groups=0, run_name="start")
    toy = config.resolve(
        reinforce.ReinforceConfig, "toy", overrides=first, presets=reinforce.RUN_PRESETS
    )
    started = reinforce.train(toy)
    resume_contract(config.resolve(cls, "toy", overrides=base, presets=loop.RUN_PRESETS), 2)
    whole = Run.open("whole")
    a = weights(whole)
    start = weights(started)
    changed = {
        n.rpartition(".weight")[0].rpartition(".")[2] for n in a if not torch.equal(a[n], start[n])
    }
    assert changed == {"qkv", "up"}
    # the start and the adapter are the trained model
    peft_format.save(*peft_format.of_checkpoint("whole"), home / "adapter")
    again = peft_format.load(loading.load_model("start").model, home / "adapter").state_dict()
    for name, tensor in a.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=1e-5)
    with pytest.raises(CheckpointError):
        peft_format.of_checkpoint("start")
