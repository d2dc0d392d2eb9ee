"""Conversations, problems and drills: only reading the list of tools solves them, and every
share of the mix is kept."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from codechat.core.config import parse
from codechat.core.errors import ConfigError
from codechat.text import chat
from codechat.text.tokenizer import load
from codechat_lab.data import synthetic
from codechat_lab.tasks.funcall import FuncallTask
from codechat_lab.tasks.toolbox import catalogue, dialogues, drills, mixes, prepare, values
from codechat_lab.tasks.toolbox.catalogue import HELD_OUT, PHRASES, SERVICES, TOOLS, family, say
from codechat_lab.tasks.toolbox.dialogues import Mix, informally
from codechat_lab.tasks.toolbox.dialogues import draw as draw_dialogues
from codechat_lab.tasks.toolbox.problems import draw as draw_problems
from codechat_lab.tasks.toolbox.problems import probes
from codechat_lab.tasks.toolbox.values import NAMES, WORDS, allowed

MIX = Mix(renamed=0.5, composed=0.15, invented=0.2, chained=0.2, unfitting=0.15)
TASK = FuncallTask()
REQUESTS = ("Write a Python function `f(x)` that doubles x.",)


def offered(messages: list[dict[str, str]]) -> dict[str, list[str]]:
    """{name on offer: its arguments} of a system prompt's lines `name(a: type, b: type) -
    description`."""
    lines = [re.match(r"(\w+)\((.*?)\)", line) for line in messages[0]["content"].splitlines()]
    return {
        line[1]: [part.partition(":")[0].strip() for part in line[2].split(",")]
        for line in lines
        if line
    }


def strata(split: str, **shares: int) -> dict[str, list]:
    """{stratum: problems}, 40 for each share's weight."""
    problems: dict[str, list] = {}
    for problem in draw_problems(
        split, 40 * sum(shares.values()), shares=shares, code_requests=REQUESTS
    ):
        problems.setdefault(problem.meta["stratum"], []).append(problem)
    return problems


def test_calls_name_offered_tools_with_exactly_their_arguments_and_kinds_have_their_shares() -> (
    None
):
    rows = list(draw_dialogues("train", 3000, mix=MIX))
    for row in rows[:600]:
        tools = offered(row["messages"])
        for message in row["messages"]:
            for call in chat.parse_calls(message["content"]):
                assert list(call.arguments) == tools[call.name], row["id"]
                assert message["role"] == "assistant"
                assert row["meta"]["kind"] in ("call", "multi_turn", "chained")
        assert row["meta"]["tools_present"] == row["messages"][0]["content"].startswith(
            "Functions:"
        )
    kinds = Counter(row["meta"]["kind"] for row in rows)
    assert 0.12 < kinds["unsuitable"] / 3000 < 0.16, "0.15 of the draws, each followed by its twin"
    assert 0.14 < kinds["chained"] / 3000 < 0.21
    assert 0.4 < sum(row["meta"].get("renamed", False) for row in rows) / 3000 < 0.5
    assert not any(row["meta"].get("renamed") for row in draw_dialogues("train", 300, mix=Mix()))
    greeted = draw_dialogues("train", 900, mix=Mix(renamed=0.5, no_tools=0.3, talk_first=0.3))
    asked = [
        (r["meta"]["tools_present"], r["messages"][1:3])
        for r in greeted
        if r["meta"]["asked"] == "tool"
    ]
    talked = Counter(
        tools for tools, first in asked if [m["content"] for m in first] in PHRASES["small_talk"]
    )
    assert 0.25 < talked[True] / sum(tools for tools, _ in asked) < 0.35
    assert not talked[False]


def test_an_unfitting_conversation_is_followed_by_its_twin() -> None:
    rows = list(draw_dialogues("train", 600, mix=MIX))
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a["meta"]["kind"] == "unsuitable"]
    assert len(pairs) > 50
    for negative, positive in pairs:
        assert negative["messages"][1] == positive["messages"][1]
        assert not chat.parse_calls(negative["messages"][2]["content"])
        (call,) = chat.parse_calls(positive["messages"][2]["content"])
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


def test_renamed_problems_are_the_call_problems_of_test_under_names_that_training_never_has() -> (
    None
):
    known = strata("test", call=1)["call"]
    renamed = strata("test_hard", renamed=1)["renamed"]
    for a, b in zip(known, renamed, strict=True):
        assert a.messages[1] == b.messages[1]
        assert list(a.gold["arguments"].values()) == list(b.gold["arguments"].values())
        assert not offered(a.messages).keys() & offered(b.messages).keys()
    trained = {
        name for row in draw_dialogues("train", 4000, mix=MIX) for name in offered(row["messages"])
    }
    assert not trained & {name for problem in renamed for name in offered(problem.messages)}


def test_the_second_call_of_a_chain_takes_the_result_of_the_first() -> None:
    problems = strata("test", chain=2)
    assert len(problems["chain_1"]) == len(problems["chain_2"]) == 40
    for first, second in zip(problems["chain_1"], problems["chain_2"], strict=True):
        result = json.loads(second.messages[-1]["content"])["result"]
        assert second.messages[:2] == first.messages
        assert len(second.messages) == 4
        assert (
            chat.parse_calls(second.messages[2]["content"])[0].arguments == first.gold["arguments"]
        )
        assert TOOLS[first.gold["name"]].call(first.gold["arguments"]) == result
        assert result in second.gold["arguments"].values()
        assert TOOLS[second.gold["name"]].call(second.gold["arguments"]) is not None


def test_reference_solutions_are_correct_and_a_shorter_list_is_the_start_of_a_longer_one() -> None:
    rows = list(draw_dialogues("train", 50, seed=5))
    assert (
        list(draw_dialogues("train", 80, seed=5))[:50]
        == rows
        != list(draw_dialogues("train", 50, seed=6))
    )
    assert len({r["id"] for r in rows}) == 50
    for split in ("train", "test", "test_hard"):
        few = draw_problems(split, 100, mix=MIX, code_requests=REQUESTS)
        assert all(TASK.score(p, TASK.gold(p)).correct for p in few)
        many = {p.id: p for p in draw_problems(split, 200, mix=MIX, code_requests=REQUESTS)}
        assert all(many[p.id] == p for p in few)
        assert len(many) == 200


def test_an_invented_tool_is_told_from_the_others_by_its_description() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words, tools = zip(*catalogue.invented_offer(rng, "train", 4).items())
        assert (
            len({t.name for t in tools})
            == len({t.description.lower() for t in tools})
            == len(set(words))
            == 4
        )
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
    cfg = parse(prepare.CallsConfig, ["--mix", name, "--mix.informal", "0.125"])
    assert cfg.mix == Mix(**mixes.shares_of(name) | {"informal": 0.125})


def test_a_mix_has_the_shares_of_the_one_it_starts_from() -> None:
    assert mixes.shares_of("everyday") == mixes.shares_of("everyday-renamed") | {"renamed": 0.5}


def test_an_unknown_mix_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reading'"):
        parse(prepare.CallsConfig, ["--mix", "readin"])


def test_unknown_strata_are_errors() -> None:
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
        "funcall.test": [problem(v) for v in (314, "lutis", 2718, "Dopis", [314, "new"], "new")]
        + [{"gold": None}],
    }
    seen = prepare.values_seen(files)["test"]
    assert seen == {"calls": 6, "same": 1, "seen": 4, "values": 5, "known": 4}
    lookup = [{"messages": [{"role": "assistant", "content": chat.format_call("g", {"b": "NEW"})}]}]
    more = prepare.values_seen(files | {"lookup_loose.train": lookup})["test"]
    assert (more["same"], more["seen"], more["known"]) == (1, 6, 5), (
        "drills are read in training too"
    )


def test_rare_words_come_in_their_share_and_leave_the_other_draws_alone() -> None:
    def words(rare: float) -> list[str]:
        mix = Mix(invented=1.0, renamed=1.0, renamed_arguments=1.0, rare_words=rare)
        rows = draw_dialogues("train", 300, 0, mix=mix)
        lists = [r["messages"][0]["content"] for r in rows if r["meta"]["tools"]]
        return [
            key for text in lists for key in re.findall(r"(\w+): (?:string|integer|number)", text)
        ]

    def share(rare: float) -> float:
        drawn = words(rare)
        return sum(w in WORDS for w in drawn) / len(drawn)

    assert share(0.0) < 0.01
    assert 0.4 < share(0.5) < 0.6
    assert share(1.0) > 0.95


def test_a_request_put_informally_asks_for_the_same() -> None:
    rng = random.Random(0)
    texts = ["What is 12 squared?", "Shorten the species Staby maixis."]
    texts += ['Say "Hi There" 3 times.', "I swim 125 metres."]
    for text in texts * 50:
        assert text[1:].rstrip(".?! ") in informally(rng, text)
    mix = dict(series=0.9, no_tools=0.0, small_talk=0.0, unfitting=0.0, multi_turn=0.1)
    for share, low, high in ((0.0, 0.0, 0.3), (1.0, 0.7, 1.0)):
        rows = draw_dialogues("train", 100, 0, mix=Mix(**mix, informal=share))
        lower = [
            m["content"][0].islower()
            for row in rows
            for m in row["messages"]
            if m["role"] == "user"
        ]
        assert low <= sum(lower) / len(lower) <= high


def test_multi_turn_responses_come_from_running_the_tool() -> None:
    rows = list(
        draw_dialogues(
            "train", 300, mix=Mix(multi_turn=1.0, unfitting=0.0, no_tools=0.0, small_talk=0.0)
        )
    )
    for row in rows:
        _, _, call, response, answer = row["messages"]
        (parsed,) = chat.parse_calls(call["content"])
        assert response["role"] == "function"
        assert answer["role"] == "assistant"
        assert json.loads(response["content"]) == {
            "result": TOOLS[parsed.name].call(parsed.arguments)
        }
        assert "<functioncall>" not in answer["content"]


def test_offered_tools_are_never_ambiguous() -> None:
    for row in draw_dialogues("test_hard", 2000, mix=Mix(unfitting=0.0, no_tools=0.0)):
        offered = row["meta"]["tools"]
        assert row["meta"]["tool"] in offered
        assert len(set(offered)) == len(offered) <= 4
        assert not any(b in family(a) for a in offered for b in offered if a != b)


def test_probes_fill_every_cell() -> None:
    rows = probes("select", 50, 0, ["Write a function that adds."])
    cells = Counter((r["asked"], r["tools_present"], r["suitable"]) for r in rows)
    tool = [(True, True), (True, False), (False, False)]
    code = [(True, False), (False, False)]
    assert cells == dict.fromkeys(
        [("tool", *cell) for cell in tool] + [("code", *cell) for cell in code], 10
    )
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["system", "user"]
        assert row["tools_present"] == row["messages"][0]["content"].startswith("Functions:")
        assert (row["asked"] == "code") == (
            row["messages"][1]["content"] == "Write a function that adds."
        )


def test_services_wordings_and_small_talk_come_in_their_shares() -> None:
    slots = {tool.name: tool.slots for tool in SERVICES}
    rows = list(draw_dialogues("train", 2000, mix=Mix(services=0.3, wordings=0.5, small_talk=0.2)))
    served = [r for r in rows if r["meta"]["tool"] in slots and r["meta"]["kind"] != "chat"]
    assert 0.25 < len(served) / sum(r["meta"]["kind"] != "chat" for r in rows) < 0.36
    for row in served:
        for call in chat.parse_calls(row["messages"][2]["content"]):
            assert call.name == row["meta"]["tool"]
            assert list(call.arguments) == list(slots[call.name])
    said = {said for said, _ in synthetic.SMALL_TALK} - {said for said, _ in PHRASES["small_talk"]}
    talk = [r["messages"][1]["content"] in said for r in rows if r["meta"]["kind"] == "chat"]
    assert 0.4 < sum(talk) / len(talk) < 0.7


def test_only_tools_of_the_catalogue_are_asked_for_in_additional_wordings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invented tool may have the name of a known one, and other arguments."""
    monkeypatch.setattr(
        dialogues, "WORDINGS", type("", (dict,), {"get": lambda *_: ["Further."]})()
    )
    only_series = dict(
        series=1.0, wordings=1.0, multi_turn=0.0, unfitting=0.0, no_tools=0.0, small_talk=0.0
    )
    for shares, further in (
        (only_series, True),
        (only_series | dict(invented=0.5, composed=0.5), False),
    ):
        rows = draw_dialogues("train", 20, mix=Mix(**shares))
        asked = {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"}
        assert (asked == {"Further."}) == ("Further." in asked) == further


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_plain_answers_state_the_result_in_their_shares(share: float) -> None:
    """The share after calls of renamed and invented tools; half of it after those of names that
    training knows."""
    mix = Mix(multi_turn=0.8, unfitting=0.0, renamed=0.5, invented=0.3, plain_answers=share)
    starts = tuple(form.partition("{")[0] for form in PHRASES["plain_answers"])
    plainly = {True: 0, False: 0}
    asked = {True: 0, False: 0}
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


# ---------------------------------------------------------------- drills
def turns(row: dict) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """{name: its words} of the list, and the (request, answer) pairs."""
    system, *rest = [m["content"] for m in row["messages"]]
    *lines, last = system.splitlines()[1:]
    assert last == "Nothing fits: none()"
    entries = [line.partition(": ") for line in lines]
    said = {m["content"]: m["role"] for m in row["messages"]}
    asked = [(a, b) for a, b in zip(rest, rest[1:]) if said[a] == "user" and not chained(a)]
    return {name.partition("(")[0]: text.lower() for text, _, name in entries}, asked


def chained(request: str) -> bool:
    return " Then" in request or " After" in request


def name_of(answer: str) -> str:
    return chat.parse_calls(answer)[0].name


@pytest.mark.parametrize("step", drills.STEPS)
def test_the_answer_is_the_name_of_the_line_that_holds_the_words(step: str) -> None:
    loose = 0
    for row in drills.lookup_dialogues("train", 300, step=step):
        entries, asked = turns(row)
        assert 2 <= len(entries) <= drills.STEPS[step].entries
        assert {name_of(answer) for _, answer in asked} <= entries.keys()
        assert drills.STEPS[step].chained or len(asked) == len(entries)
        for request, answer in asked:
            words = request.lower().split()
            own = entries[name_of(answer)].split()
            shared = {name: len(set(words) & set(text.split())) for name, text in entries.items()}
            assert shared[name_of(answer)] == max(shared.values()) > sorted(shared.values())[-2]
            loose += words[: len(own)] != own
            assert str(chat.parse_calls(answer)[0].arguments.popitem()[1]) == words[-1]
    assert (loose > 100) == (step in ("phrases", "loose"))


@pytest.mark.parametrize("step", drills.STEPS)
def test_requests_that_no_line_serves_are_declined(step: str) -> None:
    for row in drills.lookup_dialogues("train", 100, step=step, missing=1.0):
        entries, asked = turns(row)
        listed = {word for text in entries.values() for word in text.split()}
        for request, answer in asked:
            assert answer == chat.DECLINE
            assert not listed & (set(request.lower().split()) - set(PHRASES["fillers"]))


def test_a_chained_request_calls_the_first_line_and_then_the_second_with_its_result() -> None:
    seen = 0
    for row in drills.lookup_dialogues("train", 300, step="loose"):
        entries, _ = turns(row)
        contents = [m["content"] for m in row["messages"]]
        for at, (turn, text) in enumerate(zip(row["messages"], contents)):
            if turn["role"] != "user" or not chained(text):
                continue
            seen += 1
            cut = min(i for word in (". Then", ". After") if (i := text.find(word)) >= 0)
            (first,), (second,) = (
                chat.parse_calls(contents[at + 1]),
                chat.parse_calls(contents[at + 3]),
            )
            for call, part in ((first, text[:cut]), (second, text[cut:])):
                words = set(part.lower().replace(".", " ").split())
                assert words & set(entries[call.name].split())
            assert first.name != second.name
            assert text[:cut].split()[-1] == str(*first.arguments.values())
            assert json.loads(contents[at + 2]) == {"result": second.arguments.popitem()[1]}
    assert seen > 100


def test_numbers_names_and_rows_belong_to_splits_and_seeds() -> None:
    for split in ("train", "test"):
        rows = list(drills.lookup_dialogues(split, 300, step="loose"))
        numbers = {
            int(n)
            for row in rows
            for m in row["messages"]
            for n in re.findall(r"\d+", m["content"])
        }
        assert sum(n > 99 for n in numbers) > 20
        assert all(allowed(n, split) for n in numbers)
    rows = list(drills.lookup_dialogues("select", 200, step="loose"))
    names = {name for row in rows for name in turns(row)[0]}
    known = {*values.COMMON, *(f"{a}_{b}" for a in values.COMMON for b in values.COMMON)}
    assert names - known
    assert all(allowed(name, "select") for name in names - known)
    assert rows[:50] == list(drills.lookup_dialogues("select", 50, step="loose"))
    assert rows != list(drills.lookup_dialogues("select", 200, 1, step="loose"))


def test_rare_words_come_in_the_later_steps_only() -> None:
    rows = [
        drills.lookup_dialogues("train", 40, 0, step=step, rare_words=0.5)
        for step in ("calls", "phrases")
    ]
    found = [{w for text in map(str, some) for w in WORDS if f" {w}" in text} for some in rows]
    assert not found[0]
    assert len(found[1]) > 100


def test_spelling_drills_put_words_of_one_token_in_quotation_marks() -> None:
    vocabulary = load("gpt2:4096")
    words = values.whole_words()
    assert len(words) > 1500
    assert all(len(vocabulary.encode(f" {word}")) == 1 for word in words)
    texts = {
        share: [r["messages"] for r in drills.copy_dialogues("train", 600, varied=share)]
        for share in (0.0, 0.6)
    }
    spelled = {
        s: [r for r in rows if re.fullmatch(r'("\w+"(, )?){3,6}', r[1]["content"])]
        for s, rows in texts.items()
    }
    assert not spelled[0.0]
    assert 0.2 < len(spelled[0.6]) / 600 < 0.4
    for asked, answer in spelled[0.6]:
        quoted = re.findall(r'"(\w+)"', answer["content"])
        assert " ".join(quoted) in asked["content"]
        assert set(quoted) <= set(words)
    for share, rows in texts.items():
        assert all(
            answer["content"] in asked["content"]
            for asked, answer in rows
            if '", "' not in answer["content"]
        )
        assert any(set(NAMES) & set(answer["content"].split()) for _, answer in rows) == bool(share)


def test_data_calls_writes_them_with_all_strata_and_lists_tools_after_their_descriptions(
    tmp_path: Path,
) -> None:
    words = (
        "--tokenizer bytes --max-examples 200 --copies 0 "
        "--problems 100 --eval-examples 50 --probes 5"
    )
    words += " --mix.renamed 0.5 --lookups 20 --lookups-missing 0.2 --tools-style described --out"
    manifest = prepare.prepare_calls(parse(prepare.CallsConfig, [*words.split(), str(tmp_path)]))
    assert {f"lookup_{step}" for step in drills.STEPS} < manifest["domains"].keys()
    assert manifest["files"]["lookup_loose.train.jsonl"]["rows"] == 20
    assert manifest["values"]["test"]["calls"] == 30
    declined = 0
    for name in ("calls.train", "funcall.test", "probes.select"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        offers = [
            r["messages"][0]["content"] for r in rows if "Functions:" in r["messages"][0]["content"]
        ]
        lines = [line for offer in offers for line in offer.splitlines()[1:]]
        assert lines
        assert all(": " in line and line.endswith(")") for line in lines)
        for row in rows:
            said = [m["content"] for m in row["messages"]]
            assert not set(said) & set(PHRASES["no_function"])
            declined += said.count(chat.DECLINE)
            if row.get("gold"):
                assert row["gold"]["name"] in chat.offered_names(row["messages"][0]["content"])
    assert declined > 0
    task = FuncallTask(source=tmp_path)
    unseen = {t.name for t in HELD_OUT}
    problems = {split: task.problems(split) for split in ("train", "test", "test_hard")}
    kinds = {split: Counter(p.meta["stratum"] for p in some) for split, some in problems.items()}
    assert kinds["test"] == dict(call=20, unfitting=10, no_tools=5, code=5, chain_1=5, chain_2=5)
    assert kinds["test_hard"] == dict(tool=20, phrasing=15, renamed=15)
    assert kinds["train"].total() == 100
    assert {p.meta["tool"] for p in problems["test_hard"] if p.meta["stratum"] == "tool"} <= unseen
    assert not unseen & {p.meta.get("tool") for p in problems["train"]}
    assert task.grouped_by == "stratum"
