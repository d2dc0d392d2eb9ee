"""The staircase: every rung, no reward for tricks, and reference solutions of every source at
the maximum."""

import functools
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from jsonl import rows_of, write

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import conversations
from codechat.data.sources import Ledger, local_rows
from codechat.tasks.base import Problem, Score, check_reference_solutions
from codechat.text import tool_calls, tool_lists
from codechat_lab.data import public_rows
from codechat_lab.tasks.funcall import STAIRCASES, TIERS, FuncallTask, score_call
from codechat_lab.tasks.toolbox import problems

TAG = "<functioncall> "
USER = [{"role": "user", "content": "Mix it."}]
# of calls
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
]
GOLD = {
    "name": "mix",
    "arguments": {"city": "Oslo", "days": 3, "rate": 2.5, "deep": {"on": True, "tags": ["a", "b"]}},
}


def call(name="mix", arguments=None, /, **more):
    return TAG + json.dumps({"name": name, "arguments": (arguments or {}) | more})


def right(changes=None, /, **more):
    return call("mix", GOLD["arguments"] | (changes or {}) | more)


def reward(text, gold=GOLD):
    return score_call(text, gold).reward


def mix(arguments):
    """A call of mix with the arguments as they are written, and a gold call with none but `a`."""
    return TAG + '{"name": "mix", "arguments": ' + arguments + "}"


def only(value):
    return {"name": "mix", "arguments": {"a": value}}


# rows [tier, reward, completion]
RUNGS = rows_of(Path(__file__).with_name("funcall_rungs.jsonl"))
FLOODS = [  # as many tokens as possible
    ["no_tag", 0, "full match reward 1.0 " * 50],
    ["name_only", 0.55, call(city=["Oslo"] * 10_000)],
    ["name_only", 0.55, call(city="Oslo " * 10_000)],
    ["name_only", 0.55, call("mix", {f"k{i}": "Oslo" for i in range(5000)})],
]


def test_every_rung_and_what_tricks_earn():
    for tier, expected, text in [*RUNGS, *FLOODS]:
        score = score_call(text, GOLD)
        assert (score.tier, score.reward) == (tier, pytest.approx(expected)), text
        assert score.correct == (tier == "full")
        assert tier in TIERS


def test_of_a_repeated_key_the_last_value_counts():
    assert reward(mix('{"a": "Oslo", "a": "Rome"}'), only("Oslo")) == 0.55


@pytest.mark.parametrize(
    "text",
    [
        "Let me look that up. " + right(),
        right() + "\n",
        TAG.strip() + right().removeprefix(TAG),
        TAG + json.dumps({"name": "mix", "arguments": json.dumps(GOLD["arguments"])}),
        mix("'" + json.dumps(GOLD["arguments"]) + "'"),
        TAG + json.dumps({"arguments": GOLD["arguments"], "name": "mix"}, indent=2),
        right(city=" oslo "),
        right(days=3.0),
        right(rate=2.5 + 1e-7),
    ],
)
def test_correct_calls_in_every_legal_form_score_one(text):
    score = score_call(text, GOLD)
    assert score.reward == 1.0
    assert score.correct


def test_arguments_in_single_quotes_may_hold_an_apostrophe():
    assert reward(mix('\'{"a": "You\'ve won"}\''), only("You've won")) == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"days": 4},
        {"days": 3 + 1e-5},
        {"days": "3"},
        {"days": True},
        {"days": [3]},
        {"days": None},
        {"days": {"v": 3}},
        {"deep": {"on": True, "tags": ["b", "a"]}},
        {"deep": {"on": True, "tags": ["a"]}},
        {"deep": {"on": 1, "tags": ["a", "b"]}},
        {"deep": "{'on': True}"},
        {"deep": {"on": True, "tags": ["a", "b"], "more": 1}},
        {"rate": "2.5"},
        {"city": "Os lo"},
        {"city": ["Oslo"]},
    ],
)
def test_near_misses_do_not_match(changes):
    score = score_call(right(changes), GOLD)
    assert score.parts["matched"] == 3
    assert not score.correct
    assert score.reward == pytest.approx(0.55 + 0.45 * 3 / 4)


def test_booleans_are_not_numbers():
    assert reward(call(a=1), only(True)) == 0.55
    assert reward(call(a=True), only(1)) == 0.55


@pytest.mark.parametrize("near", [1000000.9, 999999.5, 1000001, 1000000 + 1e-4])
def test_integers_are_exact(near):
    assert reward(call(a=near), only(1000000)) == 0.55
    assert reward(call(a=[near]), only([1000000])) == 0.55


def test_large_integers_are_exact():
    assert reward(call(a=123456790), only(123456789)) == 0.55
    assert reward(call(a=2.0**53), only(2**53 + 1)) == 0.55
    assert reward(mix('{"a": 1' + "0" * 400 + "}"), only(1.5)) == 0.55


