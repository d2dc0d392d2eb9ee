"""Services of everyday life, further wordings, small talk: what the tables hold, and that they reach the conversations in their shares."""

from __future__ import annotations

import json
import random
import re
from string import Formatter

import pytest

from codechat.data import synthetic
from codechat.tasks import natural
from codechat.tasks.toolbox import copying, everyday, values
from codechat.tasks.toolbox.catalogue import HELD_OUT as UNSEEN
from codechat.tasks.toolbox.catalogue import SEEN as TRAINED
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.tasks.toolbox.dialogues import PLAIN_ANSWERS, SMALL_TALK, Mix
from codechat.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat.tasks.toolbox.tool import check, say
from codechat.tasks.toolbox.values import NAMES, PLACES
from codechat.text import chat
from codechat.text.tokenizer import load

SERVICES = {t.name: t for t in everyday.services()}
ROWS = {row["name"]: row for row in json.loads(everyday.SERVICES.read_text())}


def slots(template: str) -> list[str]:
    return sorted(key for _, key, _, _ in Formatter().parse(template) if key is not None)


def words(template: str) -> str:
    return " ".join(re.findall(r"[a-z0-9{}]+", template.lower()))


def test_a_service_can_be_asked_for_and_answers() -> None:
    for name, tool in SERVICES.items():
        rng = random.Random(name)
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
    for name, wordings in everyday.wordings().items():
        tool = trained[name]
        assert len(set(wordings)) == 16 and all(slots(ask) == sorted(tool.slots) for ask in wordings), name
        assert not {words(ask) for ask in wordings} & {words(ask) for ask in (*tool.asks, *tool.hard_asks)}
    other = next(tool for tool in TRAINED if tool.name not in everyday.wordings())
    arguments = other.sample(random.Random(0), "train")
    assert everyday.ask(random.Random(1), other, arguments) == other.ask(random.Random(1), arguments), "its own"


def test_tables_reach_the_conversations_in_their_shares() -> None:
    mix = Mix(services=0.3, wordings=0.5, small_talk=0.2)
    rows = list(draw_dialogues("train", 2000, mix=mix))
    served = [r for r in rows if r["meta"]["tool"] in SERVICES and r["meta"]["kind"] != "chat"]
    assert 0.25 < len(served) / sum(r["meta"]["kind"] != "chat" for r in rows) < 0.36
    for row in served:
        for call in chat.parse_calls(row["messages"][2]["content"]):
            assert call.name == row["meta"]["tool"] and list(call.arguments) == list(SERVICES[call.name].slots)
    said = {said for said, _ in synthetic.small_talk()} - {said for said, _ in SMALL_TALK}
    talk = [r["messages"][1]["content"] in said for r in rows if r["meta"]["kind"] == "chat"]
    assert 0.4 < sum(talk) / len(talk) < 0.7
    (square,) = (t for t in TRAINED if t.name == "square")
    asked = [everyday.ask(random.Random(i), square, {"x": 7}) for i in range(200)]
    assert len(set(asked)) == 16 and all("7" in text for text in asked)


def invented(value: str) -> bool:
    """Whether the grammar of `values.invent` has the word."""
    parts = ("|".join(part) for part in (values.ONSETS, values.VOWELS, values.CODAS, values.ENDINGS))
    return re.fullmatch("".join(f"({part})" for part in parts), value.lower()) is not None


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_values_come_from_further_afield_in_their_share(share: float) -> None:
    rng, greet = random.Random(0), TOOLS["greet"]
    drawn = [greet.sample(rng, "train", share)["name"] for _ in range(600)]
    other = sum(not invented(value) for value in drawn) / 600  # the grammar has a few of the real names too
    assert 0.75 * share <= other <= 1.15 * share
    rows = list(draw_dialogues("train", 600, mix=Mix(varied_values=share)))
    calls = [c for r in rows for m in r["messages"] if m["role"] == "assistant" for c in chat.parse_calls(m["content"])]
    words = [c.arguments["word"] for c in calls if isinstance(c.arguments.get("word"), str)]
    assert len(words) > 20 and any(not invented(w) for w in words) == bool(share)
    texts = [r["messages"][-1]["content"] for r in copying.copy_dialogues("train", 400, varied=share)]
    assert any(name in text.split() for text in texts for name in NAMES) == bool(share)


def test_varied_values_belong_to_splits_and_are_none_of_the_natural_requests() -> None:
    for draw in (values.varied_word, values.varied_name):
        rng, slot = random.Random(1), values.Slot({"type": "string"}, draw, values.say_plainly)
        train, test = ({slot.sample(rng, split).lower() for _ in range(1500)} for split in ("train", "test"))
        assert not train & test
    natural_words = {w for p in natural.read_requests() for w in re.findall(r"\w+", p.messages[-1]["content"].lower())}
    assert not natural_words & {name.lower() for name in (*NAMES, *PLACES)}


def test_spelling_drills_put_words_of_one_token_in_quotation_marks() -> None:
    vocabulary = load("gpt2:4096")
    words = values.whole_words()
    assert len(words) > 1500 and all(len(vocabulary.encode(f" {word}")) == 1 for word in words)
    rows = list(copying.copy_dialogues("train", 600, varied=0.6))
    drills = [r["messages"] for r in rows if re.fullmatch(r'("\w+"(, )?){3,6}', r["messages"][1]["content"])]
    assert 0.2 < len(drills) / len(rows) < 0.4
    for asked, answer in drills:
        quoted = re.findall(r'"(\w+)"', answer["content"])
        assert " ".join(quoted) in asked["content"] and set(quoted) <= set(words)


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_plain_answers_state_the_result_in_their_shares(share: float) -> None:
    """The share after calls of renamed and invented tools; half of it after those of names that training knows."""
    mix = Mix(multi_turn=0.8, unfitting=0.0, renamed=0.5, invented=0.3, plain_answers=share)
    starts = tuple(form.partition("{")[0] for form in PLAIN_ANSWERS)
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
