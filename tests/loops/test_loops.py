"""The three loops: what is learned, what resuming continues, what stops a run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contracts import assert_close_curves, assert_same_runs, dead_task_contract, resume_contract, train_one_and_two
from learning import Claim, above, below, hold, lesson
from raising import raising

from codechat import pretrain, reinforce, sft
from codechat.core.errors import RunError, UserError
from codechat.data import command, corpus
from codechat.evaluation import domain_loss
from codechat.models import head
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths, run
from codechat.tasks import toy
from codechat.text import tokenizer

TINY = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257)


def write_text_corpus(home: Path) -> str:
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(120)]
    corpus.write_corpus(texts, home / "corpus", tokenizer.load("bytes"))
    return str(home / "corpus")


@pytest.fixture
def text_corpus(home: Path) -> str:
    return write_text_corpus(home)


@pytest.fixture
def conversations(home: Path) -> str:
    folder = home / "dialogues"
    folder.mkdir()
    for domain in ("calls", "code"):
        for split, n in (("train", 60), ("select", 8)):
            rows = [
                {
                    "id": f"{domain}{i}",
                    "domain": domain,
                    "meta": {},
                    "messages": [
                        {"role": "user", "content": f"{domain} {i % 7}"},
                        {"role": "assistant", "content": str(i % 7) * 3},
                    ],
                }
                for i in range(n)
            ]
            (folder / f"{domain}.{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def pretrain_config(text_corpus: str, **changes: object) -> pretrain.PretrainConfig:
    return replace(
        pretrain.PretrainConfig(
            data_dir=text_corpus,
            model=TINY,
            seq_len=32,
            device_batch_size=4,
            max_steps=12,
            eval_every=6,
            eval_tokens=2048,
            save_every=4,
            log_every=1,
            warmup_steps=2,
            compile=False,
        ),
        **changes,
    )


def sft_config(conversations: str, **changes: object) -> sft.SFTConfig:
    return replace(
        sft.SFTConfig(
            data_dir=conversations,
            model=TINY,
            tokenizer="bytes",
            device_batch_size=2,
            max_steps=12,
            eval_every=6,
            save_every=4,
            log_every=1,
            probe_examples=0,
            warmup_steps=2,
        ),
        **changes,
    )


def toy_config(**changes: object) -> reinforce.ReinforceConfig:
    return replace(
        reinforce.ReinforceConfig(
            task="toy",
            tokenizer="bytes",
            model=GPTConfig(**toy.TOY_MODEL, vocab_size=257),
            max_steps=120,
            device_batch_size=4,
            max_new_tokens=toy.COMPLETION_LENGTH,
            lr=4e-3,
            warmup_steps=1,
            eval_every=0,
            eval_examples=4,
            save_every=0,
        ),
        **changes,
    )


@lesson()
def pretrain_on_text(home: Path, seed: int) -> list[Claim]:
    found = pretrain.train(
        pretrain_config(
            write_text_corpus(home), max_steps=60, save_every=0, eval_every=60, run_name="learns", seed=seed
        )
    )
    assert found.status["status"] == "finished"
    first, last = found.evals()["val_bpb"].iloc[[0, -1]]
    # an untrained byte model: about log2(257) bits
    return [
        above("first bits per byte", first, 7.0),
        below("first bits per byte", first, 9.5),
        below("last over first", last / first, 0.6),
    ]


def test_pretraining_lowers_bits_per_byte(home: Path) -> None:
    hold(pretrain_on_text(home, seed=0))


def test_pretraining_resumes_bitwise(text_corpus: str) -> None:
    resume_contract(pretrain.train, pretrain_config(text_corpus), 8)


def test_no_weights_are_drawn_where_a_checkpoint_replaces_them(
    text_corpus: str, conversations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the model nor by torch's own layers: of a child of another run, and of a run that goes on."""
    drawn: list[object] = []
    own, layers = GPT.init_weights, torch.nn.init.kaiming_uniform_
    monkeypatch.setattr(GPT, "init_weights", lambda model, seed=0: drawn.append(model) or own(model, seed))
    monkeypatch.setattr(
        torch.nn.init,
        "kaiming_uniform_",
        lambda tensor, **k: layers(tensor, **k) if tensor.device.type == "meta" else drawn.append(tensor),
    )
    cfg = pretrain_config(text_corpus, run_name="base", max_steps=2, save_every=1, eval_every=0)
    pretrain.train(cfg)
    assert len(drawn) == 1, "new weights, once"
    sft.train(sft_config(conversations, init_from="base", run_name="child", max_steps=1, eval_every=0))
    first = run.Run.open("base").checkpoints()[0]
    (paths.runs_dir() / "base/checkpoints/latest").write_text(f"step_{first:06d}\n")
    pretrain.train(replace(cfg, resume=True))
    assert len(drawn) == 1


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_sft_resumes_bitwise(lora_rank: int, conversations: str) -> None:
    resume_contract(sft.train, sft_config(conversations, lora_rank=lora_rank), 8)


