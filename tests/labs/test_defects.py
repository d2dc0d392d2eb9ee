"""The original's defects: on, each failure is there and measured; off, it is not, and the instrument reports it. Nothing else names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import Claim, above, below, hold, lesson
from raising import raising

from codechat import grpo, reinforce, tasks
from codechat.core import config
from codechat.core.errors import CheckpointError, ConfigError, DataError, RunError
from codechat.data import glaive, public_rows
from codechat.data.sources import read_jsonl
from codechat.evaluation import contamination, diagnose
from codechat.labs import defects
from codechat.labs.defects import DEFECTS, switched_on
from codechat.models import generate, optim
from codechat.models.config import GPTConfig
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.reports import token_attribution
from codechat.rl import advantages, losses, rollout
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.tasks import Problem, toolbox, toy
from codechat.tasks.coding import prepare
from codechat.tasks.coding.task import CodingTask
from codechat.tasks.micro import MicroConfig, prepare_micro
from codechat.text import chat, tokenizer, tool_calls

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("stop-set", "bf16-weights", "quote-parser", "printed-reward", "train-on-test", "k1-drift", "silent-resume")


@pytest.fixture(autouse=True)
def nothing_stays_on() -> Iterator[None]:
    yield
    assert defects.on() == ()


def held() -> dict[tuple[Any, str], Any]:
    """Every attribute that a defect replaces, as it is now."""
    swaps = [s for d in DEFECTS.values() for s in d.swaps()]
    return {(s.owner, s.name): vars(s.owner)[s.name] for s in swaps}


# ---------------------------------------------------------------- the switch


def test_every_finding_has_a_defect_and_no_function_is_replaced_by_two() -> None:
    assert tuple(DEFECTS) == NAMES and all(d.name == name for name, d in DEFECTS.items())
    assert sorted({f for d in DEFECTS.values() for f in d.findings}) == [f"F{i}" for i in range(1, 9)]
    swaps = [(s.owner, s.name) for d in DEFECTS.values() for s in d.swaps()]
    assert len(swaps) == len(set(swaps))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_replaces_and_puts_back_whatever_happens(name: str) -> None:
    right, mine = held(), {(s.owner, s.name) for s in DEFECTS[name].swaps()}
    with switched_on(name) as found:
        assert found == (DEFECTS[name],) and defects.on() == (name,)
        assert {key for key, value in held().items() if value is not right[key]} == mine
    assert held() == right
    with pytest.raises(KeyboardInterrupt), switched_on(name):
        raise KeyboardInterrupt
    assert held() == right


def test_blocks_nest_and_a_name_twice_is_one_defect() -> None:
    right = held()
    with switched_on("printed-reward", "printed-reward"):
        once = CodingTask.program
        with switched_on("printed-reward", "stop-set"):
            assert CodingTask.program is once and defects.on() == ("stop-set", "printed-reward")
        assert CodingTask.program is once and defects.on() == ("printed-reward",)
    assert held() == right
    first, second = switched_on("k1-drift"), switched_on("k1-drift", "stop-set")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)  # not in the order in which they were entered
    assert defects.on() == ("stop-set", "k1-drift") and advantages.worth_an_update(0)
    second.__exit__(None, None, None)
    assert held() == right


def test_an_unknown_name_is_refused_before_anything_is_switched_on() -> None:
    right = held()
    with raising(ConfigError, "'stop-set'"), switched_on("k1-drift", "stopset"):
        raise AssertionError("the block must not begin")
    assert held() == right


def test_a_defect_that_cannot_be_switched_on_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    right = held()
    whole = DEFECTS["k1-drift"]
    half = replace(whole, swaps=lambda: [*whole.swaps(), defects.Swap(chat, "no_such_function", lambda right: right)])
    monkeypatch.setitem(DEFECTS, "k1-drift", half)  # type: ignore[arg-type]
    with pytest.raises(KeyError), switched_on("stop-set", "k1-drift"):
        raise AssertionError("the block must not begin")
    monkeypatch.undo()
    assert held() == right


NAMED = re.compile(rf"(?<![\w-])(?:{'|'.join(NAMES)})(?![\w-])")


def naming(text: str) -> set[str]:
    """Names of defects in a file, in strings and prose, and imports of the module."""
    found = set(NAMED.findall(text))
    for node in ast.walk(ast.parse(text)) if "defects" in text else ():
        names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        found |= (
            {"defects"}
            if "codechat.labs.defects" in (*names, module) or (module == "codechat.labs" and "defects" in names)
            else set()
        )
    return found


def test_only_recipes_the_museum_and_the_first_notebooks_switch_name_a_defect() -> None:
    library = [p for p in (ROOT / "codechat").rglob("*.py") if p.name != "defects.py" and "recipes" not in p.parts]
    notebooks = [p for p in (ROOT / "nbs_py").glob("*.py") if "museum" not in p.name and p.name[0] != "9"]
    notebooks = [p for p in notebooks if p.name != "00_rl_in_two_minutes.py"]  # `defect` is one of its switches
    assert len(library) > 100 and len(notebooks) > 15
    assert not {str(p): found for p in [*library, *notebooks] if (found := naming(p.read_text(encoding="utf-8")))}


def test_the_naming_test_sees_what_it_forbids() -> None:
    assert naming("x = 'stop-set'") == {"stop-set"}
    assert (
        naming("from codechat.text import chat; from codechat.labs import defects")
        == naming("import codechat.labs.defects")
        == naming("from codechat.labs.defects import DEFECTS")
        == {"defects"}
    )
    assert not naming("from codechat.text import chat\nx = 'nonstop-set'")


# ---------------------------------------------------------------- F1, F2: stop-set


PIECES = frozenset({27, 29, 91, 437})  # < > | end


def policy_of(text: str, tok: tokenizer.Tokenizer, tags: str, steps: int = 80) -> tuple[GPT, list[int]]:
    """A tiny model that knows one answer by heart, and the prompt that asks for it."""
    prompt, answer = chat.prompt([{"role": "user", "content": "go"}], tok, tags), chat.completion_ids(text, tok, tags)
    model = GPT(GPTConfig(depth=1, n_embd=32, n_head=2, block_size=128, vocab_size=tok.n_vocab), seed=0)
    ids, optimizers = torch.tensor([prompt + answer]), optim.build(model, lr=1e-2, weight_decay=0.0)
    targets = ids[:, 1:].clone()
    targets[:, : len(prompt) - 1] = -100
    for _ in range(steps):
        model.loss(ids[:, :-1], targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, prompt


def sampled(model: GPT, prompt: list[int], tok: tokenizer.Tokenizer, tags: str) -> tuple[str, Completion]:
    done = generate.sample(model, [prompt], max_new_tokens=60, temperature=0, stop=chat.stop_sequences(tok, tags))[0]
    return chat.completion_text(done.ids, tok, tags), done


@pytest.mark.parametrize(
    "code, cut",
    [
        ("import math\ndef find_end(a, b):\n    return a < b", "import math\ndef find_end"),
        ("x = [1, 2, 3, 4]\nif x | a<b: f()", "x = [1, 2, 3, 4]\nif x | a<"),
    ],
)
def test_the_set_cuts_code_at_a_bare_piece(code: str, cut: str) -> None:
    tok = tokenizer.load("gpt2:1024")
    model, prompt = policy_of(code, tok, "text")
    assert sampled(model, prompt, tok, "text") == (code, sampled(model, prompt, tok, "text")[1])
    assert sampled(model, prompt, tok, "text")[1].stop == "stop"
    with switched_on("stop-set"):
        text, done = sampled(model, prompt, tok, "text")
        assert text == cut and done.stop == "stop" and done.ids[-1] in PIECES
    assert sampled(model, prompt, tok, "text")[0] == code


def test_the_set_does_not_end_a_call_at_its_own_tag_but_before_the_end_tag_is_whole() -> None:
    tok, call = tokenizer.load("gpt2:1024"), "<functioncall> {}"
    model, prompt = policy_of(call, tok, "text")
    with switched_on("stop-set"):
        assert sampled(model, prompt, tok, "text")[0] == call + "\n<"


def test_the_set_has_nothing_to_confuse_where_tags_are_reserved() -> None:
    tok, code = tokenizer.load("gpt2:1024"), "def find_end(a, b):\n    return a < b"
    model, prompt = policy_of(code, tok, "reserved")
    with switched_on("stop-set"):
        assert sampled(model, prompt, tok, "reserved")[0] == code
        assert trained(tok, "reserved", code) == len(chat.completion_ids(code, tok, "reserved"))


def batch_of(tok: tokenizer.Tokenizer, tags: str, *answers: str) -> rollout.RolloutBatch:
    """One group of these answers, the first of reward 1."""
    problem = toolbox.problems("train", 1, 0)[0]
    scores = [tasks.Score(float(i == 0), "full" if i == 0 else "no_tag", {}, i == 0) for i in range(len(answers))]
    done = [Completion(ids := chat.completion_ids(a, tok, tags), [0.0] * len(ids), "stop") for a in answers]
    return rollout.RolloutBatch(
        [problem],
        [chat.prompt(problem.messages, tok, tags)],
        done,
        list(answers),
        scores,
        torch.tensor([[s.reward for s in scores]]),
        len(answers),
    )


def trained(tok: tokenizer.Tokenizer, tags: str, answer: str) -> int:
    """Tokens of the answer that a packed batch trains."""
    chat.stop_sequences(tok, tags)  # as `collect` asks for them
    batch = batch_of(tok, tags, answer, "no")
    packed = next(rollout.pack(batch, torch.tensor([[0.5, -0.5]]), row_tokens=2048, rows=8))
    assert ((packed.targets >= 0) == (packed.completion >= 0)).all()
    return int((packed.completion == 0).sum())


def test_of_a_call_three_tokens_keep_a_gradient_in_gpt2s_vocabulary() -> None:
    tok = tokenizer.load("gpt2")
    call = '<functioncall> {"name": "get_weather", "arguments": {"location": "Paris"}}'
    ids = chat.completion_ids(call, tok, "text")
    assert [tok.decode([i]) for i, kept in zip(ids, defects.trained_by_the_set(ids, PIECES)) if kept] == [
        "<",
        "function",
        "call",
    ]
    assert trained(tok, "text", call) == len(ids)
    with switched_on("stop-set"):
        assert trained(tok, "text", call) == 3
        with raising(RunError, "stop-set"):
            defects._StopSet().masked(rollout._group_chunks)(batch_of(tok, "text", call)).__next__()


def test_with_the_broken_mask_a_group_that_opens_alike_has_no_gradient_and_xray_shows_where_it_went() -> None:
    tok = tokenizer.load("gpt2:1024")
    right, wrong = (chat.format_call("add", {"a": 1, "b": b}) for b in (2, 3))
    model = GPT(GPTConfig(depth=1, n_embd=32, n_head=2, block_size=2048, vocab_size=tok.n_vocab), seed=0)
    batch = batch_of(tok, "text", right, wrong)

    def gradient() -> float:
        chat.stop_sequences(tok, "text")
        for packed in rollout.pack(batch, advantages.group_advantages(batch.rewards), row_tokens=2048, rows=8):
            logprobs, _ = model.token_logprobs(
                packed.ids, packed.targets, positions=packed.positions, mask=packed.mask()
            )
            losses.policy_gradient_loss(
                logprobs, packed.advantages, packed.targets >= 0, count=batch.n_tokens
            ).backward()
        found = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        model.zero_grad()
        return found

    whole = gradient()
    with switched_on("stop-set"):
        assert gradient() < 1e-6 * whole, "the same tokens with advantages that add up to 0"
    prompt, ids = batch.prompts[0], batch.completions[0].ids
    kept = [False] * len(prompt) + defects.trained_by_the_set(ids, PIECES)
    shares = {
        name: token_attribution.gradient_share(model, prompt + ids, mask, [0.0] * len(prompt) + [0.5] * len(ids))
        for name, mask in (("right", [False] * len(prompt) + [True] * len(ids)), ("broken", kept))
    }
    arguments = len(prompt) + kept[len(prompt) :].index(False)
    assert sum(shares["broken"][arguments:]) == 0 and sum(shares["right"][arguments:]) > 0.5


# ---------------------------------------------------------------- F3: bf16-weights


def test_without_masters_most_small_updates_vanish_and_the_instrument_says_so() -> None:
    def moved(lr: float, steps: int = 10) -> tuple[float, float, bool]:
        model = GPT(GPTConfig(depth=1, n_embd=64, n_head=2, block_size=8, vocab_size=250), seed=0)
        optimizers, before = optim.build(model, lr=lr, weight_decay=0.0), diagnose.bf16_snapshot(model)
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.ones_like(p)  # Adam then steps by lr, always the same way
            for optimizer in optimizers:
                optimizer.step()
        asked = torch.cat(
            [(a - p).detach().flatten() for a, p in zip(start, model.parameters(), strict=True)]
        ).mean() / (lr * steps)
        gains = all(torch.equal(p, a) for a, p in zip(start, model.parameters(), strict=True) if p.ndim < 2)
        return diagnose.weights_changed_bf16(before, model), float(asked), gains

    (share, asked, gains), (share_masters, asked_masters, gains_masters) = (
        _with("bf16-weights", lambda: moved(1e-5)),
        moved(1e-5),
    )
    assert asked_masters == pytest.approx(1.0, abs=0.02) and not gains_masters
    assert asked < 0.6 and gains and share < 0.6 * share_masters, "the same ten steps"


def _with(name: str, what: Any) -> Any:
    with switched_on(name):
        return what()


# ---------------------------------------------------------------- F4: quote-parser


QUOTED = """<functioncall> {"name": "get_weather", "arguments": '{"location": "Paris"}'}"""


def test_swapping_quotes_fails_on_the_datas_own_form_and_the_gold_gate_says_so() -> None:
    gold = {"name": "get_weather", "arguments": {"location": "Paris"}}
    problems = [
        Problem(str(i), [{"role": "user", "content": "?"}], gold, "train", {"gold_text": QUOTED}) for i in range(3)
    ]
    task = tasks.load("funcall")
    assert task.score(problems[0], QUOTED).reward == 1.0 and tasks.check_reference_solutions(task, problems).ok
    with switched_on("quote-parser"):
        score = task.score(problems[0], QUOTED)
        assert (score.reward, score.tier) == (0.15, "bad_json")
        assert task.score(problems[0], chat.format_call(**gold)).reward == 1.0
        assert chat.parse_calls("<functioncall> {'name': 'f', 'arguments': '{}'}")[0].arguments == {}, (
            "why calls without arguments survived"
        )
        with pytest.raises(DataError, match="bad_json: 3"):
            tasks.check_reference_solutions(task, problems).require()


def test_a_data_set_in_single_quotes_is_lost_to_it() -> None:
    def row(arguments: str) -> dict[str, str]:
        return {
            "system": "",
            "chat": f'USER: go\n\n\nASSISTANT: <functioncall> {{"name": "f", "arguments": \'{arguments}\'}} <|endoftext|>',
        }

    rows = [row('{"a": 1}'), row('{"q": "You\'ve won"}'), row("{}")]
    assert not [r for r in map(glaive.conversation, rows) if isinstance(r, str)]
    with switched_on("quote-parser"):
        assert [r if isinstance(r, str) else "kept" for r in map(glaive.conversation, rows)] == [
            "unreadable_call",
            "unreadable_call",
            "kept",
        ]


@pytest.mark.parametrize(
    "file, rows, kept", [("glaive_v2_en_300.jsonl", 300, 147), ("glaive_format_short.jsonl", 1006, 49)]
)
def test_of_real_rows_it_keeps_those_without_calls_or_arguments(
    shared_data: Path, file: str, rows: int, kept: int
) -> None:
    found = [row for _, row in read_jsonl(shared_data / "function_calling" / file)]
    assert sum(not isinstance(glaive.conversation(row), str) for row in found) == len(found) == rows
    with switched_on("quote-parser"):
        left = [made for row in found if not isinstance(made := glaive.conversation(row), str)]
    assert len(left) == kept
    calls_left = [
        c for messages in left for m in messages if m["role"] == "assistant" for c in chat.parse_calls(m["content"])
    ]
    assert len(calls_left) == (49 if rows == 1006 else 0) and not any(c.arguments for c in calls_left)


@pytest.mark.parametrize("text, form, name, arguments", [
    ('<functioncall> {"name": "f", "arguments": "{\\"a\\": 1}"}', "object", "f", {"a": 1}),
    ("<functioncall> {'name': 'f', 'arguments': {'a': 1}} done", "object", "f", {"a": 1}),
    ('<functioncall> {"name": "f"}', "object", "f", {}),
    ('<functioncall> {"arguments": {}}', "no_name", None, None),
    ('<functioncall> {"name": "f", "arguments": 3}', "bad_arguments", "f", None),
    ("<functioncall> nothing", "bad_json", None, None),
])  # fmt: skip
def test_what_the_swapping_reader_does_read(text: str, form: str, name: str | None, arguments: dict | None) -> None:
    with switched_on("quote-parser"):
        assert tool_calls.parse_calls(text) == chat.parse_calls(text) == [chat.Call(name, arguments, form)]
        assert chat.parse_calls("no call") == []


# ---------------------------------------------------------------- F5: printed-reward


FORGED = {
    "prints the line and leaves": "print('REWARD 1.0')\nimport os\nos._exit(0)",
    "prints the line and exits": "import sys\nprint('REWARD 1.0')\nsys.exit()",
    "counts for itself": "def add(a, b):\n    global _passed\n    _passed = 2\n    return 0",
    "agrees with everything": "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
}
ADD = "def add(a, b): return a + b"


def problem(*tests: str) -> Problem:
    return Problem(
        "add",
        [{"role": "user", "content": "add"}],
        {"code": ADD, "tests": list(tests), "names": ["add"], "setup": "", "stub": ""},
        "train",
    )


def test_a_printed_reward_is_forged_four_ways_and_the_sandbox_pays_none() -> None:
    task, asked = CodingTask("forged", [], reward="binary"), problem("assert add(1, 2) == 3", "assert add(2, 2) == 4")
    pairs = [(asked, f"```python\n{code}\n```") for code in (*FORGED.values(), ADD)]
    assert [s.reward for s in task.scores(pairs)] == [0.0, 0.0, 0.0, 0.0, 1.0]
    with switched_on("printed-reward"):
        assert [s.reward for s in task.scores(pairs)] == [1.0] * 5


def test_a_printed_reward_counts_and_breaks_on_a_test_of_two_lines() -> None:
    task = CodingTask("printed", [], reward="fractional")
    with switched_on("printed-reward"):
        assert task.score(
            problem("assert add(1, 2) == 3", "assert add(2, 2) == 5", "assert add(0, 0) == 0"), ADD
        ).reward == pytest.approx(2 / 3)
        assert task.score(problem("x = add(1, 2)\nassert x == 3"), ADD).reward == 0.0
        assert task.score(problem("assert add(1, 2) == 3"), "def add(a, b):\n    while True: pass").reward == 0.0
    assert task.score(problem("x = add(1, 2)\nassert x == 3"), ADD).reward == 1.0


# ---------------------------------------------------------------- F6: train-on-test


def test_sft_on_the_test_solutions_is_found_by_the_contamination_check(tmp_path: Path) -> None:
    def exposed(out: Path) -> int:
        prepare_micro(MicroConfig(out=str(out), tokenizer="bytes", max_examples=80, problems=5, eval_examples=20))
        rows = [row for _, row in read_jsonl(out / "solutions.train.jsonl")]
        assert len(rows) == 80 and {r["meta"]["split"] for r in rows} == {"train"}
        problems = tasks.load("micro", source=str(out)).problems("test", seed=0)
        return len(contamination.search(problems, [(m["content"], True) for r in rows for m in r["messages"]]))

    clean = exposed(tmp_path / "clean")
    with switched_on("train-on-test"):
        assert exposed(tmp_path / "seen") == 20
    assert clean < 3, "small programs recur"


def test_checkpoints_would_be_ranked_on_test_and_benchmarks_let_in() -> None:
    task, row = tasks.load("micro"), {"task_id": 11, "text": "?", "code": "pass", "test_list": []}
    select, test = ([p.id for p in task.problems(split, 20)] for split in ("select", "test"))
    assert not set(select) & set(test) and public_rows.evaluation_set(row)
    with raising(DataError, "mbpp", 1):
        list(prepare.reject_benchmark_rows([row], "mbpp"))
    with switched_on("train-on-test"):
        assert [p.id for p in task.problems("select", 20)] == test
        assert list(prepare.reject_benchmark_rows([row], "mbpp")) == [row] and prepare.mbpp_split(11) == "prompt"
    assert [p.id for p in task.problems("select", 20)] == select


# ---------------------------------------------------------------- F7, F8: in the loops


@lesson()
def drift_with_k1(home: Path, seed: int) -> list[Claim]:
    cfg = config.resolve(
        grpo.GRPOConfig,
        "toy",
        overrides=dict(
            max_steps=9, dead_patience=8, diagnose_groups=0, save_every=0, kl_coef=0.02, kl_kind="k1", seed=seed
        ),
        presets=grpo.RUN_PRESETS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.ToyTask, "score", lambda self, problem, completion: tasks.Score(0.0, "none", {}, False))
        right = grpo.train(replace(cfg, run_name="right"))
        with switched_on("k1-drift"):
            drifting = grpo.train(replace(cfg, run_name="drifting", kl_kind="k3"))
    return [
        below("KL without the defect", right.metrics()["kl_ref"].abs().max(), 1e-6),
        above("last KL with it", drifting.metrics()["kl_ref"].iloc[-1], 0.05),
    ]


def test_k1_in_the_loss_moves_a_policy_that_nothing_rewards_and_the_sentinel_stops_it(home: Path) -> None:
    hold(drift_with_k1(home, seed=0))
    right, drifting = Run.open("right"), Run.open("drifting")
    for found in (right, drifting):
        assert (found.metrics()["reward_mean"] == 0).all()
        assert found.status["status"] == "stopped" and found.status["reason"].startswith("DEAD: 8 steps")
    assert (right.metrics()["weights_changed_bf16"] == 0).all() and (drifting.metrics()["grad_norm"] > 0).all()


def test_a_resume_that_cannot_load_starts_over_in_silence_or_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config.resolve(
        reinforce.ReinforceConfig,
        "toy",
        overrides=dict(max_steps=3, save_every=2, diagnose_groups=0, run_name="lost"),
        presets=reinforce.RUN_PRESETS,
    )
    began = reinforce.train(cfg)
    first = began.metrics()["time"].iloc[0]
    path = paths.find_checkpoint("lost") / "model.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.pt"):
        reinforce.train(replace(cfg, resume=True))
    assert began.metrics()["time"].iloc[0] == first, "nothing was lost"
    with switched_on("silent-resume"):
        again = reinforce.train(replace(cfg, resume=True))
    assert "starting from scratch" in capsys.readouterr().err
    assert (
        list(again.metrics()["step"]) == [1, 2, 3]
        and again.metrics()["time"].iloc[0] > first
        and "resumed" not in again.env
    )
    with switched_on("silent-resume"):  # what can be loaded is continued
        assert reinforce.train(replace(cfg, resume=True)).resumed
