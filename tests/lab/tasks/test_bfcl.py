"""The leaderboard's rules: a table of calls with their tiers, only correct calls score, every
source, the command."""

import json
import random
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from jsonl import write
from raising import raising

from codechat import cli, tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import DataError, MissingFile
from codechat.runs.run import Run
from codechat.tasks.base import Problem, check_reference_solutions
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat_lab.serve.call_grammar import prompt_grammar
from codechat_lab.tasks.bfcl import task as bfcl
from codechat_lab.tasks.bfcl.matching import fault_of_calls
from codechat_lab.tasks.bfcl.task import TIERS, BfclTask

TAG = "<functioncall> "
TASK = BfclTask("embedded")
PROBLEMS = {p.id: p for p in TASK.problems("test")}


def call(name: str, arguments: dict[str, Any] | None = None) -> str:
    return TAG + json.dumps({"name": name, "arguments": arguments or {}})


def timer(minutes: Any = 12) -> str:
    return call("set_timer", {"minutes": minutes})


def pay(account: Any = "DE-7", amount: Any = 50) -> str:
    return call("bank.transfer", {"account": account, "amount": amount})


class Verdict(NamedTuple):
    """A completion for a problem, and its tier."""

    problem: str
    tier: str
    text: str


def verdict(line: str) -> Verdict:
    """Of a row [problem, tier, completion as calls [name, arguments] or as text, and sometimes
    why]."""
    problem, tier, said, *_ = json.loads(line)
    if not isinstance(said, str):
        said = "".join(call(name, arguments) for name, arguments in said)
    return Verdict(problem, tier, said)


TABLE = [
    verdict(line)
    for line in Path(__file__).with_name("bfcl_verdicts.jsonl").read_text().splitlines()
]


def test_table_of_verdicts() -> None:
    for problem, tier, text in TABLE:
        score = TASK.score(PROBLEMS[problem], text)
        assert score.tier == tier, (problem, text)
        assert score.reward == float(tier == "full"), (problem, text)
        assert score.correct == (tier == "full"), (problem, text)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_has_right_and_wrong_completions_in_the_table(name: str) -> None:
    assert {row.tier == "full" for row in TABLE if row.problem == name} == {True, False}


def test_every_tier_has_a_completion_in_the_table() -> None:
    assert {row.tier for row in TABLE} == set(TIERS)


PUBLISHED = list(read_rows(Path(__file__).with_name("bfcl_published.jsonl")))


@pytest.mark.parametrize("id", [row["id"] for row in PUBLISHED if "id" in row])
def test_verdicts_are_those_of_the_published_checker_or_the_reason_is_known(id: str) -> None:
    """`tools/bfcl_agreement.py --table` writes what the checker says."""
    problem = bfcl.problem_of(next(row for row in PUBLISHED if row.get("id") == id))
    for row in PUBLISHED:
        if row.get("problem") == id:
            score = TASK.score(problem, row["text"])
            assert score.tier == row["ours"], row["text"]
            assert score.correct == row["published"] or row["why"]


CALLED = [problem for problem in PROBLEMS.values() if problem.gold["expect"] == "calls"]


def in_python(problem: Problem) -> str:
    """The reference solution as a list of calls of Python."""
    written = []
    for one in tool_calls.parse_calls(TASK.gold(problem)):
        arguments = ", ".join(f"{name}={value!r}" for name, value in one.arguments.items())
        written.append(f"{one.name}({arguments})")
    return f"[{', '.join(written)}]"


def test_reference_solutions_are_right() -> None:
    assert check_reference_solutions(TASK, PROBLEMS.values()).require().n == 29


@pytest.mark.parametrize("problem", CALLED, ids=lambda problem: problem.id)
def test_reference_solutions_are_right_as_calls_of_python(problem: Problem) -> None:
    assert TASK.score(problem, in_python(problem)).correct


def test_making_every_call_never_scores() -> None:
    golds = "".join(TASK.gold(problem) for problem in CALLED)
    for problem in PROBLEMS.values():
        assert not TASK.score(problem, golds).correct


@pytest.mark.parametrize("problem", CALLED, ids=lambda problem: problem.id)
def test_a_wrong_call_or_a_second_one_beside_the_right_one_never_scores(problem: Problem) -> None:
    text = TASK.gold(problem)
    for more in (text, timer(99), TAG + "{", TAG + "[]", TAG):
        assert not TASK.score(problem, text + more).correct
        assert not TASK.score(problem, more + text).correct