def test_reinforce_resumes_bitwise(home: Path) -> None:
    resume_contract(reinforce.train, toy_config(max_steps=12, save_every=4), 8)


def test_accumulation_equals_one_large_batch(text_corpus: str, conversations: str) -> None:
    for train, cfg in (
        (pretrain.train, pretrain_config(text_corpus, max_steps=3)),
        (sft.train, sft_config(conversations, max_steps=3)),
    ):
        one = train(replace(cfg, run_name=f"{train.__module__[9:]}-one", device_batch_size=4, grad_accum=1))
        four = train(replace(cfg, run_name=f"{train.__module__[9:]}-four", device_batch_size=1, grad_accum=4))
        assert_close_curves(one, four, "train_loss", rel=0, abs=2e-5)


def test_reinforce_rejects_a_dead_task_and_stops_when_it_dies(home: Path) -> None:
    found = dead_task_contract(reinforce.train, toy_config(run_name="dead"))
    assert found.metrics()["grad_norm"].max() == 0.0  # nothing moved it while it was dead


@lesson()
def raise_entropy(home: Path, seed: int) -> list[Claim]:
    last = {
        c: reinforce.train(toy_config(run_name=f"entropy{i}", max_steps=25, entropy_coef=c, seed=seed))
        .metrics()["entropy"]
        .iloc[-1]
        for i, c in enumerate((-0.3, 0.3))
    }
    return [above("entropy at 0.3 less at -0.3", last[0.3] - last[-0.3], 0.2)]


@pytest.mark.slow
def test_positive_entropy_coef_raises_entropy(home: Path) -> None:
    hold(raise_entropy(home, seed=0))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_sft_trains_adapters_with_either_optimizer(optimizer: str, conversations: str) -> None:
    """Muon, SFT's default, takes every adapter, so that nothing is left for AdamW."""
    how = dict(lora_rank=4, lora_alpha=32.0, optimizer=optimizer, max_steps=30, save_every=0)
    found = sft.train(sft_config(conversations, run_name="adapters", **how))
    losses = found.metrics().sort_values("step")["train_loss"]
    assert losses.iloc[-5:].mean() < losses.iloc[:5].mean() - 0.05  # the base is random and frozen


def test_three_rises_of_a_held_out_loss_are_named() -> None:
    falling = [{"heldout_loss/code": 1.0 + 0.1 * i, "heldout_loss/calls": 1.0 - 0.1 * i} for i in range(4)]
    assert sft.regressed(falling) == ["heldout_loss/code"]
    assert sft.regressed(falling[:3]) == []
    assert sft.regressed([{"heldout_loss/code": v} for v in (1.0, 1.1, 1.05, 1.2)]) == []