def test_an_integer_may_be_written_as_a_float():
    assert reward(call(a=1000000.0), only(1000000)) == 1.0  # JSON knows one kind of number


@pytest.mark.parametrize("near", [1000000.9, 1000000])
def test_large_floats_are_compared_relatively(near):
    assert reward(call(a=near), only(1000000.5)) == 1.0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("expected", [1, 0.0, 10**400, "NaN", None])
def test_numbers_that_json_has_not_match_nothing(value, expected):
    assert reward(mix('{"a": ' + value + "}"), only(expected)) <= 0.55


NO_ARGUMENTS = {"name": "mix", "arguments": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call(), 1.0),
        (TAG + '{"name": "mix"}', 1.0),
        (call(x=1), pytest.approx(0.55 + 0.45 * 0.9)),
        (call("mix", {f"x{i}": 1 for i in range(50)}), pytest.approx(0.55 + 0.45 * 0.5)),
        (call() + call(), pytest.approx(0.55 + 0.45 * 0.5)),
    ],
)
def test_without_expected_arguments_extra_ones_cost(text, expected):
    assert reward(text, NO_ARGUMENTS) == expected


def test_without_expected_arguments_a_list_is_not_right():
    assert reward(mix("[1, 2]"), NO_ARGUMENTS) < 0.99


def test_without_an_expected_call_prose_is_right():
    assert score_call("I cannot do that.", None).reward == 1.0
    assert score_call("", None).correct


@pytest.mark.parametrize("text", [right(), TAG, TAG + "{", "Sure: " + call("other")])
def test_without_an_expected_call_no_call_is_right(text):
    score = score_call(text, None)
    assert score.reward == 0.0
    assert not score.correct
    assert score.tier in TIERS


def with_extra_keys(arguments):
    """Scores of a call with 0 to 11 arguments that nobody expects."""
    scores = []
    for n in range(12):
        extra = {f"x{i}": "Oslo" for i in range(n)}
        scores.append(score_call(call("mix", arguments | extra), GOLD))
    return scores


def corrected(order):
    """Wrong arguments, of which one after the other is corrected."""
    arguments = dict.fromkeys(GOLD["arguments"], "wrong")
    yield dict(arguments)
    for key in order:
        arguments[key] = GOLD["arguments"][key]
        yield dict(arguments)


ORDERS = list(itertools.permutations(GOLD["arguments"]))


def test_extra_keys_never_raise_the_reward():
    for arguments in itertools.chain.from_iterable(map(corrected, ORDERS)):
        rewards = [score.reward for score in with_extra_keys(arguments)]
        assert rewards == sorted(rewards, reverse=True)
        assert rewards[1] < rewards[0] or rewards[0] == 0.55
        assert max(rewards[1:]) <= 0.99


def test_every_corrected_argument_raises_the_reward_whatever_the_extra_keys():
    for order in ORDERS:
        last = [-1.0] * 12
        for arguments in corrected(order):
            rewards = [score.reward for score in with_extra_keys(arguments)]
            assert all(before < after for before, after in zip(last, rewards))
            last = rewards


def test_a_call_with_an_extra_key_is_not_correct():
    for arguments in itertools.chain.from_iterable(map(corrected, ORDERS)):
        first, *others = with_extra_keys(arguments)
        assert first.correct == (arguments == GOLD["arguments"])
        assert not any(score.correct for score in others)


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


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(("text", "alone", "followed"), MARKED_DOWN)
def test_what_follows_the_call_costs_a_rung_and_is_not_correct(text, alone, followed, junk):
    with_junk = score_call(text + junk, GOLD, offered=OFFERED)
    assert score_call(text, GOLD, offered=OFFERED).reward == pytest.approx(alone)
    assert with_junk.reward == pytest.approx(followed)
    assert not with_junk.correct


def test_prose_before_the_call_and_blanks_behind_it_are_free():
    assert score_call("Let me see. " + right() + " \n", GOLD).correct


STYLES = pytest.mark.parametrize("style", ["compact", "json"])


def offering(style):
    """A problem whose prompt offers mix and other.tool, and mentions more names."""
    tools = [
        {"name": name, "parameters": {"properties": {"a": {}}}} for name in ("mix", "other.tool")
    ]
    content = tool_lists.tools_prompt(tools, style) + "\n\nBe brief. Use f(x), {braces} too."
    return Problem("p", [{"role": "system", "content": content}, *USER], GOLD, "train")


