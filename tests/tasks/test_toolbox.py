"""The toolbox: tools that run, values that no other split uses, short prompts."""

from __future__ import annotations

import functools
import json
import math
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from codechat.core.errors import ConfigError
from codechat.tasks.base import SPLITS
from codechat.tasks.toolbox.catalogue import FAMILIES, HELD_OUT, SEEN, TOOLS, execute, family, respond
from codechat.tasks.toolbox.dialogues import Mix
from codechat.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat.tasks.toolbox.problems import draw as draw_problems
from codechat.tasks.toolbox.problems import probes
from codechat.tasks.toolbox.tool import LEVELS, ToolError, check
from codechat.tasks.toolbox.values import is_shared
from codechat.text import chat, tokenizer

CALLS, HARD = {"call": 1}, {"tool": 1, "phrasing": 1}
# Rows [tool, arguments, result], or [tool, arguments] of an error.
RESULTS = [json.loads(line) for line in Path(__file__).with_name("tool_results.jsonl").read_text().splitlines()]


def could_ask(name, text):
    """Whether one of the wordings of a tool, any values filled in, is the text."""
    patterns, rng = {}, random.Random(0)
    for key, slot in TOOLS[name].slots.items():
        words = {slot.say(rng, value) for value in slot.schema.get("enum", ()) for _ in range(20)}
        patterns[key] = "|".join(map(re.escape, words)) or ".+"
    asks = (re.split(r"\{(\w+)\}", ask) for ask in TOOLS[name].asks)
    filled = (
        "".join(f"({patterns[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts)) for parts in asks
    )
    return any(re.fullmatch(pattern, text) for pattern in filled)


def first_calls(rows):
    """(tool name, arguments) of every call in dialogue rows."""
    for row in rows:
        for message in row["messages"]:
            if message["role"] == "assistant" and message["content"].startswith("<functioncall>"):
                call = json.loads(message["content"].removeprefix("<functioncall>"))
                yield call["name"], call["arguments"]


def test_the_catalogue_is_large_graded_and_well_formed():
    assert len(SEEN) == 102 and len(HELD_OUT) == 50 == len(TOOLS) - 102
    for level in LEVELS:
        assert sum(t.level == level for t in SEEN) >= 12 and sum(t.level == level for t in HELD_OUT) >= 2
    for tool in TOOLS.values():
        asks = tool.asks + tool.hard_asks
        assert len(tool.description.split()) <= 6 and tool.schema["parameters"]["required"] == list(tool.slots)
        assert len(asks) >= 5 and len(tool.asks) >= 4 and tool.hard_asks and len(set(asks)) == len(asks)
        assert all("{" + name + "}" in template for template in asks for name in tool.slots), tool.name
        for key, slot in tool.slots.items():
            if slot.schema["type"] == "string" and "enum" not in slot.schema and key not in ("letter", "old"):
                assert slot.unseen, (tool.name, key)


def test_sampled_arguments_run_and_are_deterministic():
    for tool in TOOLS.values():
        for split in SPLITS:
            rng, again = random.Random(tool.name + split), random.Random(tool.name + split)
            for _ in range(15):
                arguments = tool.sample(rng, split)
                assert tool.sample(again, split) == arguments
                result = execute(tool.name, arguments)
                assert execute(tool.name, json.loads(json.dumps(arguments))) == result
                assert json.loads(json.dumps(result, allow_nan=False)) == result
                assert len(tool.ask(rng, arguments, hard=split == "test_hard").split()) <= 25
                tool.ask(again, arguments, hard=split == "test_hard")
                assert tool.report(arguments, result["result"]).strip()


def test_known_results_and_errors():
    wild = [("square", {"x": x}) for x in (math.nan, math.inf, 10**400)]
    wild += [("mean", {"numbers": [1] * 1001}), ("uppercase", {"text": "x" * 1001})]
    for name, arguments, *result in [*RESULTS, *wild]:
        if result:
            assert execute(name, arguments) == {"result": result[0]}
        else:
            with pytest.raises(ToolError, match=r"\w"):
                execute(name, arguments)
            assert "error" in json.loads(respond(name, arguments))
    whole = check("n", 7.0, {"type": "integer"})
    assert whole == 7 and isinstance(whole, int), "integers written as floats are taken"


def test_no_argument_of_a_fitting_type_makes_a_tool_crash():
    wild = {
        "integer": [0, -1, 10**15, -(10**15)],
        "number": [0, -2.5, 1e15, 1e-300],
        "boolean": [True, False],
        "string": ["", " ", "\u00e9\ud800", "0" * 1000, "2024-13-01"],
        "array": [[0], [0, 0], [-1e15, 1e15]],
    }
    for tool in TOOLS.values():
        rng = random.Random(tool.name)
        for _ in range(60):
            arguments = {k: rng.choice(s.schema.get("enum") or wild[s.schema["type"]]) for k, s in tool.slots.items()}
            try:
                json.dumps(execute(tool.name, arguments), allow_nan=False)
            except ToolError:
                pass


def open_values(tool, arguments):
    """The values that must not be shared between splits."""
    for key, value in arguments.items():
        if tool.slots[key].unseen:
            yield from (str(v).lower() for v in (value if isinstance(value, list) else [value]) if not is_shared(v))


def test_argument_values_and_tuples_are_disjoint_between_splits():
    values, tuples = {s: set() for s in SPLITS}, {s: set() for s in SPLITS}
    for split in SPLITS:
        for p in draw_problems(split, 2500, seed=3, shares=HARD if split == "test_hard" else CALLS):
            values[split].update(open_values(TOOLS[p.gold["name"]], p.gold["arguments"]))
            tuples[split].add(json.dumps(p.gold, sort_keys=True))
    for a in SPLITS:
        assert len(values[a]) > 1000
        for b in SPLITS[SPLITS.index(a) + 1 :]:
            assert not values[a] & values[b], (a, b, sorted(values[a] & values[b])[:5])
            assert not tuples[a] & tuples[b], (a, b)


@functools.cache
def patterns_of(templates):
    return [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(t))) for t in templates]