def test_a_loss_that_rises_three_times_is_named(
    conversations: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rising = iter(range(1, 100))
    monkeypatch.setattr(domain_loss, "held_out_losses", lambda *a: {"heldout_loss/code": float(next(rising))})
    sft.train(sft_config(conversations, eval_every=2, max_steps=6, run_name="regress"))
    assert "heldout_loss/code rose" in capsys.readouterr().err


def test_a_rise_alone_is_not_why_a_run_was_interrupted(conversations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rising = iter(range(1, 100))

    def measured(*_: object) -> dict[str, float]:
        if (at := next(rising)) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return {"heldout_loss/code": float(at)}

    monkeypatch.setattr(domain_loss, "held_out_losses", measured)
    found = sft.train(sft_config(conversations, eval_every=2, max_steps=50, run_name="rise"))
    assert found.status["status"] == "stopped" and "heldout_loss" not in found.status["reason"]


@pytest.mark.parametrize("loop", ["pretrain", "sft"])
def test_a_loss_that_is_not_finite_is_never_saved(
    loop: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step before a save is not logged: the good checkpoints are those that are kept."""
    own, calls = head.cross_entropy, iter(range(100))

    def cross_entropy(*given: object) -> torch.Tensor:
        return own(*given) * (math.nan if torch.is_grad_enabled() and next(calls) >= 6 else 1.0)

    monkeypatch.setattr(head, "cross_entropy", cross_entropy)
    how = dict(run_name="nan", eval_every=0, save_every=2, log_every=100, device_batch_size=1, max_steps=20)
    with raising(RunError, "gradient", "nan", "step 7", "--lr"):
        if loop == "sft":
            sft.train(sft_config(request.getfixturevalue("conversations"), **how))
        else:
            pretrain.train(pretrain_config(request.getfixturevalue("text_corpus"), **how))
    assert (kept := run.Run.open("nan").checkpoints())[-1] == 6
    for step in kept:
        assert all(x.isfinite().all() for x in checkpoint.load(f"nan@{step}").model_state.values())


def test_mix_must_be_shares() -> None:
    for mix in ("calls", "calls=-1"):
        with raising(UserError, "mix", mix):
            sft.SFTConfig(mix=(mix,))


def test_a_sequence_beyond_the_block_is_refused() -> None:
    with raising(UserError, "seq_len", 65, "block_size", 64):
        pretrain.PretrainConfig(model=TINY, seq_len=65)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_killed_process_continues_where_its_checkpoint_is(
    number: signal.Signals, text_corpus: str, home: Path
) -> None:
    """The real command, killed for real; then the real command with --resume gives the same weights as an uninterrupted run."""
    program = (
        "import sys, pathlib; from codechat import cli; from codechat.runs import paths; "
        "paths.ROOT = pathlib.Path(sys.argv.pop(1)); sys.exit(cli.main(sys.argv[1:]))"
    )
    flags = [
        sys.executable,
        "-c",
        program,
        str(home),
        "pretrain",
        "--data-dir",
        text_corpus,
        "--model.depth",
        "2",
        "--model.n-embd",
        "32",
        "--model.n-head",
        "2",
        "--model.block-size",
        "64",
        "--seq-len",
        "32",
        "--device-batch-size",
        "4",
        "--max-steps",
        "600",
        "--eval-every",
        "0",
        "--eval-tokens",
        "512",
        "--save-every",
        "20",
        "--log-every",
        "1",
        "--no-compile",
        "--run-name",
        "killed",
    ]
    process = subprocess.Popen(flags, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.time() + 600
    while not (run.exists("killed") and run.Run.open("killed").checkpoints()) and time.time() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=600)
    state = run.Run.open("killed").status["status"]
    assert state == ("killed" if number == signal.SIGKILL else "stopped"), err.decode()[-2000:]
    assert process.returncode != 0
    done = subprocess.run([*flags, "--resume"], capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    whole = subprocess.run([*flags[:-1], "whole"], capture_output=True, timeout=900)
    assert whole.returncode == 0, whole.stderr.decode()[-2000:]
    assert_same_runs(run.Run.open("killed"), run.Run.open("whole"))


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(text_corpus: str, conversations: str, home: Path) -> None:
    """torchrun with two gloo ranks against one process with the same global batch: the same losses."""
    pretrained, tuned, _ = train_one_and_two(
        home,
        pretrain_config(text_corpus, max_steps=4, run_name="pretrain"),
        sft_config(conversations, max_steps=4, run_name="sft"),
        toy_config(max_steps=2, diagnose_groups=0, run_name="reinforce"),
    )
    for one, two in (pretrained, tuned):
        assert_close_curves(one, two, "train_loss", rel=0, abs=2e-5)
    assert run.Run.open("reinforce-two").status["status"] == "finished"


def test_reinforce_logs_the_behaviour_probes_beside_its_scores(home: Path) -> None:
    command.main(
        [
            "calls",
            "--out",
            str(home / "calls"),
            "--tokenizer",
            "bytes",
            "--max-examples",
            "8",
            "--problems",
            "6",
            "--copies",
            "0",
            "--eval-examples",
            "4",
            "--probes",
            "2",
            "--no-call-share",
            "0",
            "--negatives-share",
            "0",
        ]
    )
    problems = (home / "calls/funcall.train.jsonl").read_text().splitlines()
    assert all(json.loads(row)["gold"] for row in problems), "no problem wants no call"
    shape = GPTConfig(depth=1, n_embd=16, n_head=1, block_size=512, vocab_size=257)
    cfg = toy_config(
        task="funcall",
        data_dir=str(home / "calls"),
        model=shape,
        max_steps=1,
        group_size=2,
        device_batch_size=2,
        max_new_tokens=4,
        diagnose_groups=0,
    )
    plain = reinforce.train(replace(cfg, run_name="plain")).evals()
    probed = reinforce.train(replace(cfg, run_name="probed", probe_examples=2)).evals()
    assert not [c for c in plain if c.startswith("probe/")]
    assert list(probed["probe/code_with_tools/n"]) == [2] and probed["reward_mean"].equals(plain["reward_mean"])
