"""The character laboratory: dense rewards and their advantages, denoising, the four objectives
end to end."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import assert_close_curves, assert_same_weights, resume_contract, train_one_and_two
from learning import Claim, above, below, hold, lesson
from random_models import randomise

from codechat.core import config
from codechat.core.registry import COMMANDS
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import run
from codechat_lab.chars import lab as loop
from codechat_lab.chars import learning as learning
from codechat_lab.chars import task as chars

VERSE = "".join(
    f"the {a} of {b}\nand {b} is no {a}\n"
    for a, b in itertools.product(
        ("rose", "king", "night", "sea"), ("thorn", "crown", "day", "land")
    )
)


def settings(home: Path, objective: str, **changes: Any) -> loop.CharsConfig:
    (home / "verse.txt").write_text(VERSE * 3)
    model = {"depth": 1, "n_embd": 16, "n_head": 2, "block_size": 16}
    verse = str(home / "verse.txt")
    common = dict(
        objective=objective,
        source=verse,
        horizon=8,
        feed="text",
        device_batch_size=4,
        group_size=4,
        model=model,
        max_tokens=8 * 4 * 6,
        samples=2,
        warmup_steps=1,
        eval_every=0,
        save_every=0,
        log_every=1,
        kl_coef=0.01,
        kl_warmup_tokens=100,
        run_name=objective,
    )
    return config.from_dict(loop.CharsConfig, common | changes)


def random_model(vocab_size: int = 9, n_tags: int = 0, causal: bool = True) -> GPT:
    shape = GPTConfig(
        depth=1,
        n_embd=16,
        n_head=2,
        block_size=16,
        vocab_size=vocab_size,
        n_tags=n_tags,
        causal=causal,
    )
    return randomise(GPT(shape), 0.3, 0)


def logprobs_at(model: GPT, inputs: torch.Tensor, places: int) -> torch.Tensor:
    """(R, T, V) of the last places."""
    return model(inputs)[..., : model.cfg.n_ids].log_softmax(-1)[:, -places:]


def windows_of(model: GPT, count: int, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(model.cfg.vocab_size - 1, (count, length), generator=rng)


def uniforms(*shape: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    return torch.rand(*shape, generator=rng, dtype=torch.float64)


@pytest.fixture
def verse(tmp_path: Path) -> str:
    path = tmp_path / "verse.txt"
    path.write_text(VERSE)
    return str(path)


@pytest.mark.parametrize("symbols", ["chars", "bytes", "gpt2:1024"])
def test_the_text_comes_back_from_its_symbols_and_its_end_is_held_out(
    symbols: str, verse: str
) -> None:
    text = chars.load(verse, symbols)
    train = text.tokenizer.decode(text.train.tolist())
    held_out = text.tokenizer.decode(text.val.tolist())
    assert train + held_out == VERSE
    assert train.endswith("\n")
    assert 0.05 < len(held_out) / len(VERSE) < 0.2


@pytest.mark.parametrize("symbols", ["chars", "bytes", "gpt2:1024"])
def test_the_bytes_of_the_symbols_add_up_to_those_of_the_text(symbols: str, verse: str) -> None:
    text = chars.load(verse, symbols)
    held_out = text.tokenizer.decode(text.val.tolist())
    assert int(text.symbol_bytes()[text.val].sum()) == len(held_out.encode())


def test_a_vocabulary_has_the_size_that_its_name_says(verse: str) -> None:
    assert chars.load(verse, "gpt2:1024").tokenizer.n_vocab == 1024


def test_training_windows_start_at_every_symbol(verse: str) -> None:
    text = chars.load(verse, "gpt2:1024")
    starts = {tuple(row) for row in text.train.unfold(0, 5, 1).tolist()}
    drawn = text.draw_windows(9000, 5, torch.Generator().manual_seed(0)).tolist()
    assert {tuple(row) for row in drawn} == starts


def test_each_held_out_symbol_is_a_target_once(verse: str) -> None:
    text = chars.load(verse, "gpt2:1024")
    windows = text.val_windows(5, 4, 100)
    targets = windows[:, -4:].flatten().tolist()
    assert targets == text.val[1 : 1 + 4 * len(windows)].tolist()


DRAWN = torch.tensor([[1, 2, 3]])
TRUTH = torch.tensor([[1, 0, 3]])


def test_each_right_symbol_is_rewarded() -> None:
    assert chars.dense_rewards(DRAWN, TRUTH).tolist() == [[1, 0, 1]]


def test_partial_credit_adds_a_share_of_the_credit() -> None:
    credit = torch.tensor([[-1.0, -2.0, -4.0]])
    rewards = chars.dense_rewards(DRAWN, TRUTH, partial=0.05, credit=credit)
    torch.testing.assert_close(rewards, torch.tensor([[0.95, -0.1, 0.8]]))


def test_wrong_symbols_may_have_a_reward_below_zero() -> None:
    assert chars.dense_rewards(DRAWN, TRUTH, wrong=-1.0).tolist() == [[1, -1, 1]]


# (W, G, T): two windows, two draws, three places; of the first window place 0 has one hit,
# place 1 two and place 2 none
REWARDS = torch.tensor([[[1.0, 1, 0], [0, 1, 0]], [[0, 0, 1], [1, 0, 0]]])
ADVANTAGES = torch.tensor(
    [
        [[0.5, 0, 0], [-0.5, 0, 0]],
        [[-0.5, 0, 0.5], [0.5, 0, -0.5]],
    ]
)


def test_advantages_compare_the_draws_of_one_place_where_the_text_feeds() -> None:
    torch.testing.assert_close(learning.place_advantages(REWARDS, 2), ADVANTAGES)


def test_advantages_compare_the_draws_of_one_place_where_the_policy_feeds() -> None:
    rewards = REWARDS.view(4, 1, 3)  # (W G, 1, T), window-major
    want = ADVANTAGES.view(4, 1, 3)
    torch.testing.assert_close(learning.place_advantages(rewards, 2), want)


def test_the_draws_of_a_place_are_a_group() -> None:
    groups = learning.group_by_place(REWARDS, 2).tolist()
    assert groups == [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [1, 0]]


def test_the_bigram_against_counts() -> None:
    text = [0, 1, 0, 1, 1, 2, 0]
    n_vocab = 4
    table = chars.Bigram(torch.tensor(text), n_vocab)
    pairs = Counter(zip(text, text[1:]))
    before = Counter(text[:-1])  # the text's last symbol is followed by nothing
    for a, b in itertools.product(range(n_vocab), range(n_vocab)):
        want = math.log((pairs[a, b] + 1) / (before[a] + n_vocab))
        found = table.logprobs(torch.tensor([[a]]), torch.tensor([[b]]))
        assert float(found) == pytest.approx(want, abs=1e-6)


def test_the_draws_of_a_place_share_the_texts_context() -> None:
    model = random_model()
    windows = windows_of(model, 3, 7)
    batch = learning.draw_fed_by_text(model, windows, 5, 4, uniforms(3, 4, 5))
    assert batch.drawn.shape == (3, 4, 5)
    assert batch.drawn.max() < model.cfg.n_ids
    full = logprobs_at(model, windows[:, :-1], 5)[:, None].expand(3, 4, 5, -1)
    want = full.gather(-1, batch.drawn[..., None])[..., 0]
    torch.testing.assert_close(batch.logprobs, want, atol=1e-5, rtol=1e-5)


def test_the_draws_of_a_place_are_compared_with_the_texts_symbol() -> None:
    model = random_model()
    windows = windows_of(model, 3, 7)
    batch = learning.draw_fed_by_text(model, windows, 5, 4, uniforms(3, 4, 5))
    assert torch.equal(batch.truth[:, 0], windows[:, -5:])
    full = logprobs_at(model, windows[:, :-1], 5)
    truth = full.gather(-1, windows[:, -5:, None])[..., 0]
    torch.testing.assert_close(batch.truth_logprobs[:, 0], truth, atol=1e-5, rtol=1e-5)


def test_a_policy_that_feeds_itself_reads_its_own_symbols() -> None:
    model = random_model()
    windows = windows_of(model, 2, 8)
    batch = learning.draw_fed_by_itself(model, windows, 6, 3, seed=1)
    assert batch.inputs.shape == (6, 7)
    assert batch.drawn.shape == (6, 1, 6)
    prompts = windows.repeat_interleave(3, 0)[:, :2]
    assert torch.equal(batch.inputs[:, :2], prompts)
    assert torch.equal(batch.inputs[:, 2:], batch.drawn[:, 0, :-1])


def test_a_policy_that_feeds_itself_keeps_the_log_probabilities_of_its_draws() -> None:
    model = random_model()
    batch = learning.draw_fed_by_itself(model, windows_of(model, 2, 8), 6, 3, seed=1)
    again = logprobs_at(model, batch.inputs, 6).gather(-1, batch.drawn[:, 0, :, None])[..., 0]
    torch.testing.assert_close(batch.logprobs[:, 0], again, atol=1e-4, rtol=1e-4)


def test_draws_depend_on_the_windows_number_among_those_of_all_ranks() -> None:
    model = random_model()
    windows = windows_of(model, 2, 8)
    both = learning.draw_fed_by_itself(model, windows, 6, 3, seed=1)
    second = learning.draw_fed_by_itself(model, windows[1:], 6, 3, seed=1, first=1)
    assert torch.equal(second.drawn, both.drawn[3:])


def gradients(value: torch.Tensor, model: GPT) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value, list(model.parameters()), retain_graph=True)


def test_in_expectation_the_gradient_is_that_of_the_right_symbols_probability() -> None:
    """REINFORCE over all symbols, each weighted by its probability: the gradient of p(right),
    which is p times the supervised gradient, that of log p."""
    model = random_model(vocab_size=5)
    windows = windows_of(model, 2, 4)
    inputs = windows[:, :-1]
    truth = windows[:, None, -3:]
    every = torch.arange(5)[None, :, None].expand(2, 5, 3)
    logprobs, _ = learning.symbol_logprobs(model, inputs, model.hidden(inputs), every)
    rewards = chars.dense_rewards(every, truth)
    expected = (logprobs.exp().detach() * rewards * logprobs).sum()
    right = logprobs.gather(1, truth)
    found = gradients(expected, model)
    for target in (right.exp().sum(), (right.exp().detach() * right).sum()):
        for a, b in zip(found, gradients(target, model)):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def shift_by_partial_credit(batch: learning.Draws) -> float:
    """The largest change of an advantage when the true symbol's log-probability is credited."""
    plain = chars.dense_rewards(batch.drawn, batch.truth, credit=batch.truth_logprobs, partial=0)
    partial = chars.dense_rewards(
        batch.drawn, batch.truth, credit=batch.truth_logprobs, partial=0.05
    )
    change = learning.place_advantages(partial, 4) - learning.place_advantages(plain, 4)
    return float(change.abs().max())


