"""Rollouts from a server: the same curve as without one, whatever is killed meanwhile; other
samplers are measured and weighed."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import toy as toy_shape

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
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import engines
from codechat.runs import checkpoint, run
from codechat.text import chat, tokenizer

SHAPE = replace(toy_shape(), depth=1, n_embd=32)
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


def model(seed: int, shape: GPTConfig = SHAPE) -> GPT:
    return perturbed(GPT(shape), 0.2, seed)


def save(what: GPT, folder: Path, step: int = 0, tok: tokenizer.Tokenizer = TOK) -> Path:
    return checkpoint.save(folder, step, model=what, meta=META | {"tokenizer": tok.to_dict()})


def settings(loop: str, home: Path, case: dict[str, Any] | None = None, /, **changes: Any) -> Any:
    """Of three small steps; an engine that is not local takes weights from home / "weights"."""
    usual = SMALL | dict(model=config.plain(SHAPE), eval_examples=1, engine_patience_s=60.0)
    if changes.get("engine", "local") != "local":
        usual |= dict(engine_dir=str(home / "weights"))
    if loop == "grpo":
        usual |= DAPO
    return small(loop, home, usual | (case or {}) | changes)


def same(a: run.Run, b: run.Run) -> None:
    assert_close_curves(a, b, *CURVE, rel=1e-3)
    for name, tensor in weights(a).items():
        torch.testing.assert_close(tensor, weights(b)[name], atol=2e-4, rtol=1e-3)


def opened(home: Path, url: str, kind: str = "http") -> Any:
    cfg = settings(
        "reinforce", home, engine=kind, engine_url=url, run_name="direct", tags="reserved"
    )
    return engines.open_engine(cfg, TOK)


@pytest.fixture
def up(home: Path) -> Iterator[Any]:
    with Serving(
        ckpt=str(home / START), reload_from=home / "weights", max_batch=8, max_queue=12
    ) as running:
        yield running


def load(up: Any, path: str) -> tuple[int, Any]:
    return up.send("POST", "/admin/weights", {"path": path})


INSIDE = "checkpoints/step_000000"


@pytest.fixture
def foreign(home: Path) -> None:
    """Checkpoints that the server must not take over: elsewhere, of another shape, of other
    tokens, of other tags, damaged."""
    save(model(1), home / "secret")
    save(model(1, replace(SHAPE, n_embd=64)), home / "weights/other")
    save(model(1), home / "weights/words", tok=tokenizer.load("gpt2:257"))
    checkpoint.save(home / "weights/tagged", 0, model=model(1), meta=META | {"tags": "text"})
    torn = save(model(1), home / "weights/torn")
    with open(torn / "model.pt", "r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"x")


@pytest.mark.parametrize(
    "path, status",
    [
        (f"../secret/{INSIDE}", 403),
        (f"{{home}}/secret/{INSIDE}", 403),
        ("none", 409),
        ("", 400),
        (f"other/{INSIDE}", 409),
        (f"words/{INSIDE}", 409),
        (f"tagged/{INSIDE}", 409),
        (f"torn/{INSIDE}", 409),
    ],
)
def test_the_server_takes_over_nothing_that_is_foreign(
    path: str, status: int, foreign: None, up: Any, home: Path
) -> None:
    first = up.health()["version"]
    found, body = load(up, path.format(home=home))
    assert (found, body["error"]["param"]) == (status, "path"), body
    assert up.health()["version"] == first, "a rejected path changes nothing"


def test_the_server_takes_over_what_lies_in_its_directory(up: Any, home: Path) -> None:
    first = up.health()["version"]
    save(model(2), home / "weights/new", step=7)
    found, body = load(up, "new/checkpoints/step_000007")
    assert found == 200
    assert body["version"] == up.health()["version"]
    assert body["version"] != first
    assert body["version"].startswith("new@7-")


def test_completions_are_of_the_weights_that_were_taken_over(up: Any, home: Path) -> None:
    save(model(2), home / "weights/new", step=7)
    load(up, "new/checkpoints/step_000007")
    body = {
        "model": up.health()["model"],
        "return_token_ids": True,
        "ignore_eos": True,
        "prompt": [65, 66],
        "max_tokens": 6,
        "seed": 3,
    }
    (choice,) = up.send("POST", "/v1/completions", body)[1]["choices"]
    (expected,) = generate.sample(model(2), [[65, 66]], max_new_tokens=6, seed=3)
    assert choice["token_ids"] == expected.ids
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
        status = next(busy, None) if path == "/v1/completions" else None
        if status is not None:
            raise http_client.Refused("the queue is full", status)
        return ask(path, body)

    monkeypatch.setattr(engine.link, "ask", ask_busy)
    prompts = [[65 + i] * n for i, n in enumerate((1, 2, 30, 60, 62, 64))]

    def five_each(sample: Callable[..., list[Completion]]) -> list[Completion]:
        return sample(
            policy,
            prompts,
            max_new_tokens=5,
            temperature=0.9,
            seed=9,
            samples_per_prompt=5,
            keys=[3, 1, 4, 15, 9, 2],
            stop=chat.stop_sequences(TOK),
            on_overflow="stop",
        )

    right = five_each(generate.sample)
    got = five_each(engine.sample)
    assert [(c.ids, c.stop) for c in got] == [(c.ids, c.stop) for c in right]
    assert {c.stop for c in right} >= {"length", "context"}
    for mine, theirs in zip(got, right, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert engine.metrics()["engine_retries"] >= 2


def test_a_server_that_lost_the_weights_gets_them_again(up: Any, home: Path) -> None:
    """What a restart does: it answers with the weights it was started with, which no rollout
    may hold."""
    policy = model(3)
    engine = opened(home, up.url)
    engine.push(policy, 4)
    pushed = engine.version
    assert load(up, START.removeprefix("weights/"))[0] == 200
    got = engine.sample(policy, [[65], [66]], max_new_tokens=5, seed=1)
    right = generate.sample(policy, [[65], [66]], max_new_tokens=5, seed=1)
    assert [c.ids for c in got] == [c.ids for c in right]
    assert up.health()["version"] == pushed
    assert engine.metrics()["engine_retries"] > 0


# of adapters the merged weights are pushed
FOUR_STEPS = {"reinforce": dict(max_steps=4), "grpo": dict(max_steps=4, lora_rank=2)}


@pytest.mark.parametrize("loop", FOUR_STEPS)
def test_the_curve_over_http_is_the_local_one_and_a_server_that_stays_away_stops_the_run(
    loop: str, up: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step finds nobody; the run has saved its two steps and continues with the
    server to the same end."""
    ask = Link.ask
    gone = False

    def cut(self: Link, path: str, body: Any = None) -> Any:
        nonlocal gone
        if path == "/admin/weights" and "step_000002" in body["path"] and "cut" in body["path"]:
            gone = True
        if gone:
            raise http_client.NoAnswer("no server answers")
        return ask(self, path, body)

    local = train(settings(loop, home, FOUR_STEPS[loop], run_name="local"))
    cfg = settings(
        loop,
        home,
        FOUR_STEPS[loop],
        run_name="cut",
        engine="http",
        engine_url=up.url,
        engine_patience_s=0.3,
    )
    with monkeypatch.context() as patch:
        patch.setattr(Link, "ask", cut)
        stopped = train(cfg)
    assert stopped.status["status"] == "stopped"
    assert "step 2" in stopped.status["reason"]
    assert "--resume" in stopped.status["reason"]
    assert stopped.checkpoints() == [2]
    assert len(stopped.metrics()) == 2
    http = train(replace(cfg, resume=True))
    same(local, http)
    rows = http.metrics()
    assert (rows["push_s"] > 0).all()
    assert "push_s" not in local.metrics()
    assert rows["logprob_mismatch"].max() < 1e-3
    assert rows["mismatch_kl"].max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_over_http_learn_what_one_does_alone(shard: bool, up: Any, home: Path) -> None:
    two = settings(
        "reinforce",
        home,
        run_name="two",
        device_batch_size=2,
        max_steps=2,
        engine="http",
        engine_url=up.url,
        shard=shard,
    )
    train_on_ranks(2, home, two)
    one = train(settings("reinforce", home, run_name="one", device_batch_size=4, max_steps=2))
    assert_close_curves(one, run.Run.open("two"), "reward_mean", "grad_norm")


