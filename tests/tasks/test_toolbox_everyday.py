"""Services of everyday life, further wordings, small talk: what the tables hold, and that they reach the conversations in their shares."""

from __future__ import annotations

import json
import random
import re
from string import Formatter

import pytest

from codechat.data import synthetic
from codechat.tasks.toolbox import conversations, everyday, reading, tools_of
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.tasks.toolbox.tool import check
from codechat.text import chat

TRAINED, UNSEEN = tools_of(2, held_out=False), tools_of(2, held_out=True)
SERVICES = {t.name: t for t in everyday.services()}
ROWS = {row["name"]: row for row in json.loads(everyday.SERVICES.read_text())}


def slots(template: str) -> list[str]:
    return sorted(key for _, key, _, _ in Formatter().parse(template) if key is not None)


def words(template: str) -> str:
    return " ".join(re.findall(r"[a-z0-9{}]+", template.lower()))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_be_asked_for_and_answers(name: str) -> None:
    tool, rng = SERVICES[name], random.Random(name)
    assert 1 <= len(tool.slots) <= 3 and len(tool.description.split()) <= 8
    assert len(set(tool.asks)) == 12 and all(slots(ask) == sorted(tool.slots) for ask in tool.asks)
    for answer in ROWS[name]["answers"]:
        assert slots(answer).count("result") == 1 and set(slots(answer)) <= {"result", *tool.slots}
    shared = not any(slot.unseen for slot in tool.slots.values())
    for split in ("train", "train" if shared else "test") * 10:
        arguments = tool.sample(rng, split)
        assert {k: check(k, v, tool.slots[k].schema) for k, v in arguments.items()} == arguments
        text = tool.ask(rng, arguments)
        assert all("enum" in tool.slots[k].schema or str(v) in text for k, v in arguments.items())
        assert tool.call(arguments) == tool.call(arguments) not in (None, "")


def test_services_are_told_apart_and_leave_the_held_out_tools_unseen() -> None:
    assert len(SERVICES) >= 70 and not SERVICES.keys() & TOOLS.keys()
    assert len({t.description for t in SERVICES.values()}) == len(SERVICES)
    held_out = {word for t in UNSEEN for word in t.name.split("_")}
    assert not held_out & {word for name in SERVICES for word in name.split("_")}
    asks = [ask for t in SERVICES.values() for ask in t.asks]
    assert len({re.sub(r"{\w+}", "{}", ask.lower()) for ask in asks}) == len(asks)


def test_further_wordings_are_of_trained_tools_and_none_of_a_test() -> None:
    """New words for known tools stay new: training has no wording of test_hard, in any case or punctuation."""
    trained = {tool.name: tool for tool in TRAINED}
    assert len(everyday.wordings()) >= 60 and everyday.wordings().keys() <= trained.keys()
    for name, found in everyday.wordings().items():
        tool = trained[name]
        assert len(set(found)) == 16 and all(slots(ask) == sorted(tool.slots) for ask in found), name
        assert not {words(ask) for ask in found} & {words(ask) for ask in (*tool.asks, *tool.hard_asks)}


def test_a_tool_without_further_wordings_keeps_its_own() -> None:
    tool = next(tool for tool in TRAINED if tool.name not in everyday.wordings())
    arguments = tool.sample(random.Random(0), "train")
    assert everyday.ask(random.Random(1), tool, arguments) == tool.ask(random.Random(1), arguments)


def test_tables_reach_the_conversations_in_their_shares() -> None:
    mix = reading.Mix(services=0.3, wordings=0.5, small_talk=0.2)
    rows = list(reading.dialogues("train", 2000, mix=mix, edition=2))
    served = [r for r in rows if r["meta"]["tool"] in SERVICES and r["meta"]["kind"] != "chat"]
    assert 0.25 < len(served) / sum(r["meta"]["kind"] != "chat" for r in rows) < 0.36
    for row in served:
        for call in chat.parse_calls(row["messages"][2]["content"]):
            assert call.name == row["meta"]["tool"] and list(call.arguments) == list(SERVICES[call.name].slots)
    said = {said for said, _ in synthetic.small_talk()} - {said for said, _ in conversations.SMALL_TALK}
    talk = [r["messages"][1]["content"] in said for r in rows if r["meta"]["kind"] == "chat"]
    assert 0.4 < sum(talk) / len(talk) < 0.7
    (square,) = (t for t in TRAINED if t.name == "square")
    asked = [everyday.ask(random.Random(i), square, {"x": 7}) for i in range(200)]
    assert len(set(asked)) == 16 and all("7" in text for text in asked)


def test_no_table_means_the_same_rows_as_before() -> None:
    """A share of 0 draws nothing."""
    plain = [str(row) for row in reading.dialogues("train", 200, mix=reading.Mix(small_talk=0.2))]
    none = [str(row) for row in reading.dialogues("train", 200, mix=reading.Mix(small_talk=0.2, services=0.0))]
    assert plain == none
    chats, more = ([r["messages"][0]["content"] for r in synthetic.chat_rows(talk)] for talk in (False, True))
    assert more == chats + [said for said, _ in synthetic.small_talk()]
