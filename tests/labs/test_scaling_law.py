"""The scaling law: a known law is recovered, unidentified parameters are reported, and every run of the recipe spends its budget."""

from __future__ import annotations

import numpy as np

from codechat.labs import scaling_law
from codechat.launch.recipes import RECIPES
from codechat.models.config import GPTConfig

N = np.array([1e5, 3e5, 1e6, 3e6, 1e7] * 2)
D = np.concatenate([1e11 / N[:5], 1e13 / N[5:]])


def law(n: np.ndarray, d: np.ndarray) -> np.ndarray:
    return 1.6 + 0.5 * (n / 1e6) ** -0.4 + 0.9 * (d / 1e6) ** -0.3


def test_a_law_that_made_the_points_is_found_again() -> None:
    found = scaling_law.fit(N, D, law(N, D))
    assert found.rmse < 0.01 and np.abs(found.predict(2e6, 5e6) - law(np.array(2e6), np.array(5e6))) < 0.02
    assert abs(found.a - 0.4) <= 0.1 and abs(found.b - 0.3) <= 0.1 and abs(found.E - 1.6) < 0.2
    assert found.region["a"][0] <= found.a <= found.region["a"][1]
    np.testing.assert_allclose(found.residuals, law(N, D) - found.predict(N, D), atol=1e-9)


def test_noise_widens_the_region_and_points_at_one_size_identify_no_exponent_of_size() -> None:
    exact = scaling_law.fit(N, D, law(N, D))
    noisy = scaling_law.fit(N, D, law(N, D) + np.random.default_rng(0).normal(0, 0.1, len(N)))
    assert all(noisy.region[p][1] - noisy.region[p][0] > exact.region[p][1] - exact.region[p][0] for p in "ab")
    same = np.full(10, 1e6)
    assert "a" not in scaling_law.fit(same, D, law(same, D)).identified


def test_a_left_out_point_is_judged_by_a_law_that_has_not_seen_it() -> None:
    loss = law(N, D)
    loss[4] += 0.5
    errors = scaling_law.leave_one_out_errors(N, D, loss)
    assert np.abs(errors).argmax() == 4 and errors[4] > 0.3


def test_every_run_of_the_recipe_spends_its_budget() -> None:
    trained = [s for s in RECIPES["scaling"].stages if s.name != "corpus"]
    assert len(trained) == 10
    for stage in trained:
        shape = GPTConfig(**stage.settings["model"], vocab_size=4096)
        tokens = stage.settings["max_steps"] * stage.settings["device_batch_size"] * stage.settings["seq_len"]
        budget = {"low": 1e12, "high": 2e12}[stage.name.rpartition("-")[2]]
        assert abs(tokens * shape.flops_per_token(stage.settings["seq_len"]) / budget - 1) < 0.02, stage.name
        assert stage.settings["warmup_steps"] < stage.settings["max_steps"]
