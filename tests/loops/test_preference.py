"""Preference losses by hand with the signs of their gradients, preferences as data, and the loop for every loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import assert_close_curves, resume_contract, train_one_and_two
from learning import Claim, above, below, hold, lesson
from raising import raising

from codechat import preference
from codechat.core import config
from codechat.core.errors import ConfigError, DataError, MissingFile, UserError
from codechat.models.gpt import GPT
from codechat.rl import preference_data, preference_losses, rollout
from codechat.rl.rollout import RolloutBatch
from codechat.runs import checkpoint, run
from codechat.text import tokenizer

# two pairs of three tokens: log-probabilities per token, so that sums and means are easy
CHOSEN = torch.tensor([[-0.5, -1.0, -0.5], [-0.1, -0.2, -0.3]]).sum(1)  # -2.0, -0.6
REJECTED = torch.tensor([[-1.0, -1.0, -1.0], [-0.2, -0.1, -0.0]]).sum(1)  # -3.0, -0.3
REF_CHOSEN, REF_REJECTED = torch.tensor([-2.5, -0.6]), torch.tensor([-2.5, -0.6])
THREE = torch.tensor([3, 3])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


CASES = {
    # (chosen - ref) - (rejected - ref) = 0.5 + 0.5 = 1 and 0 - 0.3 = -0.3
    "dpo": (
        (dict(ref_chosen=REF_CHOSEN, ref_rejected=REF_REJECTED, beta=0.5)),
        [-math.log(sigmoid(0.5)), -math.log(sigmoid(-0.15))],
    ),
    "ipo": ((dict(ref_chosen=REF_CHOSEN, ref_rejected=REF_REJECTED, beta=0.25)), [(1 - 2) ** 2, (-0.3 - 2) ** 2]),
    "cpo": (dict(beta=0.5), [-math.log(sigmoid(0.5)), -math.log(sigmoid(-0.15))]),
    "simpo": (dict(beta=3.0, margin=0.5), [-math.log(sigmoid(1.0 - 0.5)), -math.log(sigmoid(-0.3 - 0.5))]),
    "orpo": (
        dict(beta=0.2),
        [
            -0.2 * math.log(sigmoid(log_odds(-2 / 3) - log_odds(-1.0))),
            -0.2 * math.log(sigmoid(log_odds(-0.2) - log_odds(-0.1))),
        ],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_pair_losses_by_hand_and_the_signs_of_their_gradients(kind: str) -> None:
    settings, expected = CASES[kind]
    chosen, rejected = leaf(CHOSEN), leaf(REJECTED)
    judged = preference_losses.pair_loss(
        kind, chosen, rejected, chosen_lengths=THREE, rejected_lengths=THREE, **settings
    )
    assert judged.losses.tolist() == pytest.approx(expected, rel=1e-5)
    judged.losses.sum().backward()
    assert (chosen.grad < 0).all() and (
        rejected.grad > 0
    ).all()  # a step raises what was preferred and lowers what was not
    assert not judged.chosen_rewards.requires_grad and not judged.rejected_rewards.requires_grad
    assert (judged.chosen_rewards > judged.rejected_rewards).tolist() == [True, False]


@pytest.mark.parametrize("kind", CASES)
def test_the_sft_term_adds_the_mean_loss_of_what_was_preferred(kind: str) -> None:
    settings, expected = CASES[kind]
    judged = preference_losses.pair_loss(
        kind, CHOSEN, REJECTED, chosen_lengths=THREE, rejected_lengths=THREE, sft_coef=0.5, **settings
    )
    assert judged.losses.tolist() == pytest.approx([expected[0] + 0.5 * 2 / 3, expected[1] + 0.5 * 0.2], rel=1e-5)


def test_dpo_at_the_reference_is_log_two_and_ipo_its_target_squared() -> None:
    assert preference_losses.dpo_loss(CHOSEN, REJECTED, CHOSEN, REJECTED, 0.3).losses.tolist() == pytest.approx(
        [math.log(2)] * 2
    )
    assert preference_losses.ipo_loss(CHOSEN, REJECTED, CHOSEN, REJECTED, 0.25).losses.tolist() == pytest.approx(
        [4.0, 4.0]
    )


def test_ipo_stops_pulling_at_its_target_and_dpo_does_not() -> None:
    far = leaf(CHOSEN + 50)
    assert (
        preference_losses.ipo_loss(far, REJECTED, CHOSEN, REJECTED, 0.1).losses.sum().backward() is None
        and (far.grad > 0).all()
    )  # it pulls back
    far = leaf(CHOSEN + 5)
    preference_losses.dpo_loss(far, REJECTED, CHOSEN, REJECTED, 0.1).losses.sum().backward()
    assert (far.grad < 0).all()


def test_simpo_and_orpo_divide_length_out() -> None:
    for loss in (preference_losses.simpo_loss, preference_losses.orpo_loss):
        once = loss(CHOSEN, REJECTED, THREE, THREE).losses
        torch.testing.assert_close(loss(CHOSEN * 2, REJECTED * 2, THREE * 2, THREE * 2).losses, once)
    assert not torch.allclose(
        preference_losses.cpo_loss(CHOSEN * 2, REJECTED * 2).losses, preference_losses.cpo_loss(CHOSEN, REJECTED).losses
    )


def test_orpo_holds_at_probability_one() -> None:
    sure = leaf(torch.zeros(1))
    judged = preference_losses.orpo_loss(sure, torch.tensor([-30.0]), torch.tensor([3]), torch.tensor([3]))
    judged.losses.sum().backward()
    assert judged.losses.isfinite().all() and sure.grad.isfinite().all()


def test_kto_by_hand_and_the_signs_of_its_gradient() -> None:
    """r = 0.5 (liked) and -0.5 (not), z = 0.2, beta = 2: 1 - sigmoid(0.6) and 1.5 x (1 - sigmoid(1.4))."""
    logprobs = leaf(torch.tensor([-2.0, -3.0]))
    losses, reward = preference_losses.kto_loss(
        logprobs, torch.tensor([-2.5, -2.5]), torch.tensor([True, False]), 0.2, 2.0, disliked_weight=1.5
    )
    assert losses.tolist() == pytest.approx([1 - sigmoid(0.6), 1.5 * (1 - sigmoid(1.4))], rel=1e-6)
    assert reward.tolist() == pytest.approx([1.0, -1.0])
    losses.sum().backward()
    assert logprobs.grad[0] < 0 < logprobs.grad[1]
    assert (
        preference_losses.kto_reference_point(-3.0, 2) == 0.0 and preference_losses.kto_reference_point(3.0, 2) == 1.5
    )
    at_reference, _ = preference_losses.kto_loss(torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), 0.0)
    assert at_reference.tolist() == pytest.approx([0.5, 0.5])


def test_a_loss_without_its_reference_and_an_unknown_one_are_refused() -> None:
    lengths = dict(chosen_lengths=THREE, rejected_lengths=THREE, beta=0.1)
    with raising(ConfigError, "dpo", "reference"):
        preference_losses.pair_loss("dpo", CHOSEN, REJECTED, **lengths)
    with raising(ConfigError, "'dop'", *CASES):
        preference_losses.pair_loss("dop", CHOSEN, REJECTED, **lengths)  # type: ignore[arg-type]


# ---------------------------------------------------------------- data


PAIRS = [{"prompt": f"say {i % 3}", "chosen": "yes" * (1 + i % 2), "rejected": "no" * (1 + i % 3)} for i in range(12)]
SINGLES = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


def write(home: Path, rows: list[dict], split: str = "train") -> str:
    folder = home / f"prefs{len(rows)}"
    folder.mkdir(exist_ok=True)
    (folder / f"preferences.{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def write_held_out(folder: str, rows: list[dict]) -> None:
    (Path(folder) / "preferences.select.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def read(folder: str, split: str = "train") -> Any:
    return preference_data.read_preferences(folder, split, tokenizer.load("bytes"), "reserved", 64)


def test_pairs_are_groups_of_two_and_hub_messages_read_the_same(home: Path) -> None:
    batch = read(write(home, PAIRS))
    assert batch.group_size == 2 and batch.rewards.tolist() == [[1.0, 0.0]] * 12
    hub = [
        {
            "prompt": r["prompt"],
            **{
                side: [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r[side]}]
                for side in ("chosen", "rejected")
            },
        }
        for r in PAIRS[:5]
    ]
    again = read(write(home, hub))
    assert again.prompts == batch.prompts[:5] and again.completions == batch.completions[:10]
    singles = read(write(home, SINGLES))
    assert singles.group_size == 1 and singles.rewards[:, 0].tolist() == [1.0, 0.0] * 12
    assert singles.completions == batch.completions


@pytest.mark.parametrize(
    "rows, named",
    [
        ([{"prompt": "a", "chosen": "b"}], ("jsonl:1", "'chosen', 'prompt'")),
        ([PAIRS[0], {"prompt": "a", "chosen": "b", "rejected": "b"}], ("jsonl:2", "chosen", "rejected")),
        ([PAIRS[0], SINGLES[0]], ("jsonl:2", "completion")),
        ([{"prompt": "a" * 70, "chosen": "b", "rejected": "c"}], ("block_size", 64)),
        ([{"prompt": 3, "chosen": "b", "rejected": "c"}], ("prompt", "int")),
        ([{"prompt": "a", "completion": "b", "label": "good"}], ("label", "true", "false")),
        ([{"chosen": [{"role": "user", "content": "x"}], "rejected": "c"}], ("jsonl:1", "assistant")),
    ],
)
def test_rows_that_cannot_be_preferences_are_named(rows: list[dict], named: tuple, home: Path) -> None:
    with raising(DataError, *named):
        read(write(home, rows))


def test_missing_preferences_say_what_the_file_holds(home: Path) -> None:
    with raising(MissingFile, "preferences.train.jsonl", "prompt", "chosen", "rejected"):
        read(str(home))


def test_kto_mismatches_take_the_next_prompts_completions(home: Path) -> None:
    batch = read(write(home, PAIRS))
    other = preference_data.mismatched(batch, 64)
    assert [c.ids for c in other.completions] == [
        c.ids for c in batch.completions[2:] + batch.completions[:2]
    ] and other.prompts == batch.prompts
    tight = preference_data.mismatched(batch, len(batch.prompts[0]) + 1)
    assert all(len(c.ids) <= 1 for c in tight.completions)


# ---------------------------------------------------------------- the loop


def settings(folder: str | None = None, **changes: object) -> Any:
    where = dict(data_dir=folder, task=None) if folder else {}
    return config.resolve(
        preference.PreferenceConfig,
        "toy",
        overrides=dict(max_steps=8, save_every=0, device_batch_size=4) | where | changes,
        presets=preference.RUN_PRESETS,
    )


LOSSES = ("dpo", "ipo", "kto", "cpo", "orpo", "simpo")


@lesson(*LOSSES)
def widen_the_margin(loss: str, home: Path, seed: int) -> list[Claim]:
    write(home, PAIRS, "select")
    found = preference.train(
        settings(write(home, PAIRS), run_name=loss, loss=loss, max_steps=16, eval_every=16, seed=seed)
    )
    frame, evals = found.metrics().sort_values("step"), found.evals()
    losses, margins, held, held_margins = (
        f[name]
        for f, name in (
            (frame, "preference_loss"),
            (frame, "preference_margin"),
            (evals, "heldout_preference_loss"),
            (evals, "heldout_preference_margin"),
        )
    )
    # the held-out pairs are the training pairs here
    return [
        below("change of the loss", losses.iloc[-1] - losses.iloc[0], 0),
        above("change of the margin", margins.iloc[-4:].mean() - margins.iloc[0], 0),
        below("change of the held-out loss", held.iloc[-1] - held.iloc[0], 0),
        above("change of the held-out margin", held_margins.iloc[-1] - held_margins.iloc[0], 0),
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_widens_the_margin_it_trains_on(loss: str, home: Path) -> None:
    hold(widen_the_margin(loss, home, seed=0))
    frame = run.Run.open(loss).metrics().sort_values("step")
    if loss in ("dpo", "kto"):
        assert frame["preference_loss"].iloc[0] == pytest.approx(math.log(2) if loss == "dpo" else 0.5, abs=1e-5)


@lesson()
def kto_on_singles(home: Path, seed: int) -> list[Claim]:
    found = preference.train(settings(write(home, SINGLES), run_name="singles", loss="kto", max_steps=16, seed=seed))
    return [above("last margin", found.metrics()["preference_margin"].iloc[-1], 0.1)]


def test_kto_learns_from_single_completions_and_pairs_need_pairs(home: Path) -> None:
    hold(kto_on_singles(home, seed=0))
    with raising(ConfigError, "dpo", "--loss kto"):
        preference.train(settings(write(home, SINGLES), run_name="refused"))
    assert not run.exists("refused")


def test_held_out_singles_are_averaged_as_the_same_pairs_are(home: Path) -> None:
    """Whatever form the training file has: each label's rewards over its own held-out completions."""
    folder, found = write(home, PAIRS), []
    for name, rows in (("pairs", PAIRS), ("singles", SINGLES)):
        write_held_out(folder, rows)
        how = dict(run_name=name, loss="kto", lr=1e-2, max_steps=2, eval_every=0, eval_examples=24)
        found.append(preference.train(settings(folder, **how)).evals().iloc[-1])
    for name in ("heldout_chosen_reward", "heldout_rejected_reward", "heldout_preference_margin"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3) and abs(found[0][name]) > 1e-4


