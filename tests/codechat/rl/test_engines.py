"""Rollouts from a server: the same curve as without one, whatever is killed meanwhile; other
samplers are measured and weighed."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from contracts import assert_close_curves, small, train, weights
from raising import raising
from random_models import perturbed
from ranks import train_on_ranks
from server import Serving

from codechat.core import config, http_client
from codechat.core.errors import RunError
from codechat.core.http_client import Link
from codechat.formats import hf_format
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import engines
from codechat.runs import checkpoint, run
from codechat.tasks.toy import TOY_MODEL
from codechat.text import chat, tokenizer

SHAPE = GPTConfig(**TOY_MODEL | {"depth": 1, "n_embd": 32}, vocab_size=257)
TOK = tokenizer.load("bytes")
META = {"tokenizer": TOK.to_dict(), "tags": "reserved"}
DAPO = dict(variant="dapo", inner_epochs=2, old_logprobs="trainer", importance_cap=2.0)
SMALL = dict(max_steps=3, device_batch_size=3, group_size=6, max_new_tokens=4, save_every=0)
CURVE = ("reward_mean", "exact_match", "policy_loss", "grad_norm", "entropy", "effective_groups")
START = "weights/start/checkpoints/step_000000"


@pytest.fixture(autouse=True)
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the runs of the test weights/start, which holds a model of the toy's shape that no
    run begins with."""
    monkeypatch.setattr(engines, "PAUSES_S", (0.02, 0.2))
    save(model(5), home / "weights/start")
    return home


def model(seed: int, **changes: Any) -> GPT:
    return perturbed(GPT(replace(SHAPE, **changes)), 0.2, seed)


def save(what: GPT, folder: Path, step: int = 0, tok: tokenizer.Tokenizer = TOK) -> Path:
    return checkpoint.save(folder, step, model=what, meta=META | {"tokenizer": tok.to_dict()})


def settings(loop: str, home: Path, **changes: Any) -> Any:
    how = SMALL | dict(model=config.plain(SHAPE), eval_examples=1, engine_patience_s=60.0)
    how |= (
        {} if changes.get("engine", "local") == "local" else {"engine_dir": str(home / "weights")}
    )
    return small(loop, home, **how | (DAPO if loop == "grpo" else {}) | changes)


def same(a: run.Run, b: run.Run) -> None:
    assert_close_curves(a, b, *CURVE, rel=1e-3)
    for name, tensor in weights(a).items():
        torch.testing.assert_close(tensor, weights(b)[name], atol=2e-4, rtol=1e-3)


def opened(home: Path, url: str, kind: str = "http", **changes: Any) -> Any:
    cfg = settings(
        "reinforce",
        home,
        engine=kind,
        engine_url=url,
        run_name="direct",
        tags="reserved",
        **changes,
    )
    return engines.open_engine(cfg, TOK)


def serving(home: Path, **how: Any) -> Serving:
    return Serving(**{"ckpt": str(home / START), "reload_from": home / "weights"} | how)


@pytest.fixture
def up(home: Path) -> Iterator[Any]:
    with serving(home, max_batch=8, max_queue=12) as running:
        yield running


def completions(up: Any, **body: Any) -> tuple[int, Any]:
    common = {"model": up.health()["model"], "return_token_ids": True, "ignore_eos": True}
    return up.send("POST", "/v1/completions", common | body)


def load(up: Any, path: str) -> tuple[int, Any]:
    return up.send("POST", "/admin/weights", {"path": path})