@pytest.mark.parametrize("words", ["full 1.0 ", "Let me call that.\n", "[] "])
def test_words_before_the_right_call_change_nothing(words: str) -> None:
    for problem in CALLED:
        assert TASK.score(problem, words + TASK.gold(problem)).correct


@pytest.mark.parametrize(
    "value",
    [
        "6*2",
        "int('12')",
        "12 if True else 0",
        "[x for x in [12]]",
        "(12))(",
        "12, minutes=12",
        "f'{12}'",
        "12j",
        "b'12'",
        "...",
        "{12}",
    ],
)
def test_a_call_of_python_with_more_than_literals_is_no_answer(value: str) -> None:
    score = TASK.score(PROBLEMS["float_for_int"], f"[set_timer(minutes={value})]")
    assert score.tier in ("no_call", "unreadable")
    assert not score.correct


@pytest.mark.parametrize(
    "text",
    [
        "[set_timer(12)]",
        "[set_timer(*[12])]",
        "[set_timer(**{'minutes': 12})]",
        "[[set_timer](minutes=12)]",
        "[set_timer(minutes=12)]; x",
        "[set_timer(minutes=12), 5]",
        "I call [set_timer(minutes=12)]",
        "set_timer(minutes=12) # done",
        "lambda: set_timer(minutes=12)",
    ],
)
def test_python_that_is_more_than_calls_is_no_answer(text: str) -> None:
    score = TASK.score(PROBLEMS["float_for_int"], text)
    assert score.tier in ("no_call", "unreadable")
    assert not score.correct


@pytest.mark.parametrize(
    "text", ["[set_timer(minutes=open({mark!r}, 'w'))]", "[open(file={mark!r}, mode='w')]"]
)
def test_calls_of_python_are_not_executed(text: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    assert not TASK.score(PROBLEMS["float_for_int"], text.format(mark=str(mark))).correct
    assert not mark.exists()


def deep_texts(depth: int) -> list[str]:
    deep = "[" * depth + "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    return [
        deep,
        f"[f(a={deep})]",
        "f(" * depth + ")" * depth,
        f"[f{'.a' * depth}(b=1)]",
        f"f({deep}",
        f"[f(a={'-' * depth}1)]",
        f"[f(a={'9' * depth})]",
        timer(10**300),
        timer("@").replace('"@"', deep),
        timer("@").replace('"@"', objects),
    ]


@pytest.mark.parametrize("depth", [50, 1_000, 9_000, 100_000])
def test_deep_and_giant_completions_neither_crash_nor_score(depth: int) -> None:
    for text in deep_texts(depth):
        for problem in ("float_for_int", "object", "nested_list"):
            assert not TASK.score(PROBLEMS[problem], text).correct


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "1" + "0" * 400])
@pytest.mark.parametrize("problem", ["float_for_int", "int_for_float", "list_of_floats"])
def test_nan_and_infinity_match_nothing(problem: str, value: str) -> None:
    assert not TASK.score(PROBLEMS[problem], pay("DE-7", "@").replace('"@"', value)).correct


def test_a_number_that_no_float_holds_is_a_wrong_value() -> None:
    huge = f"[bank.transfer(account='DE-7', amount=1{'0' * 400})]"
    assert TASK.score(PROBLEMS["int_for_float"], huge).tier == "wrong_value"


def can_match(calls: list[Any], ways: list[list[int]]) -> bool:
    """By every assignment."""
    for order in permutations(calls):
        given = [arguments["a"] for _, arguments in order]
        if all(value in way for value, way in zip(given, ways, strict=True)):
            return True
    return False


