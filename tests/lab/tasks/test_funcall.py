"""The staircase: every rung, no reward for tricks, and reference solutions of every source at
the maximum."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from jsonl import rows_of, write

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import local_rows
from codechat.tasks.base import Problem, Score, check_reference_solutions
from codechat.text import chat
from codechat_lab.tasks.funcall import STAIRCASES, TIERS, FuncallTask, score_call
from codechat_lab.tasks.toolbox import problems

TAG = "<functioncall> "
USER = [{"role": "user", "content": "Mix it."}]
PIECES = [
    TAG,
    *"{}[]'\"\\\ud800\x00\n",
    ": ",
    ", ",
    '"name"',
    '"arguments"',
    '"mix"',
    "NaN",
    "1e9999",
]  # of calls
GOLD = {
    "name": "mix",
    "arguments": {"city": "Oslo", "days": 3, "rate": 2.5, "deep": {"on": True, "tags": ["a", "b"]}},
}


def call(name="mix", **arguments):
    return TAG + json.dumps({"name": name, "arguments": arguments})


def right(**changes):
    return call(**(GOLD["arguments"] | changes))


def reward(text, gold=GOLD):
    return score_call(text, gold).reward


def mix(arguments):
    """A call of mix with the arguments as they are written, and a gold call with none but `a`."""
    return TAG + '{"name": "mix", "arguments": ' + arguments + "}"


def only(value):
    return {"name": "mix", "arguments": {"a": value}}


def test_every_rung_and_what_tricks_earn():
    many = [
        "full match reward 1.0 " * 50,
        call(city=["Oslo"] * 10_000),
        call(city="Oslo " * 10_000),
    ]
    many += [call(**{f"k{i}": "Oslo" for i in range(5000)})]
    rows = rows_of(Path(__file__).with_name("funcall_rungs.jsonl"))  # [tier, reward, completion]
    rows += zip(["no_tag", *["name_only"] * 3], [0, *[0.55] * 3], many)
    for tier, expected, text in rows:
        score = score_call(text, GOLD)
        assert (score.tier, score.reward) == (tier, pytest.approx(expected)), text
        assert score.correct == (tier == "full")
        assert tier in TIERS
    assert reward(mix('{"a": "Oslo", "a": "Rome"}'), only("Oslo")) == 0.55, (
        "of a repeated key the last value counts"
    )


def test_correct_calls_in_every_legal_form_score_one_and_near_misses_do_not_match():
    for text in (
        "Let me look that up. " + right(),
        right() + "\n",
        TAG.strip() + right().removeprefix(TAG),
        TAG + json.dumps({"name": "mix", "arguments": json.dumps(GOLD["arguments"])}),
        mix("'" + json.dumps(GOLD["arguments"]) + "'"),
        TAG + json.dumps({"arguments": GOLD["arguments"], "name": "mix"}, indent=2),
        right(city=" oslo "),
        right(days=3.0),
        right(rate=2.5 + 1e-7),
    ):
        assert score_call(text, GOLD).reward == 1.0 and score_call(text, GOLD).correct, text
    assert reward(mix('\'{"a": "You\'ve won"}\''), only("You've won")) == 1.0
    deep = [{"on": True, "tags": tags} for tags in (["b", "a"], ["a"])] + [
        {"on": 1, "tags": ["a", "b"]},
        "{'on': True}",
    ]
    deep += [{"on": True, "tags": ["a", "b"], "more": 1}]
    misses = [{"days": days} for days in (4, 3 + 1e-5, "3", True, [3], None, {"v": 3})] + [
        {"deep": d} for d in deep
    ]
    for changes in [*misses, {"rate": "2.5"}, {"city": "Os lo"}, {"city": ["Oslo"]}]:
        score = score_call(right(**changes), GOLD)
        assert score.parts["matched"] == 3 and not score.correct, changes
        assert score.reward == pytest.approx(0.55 + 0.45 * 3 / 4)


def test_booleans_are_not_numbers_and_large_integers_are_exact():
    assert reward(call(a=1), only(True)) == reward(call(a=True), only(1)) == 0.55
    assert reward(call(a=123456790), only(123456789)) == 0.55
    for near in (1000000.9, 999999.5, 1000001, 1000000 + 1e-4):
        assert (
            reward(call(a=near), only(1000000)) == reward(call(a=[near]), only([1000000])) == 0.55
        ), near
    assert reward(call(a=1000000.0), only(1000000)) == 1.0  # JSON knows one kind of number
    assert reward(call(a=2.0**53), only(2**53 + 1)) == 0.55
    assert (
        reward(call(a=1000000.9), only(1000000.5))
        == reward(call(a=1000000), only(1000000.5))
        == 1.0
    )
    assert reward(mix('{"a": 1' + "0" * 400 + "}"), only(1.5)) == 0.55
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        for expected in (1, 0.0, 10**400, "NaN", None):
            assert reward(mix('{"a": ' + value + "}"), only(expected)) <= 0.55


def test_without_expected_arguments_and_without_an_expected_call():
    gold = {"name": "mix", "arguments": {}}
    assert reward(call(), gold) == 1.0
    assert reward(TAG + '{"name": "mix"}', gold) == 1.0
    assert reward(call(x=1), gold) == pytest.approx(0.55 + 0.45 * 0.9)
    assert reward(call(**{f"x{i}": 1 for i in range(50)}), gold) == pytest.approx(0.55 + 0.45 * 0.5)
    assert reward(call() + call(), gold) == pytest.approx(0.55 + 0.45 * 0.5)
    assert reward(mix("[1, 2]"), gold) < 0.99
    assert score_call("I cannot do that.", None).reward == 1.0
    assert score_call("", None).correct
    for text in (right(), TAG, TAG + "{", "Sure: " + call("other")):
        score = score_call(text, None)
        assert score.reward == 0.0
        assert not score.correct
        assert score.tier in TIERS


def test_extra_keys_never_raise_the_reward_and_every_corrected_argument_does():
    wrong = {k: "wrong" for k in GOLD["arguments"]}
    for order in itertools.permutations(GOLD["arguments"]):
        arguments = dict(wrong)
        last = [-1.0] * 12
        for key in (None, *order):
            arguments |= {key: GOLD["arguments"][key]} if key else {}
            scores = [
                score_call(call(**arguments, **{f"x{i}": "Oslo" for i in range(n)}), GOLD)
                for n in range(12)
            ]
            rewards = [score.reward for score in scores]
            assert rewards == sorted(rewards, reverse=True)
            assert rewards[1] < rewards[0] or rewards[0] == 0.55
            assert all(before < after for before, after in zip(last, rewards))
            assert max(rewards[1:]) <= 0.99
            assert [score.correct for score in scores] == [arguments == GOLD["arguments"]] + [
                False
            ] * 11
            last = rewards


JUNK = (
    "}",
    " That is the call.",
    "\n<|end|>",
    TAG + "{",
    TAG + '{"name": "mix", "argum',
    right(),
    call("other"),
)
# a call, its reward alone, and with something behind it
MARKED_DOWN = [
    (right(), 1.0, 0.775),
    (right(days=4), 0.55 + 0.45 * 0.75, 0.55 + 0.45 * 0.375),
    (call(), 0.55, 0.35),
    (call("other"), 0.35, 0.30),
    (call("invented"), 0.20, 0.15),
    (TAG + '{"arguments": {}}', 0.30, 0.15),
]
OFFERED = {"mix", "other"}


def test_what_follows_the_call_costs_a_rung_and_is_not_correct():
    for junk, (text, alone, followed) in itertools.product(JUNK, MARKED_DOWN):
        scores = [score_call(text + behind, GOLD, offered=OFFERED) for behind in ("", junk)]
        assert [s.reward for s in scores] == pytest.approx([alone, followed])
        assert not scores[1].correct
    assert score_call(
        "Let me see. " + right() + " \n", GOLD
    ).correct  # prose before it, and blanks behind, are free


def test_a_name_that_is_not_offered_earns_less_than_an_offered_wrong_one():
    tools = [
        {"name": name, "parameters": {"properties": {"a": {}}}} for name in ("mix", "other.tool")
    ]
    task = FuncallTask()
    published = tasks.load("funcall:staircase=published")
    for style in ("compact", "json"):
        content = chat.tools_prompt(tools, style) + "\n\nBe brief. Use f(x), {braces} too."
        problem = Problem("p", [{"role": "system", "content": content}, *USER], GOLD, "train")
        scores = [
            task.score(problem, call(name)) for name in ("other.tool", "invented", "f", "mix(a")
        ]
        assert [(s.reward, s.tier) for s in scores] == [(0.35, "wrong_name")] + [
            (0.20, "wrong_name")
        ] * 3
        assert [s.parts["named"] for s in scores] == ["other"] + ["not_offered"] * 3
        texts = {
            right(): "right",
            "No.": "no_call",
            TAG + "{": "unreadable",
            TAG + "{}": "unreadable",
        }
        assert {text: task.score(problem, text).parts["named"] for text in texts} == texts
        without = replace(problem, gold=None)
        names = {"mix": "other", "invented": "not_offered"}
        assert {name: task.score(without, call(name)).parts["named"] for name in names} == names
        assert published.score(problem, call("invented")).reward == 0.35
    unlisted = Problem("p", USER, GOLD, "train")
    assert task.score(unlisted, call("invented")).reward == 0.35, (
        "without a list there is no verdict"
    )


def test_the_published_staircase_keeps_its_numbers():
    task = tasks.load("funcall:staircase=published")
    tools = chat.tools_prompt([{"name": "mix"}, {"name": "other"}])
    problem = Problem("p", [{"role": "system", "content": tools}, *USER], GOLD, "test")
    for text, expected in (
        (right() + "}", 1.0),
        (right() + " That is the call.", 1.0),
        (right() + TAG + "{", 0.99),
        (right() + right(), 0.99),
        (right(days=4) + "}", 0.8875),
        (call() + "}", 0.55),
        (call("invented") + "}", 0.35),
        (right(days=3 + 1e-7), 1.0),
    ):
        score = task.score(problem, text)
        assert (score.reward, score.correct) == (expected, expected == 1.0)
        assert score_call(text, GOLD, STAIRCASES["published"]).reward == expected


def test_deep_nesting_and_noise_neither_crash_nor_pay():
    for depth in (100, 5_000, 100_000):
        for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth):
            for text in (mix('{"city": ' + deep + "}"), TAG + deep, deep):
                assert score_call(text, GOLD).reward <= 0.55
    rng = random.Random(0)
    for i in range(3000):
        score = score_call(
            "".join(rng.choices(PIECES, k=rng.randint(1, 20))), GOLD if i % 2 else None
        )
        assert 0 <= score.reward <= 1
        assert score.tier in TIERS


def everything(task):
    return [p for split in tasks.SPLITS for p in task.problems(split)]


def test_files_and_directories_keep_their_splits(tmp_path):
    rows = [
        {"id": id, "messages": USER, "gold": GOLD, "split": split}
        for id, split in (("a", "test"), ("b", "train"))
    ]
    task = FuncallTask(write(tmp_path / "p.jsonl", [rows[0], rows[1] | {"gold": None}]))
    assert [p.id for p in task.problems("test")] == ["a"]
    assert task.problems("train")[0].gold is None
    assert task.problems("test_hard") == []
    assert task.ledger.kept == 2
    assert check_reference_solutions(task, everything(task)).require().passed == 2
    write(tmp_path / "funcall.train.jsonl", rows[1:])
    write(tmp_path / "funcall.test.jsonl", rows[:1])
    write(
        tmp_path / "calls.train.jsonl",
        [{"id": "c", "messages": USER, "domain": "calls", "meta": {}}],
    )
    assert [p.id for p in everything(FuncallTask(tmp_path))] == ["b", "a"], (
        "its problems, beside other files"
    )
    many = FuncallTask(
        write(tmp_path / "many.jsonl", [rows[0] | {"id": str(i)} for i in range(30)])
    )
    assert (
        many.problems("test", 5, seed=1)
        == many.problems("test", 5, seed=1)
        != many.problems("test", 5, seed=2)
    )
    assert len(many.problems("test")) == 30
    assert len(FuncallTask().problems("test", 7)) == 7
    with pytest.raises(ConfigError):
        many.problems("dev")


def test_glaive_rows_as_the_hub_has_them(tmp_path):
    def row(*answers):
        chat = "".join(f"USER: Go on.\n\n\nASSISTANT: {a} <|endoftext|>\n\n\n" for a in answers)
        return {"system": 'SYSTEM: Use them -\n{"name": "say", "parameters": {}}', "chat": chat}

    quoted = 'Sure. <functioncall> {"name": "say", "arguments": \'{"text": "You\'ve won"}\'}'
    several = call("say", text="a") + "\n" + call("say", text="b")
    path = write(
        tmp_path / "g.jsonl", [row("What?", quoted), row(several), row("I cannot do that.")]
    )
    task = FuncallTask(path)
    late, two, none = sorted(everything(task), key=lambda p: p.id)
    assert [m["role"] for m in late.messages] == ["system", "user", "assistant", "user"]
    assert late.gold["arguments"] == {"text": "You've won"}
    assert task.gold(late) == quoted
    assert two.gold["arguments"] == {"text": "a"}
    assert none.gold is None
    assert check_reference_solutions(task, [late, two, none]).require().passed == 3


def test_original_prompts_become_messages_and_equal_ones_meet_in_one_split(tmp_path):
    prompt = "<|system|>\nUse\ntools\n<|end|>\n<|user|>\nMix 1 < 2\n<|end|>\n<|assistant|>\n"
    rows = [{"prompt": prompt, "gt_name": "mix", "gt_args": {"a": i}} for i in range(3)]
    task = FuncallTask(write(tmp_path / "o.jsonl", rows))
    problems = everything(task)
    assert [tuple(m.values()) for m in problems[0].messages] == [
        ("system", "Use\ntools"),
        ("user", "Mix 1 < 2"),
    ]
    assert len({p.split for p in problems}) == 1
    assert check_reference_solutions(task, problems).require().n == 3


def test_bad_files_are_user_errors(tmp_path):
    user = '"messages": [{"role": "user", "content": "x"}]'
    for text, complaint in (
        ("", "empty"),
        ('{"prompt": "x", "gt_na', "JSON"),
        ('{"question": 1}', "question"),
        ('{"id": 1, "messages": [], "gold": null}', "bad_row"),
        ('{"id": 1, ' + user + ', "gold": {"name": 3}}', "bad_row"),
        ('{"prompt": "no tags", "gt_name": "f", "gt_args": {}}', "bad_row"),
        (
            (
                '{"messages": [{"role": "user", "content": "x"}], '
                '"gold": {"name": "f", "kwargs": {"a": [1]}}}'
            ),
            "bad_row",
        ),
        ('{"system": "SYSTEM: x", "chat": "USER: hello"}', "no_answer"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(DataError, match=complaint):
            FuncallTask(tmp_path / "bad.jsonl")
    with pytest.raises(MissingFile):
        FuncallTask(tmp_path / "absent.jsonl")


def test_the_reference_check_counts_failures_by_reason_and_raises():
    class Broken(FuncallTask):
        def gold(self, problem):
            return {"a": super().gold(problem), "b": "no call", "c": TAG + "{"}[problem.id]

    problems = [Problem(i, USER, GOLD, "test") for i in "abc"]
    found = check_reference_solutions(Broken(), problems)
    assert (found.n, found.passed, found.failed) == (3, 1, {"b": "no_tag", "c": "bad_json"})
    with pytest.raises(DataError, match="no_tag: 1.*such as b"):
        found.require()
    task = FuncallTask()
    task.score = lambda problem, text: Score(1.0, "full", {}, False)
    assert set(check_reference_solutions(task, problems).failed.values()) == {
        "maximum reward but not correct"
    }
    with pytest.raises(DataError):
        check_reference_solutions(FuncallTask(), []).require()


def test_reference_solutions_of_the_toolbox_pass():
    task = tasks.load("funcall")
    for split in tasks.SPLITS:
        assert check_reference_solutions(task, task.problems(split, 1000)).require().n >= 999


@pytest.mark.parametrize(
    "name", ["glaive_v2_en_300", "glaive_format_short", "glaive_format_converted"]
)
def test_reference_solutions_of_glaive_rows_pass_and_golds_are_the_ground_truth(shared_data, name):
    path = shared_data / "function_calling" / f"{name}.jsonl"
    truth = {
        r["id"]: json.loads(r["ground_truth"])
        for r in local_rows(path.with_name("common_non_bfcl.parquet"))
    }
    task = FuncallTask(path)
    problems = everything(task)
    assert len(problems) == task.ledger.kept == sum(1 for _ in local_rows(path)), task.ledger.lost
    check_reference_solutions(task, problems).require()
    for p in problems:
        assert p.messages[-1]["role"] != "assistant", "the answer is not part of the prompt"
        assert not any(chat.parse_calls(m["content"]) for m in p.messages)
    known = [p for p in problems if truth.get(p.id)]
    assert all(p.gold == truth[p.id][0] for p in known)
    assert len(known) > 900 or name != "glaive_format_short"
    canonical = [p for p in problems if p.gold]
    assert all(
        task.score(p, chat.format_call(p.gold["name"], p.gold["arguments"])).correct
        for p in canonical
    )


@pytest.mark.parametrize("split", ["train", "select", "test", "test_hard"])
def test_a_limit_gives_that_many_problems_and_those_of_a_smaller_one(split: str) -> None:
    task = FuncallTask()
    smaller = set()
    for limit in (0, 1, 2, 3, 5, 9, 10, 37):
        ids = {problem.id for problem in task.problems(split, limit=limit)}
        assert len(ids) == limit
        assert smaller <= ids
        smaller = ids


def test_strata_add_up_and_keep_their_shares() -> None:
    shares = {"call": 0.4, "unfitting": 0.2, "no_tools": 0.1, "chain": 0.2}
    for n in range(200):
        counts = problems.counts_of(shares, n)
        assert sum(counts.values()) == n
        assert all(abs(count - shares[name] / 0.9 * n) < 1.5 for name, count in counts.items())


@pytest.mark.parametrize("name", ["funcall", "toy", "micro", "repair", "apps", "natural"])
def test_every_task_gives_as_many_problems_as_are_asked_for(name: str) -> None:
    task = tasks.load(name)
    for limit in (0, 1, 2, 7):
        assert len(task.problems("test", limit=limit)) == limit
