"""Conversations, problems and drills: only reading the list of tools solves them, and every
share of the mix is kept."""

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from codechat.core.config import parse
from codechat.core.errors import ConfigError
from codechat.text import tool_calls, tool_lists
from codechat.text.tokenizer import load
from codechat_lab.data import synthetic
from codechat_lab.tasks.funcall import FuncallTask
from codechat_lab.tasks.toolbox import catalogue, dialogues, drills, mixes, prepare, values
from codechat_lab.tasks.toolbox.catalogue import HELD_OUT, PHRASES, SERVICES, TOOLS, family, say
from codechat_lab.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat_lab.tasks.toolbox.mixes import Mix
from codechat_lab.tasks.toolbox.problems import draw as draw_problems
from codechat_lab.tasks.toolbox.problems import probes
from codechat_lab.tasks.toolbox.sampler import informally
from codechat_lab.tasks.toolbox.values import NAMES, WORDS, allowed

MIX = Mix(renamed=0.5, composed=0.15, invented=0.2, chained=0.2, unfitting=0.15)
TASK = FuncallTask()
REQUESTS = ("Write a Python function `f(x)` that doubles x.",)


def offered(messages: list[dict[str, str]]) -> dict[str, list[str]]:
    """{name on offer: its arguments} of a system prompt's lines `name(a: type, b: type) -
    description`."""
    found = {}
    for line in messages[0]["content"].splitlines():
        signature = re.match(r"(\w+)\((.*?)\)", line)
        if signature:
            name, arguments = signature.groups()
            found[name] = [part.partition(":")[0].strip() for part in arguments.split(",")]
    return found


def contents(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"]]


def only_call(text: str) -> tool_calls.Call:
    (call,) = tool_calls.parse_calls(text)
    return call


def strata(split: str, **shares: int) -> dict[str, list]:
    """{stratum: problems}, 40 for each share's weight."""
    drawn = draw_problems(split, 40 * sum(shares.values()), shares=shares, code_requests=REQUESTS)
    problems: dict[str, list] = {}
    for problem in drawn:
        problems.setdefault(problem.meta["stratum"], []).append(problem)
    return problems


def test_calls_name_offered_tools_with_exactly_their_arguments() -> None:
    for row in draw_dialogues("train", 600, mix=MIX):
        tools = offered(row["messages"])
        for message in row["messages"]:
            for call in tool_calls.parse_calls(message["content"]):
                assert list(call.arguments) == tools[call.name], row["id"]
                assert message["role"] == "assistant"
                assert row["meta"]["kind"] in ("call", "multi_turn", "chained")


def test_a_conversation_says_whether_it_offers_tools() -> None:
    for row in draw_dialogues("train", 600, mix=MIX):
        assert row["meta"]["tools_present"] == contents(row)[0].startswith("Functions:")


def test_kinds_of_conversations_have_their_shares() -> None:
    rows = list(draw_dialogues("train", 3000, mix=MIX))
    kinds = Counter(row["meta"]["kind"] for row in rows)
    # 0.15 of the draws, each followed by its twin
    assert 0.12 < kinds["unsuitable"] / 3000 < 0.16
    assert 0.14 < kinds["chained"] / 3000 < 0.21
    assert 0.4 < sum(row["meta"].get("renamed", False) for row in rows) / 3000 < 0.5


@pytest.fixture(scope="module")
def parallel() -> list[dict[str, Any]]:
    return list(
        draw_dialogues(
            "train",
            200,
            mix=Mix(parallel=1, multi_turn=0, unfitting=0, no_tools=0, small_talk=0, renamed=0.5),
        )
    )


def test_requests_at_once_are_answered_by_as_many_offered_calls(
    parallel: list[dict[str, Any]],
) -> None:
    for row in parallel:
        _, _, answer = contents(row)
        calls = tool_calls.parse_calls(answer)
        tools = offered(row["messages"])
        assert row["meta"]["kind"] == "parallel"
        assert 2 <= len(calls) <= 3
        assert all(list(call.arguments) == tools[call.name] for call in calls)
        assert not any(call.after for call in calls)


def test_requests_at_once_are_for_one_tool_or_for_several(parallel: list[dict[str, Any]]) -> None:
    names = [[call.name for call in tool_calls.parse_calls(contents(row)[2])] for row in parallel]
    one = sum(len(set(called)) == 1 for called in names)
    assert 0.3 < one / len(parallel) < 0.6


def test_no_call_at_once_repeats_another(parallel: list[dict[str, Any]]) -> None:
    for row in parallel:
        calls = [
            (call.name, str(call.arguments)) for call in tool_calls.parse_calls(contents(row)[2])
        ]
        assert len(set(calls)) == len(calls)


def test_no_tool_is_renamed_without_a_share() -> None:
    rows = draw_dialogues("train", 300, mix=Mix())
    assert not any(row["meta"].get("renamed") for row in rows)


def test_talk_comes_first_in_its_share_and_only_where_tools_are_offered() -> None:
    rows = draw_dialogues("train", 900, mix=Mix(renamed=0.5, no_tools=0.3, talk_first=0.3))
    asked: Counter[bool] = Counter()
    talked: Counter[bool] = Counter()
    for row in rows:
        if row["meta"]["asked"] == "tool":
            with_tools = row["meta"]["tools_present"]
            asked[with_tools] += 1
            talked[with_tools] += contents(row)[1:3] in PHRASES["small_talk"]
    assert 0.25 < talked[True] / asked[True] < 0.35
    assert not talked[False]


def test_an_unfitting_conversation_is_followed_by_its_twin() -> None:
    rows = list(draw_dialogues("train", 600, mix=MIX))
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a["meta"]["kind"] == "unsuitable"]
    assert len(pairs) > 50
    for negative, positive in pairs:
        assert negative["messages"][1] == positive["messages"][1]
        assert not tool_calls.parse_calls(contents(negative)[2])
        call = only_call(contents(positive)[2])
        assert call.name in offered(positive["messages"])
        assert call.name not in offered(negative["messages"])


