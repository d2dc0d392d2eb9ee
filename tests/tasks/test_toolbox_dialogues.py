"""Conversations and problems: only reading the list of tools solves them, and every share of the mix is kept."""

import json
import random
import re
from collections import Counter

import pytest

from codechat.core.errors import ConfigError
from codechat.data import synthetic
from codechat.tasks.funcall import FuncallTask
from codechat.tasks.toolbox import catalogue, dialogues, prepare
from codechat.tasks.toolbox.catalogue import PHRASES, SERVICES, TOOLS, family, say
from codechat.tasks.toolbox.dialogues import Mix, informally
from codechat.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat.tasks.toolbox.problems import draw as draw_problems
from codechat.tasks.toolbox.problems import probes
from codechat.tasks.toolbox.values import WORDS
from codechat.text import chat

MIX = Mix(renamed=0.5, composed=0.15, invented=0.2, chained=0.2, unfitting=0.15)
TASK = FuncallTask()
REQUESTS = ("Write a Python function `f(x)` that doubles x.",)


def offered(messages: list[dict[str, str]]) -> dict[str, list[str]]:
    """{name on offer: its arguments} of a system prompt's lines `name(a: type, b: type) - description`."""
    lines = [re.match(r"(\w+)\((.*?)\)", line) for line in messages[0]["content"].splitlines()]
    return {line[1]: [part.partition(":")[0].strip() for part in line[2].split(",")] for line in lines if line}


def strata(split: str, **shares: int) -> dict[str, list]:
    """{stratum: problems}, 40 for each share's weight."""
    problems: dict[str, list] = {}
    for problem in draw_problems(split, 40 * sum(shares.values()), shares=shares, code_requests=REQUESTS):
        problems.setdefault(problem.meta["stratum"], []).append(problem)
    return problems


def test_calls_name_offered_tools_with_exactly_their_arguments_and_kinds_have_their_shares() -> None:
    rows = list(draw_dialogues("train", 3000, mix=MIX))
    for row in rows[:600]:
        tools = offered(row["messages"])
        for message in row["messages"]:
            for call in chat.parse_calls(message["content"]):
                assert list(call.arguments) == tools[call.name], row["id"]
                assert message["role"] == "assistant" and row["meta"]["kind"] in ("call", "multi_turn", "chained")
        assert row["meta"]["tools_present"] == row["messages"][0]["content"].startswith("Functions:")
    kinds = Counter(row["meta"]["kind"] for row in rows)
    assert 0.12 < kinds["unsuitable"] / 3000 < 0.16, "0.15 of the draws, each followed by its twin"
    assert 0.14 < kinds["chained"] / 3000 < 0.21
    assert 0.4 < sum(row["meta"].get("renamed", False) for row in rows) / 3000 < 0.5
    assert not any(row["meta"].get("renamed") for row in draw_dialogues("train", 300, mix=Mix()))


def test_an_unfitting_conversation_is_followed_by_its_twin() -> None:
    rows = list(draw_dialogues("train", 600, mix=MIX))
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a["meta"]["kind"] == "unsuitable"]
    assert len(pairs) > 50
    for negative, positive in pairs:
        assert negative["messages"][1] == positive["messages"][1]
        assert not chat.parse_calls(negative["messages"][2]["content"])
        (call,) = chat.parse_calls(positive["messages"][2]["content"])
        assert call.name in offered(positive["messages"]) and call.name not in offered(negative["messages"])


def test_unfitting_problems_are_call_problems_without_their_tool() -> None:
    problems = strata("test", call=1, unfitting=1)
    for call, unfitting in zip(problems["call"], problems["unfitting"], strict=True):
        assert call.messages[1] == unfitting.messages[1] and unfitting.gold is None
        assert call.gold["name"] in offered(call.messages) and call.gold["name"] not in offered(unfitting.messages)
        assert len(offered(call.messages)) == len(offered(unfitting.messages))


def test_renamed_problems_are_the_call_problems_of_test_under_names_that_training_never_has() -> None:
    known, renamed = strata("test", call=1)["call"], strata("test_hard", renamed=1)["renamed"]
    for a, b in zip(known, renamed, strict=True):
        assert a.messages[1] == b.messages[1]
        assert list(a.gold["arguments"].values()) == list(b.gold["arguments"].values())
        assert not offered(a.messages).keys() & offered(b.messages).keys()
    trained = {name for row in draw_dialogues("train", 4000, mix=MIX) for name in offered(row["messages"])}
    assert not trained & {name for problem in renamed for name in offered(problem.messages)}


