"""Alignment helpers on plain tensors: closed forms, shapes, signs of gradients, and that
accumulating equals one batch."""

import inspect
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
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

    eos_token_id, pad_token_id = 256, None

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
    with pytest.raises(ConfigError, match="2 prompts.*1 outputs"):
        functional.tokenize_prompt_and_output(["a", "b"], ["c"], Words())


def test_reductions_by_hand() -> None:
    assert float(functional.masked_mean(LOGP, MASK)) == pytest.approx(-15.5 / 5)
    assert functional.run_masked_mean(tensor=LOGP, mask=MASK, dim=1).tolist() == pytest.approx(
        [-1.5, -12.5 / 3]
    )
    assert functional.masked_mean(LOGP, MASK, 0).tolist() == pytest.approx([-0.75, -3.0, -8.0])
    assert functional.masked_mean(LOGP, torch.zeros(2, 3), 1).isnan().all()
    assert float(functional.run_masked_normalize(LOGP, MASK, None, 10.0)) == pytest.approx(-1.55)
    assert functional.masked_normalize(LOGP, MASK, 1, 4.0).tolist() == pytest.approx(
        [-0.75, -3.125]
    )
    poisoned = LOGP.clone()
    poisoned[0, 2] = math.nan
    assert functional.masked_mean(poisoned, MASK).isfinite()
    assert functional.masked_normalize(poisoned, MASK).isfinite()


def test_packed_data_is_one_stream_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "response": f"r{i}"}) + "\n" for i in range(3))
    )
    data = functional.get_packed_sft_dataset(
        tokenizer=Words(),
        dataset_path=path,
        seq_length=50,
        shuffle=False,
    )
    batches = list(functional.run_iterate_batches(dataset=data, batch_size=2, shuffle=False))
    assert batches[0]["input_ids"].shape == (2, 50)
    assert len(batches) == -(-len(data) // 2)
    texts = [
        functional.INSTRUCTION.format(instruction=f"p{i}", response=f"r{i}").encode()
        for i in range(3)
    ]
    stream = [i for text in texts for i in [257, *text, 256]]
    assert len(data) == (len(stream) - 1) // 50
    assert [i for piece in data for i in piece["input_ids"].tolist()] == stream[: 50 * len(data)]
    assert [i for piece in data for i in piece["labels"].tolist()] == stream[1 : 50 * len(data) + 1]
    mixed = functional.PackedSFTDataset(Words(), path, 50, shuffle=True)
    assert sorted(mixed.ids.tolist()) == sorted(data.ids.tolist())
    with pytest.raises(IndexError):
        data[len(data)]
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="sft.jsonl:1"):
        functional.PackedSFTDataset(Words(), path, 50, shuffle=False)
    with pytest.raises(MissingFile):
        functional.PackedSFTDataset(Words(), tmp_path / "none.jsonl", 50, shuffle=False)


def test_answers_are_read_as_the_course_says() -> None:
    answers = json.loads(Path(__file__).with_name("cs336_answers.json").read_text())
    for text, letter in answers["mmlu"]:
        assert functional.run_parse_mmlu_response({"options": ["1", "2", "3", "4"]}, text) == letter
    for text, number in answers["gsm8k"]:
        assert functional.run_parse_gsm8k_response(text) == number


# names and arguments of tests/adapters.py in the assignment of spring 2025
ADAPTERS = json.loads(Path(__file__).with_name("cs336_adapters.json").read_text())


def test_the_adapters_have_the_names_and_arguments_of_the_course() -> None:
    functions = {name: f for name, f in vars(functional).items() if name in ADAPTERS}
    assert {
        name: " ".join(inspect.signature(f).parameters) for name, f in functions.items()
    } == ADAPTERS


def test_each_adapter_gives_what_the_course_asks_for(models: tuple[GPT, GPT]) -> None:
    """Every one is called as the course's tests do, by keyword, and its values come from the
    formula, not from the library."""
    adapters = functional
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logp = models[0](ids).log_softmax(-1)
    found = adapters.run_get_response_log_probs(
        model=models[0],
        input_ids=ids,
        labels=ids,
        return_token_entropy=True,
    )
    torch.testing.assert_close(found["log_probs"], logp.gather(-1, ids[..., None])[..., 0])
    torch.testing.assert_close(found["token_entropy"], -(logp.exp() * logp).sum(-1))
    wrapped = adapters.run_get_response_log_probs(
        lambda x: SimpleNamespace(logits=models[0](x)),
        ids,
        ids,
        False,
    )
    assert torch.equal(wrapped["log_probs"], found["log_probs"])
    assert set(wrapped) == {"log_probs"}
    torch.testing.assert_close(
        adapters.run_compute_entropy(logits=logp), -(logp.exp() * logp).sum(-1)
    )
    reward = lambda response, truth: {"reward": float(response)}  # noqa: E731
    advantages, raw, _ = adapters.run_compute_group_normalized_rewards(
        reward_fn=reward,
        rollout_responses=["0", "1", "5", "5"],
        repeated_ground_truths=["x"] * 4,
        group_size=2,
        advantage_eps=0.0,
        normalize_by_std=False,
    )
    assert advantages.tolist() == [-0.5, 0.5, 0, 0]
    assert raw.tolist() == [0, 1, 5, 5]
    signal = dict(policy_log_probs=LOGP)
    naive = -ADVANTAGES * LOGP
    got = adapters.run_compute_naive_policy_gradient_loss(
        raw_rewards_or_advantages=ADVANTAGES, **signal
    )
    torch.testing.assert_close(got, naive)
    ratio = (LOGP - OLD).exp()
    clipped = -torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.9, 1.1) * ADVANTAGES)
    more = dict(advantages=ADVANTAGES, old_log_probs=OLD, cliprange=0.1)
    torch.testing.assert_close(adapters.run_compute_grpo_clip_loss(**signal, **more)[0], clipped)
    for kind, loss in (
        ("no_baseline", naive),
        ("reinforce_with_baseline", naive),
        ("grpo_clip", clipped),
    ):
        every = dict(loss_type=kind, raw_rewards=ADVANTAGES, **more)
        torch.testing.assert_close(
            adapters.run_compute_policy_gradient_loss(**signal, **every)[0], loss
        )
        trained = LOGP.clone().requires_grad_()
        step = dict(response_mask=MASK, gradient_accumulation_steps=2, **every)
        value, _ = adapters.run_grpo_microbatch_train_step(policy_log_probs=trained, **step)
        expected = ((loss * MASK).sum(1) / MASK.sum(1)).mean() / 2
        torch.testing.assert_close(value, expected)
        assert trained.grad is not None
        assert bool((trained.grad[MASK == 0] == 0).all())
    for constant in (1.0, None):
        value, _ = adapters.run_sft_microbatch_train_step(
            LOGP.clone().requires_grad_(), MASK, 2, constant
        )
        assert float(value) == pytest.approx(15.5 / 2 / 2)
    loss = adapters.run_compute_per_instance_dpo_loss(
        models[0], models[0], Words(), 0.5, "a", "b", "c"
    )
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