def says(templates, text):
    """Whether `text` is one of the templates with its slots filled."""
    return any(p.fullmatch(text) for p in patterns_of(templates))


def test_training_uses_known_phrasings_only():
    for tool in SEEN:
        filled = [t.format(**dict.fromkeys(tool.slots, "7")) for t in tool.hard_asks]
        assert not any(says(tool.asks, text) for text in filled), tool.name
    for split in SPLITS:
        for p in draw_problems(split, 1500, shares=HARD if split == "test_hard" else CALLS):
            tool, text = TOOLS[p.meta["tool"]], p.messages[-1]["content"]
            assert says(tool.hard_asks if p.meta["hard"] == "phrasing" else tool.asks, text), text


def test_multi_turn_responses_come_from_running_the_tool():
    rows = list(draw_dialogues("train", 300, mix=Mix(multi_turn=1.0, unfitting=0.0, no_tools=0.0, small_talk=0.0)))
    assert {len(r["messages"]) for r in rows} == {5}
    for row in rows:
        for call, response, answer in zip(row["messages"], row["messages"][1:], row["messages"][2:]):
            if response["role"] == "function":
                (parsed,) = chat.parse_calls(call["content"])
                assert json.loads(response["content"]) == execute(parsed.name, parsed.arguments)
                assert answer["role"] == "assistant" and "<functioncall>" not in answer["content"]


def test_negatives_have_no_call_and_no_fitting_tool():
    rows = list(draw_dialogues("train", 1000, mix=Mix(multi_turn=0.0, unfitting=0.0, no_tools=0.5, small_talk=0.5)))
    assert {r["meta"]["kind"] for r in rows} == {"absent", "chat"}
    assert not list(first_calls(rows))
    for row in rows:
        assert row["meta"]["tools_present"] == row["messages"][0]["content"].startswith("Functions:")


def test_offered_tools_are_never_ambiguous():
    for row in draw_dialogues("test_hard", 2000, mix=Mix(unfitting=0.0, no_tools=0.0)):
        offered = row["meta"]["tools"]
        assert row["meta"]["tool"] in offered and len(set(offered)) == len(offered) <= 4
        assert not any(b in family(a) for a in offered for b in offered if a != b)


def test_families_levels_and_shares():
    assert set().union(*FAMILIES) <= TOOLS.keys() and family("weekday") == {"weekday"}
    for a, b in (("add", "total"), ("to_binary", "to_base"), ("to_metres", "convert_length")):
        assert b in family(a) and a in family(b)
    levels = [p.meta["level"] for p in draw_problems("test", 1000, shares=CALLS)]
    assert 520 < levels.count(1) < 680 and 140 < levels.count(2) < 260
    with pytest.raises(ConfigError):
        list(draw_dialogues("validation", 1))


def test_same_seed_same_rows_and_longer_lists_extend_shorter_ones():
    rows = list(draw_dialogues("train", 50, seed=5))
    assert list(draw_dialogues("train", 80, seed=5))[:50] == rows
    assert list(draw_dialogues("train", 50, seed=6)) != rows
    assert draw_problems("select", 9, shares=CALLS) == draw_problems("select", 30, shares=CALLS)[:9]
    assert len({r["id"] for r in rows}) == 50


def test_probes_fill_every_cell():
    rows = probes("select", 50, 0, ["Write a function that adds."])
    cells = Counter((r["asked"], r["tools_present"], r["suitable"]) for r in rows)
    tool, code = [(True, True), (True, False), (False, False)], [(True, False), (False, False)]
    assert cells == dict.fromkeys([("tool", *cell) for cell in tool] + [("code", *cell) for cell in code], 10)
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["system", "user"]
        assert row["tools_present"] == row["messages"][0]["content"].startswith("Functions:")
        assert (row["asked"] == "code") == (row["messages"][1]["content"] == "Write a function that adds.")


def test_other_tools_of_a_probe_cannot_serve_the_request():
    """No tool on offer may belong to the family of the requested tool."""
    asked = [
        r["messages"]
        for r in probes("test", 300, 1, ["c"])
        if r["asked"] == "tool" and r["tools_present"] and not r["suitable"]
    ]
    assert len(asked) == 60
    for system, user in asked:
        offered = [line.partition("(")[0] for line in system["content"].splitlines()[1:]]
        served = [name for name in offered if could_ask(name, user["content"])]
        assert not served, (offered, user["content"])


def test_prompts_and_calls_are_short():
    tok = tokenizer.load("python:4096")
    problems = draw_problems("train", 600, shares=CALLS)
    prompts = [len(chat.prompt(p.messages, tok, "reserved")) for p in problems]
    calls = [
        chat.render([*p.messages, {"role": "assistant", "content": chat.format_call(**p.gold)}], tok, "reserved")
        for p in problems
    ]
    assert statistics.mean(prompts) <= 110
    assert statistics.mean(sum(c.loss_mask) for c in calls) <= 35


def test_a_thousand_dialogues_take_a_second_at_most():
    start = time.process_time()
    assert sum(1 for _ in draw_dialogues("train", 4000)) == 4000
    assert time.process_time() - start < 4