def test_unfitting_problems_are_call_problems_without_their_tool() -> None:
    problems = strata("test", call=1, unfitting=1)
    for call, unfitting in zip(problems["call"], problems["unfitting"], strict=True):
        assert call.messages[1] == unfitting.messages[1]
        assert unfitting.gold is None
        assert call.gold["name"] in offered(call.messages)
        assert call.gold["name"] not in offered(unfitting.messages)
        assert len(offered(call.messages)) == len(offered(unfitting.messages))


def test_renamed_problems_are_the_call_problems_of_test_under_other_names() -> None:
    known = strata("test", call=1)["call"]
    renamed = strata("test_hard", renamed=1)["renamed"]
    for a, b in zip(known, renamed, strict=True):
        assert a.messages[1] == b.messages[1]
        assert list(a.gold["arguments"].values()) == list(b.gold["arguments"].values())
        assert not offered(a.messages).keys() & offered(b.messages).keys()


def test_the_names_of_renamed_problems_are_none_of_training() -> None:
    renamed = strata("test_hard", renamed=1)["renamed"]
    tested = {name for problem in renamed for name in offered(problem.messages)}
    rows = draw_dialogues("train", 4000, mix=MIX)
    assert not tested & {name for row in rows for name in offered(row["messages"])}


def test_the_second_call_of_a_chain_takes_the_result_of_the_first() -> None:
    problems = strata("test", chain=2)
    assert len(problems["chain_1"]) == len(problems["chain_2"]) == 40
    for first, second in zip(problems["chain_1"], problems["chain_2"], strict=True):
        assert len(second.messages) == 4
        assert second.messages[:2] == first.messages
        call, response = (message["content"] for message in second.messages[2:])
        arguments = first.gold["arguments"]
        assert tool_calls.parse_calls(call)[0].arguments == arguments
        result = json.loads(response)["result"]
        assert TOOLS[first.gold["name"]].call(arguments) == result
        assert result in second.gold["arguments"].values()
        assert TOOLS[second.gold["name"]].call(second.gold["arguments"]) is not None


def test_a_shorter_list_of_conversations_is_the_start_of_a_longer_one() -> None:
    rows = list(draw_dialogues("train", 50, seed=5))
    assert list(draw_dialogues("train", 80, seed=5))[:50] == rows
    assert len({row["id"] for row in rows}) == 50