def test_held_out_preferences_must_be_pairs_where_the_loss_is_of_pairs(home: Path) -> None:
    folder = write(home, PAIRS)
    write_held_out(folder, SINGLES)
    with raising(ConfigError, "dpo", "preferences.select.jsonl", "--loss kto"):
        preference.train(settings(folder, run_name="refused"))
    assert not run.exists("refused")


def test_accumulation_equals_one_large_batch(home: Path) -> None:
    folder = write(home, PAIRS)
    one = preference.train(settings(folder, run_name="one", device_batch_size=4, max_steps=3))
    four = preference.train(settings(folder, run_name="four", device_batch_size=1, grad_accum=4, max_steps=3))
    assert_close_curves(one, four, "preference_loss", "preference_margin", "grad_norm")


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_rows_of_one_shape_learn_alike(loss: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose blocks are compiled: every pass, with gradients or without, has the shape that the longest pairs need."""
    folder, passes = write(home, PAIRS), []
    own = GPT.token_logprobs
    monkeypatch.setattr(
        GPT, "token_logprobs", lambda self, *a, **k: passes.append(tuple(a[0].shape)) or own(self, *a, **k)
    )
    how = dict(loss=loss, device_batch_size=4, max_steps=3, row_tokens=32)
    plain = preference.train(settings(folder, run_name="plain", **how))
    assert len(set(passes)) > 2
    passes.clear()

    def one_shape(batch: RolloutBatch, row_tokens: int, rows: int, device: Any) -> dict[str, Any]:
        return dict(row_tokens=max(row_tokens, batch.longest_row), rows=rows, fixed=True)

    monkeypatch.setattr(rollout, "row_shapes", one_shape)
    fixed = preference.train(settings(folder, run_name="fixed", **how))
    assert_close_curves(plain, fixed, "preference_loss", "preference_margin", "grad_norm")
    assert len(set(passes)) == 1 and 1 < passes[0][0] <= 4 and len(passes) >= 6


def test_more_rows_than_the_longest_pairs_need_are_several_passes_of_the_same_sums(home: Path) -> None:
    """First-fit may need a row more for shorter pairs; the sums come back in the order of the completions."""
    cfg, pairs = settings(write(home, PAIRS), row_tokens=32), read(write(home, PAIRS))
    judge = preference.PreferenceLoss(cfg.resolved(), GPT(replace(cfg.model, vocab_size=257)), pairs)
    part, found = pairs.take([5, 2, 7, 0]), []
    for judge.rows in (1 << 30, 1):
        judge.model.zero_grad()
        summed = judge.summed(part)
        (summed * torch.arange(8.0).view(4, 2)).sum().backward()
        found.append((summed.detach(), judge.model.wte.weight.grad.clone()))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole)
    assert len(set(found[0][0].flatten().tolist())) > 4


def test_pairs_of_rollouts_and_a_resume_bitwise(home: Path) -> None:
    """--task alone: pairs are the best and worst of groups sampled from the policy; a resume samples the same ones."""
    whole, _ = resume_contract(preference.train, settings(sample_groups=8, max_steps=6, save_every=3, loss="kto"), 3)
    assert "reward_mean" in whole.evals()


def test_its_lineage_says_where_pairs_and_problems_came_from(home: Path) -> None:
    found = preference.train(settings(write(home, PAIRS), run_name="named", max_steps=1, seed=3, eval_every=0))
    (entry,) = checkpoint.load(found.path).meta["lineage"]
    where = dict(data_dir=write(home, PAIRS), task=None, task_data=None)
    assert entry.items() >= dict(run="named", kind="preference", seed=3, **where).items()


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(task=None), ("--data-dir", "--task")),
        (dict(beta=0.0), ("beta", 0.0)),
        (dict(group_size=1), ("group_size", 1)),
        (dict(grad_accum=0), ("grad_accum", 0)),
    ],
)
def test_settings_that_cannot_be_are_rejected(changes: dict, named: tuple) -> None:
    with raising(UserError, *named):
        settings(**changes)


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(home: Path) -> None:
    write(home, PAIRS, "select")
    cfg = settings(write(home, PAIRS), run_name="kto", loss="kto", max_steps=3)
    ((one, two),) = train_one_and_two(home, cfg)
    columns = ("preference_loss", "preference_margin", "preference_accuracy", "chosen_logprob", "grad_norm")
    assert_close_curves(one, two, *columns)
