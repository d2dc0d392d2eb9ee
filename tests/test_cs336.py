"""Alignment helpers on plain tensors: closed forms, shapes, signs of gradients, and that
accumulating equals one batch."""

import inspect
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonl import write
from random_models import perturbed

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

path = Path(__file__).resolve().parents[1] / "examples" / "cs336_adapters.py"
functional = SimpleNamespace(**runpy.run_path(str(path)))
LOGP = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
OLD = LOGP - torch.tensor([[2.0, 0.5, 1.0], [0.5, 1.1, 2.0]]).log()
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


class Words:
    """A Hugging Face tokenizer in what is used of it: callable, ids of characters, an end id."""

    eos_token_id = 256
    pad_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return dict(input_ids=([257] if add_special_tokens else []) + list(text.encode()))


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT]:
    shape = GPTConfig(depth=1, n_embd=16, n_head=1, block_size=512, vocab_size=258)
    return perturbed(GPT(shape, seed=0), 0.2, 0), perturbed(GPT(shape, seed=1), 0.2, 1)


def test_prompt_and_output_are_joined_shifted_and_masked() -> None:
    found = functional.run_tokenize_prompt_and_output(
        prompt_strs=["ab", "c"],
        output_strs=["xyz", "w"],
        tokenizer=Words(),
    )
    assert found["input_ids"].tolist() == [[97, 98, 120, 121], [99, 119, 256, 256]]
    assert found["labels"].tolist() == [[98, 120, 121, 122], [119, 256, 256, 256]]
    assert found["response_mask"].tolist() == [
        [False, True, True, True],
        [True, False, False, False],
    ]


def test_prompts_without_an_output_each_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 prompts.*1 outputs"):
        functional.tokenize_prompt_and_output(["a", "b"], ["c"], Words())


def test_a_masked_mean_by_hand() -> None:
    assert float(functional.masked_mean(LOGP, MASK)) == pytest.approx(-15.5 / 5)
    rows = functional.run_masked_mean(tensor=LOGP, mask=MASK, dim=1)
    assert rows.tolist() == pytest.approx([-1.5, -12.5 / 3])
    columns = functional.masked_mean(LOGP, MASK, 0)
    assert columns.tolist() == pytest.approx([-0.75, -3.0, -8.0])


def test_a_masked_mean_of_nothing_is_no_number() -> None:
    assert functional.masked_mean(LOGP, torch.zeros(2, 3), 1).isnan().all()


def test_a_masked_sum_is_divided_by_the_constant() -> None:
    whole = functional.run_masked_normalize(LOGP, MASK, None, 10.0)
    assert float(whole) == pytest.approx(-1.55)
    rows = functional.masked_normalize(LOGP, MASK, 1, 4.0)
    assert rows.tolist() == pytest.approx([-0.75, -3.125])


def test_what_is_masked_out_may_be_no_number() -> None:
    poisoned = LOGP.clone()
    poisoned[0, 2] = math.nan
    assert functional.masked_mean(poisoned, MASK).isfinite()
    assert functional.masked_normalize(poisoned, MASK).isfinite()


@pytest.fixture
def instructions(tmp_path: Path) -> Path:
    """Three rows of instructions."""
    rows = [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(3)]
    return write(tmp_path / "sft.jsonl", rows)


@pytest.fixture
def packed(instructions: Path) -> Any:
    """In pieces of 50 ids."""
    return functional.get_packed_sft_dataset(
        tokenizer=Words(), dataset_path=instructions, seq_length=50, shuffle=False
    )


def stream() -> list[int]:
    """All rows in the course's template, each with a beginning and an end."""
    ids = []
    for i in range(3):
        text = functional.INSTRUCTION.format(instruction=f"p{i}", response=f"r{i}")
        ids += [257, *text.encode(), 256]
    return ids


def test_packed_data_is_one_stream_in_pieces(packed: Any) -> None:
    n = len(packed)
    assert n == (len(stream()) - 1) // 50
    inputs = [id for piece in packed for id in piece["input_ids"].tolist()]
    labels = [id for piece in packed for id in piece["labels"].tolist()]
    assert inputs == stream()[: 50 * n]
    assert labels == stream()[1 : 50 * n + 1]


def test_packed_data_has_no_piece_after_its_last(packed: Any) -> None:
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_packed_data_is_batched(packed: Any) -> None:
    batches = list(functional.run_iterate_batches(dataset=packed, batch_size=2, shuffle=False))
    assert batches[0]["input_ids"].shape == (2, 50)
    assert len(batches) == -(-len(packed) // 2)


def test_shuffled_packed_data_has_the_same_ids(packed: Any, instructions: Path) -> None:
    mixed = functional.PackedSFTDataset(Words(), instructions, 50, shuffle=True)
    assert sorted(mixed.ids.tolist()) == sorted(packed.ids.tolist())


def test_a_row_without_a_response_is_named(instructions: Path) -> None:
    instructions.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="sft.jsonl:1"):
        functional.PackedSFTDataset(Words(), instructions, 50, shuffle=False)


def test_a_file_of_instructions_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        functional.PackedSFTDataset(Words(), tmp_path / "none.jsonl", 50, shuffle=False)


ANSWERS = json.loads(Path(__file__).with_name("cs336_answers.json").read_text())


@pytest.mark.parametrize("text, letter", ANSWERS["mmlu"])
def test_a_letter_is_read_as_the_course_says(text: str, letter: str | None) -> None:
    options = {"options": ["1", "2", "3", "4"]}
    assert functional.run_parse_mmlu_response(options, text) == letter


