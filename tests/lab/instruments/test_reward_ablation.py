"""Reward ablation: shapes in closed form, parts of a call, and gradients under other masks,
parsers and precision."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import reward_ablation
import torch
from random_models import randomise

from codechat.core.errors import ConfigError, MissingFile
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.rl import rollout
from codechat.rl.advantages import group_advantages
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat.text import chat, tokenizer
from codechat_lab.instruments import reward_starts
from codechat_lab.tasks.funcall import score_call

TOK = tokenizer.load("gpt2:512")
GOLD = {"name": "add", "arguments": {"a": 12, "b": 7}}
CALLS = dict(
    full=GOLD,
    partial=dict(name="add", arguments={"a": 12, "b": 8}),
    name_only=dict(name="add", arguments={}),
)
CALLS |= dict(wrong_name=GOLD | {"name": "sub"})
TEXTS = {name: chat.format_call(**call) for name, call in CALLS.items()}
TEXTS |= dict(bad_json="<functioncall> {oh", no_tag="No.")


def loaded(tags: str = "reserved") -> LoadedModel:
    shape = GPTConfig(depth=1, n_embd=32, n_head=2, block_size=256, vocab_size=TOK.n_vocab)
    return LoadedModel(randomise(GPT(shape), 0.1), TOK, tags, {"step": 1, "lineage": []}, Path("x"))


def batch_of(groups: list[list[str]], tags: str = "reserved") -> rollout.RolloutBatch:
    """Groups of the texts' names as scored rollouts of one request."""
    problem = Problem("p", [{"role": "user", "content": "Add 12 and 7."}], GOLD, "train")
    texts = [TEXTS[name] for group in groups for name in group]
    ids = [chat.completion_ids(t, TOK, tags) for t in texts]
    completions = [generate.Completion(ids=i, logprobs=[-1.0] * len(i), stop="stop") for i in ids]
    scores = [score_call(t, GOLD) for t in texts]
    n = len(groups)
    prompt = chat.prompt(problem.messages, TOK, tags)
    return rollout.RolloutBatch(
        [problem] * n, [prompt] * n, completions, texts, scores, len(groups[0])
    )


def test_shapes_in_closed_form() -> None:
    for shape, *rewards in (
        ("binary", 1, 0, 0, 0, 0, 0),
        ("fractional", 1, 0.5, 0, 0, 0, 0),
        ("tiered", 1, 0.575, 0.15, 0.15, 0.05, 0),
        ("staircase", 1, 0.775, 0.55, 0.35, 0.15, 0),
    ):
        assert [
            round(reward_starts.reshaped(score_call(t, GOLD), shape), 6) for t in TEXTS.values()
        ] == rewards


def test_a_shape_sees_variance_only_where_it_pays_differently() -> None:
    batch = batch_of([["wrong_name", "name_only"], ["no_tag", "no_tag"], ["full", "partial"]])
    rows = {r["shape"]: r for r in reward_ablation.shape_rows(batch)}
    assert {s: r["effective_groups"] for s, r in rows.items()} == dict(
        binary=1, fractional=1, tiered=1, staircase=2
    )
    assert rows["staircase"]["group_variance"] == pytest.approx((0.1**2 + 0 + 0.1125**2) / 3)
    for row in rows.values():
        pulls = [value for name, value in row.items() if name.startswith("pull/")]
        assert sum(pulls) == pytest.approx(0, abs=1e-9)
        assert sum(map(abs, pulls)) == pytest.approx(1)
    assert rows["staircase"]["pull/name_only"] > 0 > rows["staircase"]["pull/wrong_name"]
    assert rows["binary"]["pull/name_only"] == 0


@pytest.mark.parametrize("tags", ["reserved", "text"])
def test_tokens_belong_to_the_parts_of_the_call(tags: str) -> None:
    model = loaded(tags)
    ids = chat.completion_ids(TEXTS["full"], TOK, tags)
    parts = reward_ablation.parts_of(ids, model)
    spelled = dict.fromkeys(reward_ablation.PARTS, "")
    for i, part in zip(ids, parts, strict=True):
        spelled[part] += chat.decode([i], TOK)
    assert spelled["tag"].strip() == "<functioncall>"
    assert spelled["end"].strip() == "<|end|>"
    assert not spelled["prose"]
    assert spelled["name"].startswith("add")
    assert '"name"' in spelled["form"]
    assert '"a": 12, "b": 7' in spelled["arguments"]
    assert set(
        reward_ablation.parts_of(chat.completion_ids("No, not here.", TOK, tags), model)
    ) == {"prose", "end"}
    assert reward_ablation.parts_of(ids[:-1], model)[-1] != "end" or tags == "text"


def test_gradients_are_where_advantages_are_and_grow_with_them() -> None:
    model = loaded()
    batch = batch_of([["full", "no_tag"], ["partial", "partial"]])
    advantages = group_advantages(batch.rewards)
    norms = reward_ablation.token_gradients(model.model, batch, advantages)
    assert norms.shape == batch.mask().shape
    assert (norms[:2][batch.mask()[:2]] > 0).all()
    assert not norms[2:].any()
    assert not norms[~batch.mask()].any()
    torch.testing.assert_close(
        reward_ablation.token_gradients(model.model, batch, 3 * advantages), 3 * norms
    )
    assert all(p.grad is None for p in model.model.parameters())


def test_the_run_holds_all_rows_and_raises_before_writing(
    home: Path, make_run: Callable[..., Run]
) -> None:
    make_run("tiny", "gpt2:512", block_size=256)
    cfg = reward_ablation.AblationConfig(ckpt=("tiny",), problems=2, group_size=2, max_new_tokens=8)
    rows = reward_ablation.ablate_rewards(cfg).evals()
    assert (rows["what"] == "shape").sum() == 4
    assert Run.open("anatomy").status["kind"] == "anatomy"
    assert set(rows["checkpoint"]) == {"tiny"}
    with pytest.raises(MissingFile):
        reward_ablation.ablate_rewards(dataclasses.replace(cfg, run_name="other", ckpt=("nobody",)))
    with pytest.raises(ConfigError):
        reward_ablation.AblationConfig(ckpt=("tiny",), group_size=1)
    assert not (home / "runs" / "other").exists()