class StubVLLM:
    """What of vLLM's OpenAI server `--engine vllm` uses: its fields and no others, weights from
    a directory, draws of its own. deaf: it keeps its first weights."""

    FIELDS = {
        "model",
        "prompt",
        "n",
        "seed",
        "temperature",
        "top_k",
        "max_tokens",
        "logprobs",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "return_token_ids",
    }

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
            return self.reload(body)
        if path == "/reset_prefix_cache":
            return None
        assert path == "/v1/completions", path
        if self.calls.count(path) == 2:  # its core dies once
            raise http_client.Refused("EngineCore encountered an issue", 500)
        return self.complete(body)

    def reload(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body == {"method": "reload_weights"}
        if not self.deaf:
            weights = hf_format.read_weights(self.folder)
            self.weights = hf_format.read_model(SHAPE, weights.items())
        return {"results": [None]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body.keys() <= self.FIELDS, body
        assert body["model"] == "weights/hf", body
        assert all(isinstance(i, int) for i in body["stop_token_ids"])
        assert all(-100 <= bias <= 100 for bias in body["logit_bias"].values())
        self.bodies.append(body)
        drawn = generate.sample(
            self.weights,
            [body["prompt"]],
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            samples_per_prompt=body["n"],
            seed=body["seed"] + 1,
            stop=[(i,) for i in body["stop_token_ids"]],
        )
        choices = [self.choice(i, c, body["prompt"]) for i, c in enumerate(drawn)]
        return {"object": "text_completion", "model": body["model"], "choices": choices[::-1]}

    def choice(self, index: int, c: Completion, prompt: list[int]) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": c.ids,
            "prompt_token_ids": prompt,
            "finish_reason": "stop" if c.stop == "stop" else "length",
            "logprobs": {
                "tokens": ["?"] * len(c.ids),
                "token_logprobs": c.logprobs,
                "text_offset": [],
            },
        }


@pytest.fixture
def train_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[StubVLLM], list[float]]:
    """Trains with a server; the mismatch of each step."""

    def mismatches(server: StubVLLM) -> list[float]:
        def asked(link: Link, path: str, body: Any = None) -> Any:
            return server.ask(path, body)

        monkeypatch.setattr(Link, "ask", asked)
        cfg = settings("reinforce", home, run_name="vllm", engine="vllm", lr=2e-2)
        return train(cfg).metrics()["logprob_mismatch"].tolist()

    return mismatches


