"""The tools of the toolbox: they run, their requests tell them apart, values belong to splits,
and the held-out ones are new."""

import functools
import inspect
import itertools
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
from codechat_lab.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat_lab.tasks.toolbox.problems import draw as draw_problems
from codechat_lab.tasks.toolbox.problems import probes
from codechat_lab.tasks.toolbox.sampler import LEVELS, tools_system
from codechat_lab.tasks.toolbox.values import COMMON, NAMES, PLACES, WORDS, is_shared

# rows [tool, arguments, result], or [tool, arguments] of an error
RESULTS = [
    json.loads(line)
    for line in Path(__file__).with_name("tool_results.jsonl").read_text().splitlines()
]
UNUSABLE = [
    ["square", {"x": math.nan}],
    ["square", {"x": math.inf}],
    ["square", {"x": 10**400}],
    ["mean", {"numbers": [1] * 1001}],
    ["uppercase", {"text": "x" * 1001}],
    ["no_tool", {}],
]


def words_of_names(tools):
    return {word for tool in tools for word in tool.name.split("_")}


def names_of(tools):
    return {tool.name for tool in tools}


def asks_of(tool):
    return [*tool.asks, *tool.hard_asks]


def shares_of(split):
    return {"tool": 1, "phrasing": 1} if split == "test_hard" else {"call": 1}


def slots(template):
    return sorted(key for _, key, _, _ in Formatter().parse(template) if key is not None)


def without_slots(ask):
    return " ".join(re.findall(r"[a-z0-9{}]+", re.sub(r"{\w+}", "{}", ask.lower())))


def test_the_catalogue_has_102_tools_of_training_and_50_held_out():
    assert len(SEEN) == 102
    assert len(HELD_OUT) == 50
    assert len(TOOLS) == 102 + 50


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
        asks = asks_of(tool)
        assert len(asks) >= 5
        assert len(tool.asks) >= 4
        assert tool.hard_asks
        assert len(set(asks)) == len(asks)
        assert all(slots(ask) == sorted(tool.slots) for ask in asks), tool.name


def is_free_text(key, slot):
    schema = slot.schema
    return schema["type"] == "string" and "enum" not in schema and key not in ("letter", "old")


def test_texts_belong_to_splits():
    for tool in TOOLS.values():
        for key, slot in tool.slots.items():
            assert slot.unseen or not is_free_text(key, slot), (tool.name, key)


def test_services_are_told_apart_from_each_other_and_from_tools():
    assert len(SERVICES) >= 70
    assert not names_of(SERVICES) & TOOLS.keys()
    assert len(names_of(SERVICES)) == len(SERVICES)
    assert len({tool.description for tool in SERVICES}) == len(SERVICES)


def test_services_are_small_and_described_briefly():
    for tool in SERVICES:
        assert 1 <= len(tool.slots) <= 3
        assert len(tool.description.split()) <= 8


def test_the_requests_for_a_service_fit_its_slots_and_are_its_own():
    asks = []
    for tool in SERVICES:
        assert len(set(tool.asks)) == 12
        assert all(slots(ask) == sorted(tool.slots) for ask in tool.asks)
        asks += [re.sub(r"{\w+}", "{}", ask.lower()) for ask in tool.asks]
    assert len(set(asks)) == len(asks)


def test_the_answers_of_a_service_state_its_result_once():
    for tool in SERVICES:
        for answer in tool.answers:
            assert slots(answer).count("result") == 1
            assert set(slots(answer)) <= {"result", *tool.slots}


def test_there_are_further_wordings_for_tools_of_training_only():
    assert len(WORDINGS) >= 60
    assert WORDINGS.keys() <= names_of(SEEN)


@pytest.mark.parametrize("name", WORDINGS)
def test_further_wordings_fit_their_slots(name):
    assert len(set(WORDINGS[name])) == 16
    assert all(slots(ask) == sorted(TOOLS[name].slots) for ask in WORDINGS[name])


@pytest.mark.parametrize("name", WORDINGS)
def test_further_wordings_are_none_of_the_requests_in_another_case_or_punctuation(name):
    wordings = set(map(without_slots, WORDINGS[name]))
    assert not wordings & set(map(without_slots, asks_of(TOOLS[name])))


