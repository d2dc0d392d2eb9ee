"""The tools of the toolbox: they run, their requests tell them apart, values belong to splits,
and the held-out ones are new."""

import functools
import inspect
import json
import math
import random
import re
from pathlib import Path
from string import Formatter

import pytest

from codechat.tasks.base import SPLITS
from codechat_lab.tasks import natural
from codechat_lab.tasks.funcall import FuncallTask
from codechat_lab.tasks.toolbox import catalogue, values
from codechat_lab.tasks.toolbox.catalogue import (
    HELD_OUT,
    SEEN,
    SERVICES,
    TOOLS,
    WORDINGS,
    composed,
    family,
)
from codechat_lab.tasks.toolbox.dialogues import LEVELS, tools_system
from codechat_lab.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat_lab.tasks.toolbox.problems import draw as draw_problems
from codechat_lab.tasks.toolbox.problems import probes
from codechat_lab.tasks.toolbox.values import COMMON, NAMES, PLACES, WORDS, is_shared

CALLS = {"call": 1}
HARD = {"tool": 1, "phrasing": 1}
# Rows [tool, arguments, result], or [tool, arguments] of an error.
RESULTS = [
    json.loads(line)
    for line in Path(__file__).with_name("tool_results.jsonl").read_text().splitlines()
]


def words_of_names(tools):
    return {word for tool in tools for word in tool.name.split("_")}


def slots(template):
    return sorted(key for _, key, _, _ in Formatter().parse(template) if key is not None)


def without_slots(ask):
    return " ".join(re.findall(r"[a-z0-9{}]+", re.sub(r"{\w+}", "{}", ask.lower())))


def test_the_catalogue_has_102_tools_of_training_and_50_held_out():
    assert len(SEEN) == 102
    assert len(HELD_OUT) == 50 == len(TOOLS) - 102


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_of_held_out_tools_have_the_shares_of_requests(level):
    assert sum(t.level == level for t in SEEN) >= 12
    share = sum(t.level == level for t in HELD_OUT) / len(HELD_OUT)
    assert share == pytest.approx(LEVELS.count(level) / len(LEVELS), abs=0.05)


def test_a_tool_runs_the_function_of_its_name_with_its_arguments():
    for tool in TOOLS.values():
        assert tool.run.__name__ == tool.name
        assert list(inspect.signature(tool.run).parameters) == list(tool.slots)


def test_every_parameter_is_required_and_described_briefly():
    for tool in TOOLS.values():
        assert len(tool.description.split()) <= 6
        assert tool.schema["parameters"]["required"] == list(tool.slots)


def test_every_tool_has_enough_different_requests_over_its_slots():
    for tool in TOOLS.values():
        asks = [*tool.asks, *tool.hard_asks]
        assert len(asks) >= 5
        assert len(tool.asks) >= 4
        assert tool.hard_asks
        assert len(set(asks)) == len(asks)
        assert all(slots(ask) == sorted(tool.slots) for ask in asks), tool.name


def test_texts_belong_to_splits():
    for tool in TOOLS.values():
        for key, slot in tool.slots.items():
            if (
                slot.schema["type"] == "string"
                and "enum" not in slot.schema
                and key not in ("letter", "old")
            ):
                assert slot.unseen, (tool.name, key)


def test_services_fit_their_slots_and_are_told_apart():
    assert len(SERVICES) >= 70
    assert not {t.name for t in SERVICES} & TOOLS.keys()
    assert (
        len({t.description for t in SERVICES}) == len({t.name for t in SERVICES}) == len(SERVICES)
    )
    for tool in SERVICES:
        assert 1 <= len(tool.slots) <= 3
        assert len(tool.description.split()) <= 8
        assert len(set(tool.asks)) == 12
        assert all(slots(ask) == sorted(tool.slots) for ask in tool.asks)
        for answer in tool.answers:
            assert slots(answer).count("result") == 1
            assert set(slots(answer)) <= {"result", *tool.slots}
    asks = [re.sub(r"{\w+}", "{}", ask.lower()) for t in SERVICES for ask in t.asks]
    assert len(set(asks)) == len(asks)


def test_further_wordings_fit_their_slots_and_are_none_of_test_hard():
    assert len(WORDINGS) >= 60
    assert WORDINGS.keys() <= {t.name for t in SEEN}
    for name, wordings in WORDINGS.items():  # in no case and punctuation
        tool = TOOLS[name]
        assert len(set(wordings)) == 16 and all(
            slots(ask) == sorted(tool.slots) for ask in wordings
        ), name
        assert not set(map(without_slots, wordings)) & set(
            map(without_slots, [*tool.asks, *tool.hard_asks])
        )


