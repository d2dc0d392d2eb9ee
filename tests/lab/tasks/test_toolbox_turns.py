"""Conversations that go on after several calls: what a sentence must state, which call follows,
and what is learned of them."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from imported import both

from codechat.data import chat_formats
from codechat.tasks.base import Problem
from codechat.text import chat, tool_calls, tool_lists
from codechat.text.tokenizer import load
from codechat_lab.tasks.funcall import FuncallTask
from codechat_lab.tasks.toolbox import dialogues, forms, mixes, statements, turns
from codechat_lab.tasks.toolbox.catalogue import HELD_OUT, PHRASES, SEEN
from codechat_lab.tasks.toolbox.sampler import Sampler

TASK = FuncallTask()
SPLITS = ("train", "select", "test", "test_hard")
MIX = mixes.Mix(**mixes.shares_of("forms-turns"))
EACH = 30
TEMPLATES = Path(__file__).parents[2] / "codechat/text/templates"
# templates that write several calls in an answer
NATIVE = ("hermes", "mistral", "python", "xml", "text")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    counts = dict.fromkeys(turns.SHARES, EACH)
    return [p for split in SPLITS for p in turns.draw_problems(split, 0, counts, MIX)]


def of(problems: list[Problem], *strata: str) -> Iterator[Problem]:
    return (problem for problem in problems if problem.meta["stratum"] in strata)


def right(problem: Problem, answer: str) -> bool:
    return TASK.score(problem, answer).correct


def texts_of(state: dict[str, Any]) -> str:
    """A value in words."""
    value = state["value"]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def conversations(count: int) -> list[list[dict[str, str]]]:
    rng = random.Random(3)
    return [turns.conversation(Sampler(rng, "train", MIX))[0] for _ in range(count)]


# ---- what is right


def test_the_gold_of_every_problem_is_right(problems: list[Problem]) -> None:
    for problem in problems:
        score = TASK.score(problem, TASK.gold(problem))
        assert score.correct
        assert score.reward == 1


def test_an_answer_that_lacks_a_result_is_wrong(problems: list[Problem]) -> None:
    lacking = 0
    for problem in of(problems, "stated"):
        states = problem.meta["states"]
        for one in range(len(states)):
            rest = [texts_of(state) for at, state in enumerate(states) if at != one]
            assert not right(problem, f"The results are {'; '.join(rest)}.")
            lacking += 1
        assert right(problem, f"The results are {'; '.join(map(texts_of, states))}.")
    assert lacking > 2 * 4 * EACH


def test_results_of_the_wrong_calls_are_wrong(problems: list[Problem]) -> None:
    reversed_ones = 0
    for problem in of(problems, "stated"):
        states = problem.meta["states"]
        listed = "; ".join(map(texts_of, reversed(states)))
        # a result such as "Ciao, Ann!" says itself whose it is
        if not any(name in listed for state in states for name in state["names"]):
            assert not right(problem, f"The results are {listed}.")
            reversed_ones += 1
    assert reversed_ones > 2 * EACH


def test_a_sentence_with_another_number_is_wrong(problems: list[Problem]) -> None:
    for problem in of(problems, "stated", "failed"):
        assert not right(problem, f"{TASK.gold(problem)[:-1]} or 77123.")


def test_neither_the_request_nor_json_nor_a_call_states_anything(problems: list[Problem]) -> None:
    for problem in of(problems, "stated", "failed"):
        told = [m["content"] for m in problem.messages if m["role"] == "function"]
        call = next(m["content"] for m in problem.messages if m["role"] == "assistant")
        asked = problem.messages[1]["content"]
        listed = "\n".join(told)
        assert not right(problem, "")
        assert not right(problem, listed)
        assert not right(problem, asked)
        assert not right(problem, call)
        assert not right(problem, f"{TASK.gold(problem)}\n{call}")


def test_a_failed_call_has_to_be_named(problems: list[Problem]) -> None:
    for problem in of(problems, "failed"):
        states = problem.meta["states"]
        values = [texts_of(state) for state in states if not state["error"]]
        failed = next(at for at, state in enumerate(states) if state["error"])
        listed = "; ".join(values)
        assert not right(problem, f"The results are {listed}.")
        assert not right(problem, f"The results are {listed}, and one call failed.")
        other = statements.ORDINALS[(failed + 1) % len(states)]
        assert not right(problem, f"The {other} failed; {listed}.")


def test_a_value_that_a_failed_call_never_gave_is_wrong(problems: list[Problem]) -> None:
    for problem in of(problems, "failed"):
        states = problem.meta["states"]
        invented = [texts_of(state) if not state["error"] else "91817" for state in states]
        assert not right(problem, f"The results are {'; '.join(invented)}.")


def test_the_share_of_stated_results_is_rewarded(problems: list[Problem]) -> None:
    problem = next(p for p in of(problems, "stated") if len(p.meta["states"]) > 2)
    first, second, *_ = map(texts_of, problem.meta["states"])
    answers = [
        "No.",
        f"It is {first}.",
        f"They are {first}; {second}.",
        TASK.gold(problem),
    ]
    rewards = [TASK.score(problem, answer).reward for answer in answers]
    assert rewards == sorted(set(rewards))
    assert (rewards[0], rewards[-1]) == (0, 1)


TWO = [
    statements.state(12, ["Oslo", "first"]),
    statements.state("kel mor", ["Rome", "second"]),
]
FAILED = [
    statements.state(1250.5, ["Oslo", "first"]),
    statements.state(None, ["Rome", "second"], "timed out"),
]
PROMPT = 'How is it in Oslo and Rome on 3 May? {"result": 12} {"result": "kel mor"}'


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("It is 12 in Oslo and kel mor in Rome.", True),
        ("Kel Mor in Rome, and 12.0 in Oslo.", True),
        ("On 3 May: 12 and kel mor.", True),
        ("The second is kel mor, the first is 12.", True),
        ("1. 12 2. kel mor", True),
        ("It is 12 in Oslo.", False),
        ("It is kel mor in Oslo and 12 in Rome.", False),
        ("Kel mor and 12.", False),
        ("It is 12 in Oslo and kelmor in Rome.", False),
        ("It is 120 in Oslo and kel mor in Rome.", False),
        ("It is 12.5 in Oslo and kel mor in Rome.", False),
        ("It is 12 or 13 in Oslo and kel mor in Rome.", False),
        ('{"result": 12} {"result": "kel mor"}', False),
    ],
)
def test_a_text_states_two_results(text: str, correct: bool) -> None:
    assert statements.is_right(text, TWO, PROMPT) == correct


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("1,250.5 for Oslo, but Rome could not be reached.", True),
        ("Rome failed (timed out); Oslo is 1250.50.", True),
        ("The first is 1250.5 and the second failed.", True),
        ("It is 1250.5 for Oslo; the other one failed.", False),
        ("Oslo failed, and Rome is 1250.5.", False),
        ("It is 1250.5 for Oslo and 1250.5 for Rome.", False),
        ("It is 1250.5 for Oslo and 8 for Rome, not bad.", False),
        ("It is 1250 for Oslo, and Rome failed.", False),
        ("Oslo and Rome could not be reached.", False),
    ],
)
def test_a_text_says_which_call_failed(text: str, correct: bool) -> None:
    assert statements.is_right(text, FAILED, 'Oslo and Rome? {"result": 1250.5}') == correct


# ---- the next call


def test_the_name_of_a_call_is_not_found_within_a_number() -> None:
    """The second call is told by its argument 7, and the first result is 10.7."""
    states = [statements.state(10.7, ["first", "3"]), statements.state(0.1, ["second", "7"])]
    told = '3 and 7? {"result": 10.7} {"result": 0.1}'
    assert statements.is_right("10.7 (3) and 0.1 (7).", states, told)
    assert not statements.is_right("10.7 (7) and 0.1 (3).", states, told)


def test_the_next_call_takes_a_result_that_the_request_does_not_hold(
    problems: list[Problem],
) -> None:
    for problem in of(problems, "followed"):
        told = [m["content"] for m in problem.messages if m["role"] == "function"]
        results = [json.loads(text)["result"] for text in told]
        taken = [value for value in problem.gold["arguments"].values() if value in results]
        assert taken
        for key, value in problem.gold["arguments"].items():
            if value in taken:
                other = {"name": problem.gold["name"]}
                other["arguments"] = problem.gold["arguments"] | {key: "something else"}
                assert not right(problem, tool_calls.format_call(**other))


def test_no_call_follows_a_failed_one(problems: list[Problem]) -> None:
    stopped = [p for p in of(problems, "failed") if any(map(p.meta["answer"].count, ends()))]
    assert stopped
    for problem in stopped:
        assert not right(problem, tool_calls.format_call(problem.meta["tools"][-1], {}))


def ends() -> list[str]:
    return list(PHRASES["stopped"])


# ---- what is drawn


def test_two_to_five_calls_have_a_result_each(problems: list[Problem]) -> None:
    counts: Counter[int] = Counter()
    for problem in problems:
        roles = [m["role"] for m in problem.messages]
        calls = tool_calls.parse_calls(problem.messages[2]["content"])
        assert roles == ["system", "user", "assistant", *["function"] * len(calls)]
        assert {call.name for call in calls} <= tool_lists.offered_names(
            problem.messages[0]["content"]
        )
        counts[len(calls)] += 1
    assert set(counts) == {2, 3, 4, 5}


def test_no_value_is_in_the_request_or_in_another(problems: list[Problem]) -> None:
    for problem in of(problems, "stated", "failed"):
        request = problem.messages[1]["content"].casefold()
        values = [one for one in problem.meta["states"] if not one["error"]]
        for one in values:
            assert statements.place_of(one["value"], request) is None
            others = [texts_of(other).casefold() for other in values if other is not one]
            assert all(statements.place_of(one["value"], other) is None for other in others)


@pytest.mark.parametrize("stratum", turns.SHARES)
def test_every_family_has_held_out_members(problems: list[Problem], stratum: str) -> None:
    held_out = {key for key, row in forms.SERVICES.items() if row.get("hard")}
    known = {tool.name for tool in SEEN} | set(forms.SERVICES) - held_out
    held_out |= {tool.name for tool in HELD_OUT}
    for problem in of(problems, stratum):
        asked = problem.meta["tool"]
        assert asked in (held_out if problem.split == "test_hard" else known)


def test_errors_of_test_hard_are_in_no_other_split(problems: list[Problem]) -> None:
    errors: dict[bool, set[str]] = {True: set(), False: set()}
    for problem in of(problems, "failed"):
        errors[problem.split == "test_hard"] |= {s["error"] for s in problem.meta["states"]}
    assert (errors[True] & errors[False]) == {""}
    assert min(map(len, errors.values())) > 3


def test_drawn_results_belong_to_one_split(problems: list[Problem]) -> None:
    words: dict[str, set[str]] = {split: set() for split in SPLITS}
    for problem in of(problems, "stated", "failed"):
        for message in problem.messages:
            if '"reference"' in message["content"] and message["role"] == "function":
                words[problem.split].add(json.loads(message["content"])["reference"])
    assert min(map(len, words.values())) > 5
    assert words["train"].isdisjoint(words["select"] | words["test"] | words["test_hard"])


def test_a_mix_has_its_share_of_turns() -> None:
    rows = list(dialogues.draw("train", 500, mix=MIX))
    share = sum(row["meta"]["kind"] in turns.SHARES for row in rows) / len(rows)
    assert share == pytest.approx(MIX.turns, abs=0.04)


def test_without_described_forms_only_tools_are_called() -> None:
    rng = random.Random(0)
    plain = mixes.Mix(turns=0.5)
    for _ in range(40):
        _, meta = turns.conversation(Sampler(rng, "train", plain))
        assert meta["tool"] in {tool.name for tool in SEEN}


def test_conversations_end_with_a_sentence_that_states_every_result() -> None:
    for messages in conversations(60):
        told = [json.loads(m["content"]) for m in messages if m["role"] == "function"]
        answer = messages[-1]["content"].casefold()
        assert not tool_calls.parse_calls(answer)
        for result in told:
            given = {k: v for k, v in result.items() if k not in ("status", "took_ms")}
            (value,) = given.values()
            assert "error" in given or statements.place_of(value, answer) is not None


# ---- what is learned, and in which words


@pytest.mark.parametrize("tags", ["reserved", "text"])
def test_only_the_words_of_the_assistant_are_learned(tags: str) -> None:
    tok = load("gpt2:4096")
    for messages in conversations(8):
        rendered = chat.render(messages, tok, tags)
        learned = [i for i, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on]
        written: list[int] = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = chat.completion_ids(message["content"], tok, tags)
                prompt = chat.prompt(messages[:at], tok, tags)
                assert rendered.ids[: len(prompt) + len(answer)] == prompt + answer
                written += answer
        assert learned == written


@pytest.mark.parametrize("name", NATIVE)
def test_models_own_words_for_calls_and_results_come_back(name: str) -> None:
    source = (TEMPLATES / f"tools_{name}.jinja").read_text().removesuffix("\n")
    tok, _ = both("bytes", source)
    for messages in conversations(6):
        rendered = chat.render(messages, tok, "native")
        learned = [i for i, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on]
        written: list[int] = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = chat.completion_ids(message["content"], tok, "native")
                back = chat.completion_text(answer, tok, "native")
                assert tool_calls.parse_calls(back) == tool_calls.parse_calls(message["content"])
                prompt = chat.prompt(messages[:at], tok, "native")
                assert rendered.ids[: len(prompt) + len(answer)] == prompt + answer
                written += answer
        assert learned == written


def test_results_in_any_order_are_those_of_their_calls() -> None:
    rng = random.Random(0)
    for messages in conversations(20):
        said, tools = tool_calls.as_openai(messages)
        first = next(at for at, m in enumerate(said) if m["role"] == "tool")
        count = len(said[first - 1]["tool_calls"])
        shuffled = rng.sample(said[first : first + count], count)
        said[first : first + count] = shuffled
        style = "json" if tool_lists.WITH_TOOLS in messages[0]["content"] else "compact"
        row = {"messages": said, "tools": tools}
        assert chat_formats.messages_of(row, "row", style) == messages