def test_vllm_samples_from_an_export_after_each_step(
    home: Path, train_on: Callable[[StubVLLM], list[float]]
) -> None:
    server = StubVLLM(home / "weights/hf")
    assert max(train_on(server)) < 1e-3, "the stub sampled from what was exported last"
    assert server.calls.count("/collective_rpc") == 3
    assert server.calls.count("/reset_prefix_cache") == 3


def test_a_server_that_keeps_its_weights_shows_in_the_mismatch(
    home: Path, train_on: Callable[[StubVLLM], list[float]]
) -> None:
    assert min(train_on(StubVLLM(home / "weights/hf", deaf=True))) > 0.1


def test_vllm_gets_its_own_fields(home: Path, train_on: Callable[[StubVLLM], list[float]]) -> None:
    server = StubVLLM(home / "weights/hf")
    train_on(server)
    body = server.bodies[0]
    assert body["top_k"] == -1
    assert body["ignore_eos"]
    assert 0 <= body["seed"] < 2**63
    assert len(body["logit_bias"]) == SHAPE.padded_vocab - SHAPE.n_ids
    assert len({b["seed"] for b in server.bodies}) == len(server.bodies)


@pytest.fixture
def answered(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Completion]]:
    """`answered(changes)`: what the engine makes of a server's answer, with these changes."""
    good = {
        "index": 0,
        "token_ids": [5, 6, 7],
        "prompt_token_ids": [65],
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]},
    }

    def completions(changes: dict[str, Any]) -> list[Completion]:
        def asked(self: Link, path: str, body: Any = None) -> Any:
            return {"data": [{"id": "x"}], "choices": [good | changes]}

        engine = opened(home, "http://127.0.0.1:1", "vllm")
        monkeypatch.setattr(Link, "ask", asked)
        return engine.sample(model(1), [[65]], max_new_tokens=3)

    return completions


def test_a_good_answer_is_a_completion(answered: Callable[..., list[Completion]]) -> None:
    assert answered({}) == [Completion([5, 6, 7], [-1.0, -2.0, -3.0], "length")]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"token_ids": None}, "token_ids"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -3.0]}}, "logprobs"),
        ({"prompt_token_ids": [1, 65]}, "prompt_token_ids"),
        ({"token_ids": [5, 300, 6]}, "300"),
        ({"token_ids": [5, 6]}, "token_ids"),
    ],
    ids=str,
)
def test_answers_that_cannot_be_trained_on(
    changes: dict[str, Any], named: str, answered: Callable[..., list[Completion]]
) -> None:
    with raising(RunError, named):
        answered(changes)
