"""`python -m benchmarks`: turns, ratios, peers of the same shape, and each kind of work end to end with tiny budgets."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import benchmarks as bench
from benchmarks import data, measure, peers, quality, rl
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import paths

TINY = "--model.depth 1 --model.n-embd 32 --model.n-head 1 --model.block-size 64 --model.vocab-size 300".split()


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def lines_of_python(folder: Path, n: int) -> Path:
    path = folder / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"def f{i}():\n    return {'x' * 40}{i}\n" * 30}) + "\n" for i in range(n))
    )
    return path


def sleeper(name: str, seconds: float, order: list[str]) -> measure.Contestant:
    def run() -> None:
        order.append(name)
        time.sleep(seconds)

    return measure.Contestant(name, run, units=2.0, flops=50.0)


def test_contestants_take_turns_and_ratios_are_of_the_first() -> None:
    order: list[str] = []
    fast, slow = measure.race([sleeper("fast", 0.02, order), sleeper("slow", 0.06, order)], rounds=3, peak_flops=1e4)
    assert order == ["fast", "slow"] * 4  # one turn each to warm up
    assert fast.ratio == 1.0 and 2.0 < slow.ratio < 4.0
    assert fast.slowest <= fast.rate <= fast.fastest <= 2.0 / 0.02
    assert fast.mfu == pytest.approx(fast.rate * 50 / 1e4)


def test_a_ratio_survives_a_machine_that_slows_down() -> None:
    """Both slow down threefold after the first round; the medians of the rates alone would mix the two states."""
    turns = {"a": iter((0.01, 0.01, 0.03, 0.03)), "b": iter((0.02, 0.02, 0.06, 0.06))}
    made = [measure.Contestant(n, lambda: None, 1.0, seconds=lambda n=n: next(turns[n])) for n in turns]
    assert [t.ratio for t in measure.race(made, rounds=3)] == [1.0, 2.0]


def test_the_peak_is_the_best_between_the_rounds_and_a_share_above_it_is_disturbed() -> None:
    """An idle moment shows the peak; where none came, a share above 1 is no share."""
    peaks, order = iter((100.0, 4e4, 300.0, 200.0)), []
    (found,) = measure.race([sleeper("a", 0.01, order)], rounds=3, peak_flops=lambda: next(peaks))
    assert found.mfu == pytest.approx(found.rate * 50 / 4e4) and 0 < found.mfu < 1 and not found.disturbed
    (found,) = measure.race([sleeper("a", 0.01, order)], rounds=1, peak_flops=lambda: 100.0)
    assert found.mfu is None and found.disturbed and measure.rows([found])[0]["disturbed"]


def test_by_default_no_round_would_end_after_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 0.0, 10.0, 16.0, 22.0))  # began; then the start of each: a warm-up of 10 s, rounds of 6
    with monkeypatch.context() as patched:
        patched.setattr(measure.time, "perf_counter", lambda: next(clock))
        assert list(measure._until(6, 27.0, False)) == [0, 1, 2], "the third round would end at 28"
    order: list[str] = []
    (found,) = measure.race([sleeper("slow", 0.05, order)], rounds=None, limit_s=0.12)
    assert found.rounds == 1 and len(order) == 1 + found.rounds
    measure.show("a bench", "tokens", [found])
    assert f"{found.rounds} round" in capsys.readouterr().out
    for rounds, made in ((None, measure.ROUNDS), (7, 7)):
        order.clear()
        (found,) = measure.race([sleeper("fast", 0.0, order)], rounds, limit_s=0.0 if rounds else 60.0)
        assert found.rounds == made == len(order) - 1, "rounds that were asked for are all run"


def test_the_plain_peer_has_the_shape_and_is_causal() -> None:
    cfg = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=16, vocab_size=300)
    model, ids = peers.PlainGPT(cfg), torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 300
    a, b = model(ids), model(changed)
    assert a.shape == (2, 16, cfg.padded_vocab)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])
    matrices = sum(p.numel() for p in GPT(cfg).parameters() if p.ndim == 2)
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == matrices + 16 * 32  # its learned positions


def test_every_kind_explains_itself_and_wrong_words_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in bench.KINDS:
        with pytest.raises(SystemExit):
            bench.main([kind, "--help"])
        assert f"python -m benchmarks {kind}" in capsys.readouterr().out
    for words in (
        ["qualty"],
        ["--rounds", "1"],
        ["train", "--vs", "nobody"],
        ["sample", *TINY],
        ["train", "--seq-len", "999"],
    ):
        with pytest.raises(ConfigError):
            bench.main(words)
    with pytest.raises(RunError):
        measure.race([], 1)
    with pytest.raises(MissingFile):
        peers.require("a_package_that_nobody_has")


@pytest.mark.slow
def test_training_steps_with_memory_end_to_end(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = in_folder / "figures.json"
    words = "--device-batch-size 2 --seq-len 16 --vs plain --modes eager --rounds 2".split()
    bench.main(["train", *TINY, *words, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert [t["name"] for t in figures["timings"]] == ["codechat", "plain, eager"]  # float32 runs eagerly as it is
    assert all(t["rate"] > 0 and t["rounds"] == 2 for t in figures["timings"])
    assert all(m["peak"] > m["before"] > 0 for m in figures["memory"].values()) and len(figures["memory"]) == 2
    assert figures["machine"]["cores"] and figures["config"]["device_batch_size"] == 2
    assert "plain, eager" in capsys.readouterr().out


def test_sampling_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--prompts 2 --prompt-tokens 4 --max-new-tokens 8 --vs no-cache --rounds 2".split()
    found = bench.run_kind("sample", [*TINY, *words])
    assert [t["name"] for t in found["timings"]] == ["codechat", "full forward per token"]
    assert "late_over_early" in found and "second half" in capsys.readouterr().out


def test_serving_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--clients 3 --prompt-tokens 4 --max-new-tokens 8 --rounds 1 --first-tokens 2".split()
    assert bench.main(["serve", *TINY, *words, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [t["name"] for t in figures["timings"]] == ["generate.sample", "engine", "server, whole", "server, streamed"]
    assert (
        figures["first_token_s"] > 0 < figures["prefill_s"]
        and "first token on an idle server" in capsys.readouterr().out
    )


def test_an_rl_step_end_to_end(in_folder: Path) -> None:
    model = "--model.depth 1 --model.n-embd 32 --model.n-head 1".split()
    words = "--problems 2 --group-size 2 --max-new-tokens 8 --rounds 1 --vs".split()
    found = bench.run_kind("rl", [*model, *words])
    (own,) = found["timings"]
    steps = [json.loads(line) for line in (in_folder / "runs" / rl.RUN_NAME / "metrics.jsonl").read_text().splitlines()]
    assert own["rate"] == pytest.approx(4 / steps[-1]["step_s"], rel=1e-6) and len(steps) == rl.STEPS


@pytest.mark.slow
def test_data_end_to_end(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "STEPS", 1)
    found = bench.run_kind(
        "data", ["--path", str(lines_of_python(in_folder, 200)), "--tokenizer", "gpt2:4096", "--rounds", "1"]
    )
    assert [t["name"] for t in found["timings"]] == ["codechat", "tiktoken's batch encoder"]
    assert 0 < found["loader_share"] < 0.5


def test_quality_holds_out_some_documents(in_folder: Path) -> None:
    text = lines_of_python(in_folder, 100)
    manifest = quality.prepare(quality.QualityBench(path=str(text)), "gpt2:4096", in_folder / "corpus")
    assert 1 <= manifest["val_documents"] <= 6 and manifest["val_documents"] + manifest["train_documents"] == 100


@pytest.mark.slow
def test_quality_gives_each_its_seconds(in_folder: Path) -> None:
    words = "--seconds 0.4 --evaluations 2 --eval-tokens 512".split()
    found = bench.run_kind("quality", ["--path", str(lines_of_python(in_folder, 100)), *words])
    assert set(found["curves"]) == {"codechat", "plain"} == set(found["lowest"])
    for name, rows in found["curves"].items():
        assert len(rows) == 2 and rows[-1]["seconds"] >= 0.4 and rows[-1]["tokens"] % 4096 == 0
        assert found["lowest"][name] == min(row["val_bpb"] for row in rows) < 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arcee", "gpt2"])
def test_transformers_models_have_the_shape(kind: str) -> None:
    pytest.importorskip("transformers", reason="the bench extra is not installed")
    cfg = GPTConfig(depth=1, n_embd=32, n_head=1, block_size=64, vocab_size=300)
    model = peers.huggingface(kind, cfg)
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, cfg.padded_vocab)
    if kind == "arcee":
        assert sum(p.numel() for p in model.parameters()) == cfg.n_params


def test_constrained_sampling_is_timed(tmp_path: Path) -> None:
    words = "--prompts 2 --prompt-tokens 4 --max-new-tokens 4 --rounds 1 --tokenizer bytes".split()
    assert bench.main(["constrain", *TINY, *words, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["name"] for row in figures["timings"]] == ["free", "constrained"]
    assert 0 < figures["mask_us_per_token"] and 0 < figures["grammar_ms"]
    with pytest.raises(ConfigError, match="square"):
        bench.main(["constrain", "--tools", "squar"])
