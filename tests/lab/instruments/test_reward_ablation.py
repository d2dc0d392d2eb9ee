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
from codechat.text import chat, tokenizer, tool_calls
from codechat_lab.instruments import reward_starts
from codechat_lab.tasks.funcall import score_call

TOK = tokenizer.load("gpt2:512")
GOLD = {"name": "add", "arguments": {"a": 12, "b": 7}}
CALLS = {
    "full": GOLD,
    "partial": {"name": "add", "arguments": {"a": 12, "b": 8}},
    "name_only": {"name": "add", "arguments": {}},
    "wrong_name": GOLD | {"name": "sub"},
}
TEXTS = {
    name: tool_calls.format_call(call["name"], call["arguments"]) for name, call in CALLS.items()
} | {"bad_json": "<functioncall> {oh", "no_tag": "No."}


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


@pytest.mark.parametrize(
    ("shape", "rewards"),
    [
        ("binary", [1, 0, 0, 0, 0, 0]),
        ("fractional", [1, 0.5, 0, 0, 0, 0]),
        ("tiered", [1, 0.575, 0.15, 0.15, 0.05, 0]),
        ("staircase", [1, 0.775, 0.55, 0.35, 0.15, 0]),
    ],
)
def test_shapes_in_closed_form(shape: str, rewards: list[float]) -> None:
    scores = [score_call(text, GOLD) for text in TEXTS.values()]
    assert [round(reward_starts.reshaped(score, shape), 6) for score in scores] == rewards


@pytest.fixture
def by_shape() -> dict[str, dict]:
    """Rows of three groups: two wrong answers of different rungs, two equal ones, a right one."""
    batch = batch_of([["wrong_name", "name_only"], ["no_tag", "no_tag"], ["full", "partial"]])
    return {row["shape"]: row for row in reward_ablation.shape_rows(batch)}


def test_a_shape_sees_variance_only_where_it_pays_differently(by_shape: dict[str, dict]) -> None:
    groups = {shape: row["effective_groups"] for shape, row in by_shape.items()}
    assert groups == {"binary": 1, "fractional": 1, "tiered": 1, "staircase": 2}
    variance = by_shape["staircase"]["group_variance"]
    assert variance == pytest.approx((0.1**2 + 0 + 0.1125**2) / 3)


def test_pulls_add_up_to_nothing(by_shape: dict[str, dict]) -> None:
    for row in by_shape.values():
        pulls = [value for name, value in row.items() if name.startswith("pull/")]
        assert sum(pulls) == pytest.approx(0, abs=1e-9)
        assert sum(map(abs, pulls)) == pytest.approx(1)


def test_pulls_follow_the_rungs_that_a_shape_pays(by_shape: dict[str, dict]) -> None:
    stairs = by_shape["staircase"]
    assert stairs["pull/name_only"] > 0 > stairs["pull/wrong_name"]
    assert by_shape["binary"]["pull/name_only"] == 0


TAGS = pytest.mark.parametrize("tags", ["reserved", "text"])


@TAGS
def test_tokens_belong_to_the_parts_of_the_call(tags: str) -> None:
    ids = chat.completion_ids(TEXTS["full"], TOK, tags)
    parts = reward_ablation.parts_of(ids, loaded(tags))
    spelled = dict.fromkeys(reward_ablation.PARTS, "")
    for i, part in zip(ids, parts, strict=True):
        spelled[part] += chat.decode([i], TOK)
    assert spelled["tag"].strip() == "<functioncall>"
    assert spelled["end"].strip() == "<|end|>"
    assert not spelled["prose"]
    assert spelled["name"].startswith("add")
    assert '"name"' in spelled["form"]
    assert '"a": 12, "b": 7' in spelled["arguments"]


@TAGS
def test_tokens_without_a_call_are_prose(tags: str) -> None:
    ids = chat.completion_ids("No, not here.", TOK, tags)
    assert set(reward_ablation.parts_of(ids, loaded(tags))) == {"prose", "end"}


@TAGS
def test_a_call_that_was_cut_has_no_end(tags: str) -> None:
    ids = chat.completion_ids(TEXTS["full"], TOK, tags)
    assert reward_ablation.parts_of(ids[:-1], loaded(tags))[-1] != "end" or tags == "text"


def test_gradients_are_where_advantages_are() -> None:
    model = loaded().model
    batch = batch_of([["full", "no_tag"], ["partial", "partial"]])
    norms = reward_ablation.token_gradients(model, batch, group_advantages(batch.rewards))
    mask = batch.mask()
    assert norms.shape == mask.shape
    assert (norms[:2][mask[:2]] > 0).all()
    assert not norms[2:].any()
    assert not norms[~mask].any()
    assert all(weight.grad is None for weight in model.parameters())


def test_gradients_grow_with_advantages() -> None:
    model = loaded().model
    batch = batch_of([["full", "no_tag"], ["partial", "partial"]])
    advantages = group_advantages(batch.rewards)
    norms = reward_ablation.token_gradients(model, batch, advantages)
    tripled = reward_ablation.token_gradients(model, batch, 3 * advantages)
    torch.testing.assert_close(tripled, 3 * norms)


@pytest.fixture
def cfg(home: Path, make_run: Callable[..., Run]) -> reward_ablation.AblationConfig:
    make_run("tiny", "gpt2:512", block_size=256)
    return reward_ablation.AblationConfig(
        ckpt=("tiny",), problems=2, group_size=2, max_new_tokens=8
    )


def test_the_run_holds_all_rows(cfg: reward_ablation.AblationConfig) -> None:
    rows = reward_ablation.ablate_rewards(cfg).evals()
    assert (rows["what"] == "shape").sum() == 4
    assert Run.open("anatomy").status["kind"] == "anatomy"
    assert set(rows["checkpoint"]) == {"tiny"}


def test_a_missing_checkpoint_raises_before_a_run_is_written(
    cfg: reward_ablation.AblationConfig, home: Path
) -> None:
    missing = dataclasses.replace(cfg, run_name="other", ckpt=("nobody",))
    with pytest.raises(MissingFile):
        reward_ablation.ablate_rewards(missing)
    assert not (home / "runs" / "other").exists()


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError):
        reward_ablation.AblationConfig(ckpt=("tiny",), group_size=1)