def test_partial_credit_of_the_true_symbol_cancels_where_the_text_feeds() -> None:
    model = random_model()
    windows = windows_of(model, 2, 8)
    batch = learning.draw_fed_by_text(model, windows, 6, 4, uniforms(2, 4, 6))
    assert shift_by_partial_credit(batch) < 1e-6


def test_partial_credit_of_the_true_symbol_remains_where_the_policy_feeds() -> None:
    model = random_model()
    windows = windows_of(model, 2, 8)
    batch = learning.draw_fed_by_itself(model, windows, 6, 4, seed=0)
    assert shift_by_partial_credit(batch) >= 1e-6


@pytest.mark.parametrize("offset", [0.0, 0.31, 0.999])
def test_every_count_of_masks_is_as_likely(offset: float) -> None:
    counts = learning.mask_counts(torch.arange(700), 700, 7, offset)
    assert torch.bincount(counts, minlength=8).tolist() == pytest.approx([0] + [100] * 7, abs=1)


def test_ranks_take_parts_of_the_counts_of_masks() -> None:
    first = learning.mask_counts(torch.arange(5), 10, 7, 0.4)
    second = learning.mask_counts(torch.arange(5, 10), 10, 7, 0.4)
    both = learning.mask_counts(torch.arange(10), 10, 7, 0.4)
    assert torch.equal(torch.cat([first, second]), both)