@STYLES
@pytest.mark.parametrize(
    ("name", "expected", "named"),
    [
        ("other.tool", 0.35, "other"),
        ("invented", 0.20, "not_offered"),
        ("f", 0.20, "not_offered"),
        ("mix(a", 0.20, "not_offered"),
    ],
)
def test_a_name_that_is_not_offered_earns_less_than_an_offered_wrong_one(
    name, expected, named, style
):
    score = FuncallTask().score(offering(style), call(name))
    assert (score.reward, score.tier) == (expected, "wrong_name")
    assert score.parts["named"] == named


@STYLES
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (right(), "right"),
        ("No.", "no_call"),
        (TAG + "{", "unreadable"),
        (TAG + "{}", "unreadable"),
    ],
)
def test_a_score_says_which_name_was_called(text, named, style):
    assert FuncallTask().score(offering(style), text).parts["named"] == named


@STYLES
@pytest.mark.parametrize(("name", "named"), [("mix", "other"), ("invented", "not_offered")])
def test_a_score_says_which_name_was_called_where_no_call_is_expected(name, named, style):
    problem = replace(offering(style), gold=None)
    assert FuncallTask().score(problem, call(name)).parts["named"] == named


@STYLES
def test_the_published_staircase_does_not_ask_whether_a_name_was_offered(style):
    published = tasks.load("funcall:staircase=published")
    assert published.score(offering(style), call("invented")).reward == 0.35


def test_without_a_list_no_name_counts_as_not_offered():
    unlisted = Problem("p", USER, GOLD, "train")
    assert FuncallTask().score(unlisted, call("invented")).reward == 0.35


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (right() + "}", 1.0),
        (right() + " That is the call.", 1.0),
        (right() + TAG + "{", 0.99),
        (right() + right(), 0.99),
        (right(days=4) + "}", 0.8875),
        (call() + "}", 0.55),
        (call("invented") + "}", 0.35),
        (right(days=3 + 1e-7), 1.0),
    ],
)
def test_the_published_staircase_keeps_its_numbers(text, expected):
    tools = tool_lists.tools_prompt([{"name": "mix"}, {"name": "other"}])
    problem = Problem("p", [{"role": "system", "content": tools}, *USER], GOLD, "test")
    score = tasks.load("funcall:staircase=published").score(problem, text)
    assert (score.reward, score.correct) == (expected, expected == 1.0)
    assert score_call(text, GOLD, STAIRCASES["published"]).reward == expected


@pytest.mark.parametrize("depth", [100, 5_000, 100_000])
def test_deep_nesting_neither_crashes_nor_pays(depth):
    for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth):
        for text in (mix('{"city": ' + deep + "}"), TAG + deep, deep):
            assert score_call(text, GOLD).reward <= 0.55


def test_noise_neither_crashes_nor_leaves_the_scale():
    rng = random.Random(0)
    for i in range(3000):
        noise = "".join(rng.choices(PIECES, k=rng.randint(1, 20)))
        score = score_call(noise, GOLD if i % 2 else None)
        assert 0 <= score.reward <= 1
        assert score.tier in TIERS


def everything(task):
    return [p for split in tasks.SPLITS for p in task.problems(split)]


IN_TEST = {"id": "a", "messages": USER, "gold": GOLD, "split": "test"}
IN_TRAIN = {"id": "b", "messages": USER, "gold": GOLD, "split": "train"}


def test_problems_of_a_file_keep_their_splits(tmp_path):
    task = FuncallTask(write(tmp_path / "p.jsonl", [IN_TEST, IN_TRAIN | {"gold": None}]))
    assert [problem.id for problem in task.problems("test")] == ["a"]
    assert task.problems("train")[0].gold is None
    assert task.problems("test_hard") == []
    assert task.ledger.kept == 2
    assert check_reference_solutions(task, everything(task)).require().passed == 2


def test_problems_of_a_directory_are_read_beside_other_files(tmp_path):
    write(tmp_path / "funcall.train.jsonl", [IN_TRAIN])
    write(tmp_path / "funcall.test.jsonl", [IN_TEST])
    conversation = {"id": "c", "messages": USER, "domain": "calls", "meta": {}}
    write(tmp_path / "calls.train.jsonl", [conversation])
    assert [problem.id for problem in everything(FuncallTask(tmp_path))] == ["b", "a"]


def test_the_seed_decides_which_problems_of_a_file_are_drawn(tmp_path):
    rows = [IN_TEST | {"id": str(i)} for i in range(30)]
    task = FuncallTask(write(tmp_path / "many.jsonl", rows))
    drawn = task.problems("test", 5, seed=1)
    assert drawn == task.problems("test", 5, seed=1)
    assert drawn != task.problems("test", 5, seed=2)
    assert len(task.problems("test")) == 30
    assert len(FuncallTask().problems("test", 7)) == 7