@pytest.mark.parametrize("tools", [SEEN, HELD_OUT, SERVICES, composed()])
def test_sampled_arguments_are_said_and_run_and_are_deterministic(tools):
    for tool in tools:
        shared = not any(slot.unseen for slot in tool.slots.values())
        for split in SPLITS if tool.name in TOOLS else ("train",) if shared else ("train", "test"):
            rng = random.Random(tool.name + split)
            again = random.Random(tool.name + split)
            for _ in range(15):
                arguments = tool.sample(rng, split)
                assert tool.sample(again, split) == arguments
                assert {
                    k: catalogue.check(k, v, tool.slots[k].schema) for k, v in arguments.items()
                } == arguments
                result = tool.call(arguments)
                assert tool.call(json.loads(json.dumps(arguments))) == result is not None
                assert json.loads(json.dumps(result, allow_nan=False)) == result
                assert result != []
                asks = tool.hard_asks if split == "test_hard" else ()
                text = tool.ask(rng, arguments, asks)
                assert tool.ask(again, arguments, asks) == text
                assert len(text.split()) <= 25
                said = {k: v for k, v in arguments.items() if "enum" not in tool.slots[k].schema}
                assert all(str(v) in text for v in said.values() if not isinstance(v, list))
                assert tool.report(arguments, result).strip() or not result


def test_known_results_and_errors_of_the_tools():
    wild = [("square", {"x": x}) for x in (math.nan, math.inf, 10**400)]
    wild += [
        ("mean", {"numbers": [1] * 1001}),
        ("uppercase", {"text": "x" * 1001}),
        ("no_tool", {}),
    ]
    for name, arguments, *result in [*RESULTS, *wild]:
        answer = json.loads(catalogue.respond(name, arguments))
        assert answer == {"result": result[0]} if result else re.search(r"\w", answer["error"]), (
            name,
            arguments,
        )


def test_integers_written_as_floats_are_taken():
    whole = catalogue.check("n", 7.0, {"type": "integer"})
    assert whole == 7
    assert isinstance(whole, int)


def test_known_results_of_composed_tools():
    by_name = {t.name: t for t in composed()}
    assert len(by_name) == len(composed()) > 150
    assert not by_name.keys() & TOOLS.keys()
    assert by_name["feet_to_metres"].call({"x": 10}) == 3.048
    assert by_name["times_seven"].call({"x": 6}) == 42
    assert by_name["over_eight"].call({"x": 2}) == 0.25
    assert by_name["without_a"].call({"word": "banana"}) == "bnn"


def test_no_argument_of_a_fitting_type_makes_a_tool_crash():
    wild = {
        "integer": [0, -1, 10**15, -(10**15)],
        "number": [0, -2.5, 1e15, 1e-300],
        "string": ["", " ", "\u00e9\ud800", "0" * 1000, "2024-13-01"],
        "array": [[0], [0, 0], [-1e15, 1e15]],
    }
    for tool in TOOLS.values():
        rng = random.Random(tool.name)
        for _ in range(60):
            arguments = {
                k: rng.choice(s.schema.get("enum") or wild[s.schema["type"]])
                for k, s in tool.slots.items()
            }
            try:
                json.dumps(tool.call(arguments), allow_nan=False)
            except catalogue.ToolError:
                pass


def test_families():
    assert set().union(*catalogue.FAMILIES) <= TOOLS.keys()
    assert family("weekday") == {"weekday"}
    for a, b in (("add", "total"), ("to_binary", "to_base"), ("to_metres", "convert_length")):
        assert b in family(a)
        assert a in family(b)


@functools.cache
def patterns_of(name, hard):
    tool = TOOLS[name]
    parts = (re.split(r"{(\w+)}", ask) for ask in (tool.hard_asks if hard else tool.asks))
    filled = (
        "".join(values_of(tool.slots[p]) if i % 2 else re.escape(p) for i, p in enumerate(ps))
        for ps in parts
    )
    return [re.compile(pattern) for pattern in filled]


def values_of(slot):
    if "enum" in slot.schema:
        rng = random.Random(0)
        words = {slot.say(rng, value) for value in slot.schema["enum"] for _ in range(20)}
        return f"(?:{'|'.join(map(re.escape, words))})"
    return {"integer": r"\d+", "number": r"[\d.]+"}.get(slot.schema["type"], ".+")


def says(name, text, hards=(False, True)):
    return any(pattern.fullmatch(text) for hard in hards for pattern in patterns_of(name, hard))


def test_no_request_for_one_tool_is_worded_like_one_for_another():
    """Not even with other values filled in."""
    for tool in TOOLS.values():
        rng = random.Random(tool.name)
        others = [
            o
            for o in (HELD_OUT if tool in SEEN else TOOLS.values())
            if o.name not in family(tool.name)
        ]
        for asks in (tool.asks, tool.hard_asks) * 4:
            text = tool.ask(rng, tool.sample(rng, "test_hard"), asks)
            assert not [o.name for o in others if says(o.name, text)], text


def test_training_uses_known_phrasings_only():
    for tool in SEEN:
        filled = [t.format(**dict.fromkeys(tool.slots, "7")) for t in tool.hard_asks]
        assert not any(says(tool.name, text, [False]) for text in filled), tool.name
    for split in SPLITS:
        for p in draw_problems(split, 1500, shares=HARD if split == "test_hard" else CALLS):
            text = p.messages[-1]["content"]
            assert says(p.meta["tool"], text, [p.meta["hard"] == "phrasing"]), text