def test_the_second_call_of_a_chain_takes_the_result_of_the_first() -> None:
    problems = strata("test", chain=2)
    assert len(problems["chain_1"]) == len(problems["chain_2"]) == 40
    for first, second in zip(problems["chain_1"], problems["chain_2"], strict=True):
        result = json.loads(second.messages[-1]["content"])["result"]
        assert second.messages[:2] == first.messages and len(second.messages) == 4
        assert chat.parse_calls(second.messages[2]["content"])[0].arguments == first.gold["arguments"]
        assert TOOLS[first.gold["name"]].call(first.gold["arguments"]) == result
        assert result in second.gold["arguments"].values()
        assert TOOLS[second.gold["name"]].call(second.gold["arguments"]) is not None


def test_reference_solutions_are_correct_and_a_shorter_list_is_the_start_of_a_longer_one() -> None:
    rows = list(draw_dialogues("train", 50, seed=5))
    assert list(draw_dialogues("train", 80, seed=5))[:50] == rows != list(draw_dialogues("train", 50, seed=6))
    assert len({r["id"] for r in rows}) == 50
    for split in ("train", "test", "test_hard"):
        few = draw_problems(split, 100, mix=MIX, code_requests=REQUESTS)
        assert all(TASK.score(p, TASK.gold(p)).correct for p in few)
        many = {p.id: p for p in draw_problems(split, 200, mix=MIX, code_requests=REQUESTS)}
        assert all(many[p.id] == p for p in few) and len(many) == 200


def test_an_invented_tool_is_told_from_the_others_by_its_description() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words, tools = zip(*catalogue.invented_offer(rng, "train", 4).items())
        assert len({t.name for t in tools}) == len({t.description.lower() for t in tools}) == len(set(words)) == 4
        text = tools[0].ask(rng, tools[0].sample(rng, "train")).lower()
        assert all(word in text for word in words[0])


def test_impossible_shares_and_unknown_strata_are_errors() -> None:
    for shares in (dict(renamed=1.5), dict(chained=0.6, unfitting=0.6), dict(composed=0.7, invented=0.7)):
        with pytest.raises(ConfigError):
            Mix(**shares)
    with pytest.raises(ConfigError):
        draw_problems("test", 10, shares={"nonsense": 1.0})


def test_values_that_training_has_are_counted() -> None:
    def problem(value: object) -> dict[str, object]:
        return {"gold": {"name": "f", "arguments": {"a": value}}, "messages": []}

    call = chat.format_call("f", {"x": [314, "Lutis"]})
    drill = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "Brelan 2718"}]
    files = {
        "calls.train": [{"messages": [{"role": "assistant", "content": call}]}],
        "copy.train": [{"messages": drill}],
        "funcall.train": [problem("dopis"), {"gold": None}],
        "funcall.test": [problem(v) for v in (314, "lutis", 2718, "Dopis", [314, "new"], "new")] + [{"gold": None}],
    }
    seen = prepare.values_seen(files)["test"]
    assert seen == {"calls": 6, "same": 1, "seen": 4, "values": 5, "known": 4}
    lookup = [{"messages": [{"role": "assistant", "content": chat.format_call("g", {"b": "NEW"})}]}]
    more = prepare.values_seen(files | {"lookup_loose.train": lookup})["test"]
    assert (more["same"], more["seen"], more["known"]) == (1, 6, 5), "drills are read in training too"


def test_rare_words_come_in_their_share_and_leave_the_other_draws_alone() -> None:
    def words(rare: float) -> list[str]:
        mix = Mix(invented=1.0, renamed=1.0, renamed_arguments=1.0, rare_words=rare)
        rows = draw_dialogues("train", 300, 0, mix=mix)
        lists = [r["messages"][0]["content"] for r in rows if r["meta"]["tools"]]
        return [key for text in lists for key in re.findall(r"(\w+): (?:string|integer|number)", text)]

    def share(rare: float) -> float:
        drawn = words(rare)
        return sum(w in WORDS for w in drawn) / len(drawn)

    assert share(0.0) < 0.01 and 0.4 < share(0.5) < 0.6 and share(1.0) > 0.95


def test_a_request_put_informally_asks_for_the_same() -> None:
    rng = random.Random(0)
    texts = [
        "What is 12 squared?",
        "Shorten the species Staby maixis.",
        'Say "Hi There" 3 times.',
        "I swim 125 metres.",
    ]
    for text in texts * 50:
        assert text[1:].rstrip(".?! ") in informally(rng, text)
    mix = dict(series=0.9, no_tools=0.0, small_talk=0.0, unfitting=0.0, multi_turn=0.1)
    for share, low, high in ((0.0, 0.0, 0.3), (1.0, 0.7, 1.0)):
        rows = draw_dialogues("train", 100, 0, mix=Mix(**mix, informal=share))
        lower = [m["content"][0].islower() for row in rows for m in row["messages"] if m["role"] == "user"]
        assert low <= sum(lower) / len(lower) <= high