def test_calls_are_matched_exactly_where_greedy_matching_fails() -> None:
    """Over random tables of who matches whom."""
    rng = random.Random(1)
    tools = {"f": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    for _ in range(300):
        size = rng.randint(1, 5)
        ways = [rng.sample(range(size), rng.randint(1, size)) for _ in range(size)]
        answers = [{"name": "f", "arguments": {"a": way}} for way in ways]
        calls = [("f", {"a": rng.randrange(size)}) for _ in range(size)]
        assert (fault_of_calls(calls, answers, tools) is None) == can_match(calls, ways)


NUMBERS = {"base": {"type": "integer"}, "height": {"type": "integer"}}
AREA = {
    "type": "dict",
    "required": ["base", "height"],
    "properties": NUMBERS | {"unit": {"type": "string"}},
}
ASKED = [[{"role": "user", "content": "Area of a triangle, base 10, height 5?"}]]
QUESTION = {
    "id": "simple_python_0",
    "question": ASKED,
    "function": [{"name": "area", "description": "d", "parameters": AREA}],
}
ANSWER = {
    "id": "simple_python_0",
    "ground_truth": [{"area": {"base": [10], "height": [5], "unit": ["units", ""]}}],
}
IDLE = {
    "id": "live_irrelevance_0-0-0",
    "question": QUESTION["question"],
    "function": QUESTION["function"],
}


@pytest.fixture
def leaderboard(tmp_path: Path) -> Path:
    folder = tmp_path / "leaderboard"
    (folder / "possible_answer").mkdir(parents=True)
    write(folder / "BFCL_v4_simple_python.json", [QUESTION])
    write(folder / "possible_answer" / "BFCL_v4_simple_python.json", [ANSWER])
    write(folder / "BFCL_v4_live_irrelevance.json", [IDLE])
    write(folder / "BFCL_v4_memory.json", [{"id": "memory_0"}])
    write(folder / "README.json", [{"about": "data"}])
    return folder


@pytest.fixture
def of_files(leaderboard: Path) -> BfclTask:
    return tasks.load("bfcl", source=str(leaderboard))


def problem_of(task: BfclTask, category: str) -> Problem:
    return next(p for p in task.problems("test") if p.meta["category"] == category)


def test_a_named_category_without_a_problem_is_an_error(leaderboard: Path) -> None:
    assert len(BfclTask(str(leaderboard), "simple").rows) == 1
    with raising(DataError, "no problem of category multiple"):
        BfclTask(str(leaderboard), "simple+multiple")


def test_the_leaderboards_own_files_are_read(of_files: BfclTask) -> None:
    problems = of_files.problems("test")
    assert {problem.meta["category"] for problem in problems} == {"simple", "live_irrelevance"}
    assert check_reference_solutions(of_files, problems).require().n == 2


def test_one_of_the_leaderboards_files_is_read(leaderboard: Path) -> None:
    one = BfclTask(source=str(leaderboard / "BFCL_v4_simple_python.json"))
    assert len(one.problems("test")) == 1


def test_an_answer_to_the_leaderboards_files_is_scored(of_files: BfclTask) -> None:
    assert of_files.score(problem_of(of_files, "simple"), "[area(base=10, height=5)]").correct


def test_a_prompt_offers_functions_in_the_compact_style(of_files: BfclTask) -> None:
    system, user = of_files.prompt(problem_of(of_files, "simple"))
    assert (system["role"], user["role"]) == ("system", "user")
    assert "area(base: integer, height: integer, unit?: string)" in system["content"]


@pytest.mark.parametrize(
    "style, shown",
    [("described", f"unit?: string)\n{tool_lists.NOTHING_FITS}"), ("json", '"required"')],
)
def test_a_prompt_offers_functions_in_the_style_of_an_evaluation(
    style: str, shown: str, of_files: BfclTask
) -> None:
    of_files.tools_style = style
    assert shown in of_files.prompt(problem_of(of_files, "simple"))[0]["content"]


def test_without_a_source_the_downloaded_wheel_is_read(leaderboard: Path, home: Path) -> None:
    data = home / "data" / "hub" / "bfcl" / "bfcl_eval" / "data"
    data.parent.mkdir(parents=True)
    leaderboard.rename(data)
    assert len(tasks.load("bfcl").problems("test")) == 2


def test_without_a_source_and_a_download_the_command_is_named() -> None:
    with raising(MissingFile, "codechat download bfcl"):
        tasks.load("bfcl")


SIDES = {"base": [10], "height": [5]}
GOOD = {
    "id": "a",
    "category": "simple",
    "ground_truth": ANSWER["ground_truth"],
    "question": QUESTION["question"],
    "functions": QUESTION["function"],
}
UNSOLVABLE = pytest.mark.parametrize(
    "truth",
    [
        [{"area": SIDES | {"base": []}}],
        [{"area": {"height": [5]}}],
        [{"area": SIDES | {"depth": [3]}}],
        [{"area": SIDES | {"base": 10}}],
        [{"area": SIDES | {"base": ["", ""]}}],
        [{"volume": SIDES}],
        [],
        "[",
        [{}],
        None,
    ],
    ids=str,
)


@UNSOLVABLE
def test_an_unsolvable_row_is_lost_and_counted(truth: Any, tmp_path: Path) -> None:
    rows = [GOOD | {"id": f"a{i}"} for i in range(30)]
    write(tmp_path / "rows.jsonl", [*rows, GOOD | {"ground_truth": truth}])
    assert BfclTask(source=str(tmp_path)).ledger.lost.total() == 1


def test_an_object_whose_entries_list_no_values_makes_its_row_unsolvable(tmp_path: Path) -> None:
    bad = json.loads(json.dumps(GOOD))
    properties = bad["functions"][0]["parameters"]["properties"]
    properties["base"]["type"] = "dict"
    bad["ground_truth"][0]["area"]["base"] = [{"size": 5}]
    rows = [GOOD | {"id": f"a{i}"} for i in range(30)]
    write(tmp_path / "rows.jsonl", [*rows, bad])
    assert BfclTask(source=str(tmp_path)).ledger.lost.total() == 1


@UNSOLVABLE
def test_too_many_unsolvable_rows_are_an_error(truth: Any, tmp_path: Path) -> None:
    bad = GOOD | {"ground_truth": truth}
    rows = [GOOD | {"id": "a0"}, GOOD | {"id": "a1"}, bad, bad]
    with pytest.raises(DataError, match="2 of 4"):
        BfclTask(source=str(write(tmp_path / "rows.jsonl", rows)))


def test_real_problems_pass_the_reference_check_but_for_four_that_no_call_solves(
    shared_data: Path,
) -> None:
    task = BfclTask(
        source=str(shared_data / "function_calling" / "bfcl_v4" / "all_single_turn.parquet")
    )
    problems = task.problems("test")
    assert check_reference_solutions(task, problems).require().n == len(problems) == 3487
    assert dict(task.ledger.lost) == {bfcl.UNSOLVABLE: 4}
    missing = set(bfcl.CATEGORIES) - {p.meta["category"] for p in problems}
    assert missing == {"simple_java", "simple_javascript"}


JAVA = {
    "id": "simple_java_0",
    "category": "simple_java",
    "question": ASKED,
    "functions": [
        {
            "name": "area",
            "description": "Area of a triangle.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "base": {"type": "long", "description": "The base."},
                    "marks": {
                        "type": "Array",
                        "items": {"type": "String"},
                        "description": "Its marks.",
                    },
                },
                "required": ["base"],
            },
        }
    ],
    "ground_truth": [{"area": {"base": [10], "marks": ["", ["a"]]}}],
}