def splits_of(tool):
    """The splits that a tool has values for."""
    if tool.name in TOOLS:
        return SPLITS
    if any(slot.unseen for slot in tool.slots.values()):
        return ("train", "test")
    return ("train",)


OFFERS = {
    "training": SEEN,
    "held out": HELD_OUT,
    "services": SERVICES,
    "composed": composed(),
}
ON_OFFER = pytest.mark.parametrize("offer", OFFERS)


def rngs(tools):
    """(tool, split, generator) for every split of every tool, 15 times."""
    for tool in tools:
        for split in splits_of(tool):
            rng = random.Random(tool.name + split)
            for _ in range(15):
                yield tool, split, rng


def hard_asks(tool, split):
    return tool.hard_asks if split == "test_hard" else ()


@ON_OFFER
def test_sampled_arguments_and_requests_are_deterministic(offer):
    both = zip(rngs(OFFERS[offer]), rngs(OFFERS[offer]))
    for (tool, split, rng), (_, _, again) in both:
        arguments = tool.sample(rng, split)
        assert tool.sample(again, split) == arguments
        asks = hard_asks(tool, split)
        assert tool.ask(rng, arguments, asks) == tool.ask(again, arguments, asks)


@ON_OFFER
def test_sampled_arguments_fit_their_schemas(offer):
    for tool, split, rng in rngs(OFFERS[offer]):
        arguments = tool.sample(rng, split)
        checked = {k: catalogue.check(k, v, tool.slots[k].schema) for k, v in arguments.items()}
        assert checked == arguments


@ON_OFFER
def test_tools_run_with_sampled_arguments(offer):
    for tool, split, rng in rngs(OFFERS[offer]):
        arguments = tool.sample(rng, split)
        result = tool.call(arguments)
        assert result is not None
        assert result != []
        assert tool.call(json.loads(json.dumps(arguments))) == result
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert tool.report(arguments, result).strip() or not result


@ON_OFFER
def test_sampled_arguments_are_said_in_a_short_request(offer):
    for tool, split, rng in rngs(OFFERS[offer]):
        arguments = tool.sample(rng, split)
        text = tool.ask(rng, arguments, hard_asks(tool, split))
        assert len(text.split()) <= 25
        for key, value in arguments.items():
            if "enum" not in tool.slots[key].schema and not isinstance(value, list):
                assert str(value) in text


@pytest.mark.parametrize(("name", "arguments", "result"), [row for row in RESULTS if len(row) == 3])
def test_known_results_of_the_tools(name, arguments, result):
    assert json.loads(catalogue.respond(name, arguments)) == {"result": result}


@pytest.mark.parametrize(
    ("name", "arguments"), [row for row in [*RESULTS, *UNUSABLE] if len(row) == 2]
)
def test_known_errors_of_the_tools(name, arguments):
    answer = json.loads(catalogue.respond(name, arguments))
    assert re.search(r"\w", answer["error"])


def test_integers_written_as_floats_are_taken():
    whole = catalogue.check("n", 7.0, {"type": "integer"})
    assert whole == 7
    assert isinstance(whole, int)


def test_composed_tools_have_names_of_their_own():
    names = names_of(composed())
    assert len(names) == len(composed())
    assert len(names) > 150
    assert not names & TOOLS.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("feet_to_metres", {"x": 10}, 3.048),
        ("times_seven", {"x": 6}, 42),
        ("over_eight", {"x": 2}, 0.25),
        ("without_a", {"word": "banana"}, "bnn"),
    ],
)
def test_known_results_of_composed_tools(name, arguments, result):
    (tool,) = (tool for tool in composed() if tool.name == name)
    assert tool.call(arguments) == result


WILD = {
    "integer": [0, -1, 10**15, -(10**15)],
    "number": [0, -2.5, 1e15, 1e-300],
    "string": ["", " ", "\u00e9\ud800", "0" * 1000, "2024-13-01"],
    "array": [[0], [0, 0], [-1e15, 1e15]],
}


def wild_value(rng, slot):
    return rng.choice(slot.schema.get("enum") or WILD[slot.schema["type"]])