def chain_nats(model: GPT, window: torch.Tensor, order: tuple[int, ...]) -> float:
    """Nats of a window's symbols, filled in one after the other in an order of places."""
    ids = window.clone()
    ids[:, 1:] = model.cfg.n_ids - 1  # the mask
    nats = 0.0
    for place in order:
        right = window[0, 1 + place]
        nats -= float(model(ids)[0, 1 + place].log_softmax(-1)[right])
        ids[0, 1 + place] = right
    return nats


@torch.no_grad()
def test_the_bound_is_the_mean_over_all_orders_of_the_chain_rule() -> None:
    """All counts and ranks of three places, against all six orders in which a chain of single
    symbols can be filled in."""
    model = random_model(causal=False, n_tags=1, vocab_size=5)
    window = windows_of(model, 1, 4)
    orders = list(itertools.permutations(range(3)))
    bounds = []
    for ranks, count in itertools.product(orders, (1, 2, 3)):
        bound = learning.denoising_bound(
            model, window, torch.tensor([count]), torch.tensor([ranks])
        )
        bounds.append(float(bound))
    chains = [chain_nats(model, window, order) for order in orders]
    assert sum(bounds) / len(bounds) == pytest.approx(sum(chains) / len(chains), rel=1e-5)


@torch.no_grad()
def test_one_symbol_a_pass_draws_from_the_models_own_distribution() -> None:
    """Two places, three symbols: frequencies of both orders' chains, mixed half and half."""
    model = random_model(causal=False, n_tags=1, vocab_size=3)
    n = 12_000
    mask = model.cfg.n_ids - 1

    def p(ids: list[int], place: int) -> torch.Tensor:
        return model(torch.tensor([ids]))[0, place, :mask].softmax(-1)

    want = torch.zeros(3, 3)
    for a, b in itertools.product(range(3), range(3)):
        left_first = p([1, mask, mask], 1)[a] * p([1, a, mask], 2)[b]
        right_first = p([1, mask, mask], 2)[b] * p([1, mask, b], 1)[a]
        want[a, b] = (left_first + right_first) / 2
    prompts = torch.ones(n, 1, dtype=torch.long)
    rng = torch.Generator().manual_seed(0)
    found = learning.fill_in(model, prompts, 2, passes=2, rng=rng)
    assert (found[:, 0] == 1).all()
    assert found.max() < mask
    freq = (found[:, 1] * 3 + found[:, 2]).bincount(minlength=9).view(3, 3) / n
    torch.testing.assert_close(freq, want, atol=4 * 0.5 / n**0.5, rtol=0)


