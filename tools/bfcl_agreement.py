"""Our verdicts on function calls beside those of the leaderboard's published checker.

    codechat download bfcl
    python tools/bfcl_agreement.py --answers 2000                 made answers, right and wrong ones
    python tools/bfcl_agreement.py --rows runs/evaluate ...       answers of evaluations
    python tools/bfcl_agreement.py --episodes 400                 made episodes of several turns
    python tools/bfcl_agreement.py --table tests/lab/tasks/bfcl_published.jsonl     written by hand;
                                                                  rewrites what the checker says

The published `ast_checker` and the reader of Python calls run from the unpacked wheel in a
process of their own. Each difference is printed with its kind."""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.atomic_files import json_lines, read_rows, write_atomic
from codechat.runs import paths
from codechat.tasks.base import Problem
from codechat.text import tool_calls
from codechat_lab.tasks.bfcl import literals, multi_turn
from codechat_lab.tasks.bfcl.multi_turn import MultiTurnTask
from codechat_lab.tasks.bfcl.task import DOWNLOADED, BfclTask, calls_of, problem_of

# What the published modules import and these functions do not need.
PEER = """
import ast, contextlib, io, json, sys, types
root = sys.argv[1]
sys.path.insert(0, root)

class Any(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None

class Plain(dict):
    def __missing__(self, name):
        return types.SimpleNamespace(underscore_to_dot=False)

for name in ("tenacity", "bfcl_eval.utils", "bfcl_eval.model_handler.parser.java_parser",
             "bfcl_eval.model_handler.parser.js_parser", "bfcl_eval.model_handler.parser.json_parser",
             "bfcl_eval.model_handler.parser.xml_parser"):
    sys.modules[name] = Any(name)
sys.modules["bfcl_eval.utils"].__all__ = []
config = types.ModuleType("bfcl_eval.constants.model_config")
config.MODEL_CONFIG_MAPPING = Plain()
sys.modules[config.__name__] = config
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.model_handler.utils import default_decode_ast_prompting

LANGUAGES = {"python": Language.PYTHON, "java": Language.JAVA, "javascript": Language.JAVASCRIPT}

def verdict(row):
    calls = row["calls"]
    if calls is None:
        try:
            calls = default_decode_ast_prompting(row["text"])
        except Exception as error:
            calls = None
    if row["expect"] == "none":
        return not calls
    if row["expect"] == "any":
        return bool(calls)
    if not calls:
        return False
    try:
        return ast_checker(row["functions"], calls, row["truth"], LANGUAGES[row["language"]],
                           row["category"], "model")["valid"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def episode(row):
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    # instances are kept by name: another sample of an entry would go on with them
    for name in [name for name in vars(utils) if name.endswith("_instance")]:
        delattr(utils, name)
    try:
        return multi_turn_checker(row["turns"], row["truth"], row["entry"], "", "model")["valid"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if sys.argv[2] == "episodes":
    verdict = episode
with contextlib.redirect_stdout(io.StringIO()):
    found = [verdict(json.loads(line)) for line in sys.stdin]
print(json.dumps(found))
"""


