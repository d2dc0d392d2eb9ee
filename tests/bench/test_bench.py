"""`python -m benchmarks`: turns, ratios, peers of the same shape, and each kind of work end to
end with tiny budgets."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from on_gpu import randomized

import benchmarks as bench
from benchmarks import curve, data, measure, peers, quality, rl, sample, sft
from benchmarks.settings import CurveBench, SampleBench, SFTBench
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.data import conversations
from codechat.data.sources import IGNORE
from codechat.formats import exchange
from codechat.models import loading
from codechat.models.config import GPTConfig
from codechat.models.fast import fused, product
from codechat.models.gpt import GPT

TINY = (
    "--model.depth 1 --model.n-embd 32 --model.n-head 1 "
    "--model.block-size 64 --model.vocab-size 300"
).split()
ONE = "--model.depth 1 --model.n-embd 32 --model.n-head 1".split()


def lines_of_python(folder: Path, n: int) -> Path:
    rows = [{"text": f"def f{i}():\n    return {'x' * 40}{i}\n" * 30} for i in range(n)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "text.jsonl"


def contestant(order: list[str], name: str, *turns: float) -> measure.Contestant:
    """Its turns take these seconds; the first is the one to warm up."""
    left = iter(turns)
    return measure.Contestant(
        name,
        lambda: order.append(name),
        2.0,
        flops=50.0,
        seconds=lambda: next(left),
    )


def test_contestants_take_turns_and_ratios_are_of_the_first_also_where_the_machine_slows_down() -> (
    None
):
    """Both slow down threefold after a round; the medians of the rates alone would mix the two
    states."""
    order: list[str] = []
    made = [
        contestant(order, "a", 0.01, 0.01, 0.03, 0.03),
        contestant(order, "b", 0.02, 0.02, 0.02, 0.06),
    ]
    a, b = measure.race(made, rounds=3, peak_flops=1e5)
    assert order == ["a", "b"] * 4
    assert (a.ratio, b.ratio) == (1.0, 2.0)
    assert (a.slowest, a.rate, a.fastest) == pytest.approx((2 / 0.03, 2 / 0.03, 2 / 0.01))
    assert a.mfu == pytest.approx(a.rate * 50 / 1e5)


def test_the_peak_is_the_best_between_the_rounds_and_a_share_above_it_is_disturbed() -> None:
    """An idle moment shows the peak; where none came, a share above 1 is no share."""
    peaks = iter((100.0, 4e4, 300.0, 200.0))
    (found,) = measure.race(
        [contestant([], "a", *[0.01] * 4)], rounds=3, peak_flops=lambda: next(peaks)
    )
    assert found.mfu == pytest.approx(2 / 0.01 * 50 / 4e4)
    assert not found.disturbed
    (found,) = measure.race([contestant([], "a", 0.01, 0.01)], rounds=1, peak_flops=lambda: 100.0)
    assert found.mfu is None
    assert found.disturbed
    assert measure.rows([found])[0]["disturbed"]


def test_the_plain_peer_has_the_shape_and_is_causal() -> None:
    cfg = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=16, vocab_size=300)
    model = peers.PlainGPT(cfg)
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 300
    a = model(ids)
    b = model(changed)
    assert a.shape == (2, 16, cfg.padded_vocab)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])
    matrices = sum(p.numel() for p in GPT(cfg).parameters() if p.ndim == 2)
    # its learned positions
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == matrices + 16 * 32


def test_every_kind_explains_itself_and_wrong_words_are_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in bench.KINDS:
        with pytest.raises(SystemExit):
            bench.main([kind, "--help"])
        assert f"python -m benchmarks {kind}" in capsys.readouterr().out
    wrong = (
        "qualty, --rounds 1, train --vs nobody, sample, train "
        "--seq-len 999, constrain --tools squar"
    )
    for words in wrong.split(", "):
        with pytest.raises(ConfigError):
            bench.main([*words.split(), *(TINY if words == "sample" else [])])
    with pytest.raises(RunError):
        measure.race([], 1)
    with pytest.raises(MissingFile):
        peers.require("a_package_that_nobody_has")


ENDS = {  # kind: its settings, the names of its timings, figures above 0, a word that is printed
    "train": (
        "--device-batch-size 2 --seq-len 16 --vs plain --modes eager --rounds 2",
        ["codechat", "plain, eager"],
        (),
        "plain, eager",
    ),
    "sample": (
        "--prompts 2 --prompt-tokens 4 --max-new-tokens 8 --vs torch no-cache --rounds 2",
        ["codechat", "codechat, torch alone", "full forward per token"],
        (),
        "codechat",
    ),
    "serve": (
        "--clients 3 --prompt-tokens 4 --max-new-tokens 8 --rounds 1 --first-tokens 2",
        ["generate.sample", "engine", "server, whole", "server, streamed"],
        ("first_token_s", "prefill_s"),
        "first token on an idle server",
    ),
    "constrain": (
        "--prompts 2 --prompt-tokens 4 --max-new-tokens 4 --rounds 1 --tokenizer bytes",
        ["free", "constrained"],
        ("mask_us_per_token", "grammar_ms"),
        "constrained",
    ),
    "judge": (
        "--programs 2 --tests 5 --kilobytes 1 --rounds 1",
        ["new scripts", "known scripts", "new scripts, exec"],
        (),
        "judging",
    ),
}


@pytest.mark.parametrize("kind", [pytest.param("train", marks=pytest.mark.slow), *list(ENDS)[1:]])
def test_a_kind_end_to_end(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, names, positive, printed = ENDS[kind]
    model = TINY if kind != "judge" else []
    assert bench.main([kind, *model, *words.split(), "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [t["name"] for t in figures["timings"]] == names
    assert all(t["rate"] > 0 for t in figures["timings"])
    assert figures["machine"]["cores"]
    assert f"--rounds {figures['config']['rounds']}" in words
    assert all(figures[name] > 0 for name in positive)
    assert printed in capsys.readouterr().out
    assert [m["peak"] > m["before"] > 0 for m in figures.get("memory", {}).values()] == [
        True,
        True,
    ] * (kind == "train")


CHAT = "chat --ckpt released/nano --prompt-tokens 4 --max-new-tokens 8 --rounds 2".split()
FAKE = """
const sequence = {async *evaluate() { for (let i = 0; ; ++i) yield i; }};
const context = {getSequence: () => sequence, dispose: async () => {}};
const model = {createContext: async ({threads}) => { if (threads === 1) return context; }};
export const getLlama = async () => ({loadModel: async ({modelPath}) => model});
"""


def folder_of(tmp_path: Path, script: str) -> Path:
    """With a package node-llama-cpp that is this script."""
    dist = tmp_path / "node_modules" / "node-llama-cpp" / "dist"
    dist.mkdir(parents=True)
    (dist / "index.js").write_text(script)
    (dist / "package.json").write_text('{"type": "module"}')
    return tmp_path


def test_a_chat_leaves_llama_cpp_out_and_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*CHAT, "--vs", "llama.cpp", "--json", str(tmp_path / "figures.json")]) == 0
    assert "npm install node-llama-cpp@" in capsys.readouterr().err
    (timing,) = json.loads((tmp_path / "figures.json").read_text())["timings"]
    assert timing["name"].startswith("codechat")
    assert timing["rate"] > 0


def test_a_folder_without_llama_cpp_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="npm install"):
        bench.main([*CHAT, "--vs", "llama.cpp", "--llama-cpp", str(tmp_path)])


@pytest.mark.skipif(not shutil.which("node"), reason="no Node")
def test_llama_cpp_says_how_long_the_tokens_behind_the_first_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "export", lambda cfg: None)
    with peers.llama_cpp(folder_of(tmp_path, FAKE), "any", torch.float32) as peer:
        short, long = [
            peer.ask(prompt=[5], tokens=n, temperature=1.0, topK=3, seed=0)
            for n in (100, 1_000_000)
        ]
    assert 0 < short < long < 60
    assert peer.process.returncode == 0


@pytest.mark.skipif(not shutil.which("node"), reason="no Node")
def test_an_error_of_llama_cpp_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "export", lambda cfg: None)
    folder = folder_of(tmp_path, 'export const getLlama = () => { throw new Error("no build"); };')
    with (
        peers.llama_cpp(folder, "any", torch.float32) as peer,
        pytest.raises(RunError, match="Error: no build"),
    ):
        peer.ask(prompt=[5], tokens=3, temperature=1.0, topK=3, seed=0)


SAMPLE = "sample --ckpt released/nano --prompts 2 --prompt-tokens 4 --max-new-tokens 3".split()
FAKE_VLLM = """
import types
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, top_k, ignore_eos, detokenize):
        self.n = max_tokens