def test_no_argument_of_a_fitting_type_makes_a_tool_crash():
    for tool in TOOLS.values():
        rng = random.Random(tool.name)
        for _ in range(60):
            arguments = {key: wild_value(rng, slot) for key, slot in tool.slots.items()}
            try:
                json.dumps(tool.call(arguments), allow_nan=False)
            except catalogue.ToolError:
                pass


def test_families_are_of_known_tools():
    assert set().union(*catalogue.FAMILIES) <= TOOLS.keys()


def test_a_tool_without_a_family_stands_alone():
    assert family("weekday") == {"weekday"}


@pytest.mark.parametrize(
    ("a", "b"), [("add", "total"), ("to_binary", "to_base"), ("to_metres", "convert_length")]
)
def test_tools_that_serve_each_others_requests_are_a_family(a, b):
    assert b in family(a)
    assert a in family(b)


def pattern_of(ask, tool):
    """A pattern of a request with any values filled in."""
    pattern = ""
    for i, part in enumerate(re.split(r"{(\w+)}", ask)):
        is_slot = i % 2 == 1
        pattern += values_of(tool.slots[part]) if is_slot else re.escape(part)
    return re.compile(pattern)


@functools.cache
def patterns_of(name, hard):
    tool = TOOLS[name]
    return [pattern_of(ask, tool) for ask in (tool.hard_asks if hard else tool.asks)]


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
        others = names_of(HELD_OUT if tool in SEEN else TOOLS.values()) - family(tool.name)
        for asks in (tool.asks, tool.hard_asks) * 4:
            text = tool.ask(rng, tool.sample(rng, "test_hard"), asks)
            assert not [name for name in others if says(name, text)], text


def test_held_out_phrasings_are_none_of_training():
    for tool in SEEN:
        filled = [ask.format(**dict.fromkeys(tool.slots, "7")) for ask in tool.hard_asks]
        assert not any(says(tool.name, text, [False]) for text in filled), tool.name


@pytest.mark.parametrize("split", SPLITS)
def test_only_the_phrasings_of_test_hard_are_held_out(split):
    for problem in draw_problems(split, 1500, shares=shares_of(split)):
        text = problem.messages[-1]["content"]
        hard = problem.meta["hard"] == "phrasing"
        assert says(problem.meta["tool"], text, [hard]), text


def test_other_tools_of_a_probe_cannot_serve_the_request():
    rows = [r for r in probes("test", 300, 1, ["c"]) if r["asked"] == "tool" and r["tools_present"]]
    asked = [row["messages"] for row in rows if not row["suitable"]]
    assert len(asked) == 60
    for system, user in asked:
        offered = [line.partition("(")[0] for line in system["content"].splitlines()[1:]]
        request = user["content"]
        assert not any(says(name, request, [False]) for name in offered), (offered, request)


def open_values(tool, arguments):
    for key, value in arguments.items():
        if tool.slots[key].unseen:
            yield from (str(v).lower() for v in values.parts(value) if not is_shared(v))


@functools.cache
def golds_of(split):
    return [p.gold for p in draw_problems(split, 2500, seed=3, shares=shares_of(split))]


PAIRS = pytest.mark.parametrize(("a", "b"), list(itertools.combinations(SPLITS, 2)))


def open_values_of(split):
    return {
        value
        for gold in golds_of(split)
        for value in open_values(TOOLS[gold["name"]], gold["arguments"])
    }


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_many_argument_values(split):
    assert len(open_values_of(split)) > 1000


@PAIRS
def test_argument_values_are_disjoint_between_splits(a, b):
    assert not open_values_of(a) & open_values_of(b)


@PAIRS
def test_tuples_of_arguments_are_disjoint_between_splits(a, b):
    golds = {json.dumps(gold, sort_keys=True) for gold in golds_of(a)}
    assert not golds & {json.dumps(gold, sort_keys=True) for gold in golds_of(b)}


INVENTED = re.compile(
    "".join(
        f"(?:{'|'.join(part)})"
        for part in (values.ONSETS, values.VOWELS, values.CODAS, values.ENDINGS)
    )
)