@pytest.mark.parametrize(
    ("objective", "feed", "epochs", "per_step"),
    [
        ("supervised", "own", 1, 32),
        ("grpo", "own", 1, 128),
        ("ppo", "own", 2, 256),
        ("ppo", "text", 2, 64),
    ],
)
def test_all_objectives_end_at_the_same_count_of_places(
    objective: str, feed: str, epochs: int, per_step: int, home: Path
) -> None:
    cfg = settings(home, objective, feed=feed, inner_epochs=epochs, max_tokens=512)
    assert cfg.tokens_per_step() == per_step
    assert cfg.tokens_per_step(2) == 2 * per_step
    found = loop.train(cfg).metrics()
    assert len(found) == 512 // per_step
    assert found["tokens"].iloc[-1] == 512
    # symbols that the policy wrote itself are no part of an epoch
    text = chars.load(cfg.source, "chars")
    epoch = len(found) * 32 / len(text.train)
    assert found["epoch"].iloc[-1] == pytest.approx(epoch)


def test_supervised_learning_begins_at_the_loss_of_an_untrained_model(home: Path) -> None:
    cfg = settings(home, "supervised", feed="own", inner_epochs=1, max_tokens=512)
    found = loop.train(cfg).metrics()
    text = chars.load(cfg.source, "chars")
    windows = text.draw_windows(4, 9, torch.Generator().manual_seed(2))
    model = GPT(replace(cfg.model, vocab_size=text.tokenizer.n_vocab, n_tags=0), seed=0)
    nats = float(model.loss(windows[:, :-1], windows[:, 1:]).detach())
    assert found["train_loss"].iloc[0] == pytest.approx(nats, rel=1e-5)