class LLM:
    def __init__(self, *, model, dtype, max_model_len, max_num_seqs, **rest):
        print("what vLLM says is no answer")
        assert open(model + "/config.json").read()
        assert (max_model_len, max_num_seqs) == (7, 2)
    def generate(self, prompts, sampling, use_tqdm):
        row = types.SimpleNamespace(token_ids=[5] * (sampling.n - SHORT))
        return [types.SimpleNamespace(outputs=[row]) for _ in prompts]
"""


def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Words for a python whose vLLM is this script."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return ["--vs", "--vllm", sys.executable, "--rounds", "2"]


def test_vllm_takes_turns_and_its_cpu_time_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = fake_vllm(tmp_path, monkeypatch, FAKE_VLLM.replace("SHORT", "0"))
    found = bench.run_kind(SAMPLE[0], [*SAMPLE[1:], *words, "--timed", "prompts"])
    assert [t["name"] for t in found["timings"]] == ["codechat", "vLLM"] == list(found["cpu"])
    own, peer = found["cpu"].values()
    assert own["ratio"] == 1
    assert 0 < peer["ratio"] < 1
    assert "CPU s of a turn" in capsys.readouterr().out


def test_vllm_has_to_sample_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = fake_vllm(tmp_path, monkeypatch, FAKE_VLLM.replace("SHORT", "1"))
    with pytest.raises(RunError, match="did not sample 3 tokens"):
        bench.run_kind(SAMPLE[0], [*SAMPLE[1:], *words])


def test_an_error_of_vllm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = fake_vllm(tmp_path, monkeypatch, "raise ImportError('no build')")
    with pytest.raises(RunError, match="vLLM ended; it said 'ImportError: no build'"):
        bench.run_kind(SAMPLE[0], [*SAMPLE[1:], *words])


def test_vllm_wants_a_checkpoint_and_its_python(tmp_path: Path) -> None:
    for kind in ("sample", "rl"):
        with pytest.raises(ConfigError, match="name a checkpoint"):
            bench.main([kind, "--vllm", "python"])
    with pytest.raises(MissingFile, match="an environment with vLLM"):
        bench.main([*SAMPLE, "--vs", "--vllm", str(tmp_path / "python")])


def test_decoding_counts_the_tokens_behind_the_first() -> None:
    cfg = SampleBench(prompts=2, max_new_tokens=5, timed="decoding")
    sampler = sample.Sampler("any", lambda n: measure.Spent(n, 2 * n), cfg)
    contestant = sampler.contestant()
    contestant.run()
    assert contestant.units == 2 * 4
    assert contestant.seconds is not None
    assert contestant.seconds() == 4
    assert sampler.turns == [measure.Spent(4, 8)]
    with pytest.raises(ConfigError, match="behind the first"):
        SampleBench(max_new_tokens=1, timed="decoding")


def test_an_rl_step_end_to_end(tmp_path: Path) -> None:
    words = "--problems 2 --group-size 2 --max-new-tokens 8 --rounds 1 --vs".split()
    found = bench.run_kind("rl", [*ONE, *words])
    (own,) = found["timings"]
    steps = [
        json.loads(line)
        for line in (tmp_path / "runs" / rl.RUN_NAME / "metrics.jsonl").read_text().splitlines()
    ]
    assert own["rate"] == pytest.approx(4 / steps[-1]["step_s"], rel=1e-6)
    assert len(steps) == rl.STEPS


@pytest.mark.slow
def test_data_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "STEPS", 1)
    words = [
        "--path",
        str(lines_of_python(tmp_path, 200)),
        *"--tokenizer gpt2:4096 --rounds 1".split(),
    ]
    found = bench.run_kind("data", words)
    assert [t["name"] for t in found["timings"]] == ["codechat", "tiktoken's batch encoder"]
    assert 0 < found["loader_share"] < 0.5


@pytest.mark.slow
def test_quality_holds_out_some_documents_and_gives_each_its_seconds(tmp_path: Path) -> None:
    text = str(lines_of_python(tmp_path, 100))
    manifest = quality.prepare(quality.QualityBench(path=text), "gpt2:4096", tmp_path / "corpus")
    assert 1 <= manifest["val_documents"] <= 6
    assert manifest["val_documents"] + manifest["train_documents"] == 100
    words = "--seconds 0.4 --evaluations 2 --eval-tokens 512".split()
    found = bench.run_kind("quality", ["--path", text, *words])
    assert set(found["curves"]) == {"codechat", "plain"} == set(found["lowest"])
    for name, rows in found["curves"].items():
        assert len(rows) == 2
        assert rows[-1]["seconds"] >= 0.4
        assert rows[-1]["tokens"] % 4096 == 0
        assert found["lowest"][name] == min(row["val_bpb"] for row in rows) < 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arcee", "gpt2"])
def test_transformers_models_have_the_shape(kind: str) -> None:
    pytest.importorskip("transformers", reason="the bench extra is not installed")
    cfg = GPTConfig(depth=1, n_embd=32, n_head=1, block_size=64, vocab_size=300)
    model = peers.huggingface(kind, cfg)
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (
        1,
        4,
        cfg.padded_vocab,
    )
    if kind == "arcee":
        assert sum(p.numel() for p in model.parameters()) == cfg.n_params


CURVE = dict(steps=2, rounds=2, start_steps=1, problems=4, group_size=4)


def test_curves_of_codechat_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        w for name, value in CURVE.items() for w in (f"--{name.replace('_', '-')}", str(value))
    ]
    found = bench.run_kind("curve", [*words, "--vs"])
    (rows,) = found["curves"].values()
    assert len(rows) == 2
    assert all(len(row) == 2 and all(0 <= x <= 1 for x in row) for row in rows)
    assert rows[0] != rows[1], "seeds sample different completions"
    for step, interval in enumerate(found["intervals"]["codechat"]):
        assert (
            interval["lo"]
            <= interval["value"]
            == pytest.approx((rows[0][step] + rows[1][step]) / 2)
        )
    assert "codechat" in capsys.readouterr().out


def test_overlap_and_difference_of_learners() -> None:
    """Of the six divisions of .1 .2 and .8 .9, the real one and its mirror have intervals
    apart; an interval of two values ends at them."""
    rows = {
        "a": [dict(lo=0.0, hi=0.2), dict(lo=0.0, hi=0.1)],
        "b": [dict(lo=0.2, hi=0.4), dict(lo=0.2, hi=0.3)],
    }
    assert curve._overlap(rows) == 0.5
    found = curve._difference(
        {"codechat": [[0.5, 0.7], [0.6, 0.8]], "trl": [[0.4, 0.6], [0.1, 0.3]]}
    )
    # the two extreme ones of six divisions
    assert found == {
        "value": pytest.approx(0.3),
        "p": pytest.approx(2 / 6),
    }
    assert curve._chance({"codechat": [[0.1], [0.2]], "trl": [[0.8], [0.9]]}) == dict(
        overlap=4 / 6, p=2 / 6
    )
    assert curve._chance({"codechat": [[0.1], [0.9]], "trl": [[0.2], [0.8]]}) == dict(
        overlap=4 / 6, p=1.0
    )


@pytest.mark.slow
def test_the_first_step_of_trl_has_codechats_rewards_and_gradient(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the bench extra is not installed")
    cfg = CurveBench(**CURVE)
    curve.train_codechat(cfg, curve.START, cfg.start_steps, 0, None)
    start = loading.load_model(curve.START)
    exchange.export(exchange.ExportConfig(ckpt=curve.START, out=tmp_path / "hf", dtype="float32"))
    rewards, first = curve.train_trl(cfg, 0, tmp_path, start)
    assert len(rewards) == cfg.steps
    assert rewards[0] == pytest.approx(sum(first["rewards"]) / len(first["rewards"]))
    assert len(first["prompts"]) == 16
    assert first["prompts"][:4] == first["prompts"][:1] * 4
    assert {len(completion) for completion in first["completions"]} == {8}
    # trl adds 1e-4 to a group's standard deviation, codechat 1e-6
    assert curve.gradient_norm(cfg, start, first) == pytest.approx(first["grad_norm"], rel=5e-3)


def test_padded_rows_hold_the_conversations_of_packed_ones() -> None:
    """The same summed loss from both: each conversation sees itself alone, from position 0."""
    tiny = GPTConfig(depth=1, n_embd=32, n_head=1, block_size=512)
    shape, (batch, *others) = sft.batches(SFTBench(model=tiny, device_batch_size=2))
    assert len(others) == 3
    ids, targets, mask = peers.padded(batch)
    n = int((batch.docs.max(1).values + 1).sum())
    assert (
        ids.shape
        == targets.shape
        == mask.shape
        == (n, -(-ids.shape[1] // peers.LENGTHS) * peers.LENGTHS)
    )
    assert n > 4
    assert int(mask.sum()) == int((batch.docs >= 0).sum())
    assert int((targets != IGNORE).sum()) == batch.supervised
    model = randomized(GPT(shape))
    with torch.no_grad():
        where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs))
        packed = model.loss(batch.ids, batch.targets, reduction="sum", **where)
        torch.testing.assert_close(
            model.loss(ids, targets, reduction="sum"), packed, rtol=1e-5, atol=0
        )


def test_an_sft_step_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench.run_kind(
        "sft", [*ONE, *"--device-batch-size 2 --rounds 1 --vs torch --modes eager".split()]
    )
    assert [t["name"] for t in figures["timings"]] == ["codechat", "codechat, torch alone"]
    assert 0.8 < figures["full"] <= 1
    assert all(t["rate"] > 0 and t["mfu"] for t in figures["timings"])
    assert "SFT step" in capsys.readouterr().out


def test_torch_alone_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "library", lambda dtype: "built")
    monkeypatch.setattr(fused, "kernel", lambda dtype: "built")
    with measure.torch_alone():
        assert product.library(torch.float32) is None
        assert fused.kernel(torch.float32) is None
    assert product.library(torch.float32) == fused.kernel(torch.float32) == "built"