def test_another_seed_draws_other_conversations() -> None:
    rows = list(draw_dialogues("train", 50, seed=5))
    assert rows != list(draw_dialogues("train", 50, seed=6))


@pytest.mark.parametrize("split", ["train", "test", "test_hard"])
def test_reference_solutions_are_correct(split: str) -> None:
    for problem in draw_problems(split, 100, mix=MIX, code_requests=REQUESTS):
        assert TASK.score(problem, TASK.gold(problem)).correct


@pytest.mark.parametrize("split", ["train", "test", "test_hard"])
def test_the_problems_of_a_shorter_list_are_in_a_longer_one(split: str) -> None:
    many = {p.id: p for p in draw_problems(split, 200, mix=MIX, code_requests=REQUESTS)}
    assert len(many) == 200
    for problem in draw_problems(split, 100, mix=MIX, code_requests=REQUESTS):
        assert many[problem.id] == problem


def test_an_invented_tool_is_told_from_the_others_by_its_description() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words, tools = zip(*catalogue.invented_offer(rng, "train", 4).items())
        assert len(set(words)) == 4
        assert len({tool.name for tool in tools}) == 4
        assert len({tool.description.lower() for tool in tools}) == 4
        text = tools[0].ask(rng, tools[0].sample(rng, "train")).lower()
        assert all(word in text for word in words[0])


@pytest.mark.parametrize(
    "shares",
    [{"renamed": 1.5}, {"chained": 0.6, "unfitting": 0.6}, {"composed": 0.7, "invented": 0.7}],
)
def test_impossible_shares_are_errors(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Mix(**shares)


@pytest.mark.parametrize("name", mixes.MIXES)
def test_a_named_mix_is_its_shares_and_given_shares_win(name: str) -> None:
    style = "json" if mixes.shares_of(name).get("forms") else "compact"
    given = ["--mix", name, "--mix.informal", "0.125", "--tools-style", style]
    cfg = parse(prepare.CallsConfig, given)
    assert cfg.mix == Mix(**mixes.shares_of(name) | {"informal": 0.125})


def test_a_mix_has_the_shares_of_the_one_it_starts_from() -> None:
    assert mixes.shares_of("everyday") == mixes.shares_of("everyday-renamed") | {"renamed": 0.5}


def test_an_unknown_mix_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reading'"):
        parse(prepare.CallsConfig, ["--mix", "readin"])


def test_unknown_strata_are_errors() -> None:
    with pytest.raises(ConfigError):
        draw_problems("test", 10, shares={"nonsense": 1.0})


def call_problem(value: object) -> dict[str, object]:
    return {"gold": {"name": "f", "arguments": {"a": value}}, "messages": []}


TRAINED = {
    "calls.train": [
        {
            "messages": [
                {"role": "assistant", "content": tool_calls.format_call("f", {"x": [314, "Lutis"]})}
            ]
        }
    ],
    "copy.train": [
        {
            "messages": [
                {"role": "user", "content": "Say"},
                {"role": "assistant", "content": "Brelan 2718"},
            ]
        }
    ],
    "funcall.train": [call_problem("dopis"), {"gold": None}],
}
TESTED = [
    call_problem(314),
    call_problem("lutis"),
    call_problem(2718),
    call_problem("Dopis"),
    call_problem([314, "new"]),
    call_problem("new"),
    {"gold": None},
]


def test_values_that_training_has_are_counted() -> None:
    seen = prepare.values_seen(TRAINED | {"funcall.test": TESTED})["test"]
    assert seen == {"calls": 6, "same": 1, "seen": 4, "values": 5, "known": 4}


def test_values_of_drills_count_as_seen_in_training() -> None:
    call = tool_calls.format_call("g", {"b": "NEW"})
    lookup = [{"messages": [{"role": "assistant", "content": call}]}]
    files = TRAINED | {"funcall.test": TESTED, "lookup_loose.train": lookup}
    seen = prepare.values_seen(files)["test"]
    assert (seen["same"], seen["seen"], seen["known"]) == (1, 6, 5)


def share_of_rare_arguments(rare: float) -> float:
    """The share of offered arguments whose names are rare words."""
    mix = Mix(invented=1.0, renamed=1.0, renamed_arguments=1.0, rare_words=rare)
    names = []
    for row in draw_dialogues("train", 300, 0, mix=mix):
        if row["meta"]["tools"]:
            names += re.findall(r"(\w+): (?:string|integer|number)", contents(row)[0])
    return sum(name in WORDS for name in names) / len(names)


@pytest.mark.parametrize(
    ("rare", "low", "high"), [(0.0, -1, 0.01), (0.5, 0.4, 0.6), (1.0, 0.95, 2)]
)
def test_rare_words_come_in_their_share(rare: float, low: float, high: float) -> None:
    assert low < share_of_rare_arguments(rare) < high


@pytest.mark.parametrize(
    "text",
    [
        "What is 12 squared?",
        "Shorten the species Staby maixis.",
        'Say "Hi There" 3 times.',
        "I swim 125 metres.",
    ],
)
def test_a_request_put_informally_asks_for_the_same(text: str) -> None:
    rng = random.Random(0)
    for _ in range(50):
        assert text[1:].rstrip(".?! ") in informally(rng, text)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.3), (1.0, 0.7, 1.0)])