class Case(NamedTuple):
    """An answer to a problem. text: what the model said."""

    problem: Problem
    kind: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, default=paths.ROOT / DOWNLOADED)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help="runs of evaluate")
    parser.add_argument("--table", type=Path, help="problems, and answers with both verdicts")
    parser.add_argument("--show", type=int, default=3, help="examples of each kind of difference")
    given = parser.parse_args()
    if given.episodes:
        compare_episodes(given.wheel, given.episodes, given.seed)
        return
    if given.table:
        rewrite(given.table, given.wheel)
        return
    task = BfclTask(str(given.wheel))
    problems = {problem.id: problem for problem in task.rows}
    if given.rows:
        cases = list(evaluated(given.rows, problems))
    else:
        cases = list(made(list(problems.values()), task, given.answers, given.seed))
    differences = compare(cases, task, given.wheel)
    totals = Counter(case.kind for case in cases)
    apart = Counter(case.kind for case, _ in differences)
    for kind, n in sorted(totals.items()):
        print(f"{kind}: {n - apart[kind]} of {n} agree")
    print(f"all: {len(cases) - len(differences)} of {len(cases)} agree")
    shown = Counter[tuple[str, str]]()
    for case, theirs in differences:
        ours = task.score(case.problem, case.text).tier
        shown[ours, str(theirs)] += 1
        if shown[ours, str(theirs)] <= given.show:
            print(
                f"  {case.problem.id}, {case.kind}: ours {ours}, theirs {theirs}: {case.text[:300]}"
            )
            print(f"    accepted: {json.dumps(case.problem.gold['answers'])[:300]}")
    for (ours, theirs), n in shown.most_common():
        print(f"ours {ours}, theirs {theirs}: {n}")


def compare(cases: Sequence[Case], task: BfclTask, wheel: Path) -> list[tuple[Case, Any]]:
    """The cases in which the published checker says something else, with what it says."""
    return [
        (case, said)
        for case, said in zip(cases, published(cases, wheel), strict=True)
        if task.score(case.problem, case.text).correct != said
    ]


def published(cases: Sequence[Case], wheel: Path) -> list[bool | str]:
    """What the published checker says; a text is the exception that it raised."""
    return asked([row_of(case) for case in cases], wheel, "answers")