def invented(value):
    """Whether the grammar of `values.invent` has the word."""
    return INVENTED.fullmatch(value.lower()) is not None


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_varied_values_come_in_their_share(share: float) -> None:
    rng = random.Random(0)
    drawn = [TOOLS["greet"].sample(rng, "train", share)["name"] for _ in range(600)]
    # the grammar has a few of the real names too
    other = sum(not invented(value) for value in drawn) / 600
    assert 0.75 * share <= other <= 1.15 * share


@pytest.mark.parametrize("draw", [values.varied_word, values.varied_name])
def test_varied_values_belong_to_splits(draw) -> None:
    rng = random.Random(1)
    slot = values.Slot({"type": "string"}, draw)
    train = {slot.sample(rng, "train").lower() for _ in range(1500)}
    test = {slot.sample(rng, "test").lower() for _ in range(1500)}
    assert not train & test


def test_natural_requests_have_no_name_of_varied_values() -> None:
    requests = [p.messages[-1]["content"].lower() for p in natural.read_requests()]
    words = set(re.findall(r"\w+", " ".join(requests)))
    assert not words & {name.lower() for name in (*NAMES, *PLACES)}


def test_held_out_names_share_no_word_with_the_trained_tools():
    words = words_of_names(HELD_OUT)
    assert not words & words_of_names((*SEEN, *composed(), *SERVICES))


def test_held_out_names_share_six_words_with_names_that_training_renames_by():
    shared = words_of_names(HELD_OUT) & set(COMMON)
    assert shared == {"back", "body", "heart", "left", "light", "team"}


def phrasings_of(tools):
    return {without_slots(ask) for tool in tools for ask in asks_of(tool)}


def test_held_out_tools_share_no_phrasing_with_the_trained_tools():
    assert not phrasings_of(SEEN) & phrasings_of(HELD_OUT)


def test_rare_words_are_many_and_none_of_the_common_ones():
    assert len(WORDS) == len(set(WORDS))
    assert len(WORDS) > 1000
    assert not set(WORDS) & set(COMMON)


def test_no_rare_word_is_of_a_held_out_tool():
    """It would be trained on."""
    texts = " ".join(f"{t.name} {t.description} {' '.join(t.slots)}" for t in HELD_OUT)
    of_tools = set(re.findall("[a-z]+", texts.lower()))
    assert not {w for w in WORDS if {w, w + "s", w.removesuffix("s")} & of_tools}


NOT_HARD = pytest.mark.parametrize("split", ["train", "select", "test"])
NAMES_HELD_OUT = re.compile(rf"\b(?:{'|'.join(names_of(HELD_OUT))})\b")


@pytest.mark.parametrize(("split", "n"), [("train", 4000), ("select", 1500), ("test", 1500)])
def test_conversations_offer_the_tools_of_training_and_name_no_other(split, n):
    offered = set()
    for row in draw_dialogues(split, n, 1):
        offered |= set(row["meta"]["tools"])
        assert not NAMES_HELD_OUT.search(" ".join(m["content"] for m in row["messages"]))
    assert not offered & names_of(HELD_OUT)
    assert offered == names_of(SEEN)


@NOT_HARD
def test_lists_of_tools_name_no_held_out_tool(split):
    rng = random.Random(0)
    assert not any(NAMES_HELD_OUT.search(tools_system(rng, split)) for _ in range(200))


@NOT_HARD
def test_probes_name_no_held_out_tool(split):
    assert not any(NAMES_HELD_OUT.search(str(row)) for row in probes(split, 200, 0, ["c"]))


def tools_of_test_hard(kind):
    problems = FuncallTask().problems("test_hard", 1000)
    return [problem.gold["name"] for problem in problems if problem.meta["hard"] == kind]


def test_test_hard_asks_for_every_held_out_tool():
    asked = tools_of_test_hard("tool")
    assert set(asked) == names_of(HELD_OUT)
    assert len(asked) == 400


def test_test_hard_asks_for_trained_tools_in_held_out_phrasings():
    asked = set(tools_of_test_hard("phrasing"))
    assert asked <= names_of(SEEN)
    assert len(asked) > 60