@lesson("supervised", "denoise")
def predict_verse(objective: str, home: Path, seed: int) -> list[Claim]:
    cfg = settings(
        home,
        objective,
        max_tokens=32 * 400,
        eval_every=400,
        lr=1e-2,
        log_every=100,
        seed=seed,
    )
    evals = loop.train(cfg).evals()
    first, last = evals["val_loss"].iloc[[0, -1]]
    return [
        above("first loss", first, 2.9),
        below("last loss", last, 1.5 if objective == "supervised" else 2.8),
    ]


@lesson("grpo", "ppo")
def predict_verse_for_rewards(objective: str, home: Path, seed: int) -> list[Claim]:
    cfg = settings(
        home,
        objective,
        seed=seed,
        group_size=8,
        max_tokens=32 * 500,
        eval_every=500,
        lr=5e-3,
        kl_coef=0.0,
        log_every=100,
    )
    first, last = loop.train(cfg).evals()["val_accuracy"].iloc[[0, -1]]
    text = chars.load(cfg.source, "chars")
    commonest = float(text.val.bincount().max()) / len(text.val)
    return [
        below("first accuracy", first, 0.1),
        above("last over the commonest's", last / commonest, 1.2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["supervised", "denoise", "grpo", "ppo"])
def test_every_objective_learns(home: Path, objective: str) -> None:
    rewarded = objective in ("grpo", "ppo")
    predict = predict_verse_for_rewards if rewarded else predict_verse
    hold(predict(objective, home, seed=0))


LEARNED = (
    "train_loss",
    "reward_mean",
    "policy_loss",
    "kl_ref",
    "kl_weight",
    "value_loss",
    "grad_norm",
)


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_where_no_draw_is_better_than_another_nothing_moves(
    objective: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All draws wrong, a reference far away: the KL term alone must not move the policy."""
    start = loop.train(settings(home, "grpo", lr=0.0, run_name="start"))
    monkeypatch.setattr(
        chars, "dense_rewards", lambda drawn, *args, **more: torch.zeros(drawn.shape)
    )
    found = loop.train(settings(home, objective, kl_coef=1.0, kl_warmup_tokens=0))
    assert found.metrics()["grad_norm"].eq(0).all()
    assert_same_weights(start, found)


def with_kl(
    home: Path, objective: str, feed: str, reference: str, save_every: int = 0
) -> loop.CharsConfig:
    """Settings under which the divergence from the reference grows in a few steps."""
    return settings(
        home,
        objective,
        feed=feed,
        reference=reference,
        save_every=save_every,
        kl_warmup_tokens=0,
        kl_coef=0.01,
        lr=1e-2,
        max_tokens=4 * 8 * 4 * 6,
    )


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
@pytest.mark.parametrize("feed", ["own", "text"])
def test_the_divergence_from_a_random_reference_starts_at_0_and_grows(
    objective: str, feed: str, home: Path
) -> None:
    divergence = loop.train(with_kl(home, objective, feed, "random")).metrics()["kl_ref"]
    assert divergence.iloc[0] == pytest.approx(0, abs=1e-6)
    assert divergence.iloc[-1] > 1e-4


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
@pytest.mark.parametrize("feed", ["own", "text"])
def test_the_divergence_from_the_bigram_does_not_start_at_0(
    objective: str, feed: str, home: Path
) -> None:
    divergence = loop.train(with_kl(home, objective, feed, "bigram")).metrics()["kl_ref"]
    assert divergence.iloc[0] > 0.01


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
@pytest.mark.parametrize("feed", ["own", "text"])
def test_a_resumed_run_keeps_its_random_reference(objective: str, feed: str, home: Path) -> None:
    resume_contract(with_kl(home, objective, feed, "random", save_every=2), 2)


@pytest.fixture
def by_mode(home: Path) -> dict[str, Any]:
    """The first metrics of GRPO in each mode of rewards."""
    found = {}
    for mode in ("+1", "±1", "+-1"):
        cfg = settings(home, "grpo", reward_mode=mode, run_name=f"mode{len(found)}", kl_coef=0.0)
        found[mode] = loop.train(cfg).metrics().iloc[0]
    return found


def test_the_mean_reward_is_the_accuracy_where_wrong_symbols_cost_nothing(
    by_mode: dict[str, Any],
) -> None:
    plain = by_mode["+1"]
    assert plain["reward_mean"] == pytest.approx(plain["symbol_accuracy"], abs=1e-6)


def test_a_wrong_symbol_may_cost_one(by_mode: dict[str, Any]) -> None:
    """Advantages of GRPO are doubled: 2 r - 1 in place of r, less the mean."""
    plain = by_mode["+1"]
    signed = by_mode["±1"]
    assert signed["reward_mean"] == pytest.approx(2 * plain["symbol_accuracy"] - 1, abs=1e-6)
    assert signed["adv_abs_mean"] == pytest.approx(2 * plain["adv_abs_mean"], rel=1e-5)


def test_the_sign_of_a_mode_may_be_typed_in_ascii(by_mode: dict[str, Any]) -> None:
    assert by_mode["+-1"]["reward_mean"] == by_mode["±1"]["reward_mean"]


@pytest.mark.parametrize(
    ("words", "reference", "mode"),
    [
        ("", "bigram", "+1"),
        ("--reference random --reward_mode ±1", "random", "±1"),
        ("--reference=bigram --reward-mode=+1", "bigram", "+1"),
        ("--ref_type random --reward_mode +-1", "random", "±1"),
    ],
)
def test_the_flags_of_the_character_project_have_their_names(
    words: str, reference: str, mode: str
) -> None:
    cfg = COMMANDS["chars"].parse(words.split())
    assert (cfg.reference, cfg.reward_mode) == (reference, mode)


def test_the_command(home: Path) -> None:
    source = settings(home, "ppo").source
    words = f"""
        --objective ppo --source {source} --tokenizer gpt2:512 --run-name cli
        --horizon 8 --device-batch-size 2 --group-size 2 --max-tokens 64
        --model.depth 1 --model.n-embd 16 --model.n-head 2
    """
    COMMANDS["chars"].run(words.split())
    assert run.Run.open("cli").evals()["val_loss"].iloc[-1] > 0


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(home: Path) -> None:
    cfgs = [
        settings(home, "supervised", eval_every=3),
        settings(home, "denoise", eval_every=3),
        settings(
            home,
            "grpo",
            eval_every=3,
            feed="own",
            max_tokens=32 * 4 * 6,
            partial_logprob=0.05,
        ),
        settings(home, "ppo", eval_every=3, minibatches=2),
    ]
    for one, two in train_one_and_two(home, *cfgs):
        logged = one.metrics()
        assert_close_curves(one, two, *(name for name in LEARNED if name in logged))
        want = pytest.approx(two.evals()["val_loss"].tolist(), rel=1e-3)
        assert one.evals()["val_loss"].tolist() == want, one.name