@pytest.mark.parametrize("text, number", ANSWERS["gsm8k"])
def test_a_number_is_read_as_the_course_says(text: str, number: str | None) -> None:
    assert functional.run_parse_gsm8k_response(text) == number


# names and arguments of tests/adapters.py in the assignment of spring 2025
ADAPTERS = json.loads(Path(__file__).with_name("cs336_adapters.json").read_text())


def test_the_adapters_have_the_names_and_arguments_of_the_course() -> None:
    found = {}
    for name, function in vars(functional).items():
        if name in ADAPTERS:
            found[name] = " ".join(inspect.signature(function).parameters)
    assert found == ADAPTERS


# Each adapter is called as the course's tests do, by keyword, and its values come from the
# formula, not from the library.
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
NAIVE = -ADVANTAGES * LOGP
RATIO = (LOGP - OLD).exp()
CLIPPED = -torch.minimum(RATIO * ADVANTAGES, RATIO.clamp(0.9, 1.1) * ADVANTAGES)


def test_log_probabilities_and_entropy_of_a_response(models: tuple[GPT, GPT]) -> None:
    logp = models[0](IDS).log_softmax(-1)
    found = functional.run_get_response_log_probs(
        model=models[0], input_ids=IDS, labels=IDS, return_token_entropy=True
    )
    torch.testing.assert_close(found["log_probs"], logp.gather(-1, IDS[..., None])[..., 0])
    torch.testing.assert_close(found["token_entropy"], -(logp.exp() * logp).sum(-1))


def test_a_model_whose_output_has_logits_gives_the_same_log_probabilities(
    models: tuple[GPT, GPT],
) -> None:
    ours = functional.run_get_response_log_probs(models[0], IDS, IDS, False)
    wrapped = functional.run_get_response_log_probs(
        lambda ids: SimpleNamespace(logits=models[0](ids)), IDS, IDS, False
    )
    assert torch.equal(wrapped["log_probs"], ours["log_probs"])
    assert set(wrapped) == {"log_probs"}


def test_the_entropy_of_logits(models: tuple[GPT, GPT]) -> None:
    logp = models[0](IDS).log_softmax(-1)
    entropy = functional.run_compute_entropy(logits=logp)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))


def reward_of(response: str, truth: str) -> dict[str, float]:
    return {"reward": float(response)}


def test_rewards_are_centred_within_their_group() -> None:
    advantages, raw, _ = functional.run_compute_group_normalized_rewards(
        reward_fn=reward_of,
        rollout_responses=["0", "1", "5", "5"],
        repeated_ground_truths=["x"] * 4,
        group_size=2,
        advantage_eps=0.0,
        normalize_by_std=False,
    )
    assert advantages.tolist() == [-0.5, 0.5, 0, 0]
    assert raw.tolist() == [0, 1, 5, 5]


def test_the_naive_policy_gradient_loss() -> None:
    loss = functional.run_compute_naive_policy_gradient_loss(
        raw_rewards_or_advantages=ADVANTAGES, policy_log_probs=LOGP
    )
    torch.testing.assert_close(loss, NAIVE)


def test_the_clipped_loss() -> None:
    loss, _ = functional.run_compute_grpo_clip_loss(
        advantages=ADVANTAGES, policy_log_probs=LOGP, old_log_probs=OLD, cliprange=0.1
    )
    torch.testing.assert_close(loss, CLIPPED)


LOSSES = pytest.mark.parametrize(
    "kind, loss",
    [("no_baseline", NAIVE), ("reinforce_with_baseline", NAIVE), ("grpo_clip", CLIPPED)],
    ids=["no_baseline", "reinforce_with_baseline", "grpo_clip"],
)


@LOSSES
def test_a_policy_gradient_loss_by_its_name(kind: str, loss: torch.Tensor) -> None:
    found, _ = functional.run_compute_policy_gradient_loss(
        policy_log_probs=LOGP,
        loss_type=kind,
        raw_rewards=ADVANTAGES,
        advantages=ADVANTAGES,
        old_log_probs=OLD,
        cliprange=0.1,
    )
    torch.testing.assert_close(found, loss)


@LOSSES
def test_a_step_of_rl_is_the_mean_over_responses_of_a_microbatch(
    kind: str, loss: torch.Tensor
) -> None:
    trained = LOGP.clone().requires_grad_()
    value, _ = functional.run_grpo_microbatch_train_step(
        policy_log_probs=trained,
        response_mask=MASK,
        gradient_accumulation_steps=2,
        loss_type=kind,
        raw_rewards=ADVANTAGES,
        advantages=ADVANTAGES,
        old_log_probs=OLD,
        cliprange=0.1,
    )
    torch.testing.assert_close(value, ((loss * MASK).sum(1) / MASK.sum(1)).mean() / 2)
    assert trained.grad is not None
    assert bool((trained.grad[MASK == 0] == 0).all())


@pytest.mark.parametrize("constant", [1.0, None])
def test_a_step_of_sft_by_hand(constant: float | None) -> None:
    trained = LOGP.clone().requires_grad_()
    value, _ = functional.run_sft_microbatch_train_step(trained, MASK, 2, constant)
    assert float(value) == pytest.approx(15.5 / 2 / 2)


def test_the_loss_of_dpo_against_itself_is_the_logarithm_of_two(models: tuple[GPT, GPT]) -> None:
    loss = functional.run_compute_per_instance_dpo_loss(
        models[0], models[0], Words(), 0.5, "a", "b", "c"
    )
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
