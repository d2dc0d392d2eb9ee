"""The held-out tools of the toolbox: other domains, other names."""

from __future__ import annotations

import random
import re
from statistics import mean

import pytest

from codechat.tasks.base import SPLITS
from codechat.tasks.funcall.task import FuncallTask
from codechat.tasks.toolbox import everyday, generated
from codechat.tasks.toolbox.catalogue import HELD_OUT as UNSEEN
from codechat.tasks.toolbox.catalogue import SEEN as TRAINED
from codechat.tasks.toolbox.catalogue import execute, family
from codechat.tasks.toolbox.dialogues import LEVELS, tools_system
from codechat.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat.tasks.toolbox.problems import draw as draw_problems
from codechat.tasks.toolbox.problems import probes
from codechat.tasks.toolbox.tool import check
from codechat.tasks.toolbox.values import COMMON, WORDS

# Words that say nothing about which tool is meant.
FILLERS = frozenset(
    """a an and are as at be by can could do does each find for from get give had has have how i if in into is it its
    long make many me much my need of on one or our out please say show so tell than that the there this to up us want
    was we what when where which who why with work would you""".split()
)


def test_there_are_many_tools_of_all_levels():
    for level in (1, 2, 3):
        share = sum(t.level == level for t in UNSEEN) / len(UNSEEN)
        assert share == pytest.approx(LEVELS.count(level) / len(LEVELS), abs=0.05)


def test_names_and_phrasings_share_nothing_with_the_trained_tools():
    known = {word for t in TRAINED for word in t.name.split("_")}
    assert not known & {word for t in UNSEEN for word in t.name.split("_")}
    asks = {re.sub(r"{\w+}", "{}", ask) for t in TRAINED for ask in t.asks + t.hard_asks}
    assert not asks & {re.sub(r"{\w+}", "{}", ask) for t in UNSEEN for ask in t.asks + t.hard_asks}


def test_every_tool_runs_on_what_is_sampled_for_it():
    for tool in UNSEEN:
        rng = random.Random(tool.name)
        for i in range(80):
            arguments = tool.sample(rng, SPLITS[i % len(SPLITS)])
            schemas = tool.schema["parameters"]["properties"]
            assert {k: check(k, v, schemas[k]) for k, v in arguments.items()} == arguments
            assert execute(tool.name, arguments)["result"] not in (None, "", [])
            text = tool.ask(rng, arguments, hard=i % 2 == 1)
            assert all(tool.slots[k].schema.get("enum") or str(v) in text for k, v in arguments.items() if k != "ohms")
        assert len(tool.asks) == 5 and len(tool.hard_asks) in (1, 2)


def stem(word):
    for ending in ("ies", "ing", "es", "ed", "s", "er", "e"):
        if word.endswith(ending) and len(word) >= len(ending) + 3:
            return word.removesuffix(ending) + ("y" if ending == "ies" else "")
    return word


def content_words(text):
    text = re.sub(r"{\w+}", " ", text.lower()).replace("_", " ")
    return {stem(word) for word in re.findall("[a-z]+", text) if word not in FILLERS}


def told_share(tools, asks):
    """Share of the content words of the asks that the name and the description have: mean over asks, then tools."""
    shares = []
    for tool in tools:
        known, found = content_words(f"{tool.name} {tool.description}"), map(content_words, asks(tool))
        shares.append([len(words & known) / len(words) for words in found if words])
    return mean(mean(s) for s in shares if s)


def test_descriptions_tell_as_much_of_a_request_as_those_of_trained_tools():
    for asks in (lambda t: t.asks, lambda t: t.hard_asks):
        assert abs(told_share(UNSEEN, asks) - told_share(TRAINED, asks)) <= 0.1
        assert abs(told_share(UNSEEN, asks) - told_share(TRAINED, asks)) <= 0.1


def test_no_request_for_one_tool_is_worded_like_one_for_another():
    """Not even with other values filled in."""
    everything = TRAINED + UNSEEN
    patterns = {t.name: [pattern(t, ask) for ask in t.asks + t.hard_asks] for t in everything}
    for tool in everything:
        rng = random.Random(tool.name)
        others = [o for o in (UNSEEN if tool in TRAINED else everything) if o.name not in family(tool.name)]
        for hard in (False, True) * 4:
            text = tool.ask(rng, tool.sample(rng, "test_hard"), hard)
            assert not [o.name for o in others if any(p.fullmatch(text) for p in patterns[o.name])], text


def pattern(tool, ask):
    """What an ask looks like with any values."""
    parts = re.split(r"{(\w+)}", ask)
    return re.compile("".join(values_of(tool.slots[p]) if i % 2 else re.escape(p) for i, p in enumerate(parts)))


def values_of(slot):
    if "enum" in slot.schema:
        rng = random.Random(0)
        words = {slot.say(rng, value) for value in slot.schema["enum"] for _ in range(20)}
        return f"(?:{'|'.join(map(re.escape, words))})"
    return {"integer": r"\d+", "number": r"[\d.]+"}.get(slot.schema["type"], ".+")


def test_held_out_tools_are_offered_in_test_hard_only():
    names = {t.name for t in UNSEEN}
    named = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for split, n in (("train", 4000), ("select", 1500), ("test", 1500)):
        offered = set()
        for row in draw_dialogues(split, n, 1):
            assert not names & set(row["meta"]["tools"])
            assert not named.search(" ".join(m["content"] for m in row["messages"]))
            offered |= set(row["meta"]["tools"])
        assert offered == {t.name for t in TRAINED}
        rng = random.Random(0)
        assert not any(named.search(tools_system(rng, split)) for _ in range(200))
        assert not any(named.search(str(row)) for row in probes(split, 200, 0, ["c"]))


def test_two_fifths_of_test_hard_need_the_new_tools():
    problems = FuncallTask().problems("test_hard", 1000)
    wanted = {kind: {p.gold["name"] for p in problems if p.meta["hard"] == kind} for kind in ("tool", "phrasing")}
    assert wanted["tool"] == {t.name for t in UNSEEN}
    assert wanted["phrasing"] <= {t.name for t in TRAINED} and len(wanted["phrasing"]) > 60
    assert sum(p.meta["hard"] == "tool" for p in problems) == 400
    assert any("lcm" in p.meta["tools"] for p in draw_problems("train", 1000))


def test_the_rare_words_are_of_no_unseen_tool():
    """A word in a name, a description or an argument of an unseen tool would be trained on."""
    of_tools = set()
    for tool in UNSEEN:
        of_tools |= set(re.findall("[a-z]+", f"{tool.name} {tool.description} {' '.join(tool.slots)}".lower()))
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert not {w for w in WORDS if {w, w + "s", w.removesuffix("s")} & of_tools}
    assert not set(WORDS) & set(COMMON)


def test_names_share_six_common_words_with_what_training_draws_and_none_with_its_other_tools():
    """Renamed and invented tools are named by common words; composed tools and services by words of their own."""
    words = {word for t in UNSEEN for word in t.name.split("_")}
    assert words & set(COMMON) == {"back", "body", "heart", "left", "light", "team"}
    drawn = (*generated.composed(), *everyday.services())
    assert not words & {word for t in drawn for word in t.name.split("_")}
