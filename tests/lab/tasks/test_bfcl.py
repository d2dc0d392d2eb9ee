"""The leaderboard's rules: a table of calls with their tiers, only correct calls score, every
source, the command."""

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonl import write
from raising import raising

from codechat import cli, tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import DataError, MissingFile
from codechat.runs.run import Run
from codechat.tasks.base import check_reference_solutions
from codechat.text import chat, tokenizer
from codechat_lab.serve.call_grammar import prompt_grammar
from codechat_lab.tasks.bfcl import task as bfcl
from codechat_lab.tasks.bfcl.matching import fault_of_calls
from codechat_lab.tasks.bfcl.task import TIERS, BfclTask

TAG = "<functioncall> "
TASK = BfclTask("embedded")
PROBLEMS = {p.id: p for p in TASK.problems("test")}


def call(name: str, /, **arguments: Any) -> str:
    return TAG + json.dumps({"name": name, "arguments": arguments})


def timer(minutes: Any = 12, **more: Any) -> str:
    return call("set_timer", minutes=minutes, **more)


def pay(account: Any = "DE-7", amount: Any = 50, **more: Any) -> str:
    return call("bank.transfer", account=account, amount=amount, **more)


# Rows [problem, tier, completion as calls [name, arguments] or as text, and sometimes why].
TABLE = [
    json.loads(line)
    for line in Path(__file__).with_name("bfcl_verdicts.jsonl").read_text().splitlines()
]


def test_table_of_verdicts() -> None:
    for name, tier, said, *_ in TABLE:
        text = (
            said
            if isinstance(said, str)
            else "".join(call(name, **arguments) for name, arguments in said)
        )
        score = TASK.score(PROBLEMS[name], text)
        assert (score.tier, score.reward, score.correct) == (
            tier,
            float(tier == "full"),
            tier == "full",
        ), (name, text)
    for name in PROBLEMS:
        assert {tier == "full" for problem, tier, *_ in TABLE if problem == name} == {
            True,
            False,
        }, name
    assert {tier for _, tier, *_ in TABLE} == set(TIERS)


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


def test_gold_answers_pass_in_both_written_forms() -> None:
    assert check_reference_solutions(TASK, PROBLEMS.values()).require().n == 29
    for problem in PROBLEMS.values():
        if problem.gold["expect"] == "calls":
            calls = chat.parse_calls(TASK.gold(problem))
            python = ", ".join(
                f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})"
                for c in calls
            )
            assert TASK.score(problem, f"[{python}]").correct, python


def test_making_every_call_or_a_wrong_one_beside_the_right_one_never_scores() -> None:
    golds = "".join(TASK.gold(p) for p in PROBLEMS.values() if p.gold["expect"] == "calls")
    for problem in PROBLEMS.values():
        assert not TASK.score(problem, golds).correct
        if problem.gold["expect"] == "calls":
            text = TASK.gold(problem)
            for more in (text, timer(99), TAG + "{", TAG + "[]", TAG):
                assert not TASK.score(problem, text + more).correct
                assert not TASK.score(problem, more + text).correct
            for fine in ("full 1.0 ", "Let me call that.\n", "[] "):
                assert TASK.score(problem, fine + text).correct


