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
    model = dict(depth=1, n_embd=16, n_head=2, block_size=16)
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


def random_model(seed: int = 0, **options: Any) -> GPT:
    shape = dict(depth=1, n_embd=16, n_head=2, block_size=16, vocab_size=9, n_tags=0) | options
    return randomise(GPT(GPTConfig(**shape)), 0.3, seed)


def logprobs_at(model: GPT, inputs: torch.Tensor, places: int) -> torch.Tensor:
    """(R, T, V) of the last places."""
    return model(inputs)[..., : model.cfg.n_ids].log_softmax(-1)[:, -places:]


def windows_of(model: GPT, count: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(
        model.cfg.vocab_size - 1, (count, length), generator=torch.Generator().manual_seed(seed)
    )


def uniforms(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_text_comes_back_from_its_symbols_and_its_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "verse.txt").write_text(VERSE)
    for symbols in ("chars", "bytes", "gpt2:1024"):
        text = chars.load(str(tmp_path / "verse.txt"), symbols)
        parts = [text.tokenizer.decode(part.tolist()) for part in (text.train, text.val)]
        assert "".join(parts) == VERSE
        assert parts[0].endswith("\n")
        assert 0.05 < len(parts[1]) / len(VERSE) < 0.2
        assert int(text.symbol_bytes()[text.val].sum()) == len(parts[1].encode())
    assert text.tokenizer.n_vocab == 1024
    starts = {tuple(row) for row in text.train.unfold(0, 5, 1).tolist()}
    drawn = text.draw_windows(9000, 5, torch.Generator().manual_seed(0)).tolist()
    assert {tuple(row) for row in drawn} == starts, "every start comes"
    held = text.val_windows(5, 4, 100)
    assert held[:, -4:].flatten().tolist() == text.val[1 : 1 + 4 * len(held)].tolist(), (
        "each symbol is a target once"
    )


def test_dense_rewards_and_the_advantages_of_the_draws_of_one_place_by_hand() -> None:
    drawn = torch.tensor([[1, 2, 3]])
    truth = torch.tensor([[1, 0, 3]])
    assert chars.dense_rewards(drawn, truth).tolist() == [[1, 0, 1]]
    partial = chars.dense_rewards(
        drawn, truth, partial=0.05, credit=torch.tensor([[-1.0, -2.0, -4.0]])
    )
    torch.testing.assert_close(partial, torch.tensor([[0.95, -0.1, 0.8]]))
    assert chars.dense_rewards(drawn, truth, wrong=-1.0).tolist() == [[1, -1, 1]]
    # advantages: two windows, two draws, three places; place (0, 0) has one hit, (0, 1) two,
    # (0, 2) none
    rewards = torch.tensor(
        [[[1.0, 1, 0], [0, 1, 0]], [[0, 0, 1], [1, 0, 0]]]
    )  # fed by the text: (W, G, T)
    want = torch.tensor([[[0.5, 0, 0], [-0.5, 0, 0]], [[-0.5, 0, 0.5], [0.5, 0, -0.5]]])
    torch.testing.assert_close(learning.place_advantages(rewards, 2), want)
    own = rewards.view(4, 1, 3)  # fed by itself: (W G, 1, T), window-major
    torch.testing.assert_close(learning.place_advantages(own, 2), want.view(4, 1, 3))
    assert learning.group_by_place(rewards, 2).tolist() == [
        [1, 0],
        [1, 1],
        [0, 0],
        [0, 1],
        [0, 0],
        [1, 0],
    ]


def test_the_bigram_against_counts() -> None:
    ids = torch.tensor([0, 1, 0, 1, 1, 2, 0])
    table = chars.Bigram(ids, 4)
    pairs = Counter(zip(ids.tolist(), ids.tolist()[1:]))
    V = 4
    before = Counter(ids.tolist()[:-1])  # the text's last symbol is followed by nothing
    for a, b in itertools.product(range(V), range(V)):
        want = math.log((pairs[a, b] + 1) / (before[a] + V))
        assert float(table.logprobs(torch.tensor([[a]]), torch.tensor([[b]]))) == pytest.approx(
            want, abs=1e-6
        )


def test_the_draws_of_a_place_share_the_texts_context() -> None:
    model = random_model()
    windows = windows_of(model, 3, 7)
    batch = learning.draw_fed_by_text(model, windows, 5, 4, uniforms(3, 4, 5))
    assert batch.drawn.shape == (3, 4, 5)
    assert torch.equal(batch.truth[:, 0], windows[:, -5:])
    assert batch.drawn.max() < model.cfg.n_ids
    full = logprobs_at(model, windows[:, :-1], 5)
    want = full[:, None].expand(3, 4, 5, -1).gather(-1, batch.drawn[..., None])[..., 0]
    truth = full.gather(-1, windows[:, -5:, None])[..., 0]
    torch.testing.assert_close(batch.logprobs, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.truth_logprobs[:, 0], truth, atol=1e-5, rtol=1e-5)


def test_a_policy_that_feeds_itself_reads_its_own_symbols() -> None:
    model = random_model()
    windows = windows_of(model, 2, 8)
    batch = learning.draw_fed_by_itself(model, windows, 6, 3, seed=1)
    assert batch.inputs.shape == (6, 7)
    assert batch.drawn.shape == (6, 1, 6)
    assert torch.equal(batch.inputs[:, :2], windows.repeat_interleave(3, 0)[:, :2])
    assert torch.equal(batch.inputs[:, 2:], batch.drawn[:, 0, :-1])
    again = logprobs_at(model, batch.inputs, 6).gather(-1, batch.drawn[:, 0, :, None])[..., 0]
    torch.testing.assert_close(batch.logprobs[:, 0], again, atol=1e-4, rtol=1e-4)
    part = learning.draw_fed_by_itself(model, windows[1:], 6, 3, seed=1, first=1)
    assert torch.equal(part.drawn, batch.drawn[3:]), (
        "draws depend on the window's number among all ranks'"
    )


def test_in_expectation_the_gradient_is_the_supervised_one_weighted_by_the_right_symbols_probability() -> (
    None
):
    """REINFORCE over all symbols, each weighted by its probability: the gradient of p(right),
    which is p x that of log p."""
    model = random_model(vocab_size=5)
    windows = windows_of(model, 2, 4)
    inputs = windows[:, :-1]
    truth = windows[:, None, -3:]
    every = torch.arange(5)[None, :, None].expand(2, 5, 3)
    logprobs, _ = learning.symbol_logprobs(model, inputs, model.hidden(inputs), every)
    rewards = chars.dense_rewards(every, truth)
    expected = (logprobs.exp().detach() * rewards * logprobs).sum()
    grads = torch.autograd.grad(expected, list(model.parameters()), retain_graph=True)
    right = logprobs.gather(1, truth)
    for target in (right.exp().sum(), (right.exp().detach() * right).sum()):
        for a, b in zip(
            grads, torch.autograd.grad(target, list(model.parameters()), retain_graph=True)
        ):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_partial_credit_of_the_true_symbol_cancels_where_the_text_feeds_and_not_where_the_policy_does() -> (
    None
):
    model = random_model()
    windows = windows_of(model, 2, 8)
    text = learning.draw_fed_by_text(model, windows, 6, 4, uniforms(2, 4, 6))
    own = learning.draw_fed_by_itself(model, windows, 6, 4, seed=0)
    for batch, cancels in ((text, True), (own, False)):
        how = dict(drawn=batch.drawn, truth=batch.truth, credit=batch.truth_logprobs)
        rewards = (chars.dense_rewards(**how, partial=weight) for weight in (0, 0.05))
        plain, partial = (learning.place_advantages(r, 4) for r in rewards)
        assert (float((partial - plain).abs().max()) < 1e-6) == cancels


def test_every_count_of_masks_is_as_likely_and_ranks_take_parts_of_them() -> None:
    for offset in (0.0, 0.31, 0.999):
        counts = learning.mask_counts(torch.arange(700), 700, 7, offset)
        assert torch.bincount(counts, minlength=8).tolist() == pytest.approx([0] + [100] * 7, abs=1)
    both = [
        learning.mask_counts(part, 10, 7, 0.4) for part in (torch.arange(5), torch.arange(5, 10))
    ]
    assert torch.equal(torch.cat(both), learning.mask_counts(torch.arange(10), 10, 7, 0.4))


@torch.no_grad()
def test_the_bound_is_the_mean_over_all_orders_of_the_chain_rule() -> None:
    """All counts and ranks of three places, against all six orders in which a chain of single
    symbols can be filled in."""
    model = random_model(causal=False, n_tags=1, vocab_size=5)
    window = windows_of(model, 1, 4)
    orders = list(itertools.permutations(range(3)))
    masked = itertools.product(orders, (1, 2, 3))

    def bound(ranks: tuple[int, ...], m: int) -> torch.Tensor:
        return learning.denoising_bound(model, window, torch.tensor([m]), torch.tensor([ranks]))

    bounds = [float(bound(*how)) for how in masked]
    mask = model.cfg.n_ids - 1
    chains = []
    for order in orders:
        ids = window.clone()
        nats = 0.0
        ids[:, 1:] = mask
        for place in order:
            nats -= float(model(ids)[0, 1 + place].log_softmax(-1)[window[0, 1 + place]])
            ids[0, 1 + place] = window[0, 1 + place]
        chains.append(nats)
    assert sum(bounds) / len(bounds) == pytest.approx(sum(chains) / len(chains), rel=1e-5)


@torch.no_grad()
def test_one_symbol_a_pass_draws_from_the_models_own_distribution() -> None:
    """Two places, three symbols: frequencies of both orders' chains, mixed half and half."""
    model = random_model(causal=False, n_tags=1, vocab_size=3)
    n = 12_000
    mask = model.cfg.n_ids - 1
    prompt = torch.tensor([[1]])

    def p(ids: list[int], place: int) -> torch.Tensor:
        return model(torch.tensor([ids]))[0, place, :mask].softmax(-1)

    want = torch.zeros(3, 3)
    for a, b in itertools.product(range(3), range(3)):
        left_first = p([1, mask, mask], 1)[a] * p([1, a, mask], 2)[b]
        want[a, b] = (left_first + p([1, mask, mask], 2)[b] * p([1, mask, b], 1)[a]) / 2
    found = learning.fill_in(
        model, prompt.expand(n, 1), 2, passes=2, rng=torch.Generator().manual_seed(0)
    )
    assert (found[:, 0] == 1).all()
    assert found.max() < mask
    freq = (found[:, 1] * 3 + found[:, 2]).bincount(minlength=9).view(3, 3) / n
    torch.testing.assert_close(freq, want, atol=4 * 0.5 / n**0.5, rtol=0)


def test_all_objectives_end_at_the_same_count_of_places(home: Path) -> None:
    """And supervised learning begins at the loss of an untrained model."""
    several = (
        ("supervised", "own", 1, 32),
        ("grpo", "own", 1, 128),
        ("ppo", "own", 2, 256),
        ("ppo", "text", 2, 64),
    )
    for objective, feed, epochs, per_step in several:
        cfg = settings(
            home,
            objective,
            feed=feed,
            inner_epochs=epochs,
            max_tokens=512,
            run_name=f"{objective}-{feed}",
        )
        assert cfg.tokens_per_step() == per_step
        assert cfg.tokens_per_step(2) == 2 * per_step
        found = loop.train(cfg).metrics()
        text = chars.load(cfg.source, "chars")
        assert len(found) == 512 // per_step
        assert found["tokens"].iloc[-1] == 512
        assert found["epoch"].iloc[-1] == pytest.approx(len(found) * 32 / len(text.train)), (
            "own symbols are no text"
        )
        if objective == "supervised":
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
    how = dict(max_tokens=32 * 500, eval_every=500, lr=5e-3, kl_coef=0.0, log_every=100)
    cfg = settings(home, objective, seed=seed, group_size=8, **how)
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
    hold((predict_verse_for_rewards if rewarded else predict_verse)(objective, home, seed=0))


LEARNED = (
    "train_loss",
    "reward_mean",
    "policy_loss",
    "kl_ref",
    "kl_weight",
    "value_loss",
    "grad_norm",
)


def test_where_no_draw_is_better_than_another_nothing_moves(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All draws wrong, a reference far away: the KL term alone must not move the policy."""
    start = loop.train(settings(home, "grpo", lr=0.0, run_name="start"))
    monkeypatch.setattr(
        chars, "dense_rewards", lambda drawn, *args, **more: torch.zeros(drawn.shape)
    )
    for objective in ("grpo", "ppo"):
        found = loop.train(
            settings(home, objective, kl_coef=1.0, kl_warmup_tokens=0, run_name=f"{objective}-dead")
        )
        assert found.metrics()["grad_norm"].eq(0).all()
        assert_same_weights(start, found)


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
@pytest.mark.parametrize("feed", ["own", "text"])
def test_a_random_reference_is_the_untrained_policy_and_stays_it(
    objective: str, feed: str, home: Path
) -> None:
    """The divergence starts at 0 and grows; from the bigram it does not start there. A resumed
    run keeps it."""
    how = dict(feed=feed, kl_warmup_tokens=0, kl_coef=0.01, lr=1e-2, max_tokens=4 * 8 * 4 * 6)
    random = loop.train(
        settings(home, objective, reference="random", run_name="random", **how)
    ).metrics()
    bigram = loop.train(settings(home, objective, run_name="bigram", **how)).metrics()
    assert random["kl_ref"].iloc[0] == pytest.approx(0, abs=1e-6)
    assert random["kl_ref"].iloc[-1] > 1e-4
    assert bigram["kl_ref"].iloc[0] > 0.01
    resume_contract(
        settings(home, objective, reference="random", run_name=objective, save_every=2, **how), 2
    )


def test_a_wrong_symbol_may_cost_one(home: Path) -> None:
    """Advantages of GRPO are doubled: 2 r - 1 in place of r, less the mean."""
    found = {}
    for mode in ("+1", "±1", "+-1"):
        cfg = settings(home, "grpo", reward_mode=mode, run_name=f"mode{len(found)}", kl_coef=0.0)
        found[mode] = loop.train(cfg).metrics().iloc[0]
    plain = found["+1"]
    signed = found["±1"]
    assert signed["reward_mean"] == pytest.approx(2 * plain["symbol_accuracy"] - 1, abs=1e-6)
    assert plain["reward_mean"] == pytest.approx(plain["symbol_accuracy"], abs=1e-6)
    assert signed["adv_abs_mean"] == pytest.approx(2 * plain["adv_abs_mean"], rel=1e-5)
    assert found["+-1"]["reward_mean"] == signed["reward_mean"]


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
    words = (
        f"--objective ppo --source {source} --tokenizer gpt2:512 "
        "--horizon 8 --device-batch-size 2 --group-size 2"
    )
    words += " --max-tokens 64 --model.depth 1 --model.n-embd 16 --model.n-head 2 --run-name cli"
    COMMANDS["chars"].run(words.split())
    assert run.Run.open("cli").evals()["val_loss"].iloc[-1] > 0


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(home: Path) -> None:
    more = {
        "grpo": dict(feed="own", max_tokens=32 * 4 * 6, partial_logprob=0.05),
        "ppo": dict(minibatches=2),
    }
    cfgs = [
        settings(home, o, **more.get(o, {}), eval_every=3)
        for o in ("supervised", "denoise", "grpo", "ppo")
    ]
    for one, two in train_one_and_two(home, *cfgs):
        assert_close_curves(one, two, *(name for name in LEARNED if name in one.metrics()))
        assert one.evals()["val_loss"].tolist() == pytest.approx(
            two.evals()["val_loss"].tolist(), rel=1e-3
        ), one.name