def asked(rows: Sequence[dict[str, Any]], wheel: Path, what: str) -> list[bool | str]:
    """The verdicts of the process that runs the published code."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PEER, str(wheel), what],
        input="\n".join(map(json.dumps, rows)),
        capture_output=True,
        text=True,
        check=True,
    )
    verdicts: list[bool | str] = json.loads(done.stdout)
    return verdicts


def rewrite(path: Path, wheel: Path) -> None:
    """Both verdicts on the answers of a table, whose first rows are the problems."""
    rows = list(read_rows(path))
    task = BfclTask("embedded")
    problems = {row["id"]: problem_of(row) for row in rows if "id" in row}
    answers = [row for row in rows if "problem" in row]
    cases = [Case(problems[row["problem"]], row["problem"], row["text"]) for row in answers]
    for row, case, said in zip(answers, cases, published(cases, wheel), strict=True):
        row["ours"] = task.score(case.problem, case.text).tier
        row["published"] = said
    write_atomic(path, json_lines(rows))
    apart = [row for row in answers if (row["ours"] == "full") != row["published"]]
    print(f"{path}: {len(answers) - len(apart)} of {len(answers)} agree")
    for row in apart:
        print(f"  {row}")


def row_of(case: Case) -> dict[str, Any]:
    """What the peer process needs. calls: of our own form; the published reader reads Python."""
    gold = case.problem.gold
    ours = tool_calls.CALL_TAG in case.text
    calls = [
        {c.name: c.arguments} for c in calls_of(case.text) if c.name and c.arguments is not None
    ]
    tools = gold["tools"]
    functions = [
        {"name": name, "parameters": {"type": "dict", **tool}} for name, tool in tools.items()
    ]
    return {
        "expect": gold["expect"],
        "category": case.problem.meta["category"],
        "language": next(iter(tools.values()))["language"] if tools else literals.PYTHON,
        "functions": functions,
        "truth": [{answer["name"]: answer["arguments"]} for answer in gold["answers"]],
        "calls": calls if ours else None,
        "text": case.text,
    }


def evaluated(runs: Sequence[Path], problems: dict[str, Problem]) -> Iterator[Case]:
    """The answers of evaluations."""
    for run in runs:
        for row in read_rows(run / "examples.jsonl"):
            if row["problem"] in problems:
                yield Case(problems[row["problem"]], row["checkpoint"], row["completion"])


# ---- episodes of several turns


def compare_episodes(wheel: Path, n: int, seed: int) -> None:
    """Print how many verdicts on made episodes agree, and those that do not."""
    task = MultiTurnTask(str(wheel))
    entries: dict[str, Any] = {}
    for category in multi_turn.CATEGORIES:
        for row in read_rows(task.data / f"BFCL_v4_multi_turn_{category}.json"):
            entries[row["id"]] = row
    rng = random.Random(seed)
    ours: list[Any] = []
    rows: list[dict[str, Any]] = []
    for _ in range(n):
        problem = rng.choice(task.rows)
        truth = [turn["expected"] for turn in problem.gold["turns"]]
        kind, turns = changed_turns(truth, rng)
        world = task.environment()
        world.reset(problem, 0)
        for calls in turns:
            texts = [multi_turn.named_call(call, problem) for call in calls]
            for text in ["\n".join(texts), "Done."] if texts else ["Done."]:
                world.step({"role": "assistant", "content": text})
        ours.append((kind, problem.id, world.score()))
        rows.append(
            {
                "turns": [[as_texts(calls)] if calls else [] for calls in turns],
                "truth": [as_texts(calls) for calls in truth],
                "entry": entries[problem.id],
            }
        )
    theirs = asked(rows, wheel, "episodes")
    totals = Counter(kind for kind, _, _ in ours)
    agreed: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    for (kind, id, score), said in zip(ours, theirs, strict=True):
        agreed[kind] += score.correct == said
        correct[kind] += score.correct
        if score.correct != said:
            print(f"  {id} {kind}: ours {score.tier}, theirs {said}")
    for kind, total in sorted(totals.items()):
        print(f"{kind}: {agreed[kind]} of {total} agree ({correct[kind]} correct)")
    print(f"all: {agreed.total()} of {n} agree")


def as_texts(calls: Sequence[multi_turn.Call]) -> list[str]:
    texts = []
    for name, positional, named in calls:
        words = [repr(value) for value in positional]
        words += [f"{key}={value!r}" for key, value in named.items()]
        texts.append(f"{name}({', '.join(words)})")
    return texts


def changed_turns(
    truth: Sequence[Sequence[multi_turn.Call]], rng: random.Random
) -> tuple[str, list[list[multi_turn.Call]]]:
    """The reference calls with one change, and its name."""
    turns = [[[name, list(pos), dict(named)] for name, pos, named in turn] for turn in truth]
    kind = rng.choice(("right", "a call less", "a call twice", "order", "value", "turns", "empty"))
    at = rng.choice([i for i, turn in enumerate(turns) if turn])
    turn = turns[at]
    place = rng.randrange(len(turn))
    if kind == "a call less":
        turn.pop(place)
    elif kind == "a call twice":
        turn.insert(place, turn[place])
    elif kind == "order":
        rng.shuffle(turn)
    elif kind == "turns":  # all calls in the first turn
        turns[0] = [call for turn in turns for call in turn]
        turns[1:] = [[turn[0]] if turn else [] for turn in turns[1:]]
    elif kind == "empty":
        turn.clear()
    elif kind == "value":
        named = turn[place][2]
        for key in list(named)[:1]:
            named[key] = changed(named[key], rng.choice(("another value", "another type")), rng)
    return kind, turns


# ---- made answers


def made(problems: Sequence[Problem], task: BfclTask, n: int, seed: int) -> Iterator[Case]:
    """n answers: the right ones changed in one place, in our form or as Python calls."""
    rng = random.Random(seed)
    of_category: dict[str, list[Problem]] = {}
    for problem in problems:
        of_category.setdefault(problem.meta["category"], []).append(problem)
    for _ in range(n):
        # the same share for each category, or most would be live ones of several functions
        problem = rng.choice(of_category[rng.choice(list(of_category))])
        calls = [
            {"name": c.name, "arguments": dict(c.arguments or {})}
            for c in calls_of(task.gold(problem))
        ]
        kind = rng.choice(KINDS)
        if calls:
            change(kind, calls, problem, rng)
        else:
            kind = "no call"
            if rng.random() < 0.5:
                name = next(iter(problem.gold["tools"]), "f")
                calls = [{"name": name, "arguments": {}}]
        if rng.random() < 0.3:
            yield Case(problem, f"{kind}, as Python", as_python(calls))
        else:
            text = "".join(tool_calls.format_call(c["name"], c["arguments"]) for c in calls)
            yield Case(problem, kind, text or "I cannot do that.")


def as_python(calls: Sequence[dict[str, Any]]) -> str:
    written = [
        f"{c['name']}({', '.join(f'{key}={value!r}' for key, value in c['arguments'].items())})"
        for c in calls
    ]
    return f"[{', '.join(written)}]"


KINDS = (
    "right",
    "another accepted value",
    "another value",
    "another type",
    "order of arguments",
    "order of items",
    "order of calls",
    "a parameter less",
    "a parameter more",
    "another function",
    "a call less",
    "a call more",
    "null",
    "empty text",
    "case and marks",
    "inside",
    "a literal",
)


def change(kind: str, calls: list[dict[str, Any]], problem: Problem, rng: random.Random) -> None:
    """Change one of the calls in place."""
    i = rng.randrange(len(calls))
    call = calls[i]
    arguments = call["arguments"]
    key = rng.choice(list(arguments)) if arguments else ""
    if kind == "another accepted value":
        for answer in problem.gold["answers"]:
            if answer["name"] == call["name"]:
                for name in arguments:
                    arguments[name] = rng.choice(answer["arguments"][name])
    elif kind == "another function":
        call["name"] += rng.choice(("x", "_2", ".go"))
    elif kind == "a call less":
        calls.pop(i)
    elif kind == "a call more":
        calls.append(rng.choice(calls))
    elif kind == "order of calls":
        rng.shuffle(calls)
    elif kind == "a parameter more":
        known = [name for tool in problem.gold["tools"].values() for name in tool["properties"]]
        arguments[rng.choice([*known, "extra"])] = rng.choice(("a", 1, [], {}, True))
    elif kind == "order of arguments":
        call["arguments"] = dict(rng.sample(list(arguments.items()), len(arguments)))
    elif not arguments:
        return
    elif kind == "a parameter less":
        arguments.pop(key)
    elif kind == "null":
        arguments[key] = None
    elif kind == "empty text":
        arguments[key] = rng.choice(("", [], {}, 0))
    elif kind != "right":
        arguments[key] = changed(arguments[key], kind, rng)


def changed(value: Any, kind: str, rng: random.Random) -> Any:
    """Another value in the place of this one."""
    if kind == "inside" and isinstance(value, (list, dict)) and value:
        inner = list(value) if isinstance(value, list) else dict(value)
        at = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        inner[at] = changed(inner[at], rng.choice(("another value", "another type", "inside")), rng)
        return inner
    if kind == "order of items" and isinstance(value, list):
        return rng.sample(value, len(value))
    if kind == "another type":
        others = [str(value), [value], {"value": value}, (value,), True, 1, 1.5, "a"]
        if isinstance(value, (int, float)):
            others += [float(value), int(value), bool(value), int(bool(value))]
        if isinstance(value, list) and value:
            others += [value[0], tuple(value), value[:-1]]
        return rng.choice(others)
    if isinstance(value, str):
        if kind == "case and marks":
            return rng.choice((value.upper(), f" {value}.", value.replace(" ", "-"), f"'{value}'"))
        literal = (
            f'"{value}"',
            f"{value}L",
            f"{value}f",
            f"{value}n",
            f"[{value}]",
            f"{{a: {value}}}",
        )
        return rng.choice(literal) if kind == "a literal" else rng.choice((value + "x", value[:-1]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice((value + 1, -value, value * 1.0000001))
    return value


if __name__ == "__main__":
    main()