def test_other_tools_of_a_probe_cannot_serve_the_request():
    rows = [r for r in probes("test", 300, 1, ["c"]) if r["asked"] == "tool" and r["tools_present"]]
    asked = [r["messages"] for r in rows if not r["suitable"]]
    assert len(asked) == 60
    for system, user in asked:
        offered = [line.partition("(")[0] for line in system["content"].splitlines()[1:]]
        assert not any(says(name, user["content"], [False]) for name in offered), (
            offered,
            user["content"],
        )


def open_values(tool, arguments):
    for key, value in arguments.items():
        if tool.slots[key].unseen:
            yield from (str(v).lower() for v in values.parts(value) if not is_shared(v))


def test_argument_values_and_tuples_are_disjoint_between_splits():
    found = {s: set() for s in SPLITS}
    tuples = {s: set() for s in SPLITS}
    for split in SPLITS:
        for p in draw_problems(split, 2500, seed=3, shares=HARD if split == "test_hard" else CALLS):
            found[split].update(open_values(TOOLS[p.gold["name"]], p.gold["arguments"]))
            tuples[split].add(json.dumps(p.gold, sort_keys=True))
    for a in SPLITS:
        assert len(found[a]) > 1000
        for b in SPLITS[SPLITS.index(a) + 1 :]:
            assert not found[a] & found[b], (a, b, sorted(found[a] & found[b])[:5])
            assert not tuples[a] & tuples[b], (a, b)


def invented(value):
    """Whether the grammar of `values.invent` has the word."""
    parts = (
        "|".join(part) for part in (values.ONSETS, values.VOWELS, values.CODAS, values.ENDINGS)
    )
    return re.fullmatch("".join(f"({part})" for part in parts), value.lower()) is not None


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_varied_values_come_in_their_share(share: float) -> None:
    rng = random.Random(0)
    drawn = [TOOLS["greet"].sample(rng, "train", share)["name"] for _ in range(600)]
    other = (
        sum(not invented(value) for value in drawn) / 600
    )  # the grammar has a few of the real names too
    assert 0.75 * share <= other <= 1.15 * share


@pytest.mark.parametrize("draw", [values.varied_word, values.varied_name])
def test_varied_values_belong_to_splits(draw) -> None:
    rng = random.Random(1)
    slot = values.Slot({"type": "string"}, draw)
    train, test = (
        {slot.sample(rng, split).lower() for _ in range(1500)} for split in ("train", "test")
    )
    assert not train & test


def test_natural_requests_have_no_name_of_varied_values() -> None:
    natural_words = {
        w
        for p in natural.read_requests()
        for w in re.findall(r"\w+", p.messages[-1]["content"].lower())
    }
    assert not natural_words & {name.lower() for name in (*NAMES, *PLACES)}


def test_names_phrasings_and_words_share_nothing_with_the_trained_tools():
    """But six common words, by which training names renamed and invented tools. A rare word of
    an unseen tool would be trained on."""
    words = words_of_names(HELD_OUT)
    assert not words & words_of_names((*SEEN, *composed(), *SERVICES))
    assert words & set(COMMON) == {"back", "body", "heart", "left", "light", "team"}
    asks = [
        {without_slots(ask) for t in tools for ask in (*t.asks, *t.hard_asks)}
        for tools in (SEEN, HELD_OUT)
    ]
    assert not asks[0] & asks[1]
    texts = " ".join(f"{t.name} {t.description} {' '.join(t.slots)}" for t in HELD_OUT)
    of_tools = set(re.findall("[a-z]+", texts.lower()))
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert not set(WORDS) & set(COMMON)
    assert not {w for w in WORDS if {w, w + "s", w.removesuffix("s")} & of_tools}


def test_held_out_tools_are_offered_in_test_hard_only():
    names = {t.name for t in HELD_OUT}
    named = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for split, n in (("train", 4000), ("select", 1500), ("test", 1500)):
        offered = set()
        for row in draw_dialogues(split, n, 1):
            assert not names & set(row["meta"]["tools"])
            assert not named.search(" ".join(m["content"] for m in row["messages"]))
            offered |= set(row["meta"]["tools"])
        assert offered == {t.name for t in SEEN}
        rng = random.Random(0)
        assert not any(named.search(tools_system(rng, split)) for _ in range(200))
        assert not any(named.search(str(row)) for row in probes(split, 200, 0, ["c"]))
    problems = FuncallTask().problems("test_hard", 1000)
    asked = {
        kind: [p.gold["name"] for p in problems if p.meta["hard"] == kind]
        for kind in ("tool", "phrasing")
    }
    assert set(asked["tool"]) == names
    assert len(asked["tool"]) == 400
    assert set(asked["phrasing"]) <= {t.name for t in SEEN}
    assert len(set(asked["phrasing"])) > 60