def test_python_that_is_more_than_calls_with_literals_is_no_answer_and_is_not_executed(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "executed"
    values = [
        "6*2",
        "int('12')",
        "12 if True else 0",
        "[x for x in [12]]",
        "(12))(",
        "12, minutes=12",
        "f'{12}'",
    ]
    values += ["12j", "b'12'", "...", "{12}", f"open({str(mark)!r}, 'w')"]
    others = [
        "[set_timer(12)]",
        "[set_timer(*[12])]",
        "[set_timer(**{'minutes': 12})]",
        "[[set_timer](minutes=12)]",
    ]
    others += [
        "[set_timer(minutes=12)]; x",
        "[set_timer(minutes=12), 5]",
        "I call [set_timer(minutes=12)]",
    ]
    others += [
        "set_timer(minutes=12) # done",
        "lambda: set_timer(minutes=12)",
        f"[open(file={str(mark)!r}, mode='w')]",
    ]
    for text in [f"[set_timer(minutes={value})]" for value in values] + others:
        score = TASK.score(PROBLEMS["float_for_int"], text)
        assert score.tier in ("no_call", "unreadable") or text.startswith("[open(file="), text
        assert not score.correct
    assert not mark.exists()


def test_deep_and_giant_completions_neither_crash_nor_score() -> None:
    for depth in (50, 1_000, 9_000, 100_000):
        deep = "[" * depth + "]" * depth
        texts = [
            deep,
            f"[f(a={deep})]",
            "f(" * depth + ")" * depth,
            f"[f{'.a' * depth}(b=1)]",
            f"f({deep}",
        ]
        texts += [f"[f(a={'-' * depth}1)]", f"[f(a={'9' * depth})]", timer(10**300)]
        texts += [
            timer("@").replace('"@"', text) for text in (deep, '{"a":' * depth + "1" + "}" * depth)
        ]
        for text in texts:
            for problem in ("float_for_int", "object", "nested_list"):
                assert not TASK.score(PROBLEMS[problem], text).correct


def test_nan_and_infinity_match_nothing() -> None:
    for value in ("NaN", "Infinity", "1e999", "1" + "0" * 400):
        for problem in ("float_for_int", "int_for_float", "list_of_floats"):
            assert not TASK.score(PROBLEMS[problem], pay("DE-7", "@").replace('"@"', value)).correct
    huge = f"[bank.transfer(account='DE-7', amount=1{'0' * 400})]"
    assert TASK.score(PROBLEMS["int_for_float"], huge).tier == "wrong_value"


def test_calls_are_matched_exactly_where_greedy_matching_fails() -> None:
    """Against every assignment, over random tables of who matches whom."""
    rng = random.Random(1)
    tools = {"f": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    for _ in range(300):
        size = rng.randint(1, 5)
        ways = [rng.sample(range(size), rng.randint(1, size)) for _ in range(size)]
        answers = [{"name": "f", "arguments": {"a": each}} for each in ways]
        calls = [("f", {"a": rng.randrange(size)}) for _ in range(size)]
        possible = any(
            all(c[1]["a"] in w for c, w in zip(order, ways)) for order in permutations(calls)
        )
        assert (fault_of_calls(calls, answers, tools) is None) == possible


NUMBERS = {"base": {"type": "integer"}, "height": {"type": "integer"}}
AREA = {
    "type": "dict",
    "required": ["base", "height"],
    "properties": NUMBERS | {"unit": {"type": "string"}},
}
ASKED = [[{"role": "user", "content": "Area of a triangle, base 10, height 5?"}]]
QUESTION = dict(
    id="simple_python_0",
    question=ASKED,
    function=[dict(name="area", description="d", parameters=AREA)],
)
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


def test_the_leaderboards_own_files_are_read(leaderboard: Path) -> None:
    task = tasks.load("bfcl", source=str(leaderboard))
    problems = {p.meta["category"]: p for p in task.problems("test")}
    assert problems.keys() == {"simple", "live_irrelevance"}
    assert check_reference_solutions(task, problems.values()).require().n == 2
    assert [m["role"] for m in task.prompt(problems["simple"])] == ["system", "user"]
    assert (
        "area(base: integer, height: integer, unit?: string)"
        in task.prompt(problems["simple"])[0]["content"]
    )
    assert task.score(problems["simple"], "[area(base=10, height=5)]").correct
    task.tools_style = "described"  # as an evaluation sets it
    assert task.prompt(problems["simple"])[0]["content"].endswith(
        f"unit?: string)\n{chat.NOTHING_FITS}"
    )
    one = BfclTask(source=str(leaderboard / "BFCL_v4_simple_python.json"))
    one.tools_style = "json"
    assert len(one.problems("test")) == 1
    assert '"required"' in one.prompt(one.problems("test")[0])[0]["content"]


def test_without_a_source_the_downloaded_wheel_is_read(
    leaderboard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codechat.runs.paths.ROOT", tmp_path / "home")
    with raising(MissingFile, "codechat download bfcl"):
        tasks.load("bfcl")
    data = tmp_path / "home" / "data" / "hub" / "bfcl" / "bfcl_eval" / "data"
    data.parent.mkdir(parents=True)
    leaderboard.rename(data)
    assert len(tasks.load("bfcl").problems("test")) == 2


def test_unsolvable_rows_are_lost_and_too_many_are_an_error(tmp_path: Path) -> None:
    columns = {"question": QUESTION["question"], "functions": QUESTION["function"]}
    good = {"id": "a", "category": "simple", "ground_truth": ANSWER["ground_truth"]} | columns
    rows = [good | {"id": f"a{i}"} for i in range(30)]
    sides = {"base": [10], "height": [5]}
    arguments = (
        sides | {"base": []},
        {"height": [5]},
        sides | {"depth": [3]},
        sides | {"base": 10},
    )
    for truth in [
        *([{"area": given}] for given in arguments),
        [{"volume": sides}],
        [],
        "[",
        [{}],
        None,
    ]:
        bad = good | {"ground_truth": truth}
        assert (
            BfclTask(
                source=str(write(tmp_path / "rows.jsonl", [*rows, bad]).parent)
            ).ledger.lost.total()
            == 1
        )
        with pytest.raises(DataError, match="2 of 4"):
            BfclTask(source=str(write(tmp_path / "rows.jsonl", [*rows[:2], bad, bad])))


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
    assert TASK.gold(problem) == call("area", base="10L")
    assert TASK.score(problem, TASK.gold(problem)).correct


def test_a_row_of_java_whose_answer_no_text_means_is_lost() -> None:
    """The published rules read no number inside a list of texts."""
    truth = [{"area": {"base": [10], "marks": [["a", 5]]}}]
    assert bfcl.problem_of(JAVA | {"ground_truth": truth}) == bfcl.UNSOLVABLE


def test_hostile_literals_take_no_long_time() -> None:
    problem = bfcl.problem_of(JAVA)
    for text in ("new String[]{" * 50_000, "new HashMap<" * 50_000, "{" * 200_000):
        assert TASK.score(problem, call("area", base="10L", marks=text)).tier == "wrong_type"


def test_the_command_gives_a_score_for_each_category(make_run: Any, capsys: Any) -> None:
    make_run("new", block_size=256)
    words = "evaluate --ckpt new --task bfcl:source=embedded --n 1 --ks 1 --temperature 0 --max-new-tokens 4".split()
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    row = Run.open("evaluate").evals().iloc[0]
    categories = {p.meta["category"] for p in PROBLEMS.values()}
    assert all(f"  category {name}: pass@1 = " in shown for name in categories)
    assert f"mean over {len(categories)} of category" in shown
    assert sum(row[f"{name}/n"] for name in categories) == row["n_problems"] == 29
    assert row["mean_of_groups"] == pytest.approx(
        sum(row[f"{name}/pass@1"] for name in categories) / len(categories)
    )
    assert row["call/n"] + row["no call/n"] == 29
    assert row["no call/pass@1"] == 1
    assert row["harmonic_mean"] == row["call/pass@1"] == 0, "silence has no score"
    assert "  harmonic mean of these: 0.000" in shown
    examples = {e["problem"]: e for e in read_rows(Run.open("evaluate").path / "examples.jsonl")}
    assert examples["no_tools"]["correct"], "four tokens of a new model are no call"
    assert cli.main([*words, "--split", "select", "--run-name", "b"]) == 2
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
        calls = chat.parse_calls(task.gold(problem))
        if all(
            jsonschema.Draft202012Validator(schemas[one.name]).is_valid(one.arguments)
            for one in calls
        ):
            texts = [
                chat.format_call(one.name, _in_the_order_of(one.arguments, schemas[one.name]))
                for one in calls
            ]
            ids = chat.completion_ids("".join(texts), tok)
            grammar = prompt_grammar(task.prompt(problem), tok, "reserved")
            if grammar.begin().matcher.validate_tokens(ids) < len(ids) - 1:
                found.append(problem.id)
    return found


@pytest.mark.parametrize("style", chat.STYLES)
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