def test_an_unknown_split_is_an_error(tmp_path):
    task = FuncallTask(write(tmp_path / "p.jsonl", [IN_TEST]))
    with pytest.raises(ConfigError):
        task.problems("dev")


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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ('{"prompt": "x", "gt_na', "JSON"),
        ('{"question": 1}', "question"),
        ('{"id": 1, "messages": [], "gold": null}', "bad_row"),
        (json.dumps({"id": 1, "messages": USER, "gold": {"name": 3}}), "bad_row"),
        ('{"prompt": "no tags", "gt_name": "f", "gt_args": {}}', "bad_row"),
        (json.dumps({"messages": USER, "gold": {"name": "f", "kwargs": {"a": [1]}}}), "bad_row"),
        ('{"system": "SYSTEM: x", "chat": "USER: hello"}', "no_answer"),
    ],
)
def test_bad_files_are_user_errors(text, complaint, tmp_path):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=complaint):
        FuncallTask(tmp_path / "bad.jsonl")


def test_an_absent_file_is_a_user_error(tmp_path):
    with pytest.raises(MissingFile):
        FuncallTask(tmp_path / "absent.jsonl")


class Broken(FuncallTask):
    """Its reference solutions of b and c are wrong."""

    def gold(self, problem):
        return {"a": super().gold(problem), "b": "no call", "c": TAG + "{"}[problem.id]


ABC = [Problem(name, USER, GOLD, "test") for name in "abc"]


def test_the_reference_check_counts_failures_by_reason_and_raises():
    found = check_reference_solutions(Broken(), ABC)
    assert (found.n, found.passed, found.failed) == (3, 1, {"b": "no_tag", "c": "bad_json"})
    with pytest.raises(DataError, match="no_tag: 1.*such as b"):
        found.require()


def test_the_reference_check_fails_a_maximum_reward_that_is_not_correct():
    task = FuncallTask()
    task.score = lambda problem, text: Score(1.0, "full", {}, False)
    reasons = set(check_reference_solutions(task, ABC).failed.values())
    assert reasons == {"maximum reward but not correct"}


def test_the_reference_check_of_no_problem_raises():
    with pytest.raises(DataError):
        check_reference_solutions(FuncallTask(), []).require()


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_reference_solutions_of_the_toolbox_pass(split):
    task = tasks.load("funcall")
    assert check_reference_solutions(task, task.problems(split, 1000)).require().n >= 999


GLAIVE = pytest.mark.parametrize(
    "name", ["glaive_v2_en_300", "glaive_format_short", "glaive_format_converted"]
)


@pytest.fixture
def glaive(shared_data, name):
    """The file of a set's rows."""
    return shared_data / "function_calling" / f"{name}.jsonl"


@functools.cache  # reading takes seconds
def task_of(path):
    return FuncallTask(path)


@GLAIVE
def test_reference_solutions_of_glaive_rows_pass(glaive):
    task = task_of(glaive)
    problems = everything(task)
    assert len(problems) == task.ledger.kept == sum(1 for _ in local_rows(glaive)), task.ledger.lost
    check_reference_solutions(task, problems).require()


@GLAIVE
def test_the_answer_of_a_glaive_row_is_not_part_of_its_prompt(glaive):
    for problem in everything(task_of(glaive)):
        assert problem.messages[-1]["role"] != "assistant"
        said = [call for m in problem.messages for call in tool_calls.parse_calls(m["content"])]
        assert not any(problem.gold == {"name": c.name, "arguments": c.arguments} for c in said)


@pytest.mark.parametrize("name", ["glaive_format_short"])
def test_what_is_written_of_glaive_rows_is_read_again(glaive):
    ledger = Ledger("glaive")
    # the last hundred have calls that no tag marks
    given = list(local_rows(glaive))[-200:]
    rows = list(public_rows.conversation_rows(given, "glaive", ledger, domain="real"))
    assert len(rows) > 190
    assert any(tool_calls.CALL_TAG in m["content"] for row in rows for m in row["messages"][1:-1])
    for row in rows:
        assert conversations.check_row(row, "real", "row")["messages"] == row["messages"]


@GLAIVE
def test_golds_of_glaive_rows_are_the_ground_truth(glaive, name):
    rows = local_rows(glaive.with_name("common_non_bfcl.parquet"))
    truth = {row["id"]: json.loads(row["ground_truth"]) for row in rows}
    known = [problem for problem in everything(task_of(glaive)) if truth.get(problem.id)]
    assert all(problem.gold == truth[problem.id][0] for problem in known)
    assert len(known) > 900 or name != "glaive_format_short"


@GLAIVE
def test_canonical_calls_of_glaive_rows_are_correct(glaive):
    task = task_of(glaive)
    for problem in everything(task):
        if problem.gold:
            text = tool_calls.format_call(problem.gold["name"], problem.gold["arguments"])
            assert task.score(problem, text).correct


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