def test_requests_are_put_informally_in_their_share(share: float, low: float, high: float) -> None:
    mix = Mix(
        series=0.9, no_tools=0.0, small_talk=0.0, unfitting=0.0, multi_turn=0.1, informal=share
    )
    lower = []
    for row in draw_dialogues("train", 100, 0, mix=mix):
        requests = [m["content"] for m in row["messages"] if m["role"] == "user"]
        lower += [request[0].islower() for request in requests]
    assert low <= sum(lower) / len(lower) <= high


def test_multi_turn_responses_come_from_running_the_tool() -> None:
    mix = Mix(multi_turn=1.0, unfitting=0.0, no_tools=0.0, small_talk=0.0)
    for row in draw_dialogues("train", 300, mix=mix):
        _, _, call, response, answer = row["messages"]
        parsed = only_call(call["content"])
        result = TOOLS[parsed.name].call(parsed.arguments)
        assert response["role"] == "function"
        assert json.loads(response["content"]) == {"result": result}
        assert answer["role"] == "assistant"
        assert "<functioncall>" not in answer["content"]


def test_offered_tools_are_never_ambiguous() -> None:
    for row in draw_dialogues("test_hard", 2000, mix=Mix(unfitting=0.0, no_tools=0.0)):
        tools = row["meta"]["tools"]
        assert row["meta"]["tool"] in tools
        assert len(set(tools)) == len(tools) <= 4
        for tool in tools:
            assert not family(tool) & set(tools) - {tool}


PROBE_CELLS = [  # asked, tools present, suitable
    ("tool", True, True),
    ("tool", True, False),
    ("tool", False, False),
    ("code", True, False),
    ("code", False, False),
]


def test_probes_fill_every_cell() -> None:
    rows = probes("select", 50, 0, ["Write a function that adds."])
    cells = Counter((r["asked"], r["tools_present"], r["suitable"]) for r in rows)
    assert cells == dict.fromkeys(PROBE_CELLS, 10)


def test_probes_hold_what_their_cell_says() -> None:
    for row in probes("select", 50, 0, ["Write a function that adds."]):
        assert [m["role"] for m in row["messages"]] == ["system", "user"]
        system, request = contents(row)
        assert row["tools_present"] == system.startswith("Functions:")
        assert (row["asked"] == "code") == (request == "Write a function that adds.")


@pytest.fixture(scope="module")
def with_services() -> list[dict]:
    mix = Mix(services=0.3, wordings=0.5, small_talk=0.2)
    return list(draw_dialogues("train", 2000, mix=mix))


SLOTS = {tool.name: tool.slots for tool in SERVICES}


def is_of_a_service(row: dict) -> bool:
    return row["meta"]["tool"] in SLOTS and row["meta"]["kind"] != "chat"


def test_services_come_in_their_share(with_services: list[dict]) -> None:
    served = sum(map(is_of_a_service, with_services))
    assert 0.25 < served / sum(r["meta"]["kind"] != "chat" for r in with_services) < 0.36


def test_services_are_called_with_their_arguments(with_services: list[dict]) -> None:
    for row in filter(is_of_a_service, with_services):
        for call in tool_calls.parse_calls(contents(row)[2]):
            assert call.name == row["meta"]["tool"]
            assert list(call.arguments) == list(SLOTS[call.name])