def test_functions_of_java_are_offered_with_texts_that_name_the_type() -> None:
    problem = bfcl.problem_of(JAVA)
    (tool,) = problem.gold["listed"]
    assert "Java 8 SDK syntax" in tool["description"]
    assert tool["parameters"]["properties"]["base"] == {
        "type": "string",
        "description": "The base. This is Java long type parameter in string representation.",
    }
    assert "elements are of type String" in json.dumps(tool["parameters"]["properties"]["marks"])


def test_the_reference_solution_of_java_is_written_in_java() -> None:
    problem = bfcl.problem_of(JAVA)
    assert TASK.gold(problem) == call("area", {"base": "10L"})
    assert TASK.score(problem, TASK.gold(problem)).correct


def test_a_row_of_java_whose_answer_no_text_means_is_lost() -> None:
    """The published rules read no number inside a list of texts."""
    truth = [{"area": {"base": [10], "marks": [["a", 5]]}}]
    assert bfcl.problem_of(JAVA | {"ground_truth": truth}) == bfcl.UNSOLVABLE


@pytest.mark.parametrize(
    "text",
    ["new String[]{" * 50_000, "new HashMap<" * 50_000, "{" * 200_000],
    ids=["array", "map", "braces"],
)
def test_hostile_literals_take_no_long_time(text: str, quick: Callable[..., Any]) -> None:
    problem = bfcl.problem_of(JAVA)
    said = call("area", {"base": "10L", "marks": text})
    assert quick(2, TASK.score, problem, said).tier == "wrong_type"


class Evaluated(NamedTuple):
    """A root with the run "evaluate" of a new model, its row, and what was printed."""

    root: Path
    row: Any
    shown: str


EVALUATE = (
    "evaluate --ckpt new --task bfcl:source=embedded --n 1 --ks 1 --temperature 0 "
    "--max-new-tokens 4"
).split()
CATEGORIES = {problem.meta["category"] for problem in PROBLEMS.values()}


