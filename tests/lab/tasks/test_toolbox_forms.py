"""Requests whose values have a described form: what is right follows from the request and the
description, what is held out stays out, and the checker takes no other answer."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from codechat.core.config import parse
from codechat.core.errors import ConfigError
from codechat.tasks.base import Problem
from codechat.text import json_schemas, tool_calls, tool_lists
from codechat_lab.tasks.funcall import FuncallTask, naming_words
from codechat_lab.tasks.toolbox import dialogues, forms, mixes, prepare
from codechat_lab.tasks.toolbox.values import allowed, whole

TASK = FuncallTask()
SPLITS = ("train", "select", "test", "test_hard")
CALLING = ("form", "at_once", "at_once_mixed")
EACH = 30


@pytest.fixture(scope="module")
def problems() -> dict[str, list[Problem]]:
    counts = dict.fromkeys(forms.SHARES, EACH)
    return {split: list(forms.draw_problems(split, 0, counts)) for split in SPLITS}


def of(problems: dict[str, list[Problem]], *strata: str) -> Iterator[Problem]:
    for split in SPLITS:
        for problem in problems[split]:
            if not strata or problem.meta["stratum"] in strata:
                yield problem


def golds(problem: Problem) -> list[dict[str, Any]]:
    if problem.gold is None:
        return []
    return problem.gold if isinstance(problem.gold, list) else [problem.gold]


def schemas(problem: Problem) -> dict[str, Any]:
    listed = tool_lists.offered_schemas(problem.messages[0]["content"])
    return {schema["name"]: schema["parameters"] for schema in listed}


def written(calls: list[dict[str, Any]]) -> str:
    return "\n".join(tool_calls.format_call(call["name"], call["arguments"]) for call in calls)


def right(problem: Problem, answer: str) -> bool:
    return TASK.score(problem, answer).correct


def test_the_gold_of_every_problem_is_right(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems):
        score = TASK.score(problem, TASK.gold(problem))
        assert score.correct
        assert score.reward == 1


def test_gold_calls_fit_the_schemas_on_offer(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, *CALLING):
        offered = schemas(problem)
        for call in golds(problem):
            assert json_schemas.error_of(call["arguments"], offered[call["name"]]) is None
            assert (
                json_schemas.error_of(call["arguments"] | call["optional"], offered[call["name"]])
                is None
            )


def test_schemas_are_schemas(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "form"):
        json_schemas.check(schemas(problem)[problem.gold["name"]])


def test_a_call_with_another_value_is_wrong(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "form"):
        arguments = problem.gold["arguments"]
        for key in arguments:
            other = arguments | {key: "something else"}
            assert not right(problem, tool_calls.format_call(problem.gold["name"], other))


def test_several_calls_are_right_in_any_order(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "at_once", "at_once_mixed"):
        assert right(problem, written(problem.gold[::-1]))


def test_one_of_several_calls_less_twice_or_more_is_wrong(
    problems: dict[str, list[Problem]],
) -> None:
    for problem in of(problems, "at_once", "at_once_mixed"):
        calls = problem.gold
        assert not right(problem, written(calls[1:]))
        assert not right(problem, written([*calls[1:], calls[1]]))
        assert not right(problem, written([*calls, calls[0]]))


def test_several_calls_earn_what_is_right_of_them(problems: dict[str, list[Problem]]) -> None:
    problem = next(of(problems, "at_once"))
    rewards = [
        TASK.score(problem, answer).reward
        for answer in ("No.", written(problem.gold[:1]), written(problem.gold))
    ]
    assert rewards[0] == 0
    assert rewards == sorted(set(rewards))


def test_a_default_may_be_left_out_or_said(problems: dict[str, list[Problem]]) -> None:
    said = 0
    for problem in of(problems, "form"):
        for key, value in problem.gold["optional"].items():
            stated = problem.gold["arguments"] | {key: value}
            assert right(problem, tool_calls.format_call(problem.gold["name"], stated))
            other = problem.gold["arguments"] | {key: "something else"}
            assert not right(problem, tool_calls.format_call(problem.gold["name"], other))
            said += 1
    assert said > 50


def test_requests_at_once_have_two_to_five_calls_of_one_or_several_services(
    problems: dict[str, list[Problem]],
) -> None:
    for problem in of(problems, "at_once", "at_once_mixed"):
        names = {call["name"] for call in problem.gold}
        assert 2 <= len(problem.gold) <= forms.MOST_CALLS
        assert (len(names) == 1) == (problem.meta["stratum"] == "at_once")
        calls = [written([call]) for call in problem.gold]
        assert len(set(calls)) == len(calls)
    counts = Counter(len(problem.gold) for problem in of(problems, "at_once", "at_once_mixed"))
    assert set(counts) == {2, 3, 4, 5}


def test_no_amount_choice_or_quoted_text_stands_for_several_calls() -> None:
    def may(kind: Any, words: str = "of {}") -> bool:
        form = forms.form_of(kind, random.Random(0), hard=False)
        argument = forms.Argument("x", "the x", (words,), form, True)
        return forms._may_have_several_values(argument)

    assert may("word")
    assert may("us_city")
    assert not may("money")
    assert not may({"a": "one", "b": "two"})
    assert not may("word", "called '{}'")
    assert not may({"list": "word"})


def test_a_lacking_value_is_asked_for(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "lacking"):
        (lacks,) = (
            [name for name in parameters["required"] if name == problem.meta["lacks"]]
            for key, parameters in schemas(problem).items()
            if key == problem.meta["tools"][0]
        )
        assert lacks
        assert right(problem, f"What is the {problem.meta['asks_for']}?")
        assert not right(problem, "I have no function for that.")
        call = tool_calls.format_call(problem.meta["tools"][0], {})
        assert not right(problem, f"What is the {problem.meta['asks_for']}? {call}")


def test_a_question_that_names_nothing_is_not_paid(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "lacking"):
        for text in ("?", "Which of it should I use?", "How may I help you?"):
            assert not right(problem, text), problem.meta


def test_every_description_of_an_argument_names_it() -> None:
    for row in forms.SERVICES.values():
        for name, (_, about, *_) in row["needs"].items():
            assert naming_words(f"{name} {about}"), name


@pytest.mark.parametrize(
    "about, wrong", [("the street", "the the"), ("how long it takes", "the how"), ("age", "me age")]
)
def test_a_question_is_a_sentence(about: str, wrong: str) -> None:
    for seed in range(20):
        question = forms._question(about, random.Random(seed))
        assert wrong not in question
        assert about.removeprefix("the ") in question
        assert "?" in question


def test_the_words_of_a_name_are_told_apart() -> None:
    assert naming_words("departureDate the day of it") == {"departure", "date", "day"}
    assert naming_words("departure_date") == {"departure", "date"}


def test_beside_near_misses_only_silence_is_right(problems: dict[str, list[Problem]]) -> None:
    near = 0
    for problem in of(problems, "near_miss"):
        asked = problem.meta["tool"]
        group = forms.SERVICES[asked]["group"]
        named = {re.sub(r"\W|_", "", key).lower(): key for key in forms.SERVICES}
        keys = [named[name.replace(".", "").replace("_", "").lower()] for name in schemas(problem)]
        assert asked not in keys
        near += any(forms.SERVICES[key]["group"] == group for key in keys)
        assert right(problem, "I have no function for that.")
        assert not right(problem, tool_calls.format_call(problem.meta["tools"][0], {}))
    assert near == 4 * EACH


def test_services_and_forms_of_test_hard_are_in_no_other_split(
    problems: dict[str, list[Problem]],
) -> None:
    asked = {split: {p.meta["tool"] for p in problems[split]} for split in SPLITS}
    assert asked["test_hard"].isdisjoint(asked["train"] | asked["select"] | asked["test"])
    held_out = [
        about
        for domain in forms.FORMS.values()
        for form in domain["forms"]
        if form.get("hard")
        for about in form["about"]
    ]
    texts = {
        split: "\n".join(p.messages[0]["content"] for p in problems[split]) for split in SPLITS
    }
    assert not any(about in texts[split] for about in held_out for split in SPLITS[:3])
    assert sum(about in texts["test_hard"] for about in held_out) > 10


@pytest.mark.parametrize("name", forms.FORMS)
def test_every_domain_has_a_held_out_form_or_held_out_values(name: str) -> None:
    domain = forms.FORMS[name]
    assert any("hard" in form for form in domain["forms"]) or "shared" not in domain
    assert any("hard" not in form for form in domain["forms"])


@pytest.mark.parametrize("split", SPLITS)
def test_every_table_has_values_of_every_split(split: str) -> None:
    for name, domain in forms.FORMS.items():
        if "rows" in domain and "shared" not in domain:
            said = [row.split("|")[0] for row in domain["rows"]]
            assert sum(allowed(one, split) for one in said) >= 3, name
            assert len(set(said)) == len(said)


def test_each_call_as_a_whole_belongs_to_its_split(problems: dict[str, list[Problem]]) -> None:
    for problem in of(problems, "form", "at_once"):
        for call in golds(problem):
            assert whole({problem.meta["tool"]: call["arguments"]}, problem.split)


def test_invented_words_belong_to_one_split(problems: dict[str, list[Problem]]) -> None:
    words: dict[str, set[str]] = {}
    for split in SPLITS:
        addresses = re.findall(r"(\w+)@example\.org", str([golds(p) for p in problems[split]]))
        words[split] = set(addresses)
    assert len(words["train"]) > 10
    assert words["train"].isdisjoint(words["test"] | words["select"] | words["test_hard"])


# description -> what the value looks like
FORMATS = {
    "YYYY-MM-DDTHH:MM": r"\d{4}-\d\d-\d\dT\d\d:\d\d(:00Z)?",
    "as YYYY-MM-DD HH:MM": r"\d{4}-\d\d-\d\d \d\d:\d\d",
    "MM/DD/YYYY": r"\d\d/\d\d/\d{4}",
    "DD.MM.YYYY": r"\d\d\.\d\d\.\d{4}",
    "YYYYMMDD": r"\d{8}",
    "HHMM": r"\d{4}",
    "two-letter country code": r"[A-Z]{2}",
    "as two small letters": r"[a-z]{2}",
    "IATA airport code": r"[A-Z]{3}",
    "City, ST": r"[\w ]+, [A-Z]{2}",
    "City, Country": r"[\w ]+, [\w ]+",
    "#RRGGBB": r"#[0-9A-F]{6}",
}


def test_values_have_the_form_that_their_description_prescribes(
    problems: dict[str, list[Problem]],
) -> None:
    seen = set()
    for problem in of(problems, *CALLING):
        for call in golds(problem):
            properties = schemas(problem)[call["name"]]["properties"]
            for key, value in call["arguments"].items():
                about = properties[key]["description"]
                for words, pattern in FORMATS.items():
                    if words in about and isinstance(value, str):
                        assert re.fullmatch(pattern, value), (about, value)
                        seen.add(words)
    assert seen == set(FORMATS)


@pytest.mark.parametrize(
    ("domain", "words", "said", "value"),
    [
        ("share", "as a fraction between 0 and 1", "20 %", 0.2),
        ("share", "in percent, 0 to 100", "20 %", 20),
        ("duration", "in minutes", "an hour and a half", 90),
        ("duration", "in seconds", "half an hour", 1800),
        ("distance", "in metres", "3 km", 3000),
        ("weight", "in kilograms", "50 grams", 0.05),
        ("money", "in cents", "12 dollars and 50 cents", 1250),
        ("size", "in gigabytes", "10 MB", 0.01),
        ("country", "two-letter country code, such as GB", "the Netherlands", "NL"),
        ("weekday", "1 for Monday to 7 for Sunday", "Sunday", 7),
    ],
)
def test_an_amount_or_name_is_written_as_described(
    domain: str, words: str, said: str, value: Any
) -> None:
    rng = random.Random(0)
    while True:
        form = forms.form_of(domain, rng, hard=False)
        if form.about == words:
            break
    drawn = (form.draw(rng, split) for split in itertools.cycle(SPLITS))
    assert next(one for one in drawn if one.said == said).written == value


def test_conversations_answer_as_the_checker_wants() -> None:
    rng = random.Random(0)
    kinds: Counter[str] = Counter()
    for _ in range(150):
        for messages, meta in forms.conversations(rng, "train"):
            kinds[meta["kind"]] += 1
            calls = tool_calls.parse_calls(messages[2]["content"])
            if meta["kind"] in CALLING:
                assert calls
                assert {call.name for call in calls} <= set(meta["tools"])
            else:
                assert not calls
                assert messages[2]["content"].endswith("?") == (meta["kind"] == "lacking")
            if len(messages) > 3:
                (call,) = tool_calls.parse_calls(messages[4]["content"])
                assert meta["lacks"] in call.arguments
    assert kinds.keys() == forms.SHARES.keys()


def test_a_near_miss_is_followed_by_its_twin() -> None:
    rng = random.Random(1)
    drawn = [forms.conversations(rng, "train") for _ in range(80)]
    twins = [two for two in drawn if len(two) == 2]
    assert twins
    for (declined, _), (served, _) in twins:
        assert declined[1] == served[1]
        assert tool_calls.parse_calls(served[2]["content"])


@pytest.mark.parametrize("name", ["forms-turns", "declining-turns"])
def test_a_mix_has_its_share_of_forms(name: str) -> None:
    mix = mixes.Mix(**mixes.shares_of(name))
    rows = list(dialogues.draw("train", 400, mix=mix))
    share = sum(row["meta"]["kind"] in forms.SHARES for row in rows) / len(rows)
    assert share == pytest.approx(mix.forms, abs=0.1)


def test_forms_want_a_list_that_shows_descriptions() -> None:
    with pytest.raises(ConfigError, match="give --tools-style arguments or json"):
        parse(prepare.CallsConfig, ["--mix", "forms-turns"])
    for style in ("arguments", "json"):
        assert parse(
            prepare.CallsConfig, ["--mix", "forms-turns", "--tools-style", style]
        ).mix.forms


def described_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """The descriptions of arguments, at any depth."""
    inner: dict[str, Any] = schema.get("items", schema)
    keys = {name: described_keys(one) for name, one in inner.get("properties", {}).items()}
    return {"about": schema.get("description"), "keys": keys}


def test_a_list_with_lines_for_arguments_says_what_whole_schemas_say(
    problems: dict[str, list[Problem]],
) -> None:
    nested = False
    for problem in of(problems, "form"):
        row = {"messages": problem.messages}
        again = prepare._listed(row, "arguments")["messages"][0]["content"]
        before = schemas(problem)
        after = {one["name"]: one["parameters"] for one in tool_lists.offered_schemas(again)}
        assert again.endswith(tool_lists.NOTHING_FITS)
        assert before.keys() == after.keys()
        for name, parameters in before.items():
            assert described_keys(after[name]) == described_keys(parameters)
            assert after[name]["required"] == parameters["required"]
        nested |= re.search(r"\n  \w+\.\w+: ", again) is not None
    assert nested


def test_a_list_of_the_catalogue_is_written_as_whole_schemas() -> None:
    mix = mixes.Mix(parallel=0.2)
    for row in dialogues.draw("train", 40, mix=mix):
        again = prepare._listed(row, "json")
        before, after = row["messages"][0]["content"], again["messages"][0]["content"]
        assert again["messages"][1:] == row["messages"][1:]
        assert tool_lists.offered_schemas(after) == tool_lists.offered_schemas(before)
        assert ("Functions:" in before) == (tool_lists.WITH_TOOLS in after)


def test_problems_of_several_calls_are_read_from_a_file(tmp_path: Any) -> None:
    counts = dict.fromkeys(forms.SHARES, 3)
    drawn = {problem.id: problem for problem in forms.draw_problems("test", 0, counts)}
    rows = [
        {
            "id": p.id,
            "messages": p.messages,
            "gold": p.gold,
            "split": p.split,
            "meta": p.meta,
        }
        for p in drawn.values()
    ]
    file = tmp_path / "funcall.test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    task = FuncallTask(str(file))
    assert {p.id: p.gold for p in task.problems("test")} == {i: p.gold for i, p in drawn.items()}