def test_further_small_talk_comes_in_its_share(with_services: list[dict]) -> None:
    known = {said for said, _ in PHRASES["small_talk"]}
    further = {said for said, _ in synthetic.SMALL_TALK} - known
    talk = [contents(row)[1] for row in with_services if row["meta"]["kind"] == "chat"]
    assert 0.4 < sum(said in further for said in talk) / len(talk) < 0.7


class Further(dict):
    """One additional wording for every tool."""

    def get(self, *_: object) -> list[str]:
        return ["Further."]


@pytest.mark.parametrize(("others", "further"), [(0.0, True), (0.5, False)])
def test_only_tools_of_the_catalogue_are_asked_for_in_additional_wordings(
    others: float, further: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invented tool may have the name of a known one, and other arguments."""
    monkeypatch.setattr(dialogues, "WORDINGS", Further())
    mix = Mix(
        series=1.0,
        wordings=1.0,
        multi_turn=0.0,
        unfitting=0.0,
        no_tools=0.0,
        small_talk=0.0,
        invented=others,
        composed=others,
    )
    rows = draw_dialogues("train", 20, mix=mix)
    asked = {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"}
    assert (asked == {"Further."}) == further
    assert ("Further." in asked) == further


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_plain_answers_state_the_result_in_their_shares(share: float) -> None:
    """The share after calls of renamed and invented tools; half of it after those of names that
    training knows."""
    mix = Mix(multi_turn=0.8, unfitting=0.0, renamed=0.5, invented=0.3, plain_answers=share)
    starts = tuple(form.partition("{")[0] for form in PHRASES["plain_answers"])
    plainly = {True: 0, False: 0}
    asked = {True: 0, False: 0}
    for row in draw_dialogues("train", 1600, mix=mix):
        if row["meta"]["kind"] != "multi_turn":
            continue
        call, response, answer = contents(row)[-3:]
        known = tool_calls.parse_calls(call)[0].name in TOOLS
        asked[known] += 1
        if answer.startswith(starts):
            plainly[known] += 1
            assert say(json.loads(response)["result"]) in answer
    assert min(asked.values()) > 300
    assert 0.9 * share <= plainly[False] / asked[False] <= 1.1 * share
    assert 0.4 * share <= plainly[True] / asked[True] <= 0.65 * share


# ---------------------------------------------------------------- drills
def entries_of(row: dict) -> dict[str, str]:
    """{name: its words} of a drill's list."""
    *lines, last = contents(row)[0].splitlines()[1:]
    assert last == "Nothing fits: none()"
    entries = {}
    for line in lines:
        words, _, name = line.partition(": ")
        entries[name.partition("(")[0]] = words.lower()
    return entries


def single_requests(row: dict) -> list[tuple[str, str]]:
    """(request, answer) of a drill's requests for one call."""
    return [
        (turn["content"], answer["content"])
        for turn, answer in zip(row["messages"], row["messages"][1:])
        if turn["role"] == "user" and not chained(turn["content"])
    ]


def chained(request: str) -> bool:
    return " Then" in request or " After" in request


def name_of(answer: str) -> str:
    return tool_calls.parse_calls(answer)[0].name


@pytest.mark.parametrize("step", drills.STEPS)
def test_the_answer_is_the_name_of_the_line_that_holds_the_words(step: str) -> None:
    for row in drills.lookup_dialogues("train", 300, step=step):
        entries = entries_of(row)
        for request, answer in single_requests(row):
            words = set(request.lower().split())
            shared = {name: len(words & set(text.split())) for name, text in entries.items()}
            second, first = sorted(shared.values())[-2:]
            assert shared[name_of(answer)] == first > second


@pytest.mark.parametrize("step", drills.STEPS)
def test_the_lines_of_a_drill_are_at_most_those_of_its_step(step: str) -> None:
    for row in drills.lookup_dialogues("train", 300, step=step):
        entries = entries_of(row)
        asked = single_requests(row)
        assert 2 <= len(entries) <= drills.STEPS[step].entries
        assert {name_of(answer) for _, answer in asked} <= entries.keys()
        assert drills.STEPS[step].chained or len(asked) == len(entries)


@pytest.mark.parametrize("step", drills.STEPS)
def test_a_drills_call_takes_the_last_word_of_its_request(step: str) -> None:
    for row in drills.lookup_dialogues("train", 300, step=step):
        for request, answer in single_requests(row):
            arguments = tool_calls.parse_calls(answer)[0].arguments
            assert str(arguments.popitem()[1]) == request.lower().split()[-1]


@pytest.mark.parametrize("step", drills.STEPS)
def test_only_later_steps_ask_in_other_words_than_their_line(step: str) -> None:
    loose = 0
    for row in drills.lookup_dialogues("train", 300, step=step):
        entries = entries_of(row)
        for request, answer in single_requests(row):
            line = entries[name_of(answer)].split()
            loose += request.lower().split()[: len(line)] != line
    assert (loose > 100) == (step in ("phrases", "loose"))


@pytest.mark.parametrize("step", drills.STEPS)
def test_requests_that_no_line_serves_are_declined(step: str) -> None:
    for row in drills.lookup_dialogues("train", 100, step=step, missing=1.0):
        listed = set(" ".join(entries_of(row).values()).split())
        for request, answer in single_requests(row):
            assert answer == tool_calls.DECLINE
            assert not listed & (set(request.lower().split()) - set(PHRASES["fillers"]))


def test_a_chained_request_calls_the_first_line_and_then_the_second_with_its_result() -> None:
    seen = 0
    for row in drills.lookup_dialogues("train", 300, step="loose"):
        entries = entries_of(row)
        texts = contents(row)
        for at, turn in enumerate(row["messages"]):
            if turn["role"] != "user" or not chained(turn["content"]):
                continue
            seen += 1
            request, answer, response, last = texts[at : at + 4]
            first = only_call(answer)
            second = only_call(last)
            cut = re.search(r"\. Then|\. After", request).start()
            for call, part in ((first, request[:cut]), (second, request[cut:])):
                words = set(part.lower().replace(".", " ").split())
                assert words & set(entries[call.name].split())
            assert first.name != second.name
            assert request[:cut].split()[-1] == str(*first.arguments.values())
            assert json.loads(response) == {"result": second.arguments.popitem()[1]}
    assert seen > 100


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_numbers_of_drills_belong_to_splits(split: str) -> None:
    numbers: set[int] = set()
    for row in drills.lookup_dialogues(split, 300, step="loose"):
        numbers |= set(map(int, re.findall(r"\d+", " ".join(contents(row)))))
    assert sum(number > 99 for number in numbers) > 20
    assert all(allowed(number, split) for number in numbers)


def test_the_names_of_drills_belong_to_splits() -> None:
    rows = drills.lookup_dialogues("select", 200, step="loose")
    names = {name for row in rows for name in entries_of(row)}
    pairs = {f"{a}_{b}" for a in values.COMMON for b in values.COMMON}
    invented = names - {*values.COMMON} - pairs
    assert invented
    assert all(allowed(name, "select") for name in invented)


def test_the_seed_and_the_number_decide_the_drills() -> None:
    rows = list(drills.lookup_dialogues("select", 200, step="loose"))
    assert rows[:50] == list(drills.lookup_dialogues("select", 50, step="loose"))
    assert rows != list(drills.lookup_dialogues("select", 200, 1, step="loose"))


def rare_words_of(step: str) -> set[str]:
    rows = drills.lookup_dialogues("train", 40, 0, step=step, rare_words=0.5)
    text = "".join(map(str, rows))
    return {word for word in WORDS if f" {word}" in text}


def test_rare_words_come_in_the_later_steps_only() -> None:
    assert not rare_words_of("calls")
    assert len(rare_words_of("phrases")) > 100


def test_whole_words_are_tokens_of_the_vocabulary() -> None:
    vocabulary = load("gpt2:4096")
    words = values.whole_words()
    assert len(words) > 1500
    assert all(len(vocabulary.encode(f" {word}")) == 1 for word in words)


@functools.cache
def copy_drills(varied: float) -> list[tuple[str, str]]:
    """(request, answer) of each drill in copying."""
    rows = drills.copy_dialogues("train", 600, varied=varied)
    return [tuple(contents(row)) for row in rows]


def is_spelled(answer: str) -> bool:
    return re.fullmatch(r'("\w+"(, )?){3,6}', answer) is not None


def test_spelling_drills_come_where_copies_vary() -> None:
    assert not any(is_spelled(answer) for _, answer in copy_drills(0.0))
    assert 0.2 < sum(is_spelled(answer) for _, answer in copy_drills(0.6)) / 600 < 0.4


def test_spelling_drills_put_words_of_one_token_in_quotation_marks() -> None:
    words = set(values.whole_words())
    for request, answer in copy_drills(0.6):
        if is_spelled(answer):
            quoted = re.findall(r'"(\w+)"', answer)
            assert " ".join(quoted) in request
            assert set(quoted) <= words


@pytest.mark.parametrize("varied", [0.0, 0.6])
def test_other_copies_repeat_a_part_of_the_request(varied: float) -> None:
    for request, answer in copy_drills(varied):
        assert answer in request or '", "' in answer


@pytest.mark.parametrize("varied", [0.0, 0.6])
def test_names_are_copied_where_copies_vary(varied: float) -> None:
    copied = {word for _, answer in copy_drills(varied) for word in answer.split()}
    assert bool(copied & set(NAMES)) == bool(varied)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `codechat data calls` writes, with drills and renamed tools."""
    out = tmp_path_factory.mktemp("calls")
    words = f"""
        --tokenizer bytes --max-examples 200 --copies 0 --problems 100 --eval-examples 50
        --probes 5 --mix.renamed 0.5 --lookups 20 --lookups-missing 0.2
        --tools-style described --out {out}
    """
    prepare.prepare_calls(parse(prepare.CallsConfig, words.split()))
    return out


def rows_written(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


WRITTEN = ("calls.train", "funcall.test", "probes.select")


def test_data_calls_lists_its_files_and_values_in_the_manifest(written: Path) -> None:
    manifest = json.loads((written / "manifest.json").read_text())
    assert {f"lookup_{step}" for step in drills.STEPS} < manifest["domains"].keys()
    assert manifest["files"]["lookup_loose.train.jsonl"]["rows"] == 20
    assert manifest["values"]["test"]["calls"] == 30


@pytest.mark.parametrize("name", WRITTEN)
def test_data_calls_lists_tools_after_their_descriptions(name: str, written: Path) -> None:
    offers = [contents(row)[0] for row in rows_written(written, name)]
    lines = [line for o in offers if "Functions:" in o for line in o.splitlines()[1:]]
    assert lines
    assert all(": " in line and line.endswith(")") for line in lines)


def test_data_calls_declines_in_one_wording(written: Path) -> None:
    declined = 0
    for name in WRITTEN:
        for row in rows_written(written, name):
            assert not set(contents(row)) & set(PHRASES["no_function"])
            declined += contents(row).count(tool_calls.DECLINE)
    assert declined > 0


@pytest.mark.parametrize("name", WRITTEN)
def test_data_calls_offers_the_tool_of_every_answer(name: str, written: Path) -> None:
    for row in rows_written(written, name):
        if row.get("gold"):
            assert row["gold"]["name"] in tool_lists.offered_names(contents(row)[0])


def test_problems_of_data_calls_have_all_strata(written: Path) -> None:
    task = FuncallTask(source=written)
    kinds = Counter(p.meta["stratum"] for p in task.problems("test"))
    hard = Counter(p.meta["stratum"] for p in task.problems("test_hard"))
    assert kinds == dict(call=20, unfitting=10, no_tools=5, code=5, chain_1=5, chain_2=5)
    assert hard == dict(tool=20, phrasing=15, renamed=15)
    assert len(task.problems("train")) == 100
    assert task.grouped_by == "stratum"


def test_held_out_tools_are_only_in_test_hard_of_data_calls(written: Path) -> None:
    task = FuncallTask(source=written)
    unseen = {tool.name for tool in HELD_OUT}
    hard = [p for p in task.problems("test_hard") if p.meta["stratum"] == "tool"]
    assert {p.meta["tool"] for p in hard} <= unseen
    assert not unseen & {p.meta.get("tool") for p in task.problems("train")}