@pytest.fixture
def evaluated(make_run: Any, home: Path, capsys: pytest.CaptureFixture) -> Evaluated:
    """Four tokens of a new model are no call, so that it is silent everywhere."""
    make_run("new", block_size=256)
    assert cli.main(EVALUATE) == 0
    row = Run.open("evaluate").evals().iloc[0]
    return Evaluated(home, row, capsys.readouterr().out)


def test_the_command_gives_a_score_for_each_category(evaluated: Evaluated) -> None:
    for name in CATEGORIES:
        assert f"  category {name}: pass@1 = " in evaluated.shown
    assert f"mean over {len(CATEGORIES)} of category" in evaluated.shown


def test_the_mean_of_categories_counts_each_once(evaluated: Evaluated) -> None:
    row = evaluated.row
    assert sum(row[f"{name}/n"] for name in CATEGORIES) == row["n_problems"] == 29
    mean = sum(row[f"{name}/pass@1"] for name in CATEGORIES) / len(CATEGORIES)
    assert row["mean_of_groups"] == pytest.approx(mean)


def test_calls_and_silence_are_scored_apart_and_silence_alone_has_no_score(
    evaluated: Evaluated,
) -> None:
    row = evaluated.row
    assert row["call/n"] + row["no call/n"] == 29
    assert row["no call/pass@1"] == 1
    assert row["call/pass@1"] == 0
    assert row["harmonic_mean"] == 0
    assert "  harmonic mean of these: 0.000" in evaluated.shown


def test_silence_is_correct_where_nothing_is_offered(evaluated: Evaluated) -> None:
    rows = read_rows(Run.open("evaluate").path / "examples.jsonl")
    examples = {row["problem"]: row for row in rows}
    assert examples["no_tools"]["correct"]


def test_a_split_that_the_leaderboard_lacks_is_refused(
    make_run: Any, capsys: pytest.CaptureFixture
) -> None:
    make_run("new", block_size=256)
    assert cli.main([*EVALUATE, "--split", "select"]) == 2
    assert "required: one of test" in capsys.readouterr().err


def _in_the_order_of(value: Any, schema: Any) -> Any:
    """The value with its keys in the order of the schema, in which masks hold them."""
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties") or {}
    if isinstance(value, list):
        return [_in_the_order_of(one, schema.get("items")) for one in value]
    if not isinstance(value, dict):
        return value
    names = [name for name in properties if name in value] + [
        name for name in value if name not in properties
    ]
    return {name: _in_the_order_of(value[name], properties.get(name)) for name in names}


def _rejected(task: BfclTask, style: str) -> list[str]:
    """Ids of problems whose gold calls the masks of their own list reject, though the calls fit
    their schemas."""
    tok = tokenizer.load("bytes")
    found = []
    task.tools_style = style
    for problem in (one for one in task.rows if one.gold["expect"] == "calls"):
        schemas = {tool["name"]: tool["parameters"] for tool in problem.gold["listed"]}
        calls = tool_calls.parse_calls(task.gold(problem))
        if all(
            jsonschema.Draft202012Validator(schemas[one.name]).is_valid(one.arguments)
            for one in calls
        ):
            texts = [
                tool_calls.format_call(one.name, _in_the_order_of(one.arguments, schemas[one.name]))
                for one in calls
            ]
            ids = chat.completion_ids("".join(texts), tok)
            grammar = prompt_grammar(task.prompt(problem), tok, "reserved")
            if grammar.begin().matcher.validate_tokens(ids) < len(ids) - 1:
                found.append(problem.id)
    return found


@pytest.mark.parametrize("style", tool_lists.STYLES)
def test_masks_allow_the_gold_calls(style: str) -> None:
    assert _rejected(TASK, style) == []


@pytest.mark.slow
@pytest.mark.parametrize("style", ("compact", "described"))
def test_masks_allow_the_gold_calls_of_the_real_problems(style: str, shared_data: Path) -> None:
    """But for numbers that the answer writes with an exponent, and keys that no schema lists."""
    task = BfclTask(
        source=str(shared_data / "function_calling" / "bfcl_v4" / "all_single_turn.parquet")
    )
    exponents = ["simple_python_38", "parallel_97", "parallel_multiple_139"]
    assert sorted(_rejected(task, style)) == sorted([*exponents, "live_multiple_189-83-0"])