# ---------------------------------------------------------------- kinds of conversations


def test_multi_turn_responses_come_from_running_the_tool() -> None:
    rows = list(draw_dialogues("train", 300, mix=Mix(multi_turn=1.0, unfitting=0.0, no_tools=0.0, small_talk=0.0)))
    for row in rows:
        _, _, call, response, answer = row["messages"]
        (parsed,) = chat.parse_calls(call["content"])
        assert response["role"] == "function" and answer["role"] == "assistant"
        assert json.loads(response["content"]) == {"result": TOOLS[parsed.name].call(parsed.arguments)}
        assert "<functioncall>" not in answer["content"]


def test_offered_tools_are_never_ambiguous() -> None:
    for row in draw_dialogues("test_hard", 2000, mix=Mix(unfitting=0.0, no_tools=0.0)):
        offered = row["meta"]["tools"]
        assert row["meta"]["tool"] in offered and len(set(offered)) == len(offered) <= 4
        assert not any(b in family(a) for a in offered for b in offered if a != b)


def test_probes_fill_every_cell() -> None:
    rows = probes("select", 50, 0, ["Write a function that adds."])
    cells = Counter((r["asked"], r["tools_present"], r["suitable"]) for r in rows)
    tool, code = [(True, True), (True, False), (False, False)], [(True, False), (False, False)]
    assert cells == dict.fromkeys([("tool", *cell) for cell in tool] + [("code", *cell) for cell in code], 10)
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["system", "user"]
        assert row["tools_present"] == row["messages"][0]["content"].startswith("Functions:")
        assert (row["asked"] == "code") == (row["messages"][1]["content"] == "Write a function that adds.")


def test_services_wordings_and_small_talk_come_in_their_shares() -> None:
    slots = {tool.name: tool.slots for tool in SERVICES}
    rows = list(draw_dialogues("train", 2000, mix=Mix(services=0.3, wordings=0.5, small_talk=0.2)))
    served = [r for r in rows if r["meta"]["tool"] in slots and r["meta"]["kind"] != "chat"]
    assert 0.25 < len(served) / sum(r["meta"]["kind"] != "chat" for r in rows) < 0.36
    for row in served:
        for call in chat.parse_calls(row["messages"][2]["content"]):
            assert call.name == row["meta"]["tool"] and list(call.arguments) == list(slots[call.name])
    said = {said for said, _ in synthetic.small_talk()} - {said for said, _ in PHRASES["small_talk"]}
    talk = [r["messages"][1]["content"] in said for r in rows if r["meta"]["kind"] == "chat"]
    assert 0.4 < sum(talk) / len(talk) < 0.7


def test_only_tools_of_the_catalogue_are_asked_for_in_additional_wordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invented tool may have the name of a known one, and other arguments."""
    monkeypatch.setattr(dialogues, "WORDINGS", type("", (dict,), {"get": lambda *_: ["Further."]})())
    only_series = dict(series=1.0, wordings=1.0, multi_turn=0.0, unfitting=0.0, no_tools=0.0, small_talk=0.0)
    for shares, further in ((only_series, True), (only_series | dict(invented=0.5, composed=0.5), False)):
        rows = draw_dialogues("train", 20, mix=Mix(**shares))
        asked = {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"}
        assert (asked == {"Further."}) == ("Further." in asked) == further


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_plain_answers_state_the_result_in_their_shares(share: float) -> None:
    """The share after calls of renamed and invented tools; half of it after those of names that training knows."""
    mix = Mix(multi_turn=0.8, unfitting=0.0, renamed=0.5, invented=0.3, plain_answers=share)
    starts = tuple(form.partition("{")[0] for form in PHRASES["plain_answers"])
    plainly, asked = {True: 0, False: 0}, {True: 0, False: 0}
    for row in draw_dialogues("train", 1600, mix=mix):
        *_, call, response, answer = [message["content"] for message in row["messages"]]
        if row["meta"]["kind"] != "multi_turn":
            continue
        known = chat.parse_calls(call)[0].name in TOOLS
        asked[known] += 1
        plainly[known] += answer.startswith(starts)
        assert not answer.startswith(starts) or say(json.loads(response)["result"]) in answer
    assert min(asked.values()) > 300
    assert 0.9 * share <= plainly[False] / asked[False] <= 1.1 * share
    assert 0.4 * share <= plainly[True] / asked[True] <= 0.65 * share
