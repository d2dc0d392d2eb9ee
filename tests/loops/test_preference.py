"""Preferences as data, and what only their loop does. Losses by hand are in tests/rl/test_losses, what all loops keep in test_contracts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import PAIRS, SINGLES, assert_close_curves, small, train, write_rows

from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.rl.rollout import RolloutBatch
from codechat.text import tokenizer
from codechat.training import preferences


def read(home: Path, rows: list[dict], block: int = 64) -> Any:
    folder = write_rows(home / "read" / "preferences.train.jsonl", rows)
    return preferences.read_preferences(folder, "train", tokenizer.load("bytes"), "reserved", block)


def test_kto_mismatches_take_the_next_prompts_completions(home: Path) -> None:
    batch = read(home, PAIRS)
    other = preferences.mismatched(batch, 64)
    shifted = batch.completions[2:] + batch.completions[:2]
    assert [c.ids for c in other.completions] == [c.ids for c in shifted] and other.prompts == batch.prompts
    tight = preferences.mismatched(batch, len(batch.prompts[0]) + 1)
    assert all(len(c.ids) <= 1 for c in tight.completions)


def test_held_out_singles_are_averaged_as_the_same_pairs_are(home: Path) -> None:
    """Whatever form the training file has: each label's rewards over its own held-out completions."""
    found = []
    for name, rows in (("pairs", PAIRS), ("singles", SINGLES)):
        cfg = small("preference", home, run_name=name, loss="kto", lr=1e-2, max_steps=2, eval_every=0, eval_examples=24)
        write_rows(home / "pairs" / "preferences.select.jsonl", rows)
        found.append(train(cfg).evals().iloc[-1])
    for name in ("heldout_chosen_reward", "heldout_rejected_reward", "heldout_preference_margin"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3) and abs(found[0][name]) > 1e-4


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_rows_of_one_shape_learn_alike(loss: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose blocks are compiled: every pass, with gradients or without, has the shape that the longest pairs need."""
    passes, own = [], GPT.token_logprobs

    def counted(model: GPT, ids: torch.Tensor, *a: Any, **k: Any) -> Any:
        passes.append(tuple(ids.shape))
        return own(model, ids, *a, **k)

    monkeypatch.setattr(GPT, "token_logprobs", counted)
    how = dict(loss=loss, max_steps=3, row_tokens=32, eval_every=0)
    plain = train(small("preference", home, run_name="plain", **how))
    assert len(set(passes)) > 2
    passes.clear()

    def one_shape(batch: RolloutBatch, row_tokens: int, rows: int, device: Any) -> dict[str, Any]:
        return dict(row_tokens=max(row_tokens, batch.longest_row), rows=rows, fixed=True)

    monkeypatch.setattr(rollout, "row_shapes", one_shape)
    fixed = train(small("preference", home, run_name="fixed", **how))
    assert_close_curves(plain, fixed, "preference_loss", "preference_margin", "grad_norm")
    assert len(set(passes)) == 1 and 1 < passes[0][0] <= 4 and len(passes) >= 6