def test_the_server_takes_over_what_lies_in_its_directory_and_nothing_else(
    up: Any, home: Path
) -> None:
    first = up.health()["version"]
    save(model(1), home / "secret")
    save(model(1, n_embd=64), home / "weights/other")
    save(model(1), home / "weights/words", tok=tokenizer.load("gpt2:257"))
    torn = save(model(1), home / "weights/torn")
    with open(torn / "model.pt", "r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"x")
    checkpoint.save(home / "weights/tagged", 0, model=model(1), meta=META | {"tags": "text"})
    inside = "checkpoints/step_000000"
    bad = {f"../secret/{inside}": 403, str(home / "secret" / inside): 403, "none": 409, "": 400}
    bad |= {f"{name}/{inside}": 409 for name in ("other", "words", "tagged", "torn")}
    for path, status in bad.items():
        found, body = load(up, path)
        assert (found, body["error"]["param"]) == (status, "path"), body
    assert up.health()["version"] == first, "a rejected path changes nothing"
    save(model(2), home / "weights/new", step=7)
    found, body = load(up, "new/checkpoints/step_000007")
    assert found == 200
    assert body["version"] == up.health()["version"] != first
    assert body["version"].startswith("new@7-")
    (choice,) = completions(up, prompt=[65, 66], max_tokens=6, seed=3)[1]["choices"]
    assert (
        choice["token_ids"]
        == generate.sample(model(2), [[65, 66]], max_new_tokens=6, seed=3)[0].ids
    )
    assert choice["weights_version"] == up.health()["version"]


def test_the_engine_samples_as_generate_does(
    up: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More completions than the server's queue takes, prompts up to the block and beyond, after
    a push the new weights; a busy server is asked again."""
    policy = model(3)
    engine = opened(home, up.url)
    engine.push(policy, 0)
    # whether the queue overflows depends on the machine's speed
    ask = engine.link.ask
    busy = iter([429, 503])

    def ask_busy(path: str, body: Any = None) -> Any:
        if path == "/v1/completions" and (status := next(busy, None)):
            raise http_client.Refused("the queue is full", status)
        return ask(path, body)

    monkeypatch.setattr(engine.link, "ask", ask_busy)
    prompts = [[65 + i] * n for i, n in enumerate((1, 2, 30, 60, 62, 64))]
    how: dict[str, Any] = dict(max_new_tokens=5, temperature=0.9, seed=9, samples_per_prompt=5)
    how |= dict(keys=[3, 1, 4, 15, 9, 2], stop=chat.stop_sequences(TOK), on_overflow="stop")
    right = generate.sample(policy, prompts, **how)
    got = engine.sample(policy, prompts, **how)
    assert [(c.ids, c.stop) for c in got] == [(c.ids, c.stop) for c in right]
    assert {c.stop for c in right} >= {"length", "context"}
    assert [lp for c in got for lp in c.logprobs] == pytest.approx(
        [lp for c in right for lp in c.logprobs], abs=1e-4
    )
    assert engine.metrics()["engine_retries"] >= 2


def test_a_server_that_lost_the_weights_gets_them_again(up: Any, home: Path) -> None:
    """What a restart does: it answers with the weights it was started with, which no rollout
    may hold."""
    policy = model(3)
    engine = opened(home, up.url)
    engine.push(policy, 4)
    pushed = engine.version
    how = dict(max_new_tokens=5, seed=1)
    assert load(up, START.removeprefix("weights/"))[0] == 200
    got = engine.sample(policy, [[65], [66]], **how)
    right = generate.sample(policy, [[65], [66]], **how)
    assert [c.ids for c in got] == [c.ids for c in right]
    assert up.health()["version"] == pushed
    assert engine.metrics()["engine_retries"] > 0


@pytest.mark.parametrize("loop", ["reinforce", "grpo"])
def test_the_curve_over_http_is_the_local_one_and_a_server_that_stays_away_stops_the_run(
    loop: str,
    up: Any,
    home: Path,
    monkeypatch: Any,
) -> None:
    """The third step finds nobody; the run has saved its two steps and continues with the
    server to the same end."""
    more = dict(max_steps=4) | (
        dict(lora_rank=2) if loop == "grpo" else {}
    )  # what is pushed are the merged weights
    ask = Link.ask
    calls = {"gone": False}

    def cut(self: Link, path: str, body: Any = None) -> Any:
        calls["gone"] |= (
            path == "/admin/weights" and "step_000002" in body["path"] and "cut" in body["path"]
        )
        if calls["gone"]:
            raise http_client.NoAnswer("no server answers")
        return ask(self, path, body)

    local = train(settings(loop, home, run_name="local", **more))
    cfg = settings(
        loop,
        home,
        run_name="cut",
        engine="http",
        engine_url=up.url,
        engine_patience_s=0.3,
        **more,
    )
    with monkeypatch.context() as patch:
        patch.setattr(Link, "ask", cut)
        found = train(cfg)
    assert found.status["status"] == "stopped"
    assert "step 2" in found.status["reason"]
    assert "--resume" in found.status["reason"]
    assert found.checkpoints() == [2]
    assert len(found.metrics()) == 2
    http = train(replace(cfg, resume=True))
    same(local, http)
    found = http.metrics()
    assert (found["push_s"] > 0).all()
    assert "push_s" not in local.metrics()
    assert found["logprob_mismatch"].max() < 1e-3
    assert found["mismatch_kl"].max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_over_http_learn_what_one_does_alone(shard: bool, up: Any, home: Path) -> None:
    there = dict(engine="http", engine_url=up.url, shard=shard)
    train_on_ranks(
        2,
        home,
        settings("reinforce", home, run_name="two", device_batch_size=2, max_steps=2, **there),
    )
    one = train(settings("reinforce", home, run_name="one", device_batch_size=4, max_steps=2))
    assert_close_curves(one, run.Run.open("two"), "reward_mean", "grad_norm")


class StubVLLM:
    """What of vLLM's OpenAI server `--engine vllm` uses: its fields and no others, weights from
    a directory, draws of
    its own. deaf: it keeps its first weights."""

    FIELDS = {
        "model",
        *"prompt n seed temperature top_k max_tokens logprobs stop_token_ids".split(),
    }
    FIELDS |= {"ignore_eos", "logit_bias", "return_token_ids"}

    def __init__(self, folder: Path, *, deaf: bool = False) -> None:
        self.folder = folder
        self.deaf = deaf
        self.bodies = list[dict[str, Any]]()
        self.calls = list[str]()
        self.weights = model(5)

    def ask(self, path: str, body: Any) -> Any:
        body = json.loads(json.dumps(body))
        self.calls.append(path)
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "weights/hf", "object": "model"}]}
        if path == "/collective_rpc":
            assert body == {"method": "reload_weights"}
            if not self.deaf:
                self.weights = hf_format.read_model(
                    SHAPE, hf_format.read_weights(self.folder).items()
                )
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return None
        assert (
            path == "/v1/completions"
            and body.keys() <= self.FIELDS
            and body["model"] == "weights/hf"
        ), body
        if self.calls.count(path) == 2:  # its core dies once
            raise http_client.Refused("EngineCore encountered an issue", 500)
        self.bodies.append(body)
        assert all(isinstance(i, int) for i in body["stop_token_ids"])
        assert all(-100 <= bias <= 100 for bias in body["logit_bias"].values())
        how = dict(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            samples_per_prompt=body["n"],
        )
        how |= dict(seed=body["seed"] + 1, stop=[(i,) for i in body["stop_token_ids"]])
        drawn = generate.sample(self.weights, [body["prompt"]], **how)
        choices = []
        for i, c in enumerate(drawn):
            tokens = {"tokens": ["?"] * len(c.ids), "token_logprobs": c.logprobs, "text_offset": []}
            choice = dict(
                index=i, token_ids=c.ids, prompt_token_ids=body["prompt"], logprobs=tokens
            )
            choices.append(choice | {"finish_reason": "stop" if c.stop == "stop" else "length"})
        return {"object": "text_completion", "model": body["model"], "choices": choices[::-1]}


def test_vllm_gets_an_export_after_each_step_and_its_own_fields(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StubVLLM(home / "weights/hf")
    deaf = StubVLLM(home / "weights/hf", deaf=True)
    found = []
    lost = []
    for stub, into in ((server, found), (deaf, lost)):
        monkeypatch.setattr(
            Link, "ask", lambda link, path, body=None, stub=stub: stub.ask(path, body)
        )
        cfg = settings("reinforce", home, run_name=f"vllm{stub.deaf}", engine="vllm", lr=2e-2)
        into += train(cfg).metrics()["logprob_mismatch"].tolist()
    assert max(found) < 1e-3, "the stub sampled from what was exported last"
    assert min(lost) > 0.1, "a server that keeps its weights shows in the mismatch"
    assert server.calls.count("/collective_rpc") == server.calls.count("/reset_prefix_cache") == 3
    body = server.bodies[0]
    assert body["top_k"] == -1
    assert body["ignore_eos"]
    assert 0 <= body["seed"] < 2**63
    assert len(body["logit_bias"]) == SHAPE.padded_vocab - SHAPE.n_ids
    assert len({b["seed"] for b in server.bodies}) == len(server.bodies)


def test_answers_that_cannot_be_trained_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = dict(index=0, token_ids=[5, 6, 7], prompt_token_ids=[65], finish_reason="length")
    good |= dict(logprobs={"token_logprobs": [-1.0, -2.0, -3.0]})
    engine = opened(home, "http://127.0.0.1:1", "vllm")
    choices = [good]
    monkeypatch.setattr(
        Link, "ask", lambda self, path, body=None: {"data": [{"id": "x"}], "choices": choices}
    )
    sample = lambda: engine.sample(model(1), [[65]], max_new_tokens=3)  # noqa: E731
    assert sample() == [generate.Completion([5, 6, 7], [-1.0, -2.0, -3.0], "length")]
    for change, named in (
        ({"token_ids": None}, "token_ids"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -3.0]}}, "logprobs"),
        ({"prompt_token_ids": [1, 65]}, "prompt_token_ids"),
        ({"token_ids": [5, 300, 6]}, "300"),
        ({"token_ids": [5, 6]}, "token_ids"),
    ):
        choices[0] = good | change
        with raising(RunError, named):
            sample()
