"""Function calling: one request, the tools on offer, one call, graded by the staircase.

Problems come from the toolbox (generated, any number) or from files, told apart by their
columns:

    problems  {id, messages, gold: {name, arguments} | null, split}, as `codechat data calls` writes them
    glaive    {system, chat}: the first assistant call is gold; without one, no call is correct
    original  {prompt, gt_name, gt_args}: prompt is rendered text with tags, of the original project

The staircase, for the first call: no_tag 0, bad_json 0.15, no_name 0.3, wrong_name 0.35 (0.2 if
it is not offered), name_only 0.55, partial 0.55 + 0.45 f, full 1; f = matched / expected
arguments (1 if none is expected) x max(0.5, 1 - 0.1 x extra keys). What follows the call costs
a rung: f is halved, else the reward is that of the next lower rung. Where no call is correct,
an answer without one scores 1, any call 0. "published" is the original system's staircase.

Values match if they are equal numbers (3 and 3.0 are; floats within a tolerance), strings equal
up to case and outer blanks, or lists or objects of matching items. Types are never mixed: true
is not 1, "5" is not 5. NaN and infinities match nothing.

Of several right calls (a list as gold) any order is right: the reward is the mean of the calls'
rewards, each compared with the right call that it fits best, and a missing or further call
counts as 0. A right call may have "optional" arguments, which an answer may leave out or give
with their value. Where a required value is lacking (meta["lacks"], and meta["asks_for"], its
description), the right answer calls nothing and asks for it. Where the results of several calls
are to be stated (meta["states"]), `toolbox.statements` says what is right."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from codechat.core.errors import check_choice
from codechat.data.row_readers import NO_CALL, glaive_turns
from codechat.data.sources import Ledger, digest, local_rows, require_columns
from codechat.data.splits import split_of
from codechat.tasks.base import SPLITS, BaseTask, Problem, Score, shuffled
from codechat.text import chat, tool_calls, tool_lists
from codechat_lab.data import public_rows
from codechat_lab.tasks.preparation import DEFAULT_LIMIT
from codechat_lab.tasks.toolbox import problems, statements

Row = dict[str, Any]
# The name of the first call: there is no call, it is unreadable, not offered by the prompt,
# another offered one, right.
NAMED = ("no_call", "unreadable", "not_offered", "other", "right")
TIERS = ("no_tag", "bad_json", "no_name", "wrong_name", "name_only", "partial", "full")
EXTRA_PENALTY = 0.1  # argument credit lost per unexpected argument
LEAST_CREDIT = 0.5  # share of the credit that unexpected arguments leave
TRAILING_CREDIT = 0.5  # share of the credit left if something follows the call and costs a rung
TOLERANCE = 1e-6  # floats match within this, relative above 1 and absolute below
COLUMNS = (("messages", "gold"), ("system", "chat"), ("prompt", "gt_name", "gt_args"))
_TURN = re.compile(
    r"<\|(system|user|assistant|function_response)\|>\n(.*?)\n<\|end\|>\n", re.DOTALL
)


class Staircase(TypedDict):
    """Rewards of the rungs. cap: largest reward of anything less than a full match. marks_down:
    whatever follows the call costs a rung; else a further call costs what is above the cap.
    integer_tolerance: as TOLERANCE, for a float in place of an integer."""

    no_tag: float
    bad_json: float
    no_name: float
    not_offered: float
    wrong_name: float
    name_only: float
    full: float
    cap: float
    marks_down: bool
    integer_tolerance: float


OURS: Staircase = {
    "no_tag": 0.0,
    "bad_json": 0.15,
    "no_name": 0.30,
    "not_offered": 0.20,
    "wrong_name": 0.35,
    "name_only": 0.55,
    "full": 1.0,
    "cap": 0.99,
    "marks_down": True,
    "integer_tolerance": 0.0,
}
PUBLISHED: Staircase = {
    **OURS,
    "not_offered": 0.35,
    "marks_down": False,
    "integer_tolerance": TOLERANCE,
}
STAIRCASES = {"ours": OURS, "published": PUBLISHED}
Rung = Literal["no_tag", "bad_json", "no_name", "not_offered", "wrong_name", "name_only"]
BELOW: dict[Rung, Rung] = {"name_only": "wrong_name", "wrong_name": "no_name"}  # else bad_json


def score_calls(
    text: str,
    golds: Sequence[Mapping[str, Any]],
    staircase: Staircase = OURS,
    offered: Collection[str] = (),
) -> Score:
    """Score all calls of a completion's text where several are right, in any order. Never raises.

    parts: calls, expected, matched. The tier is full where all are right, no_tag without a call,
    else partial where every name is right as often as it is due, else wrong_name."""
    calls = tool_calls.parse_calls(text)
    left = list(calls)
    unmatched = []
    for gold in golds:
        right = next((one for one in left if _credit_of(one, gold, staircase, offered) == 1), None)
        if right is None:
            unmatched.append(gold)
        else:
            left.remove(right)
    matched = len(golds) - len(unmatched)
    rewards = [staircase["full"]] * matched
    for gold in unmatched:
        scored = [_reward_of(one, gold, staircase, offered) for one in left]
        if scored:
            rewards.append(max(scored))
            left.pop(scored.index(max(scored)))
    parts = {"calls": len(calls), "expected": len(golds), "matched": matched}
    correct = matched == len(golds) == len(calls) and not any(one.after for one in calls)
    if correct:
        return Score(staircase["full"], "full", parts, True)
    due = Counter(gold["name"] for gold in golds)
    named = Counter(one.name for one in calls)
    tier = "partial" if named == due else "wrong_name"
    reward = min(staircase["cap"], sum(rewards) / max(len(golds), len(calls)))
    return Score(reward, tier if calls else "no_tag", parts, False)


def _credit_of(
    call: tool_calls.Call, gold: Mapping[str, Any], staircase: Staircase, offered: Collection[str]
) -> float:
    """The argument credit of a call of the right name; 0 for another one."""
    _, named = _named(call, gold, offered)
    return _argument_credit(call, gold, staircase).f if named == "right" else 0.0


def _reward_of(
    call: tool_calls.Call, gold: Mapping[str, Any], staircase: Staircase, offered: Collection[str]
) -> float:
    """The reward of one call beside others, none of which follows it."""
    tier, named = _named(call, gold, offered)
    if named == "not_offered":
        return staircase["not_offered"]
    rung = _rung(staircase, tier, lower=False)
    return rung + (staircase["full"] - rung) * _credit_of(call, gold, staircase, offered)


# words that name nothing, of names and descriptions of arguments
SMALL_WORDS = frozenset(
    "a an and as at by for from how in is it of on or that the this to what when where which who "
    "why with".split()
)


def naming_words(about: str) -> set[str]:
    """The words of an argument's name and description that name it; of `departureDate` both."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", about)} - SMALL_WORDS


def score_question(text: str, about: str, staircase: Staircase = OURS) -> Score:
    """Score an answer that has to ask for what a request lacks: it calls nothing, holds a question
    mark, and has a word of its name or description. A question mark alone would be paid for every
    request."""
    calls = tool_calls.parse_calls(text)
    named = naming_words(about) & set(re.findall(r"[a-z]+", text.lower()))
    asks = not calls and "?" in text and bool(named)
    parts = {"calls": len(calls)}
    if asks:
        return Score(staircase["full"], "full", parts, True)
    return Score(0.0, "wrong_name" if calls else "no_tag", parts, False)


def score_statement(
    text: str, states: Sequence[Mapping[str, Any]], prompt: str, staircase: Staircase = OURS
) -> Score:
    """Score an answer that has to state the results of several calls. prompt: the texts that it
    may take numbers from. What is not right earns the share of results that it states, as far as
    a call with the right name and other arguments."""
    calls = tool_calls.parse_calls(text)
    found = sum(place is not None for place in statements.stated(text, states))
    parts = {"calls": len(calls), "expected": len(states), "matched": found}
    if calls:
        return Score(0.0, "wrong_name", parts, False)
    if statements.is_right(text, states, prompt):
        return Score(staircase["full"], "full", parts, True)
    reward = staircase["name_only"] * found / len(states)
    tier = "partial" if found else "no_tag"
    return Score(reward, tier, parts, False)


def score_call(
    text: str,
    gold: Mapping[str, Any] | None,
    staircase: Staircase = OURS,
    offered: Collection[str] = (),
) -> Score:
    """Score the first call of a completion's text. Never raises.

    gold: {"name", "arguments"}. None: no call is correct, and any call, readable or not, is a
    wrong name of reward 0.
    offered: names of the functions in the prompt; empty = unknown, and then every name counts
    as offered. parts: calls, form, trailing (whether anything follows the first call), named
    (one of NAMED), with a correct name matched, expected, extra, f."""
    calls = tool_calls.parse_calls(text)
    first = calls[0] if calls else None
    trailing = first is not None and (len(calls) > 1 or bool(first.after))
    tier, named = _named(first, gold, offered)
    parts = {
        "calls": len(calls),
        "form": first and first.form,
        "trailing": trailing,
        "named": named,
    }
    if gold is None:
        return Score(
            0.0 if calls else staircase["full"], "wrong_name" if calls else "full", parts, not calls
        )
    lower = trailing and staircase["marks_down"]
    if first is None or named != "right":
        rung = "not_offered" if named == "not_offered" else tier
        return Score(_rung(staircase, rung, lower), tier, parts, False)
    credit = _argument_credit(first, gold, staircase)
    parts |= credit._asdict()
    if credit.f == 1 and not lower and len(calls) == 1:
        return Score(staircase["full"], "full", parts, True)
    if credit.f == 0:
        return Score(_rung(staircase, "name_only", lower), "name_only", parts, False)
    share = credit.f * TRAILING_CREDIT if lower else credit.f
    reward = staircase["name_only"] + (staircase["full"] - staircase["name_only"]) * share
    return Score(min(staircase["cap"], reward), "partial", parts, False)


class Credit(NamedTuple):
    """matched, expected, extra: numbers of arguments. f: their credit, 0 to 1."""

    matched: int
    expected: int
    extra: int
    f: float


def _argument_credit(
    call: tool_calls.Call, gold: Mapping[str, Any], staircase: Staircase
) -> Credit:
    given = call.arguments or {}
    expected = gold["arguments"]
    matched = sum(
        key in given and values_match(value, given[key], staircase)
        for key, value in expected.items()
    )
    extra = len(given.keys() - expected.keys())
    for key, value in gold.get("optional", {}).items():
        extra -= key in given and key not in expected and values_match(value, given[key], staircase)
    if call.arguments is None:  # unreadable
        return Credit(matched, len(expected), extra, 0.0)
    share = matched / len(expected) if expected else 1.0
    return Credit(
        matched, len(expected), extra, share * max(LEAST_CREDIT, 1 - EXTRA_PENALTY * extra)
    )


def _rung(staircase: Staircase, name: Rung, lower: bool) -> float:
    """The reward of a rung without argument credit; lower: of the one below."""
    return (
        min(staircase[name], staircase[BELOW.get(name, "bad_json")]) if lower else staircase[name]
    )


def _named(
    call: tool_calls.Call | None, gold: Mapping[str, Any] | None, offered: Collection[str]
) -> tuple[Rung, str]:
    """(the tier of a call without argument credit, one of NAMED). Blanks around a name are
    ignored."""
    if call is None:
        return "no_tag", "no_call"
    if call.name is None or not call.name.strip():
        return "bad_json" if call.form == "bad_json" else "no_name", "unreadable"
    if gold is not None and call.name.strip() == gold["name"].strip():
        return "name_only", "right"
    return "wrong_name", "other" if not offered or call.name.strip() in offered else "not_offered"


def values_match(expected: Any, value: Any, staircase: Staircase) -> bool:
    """Equality of JSON values by the rules of the module docstring. Recurses only as deep as
    `expected`."""
    if isinstance(expected, str):
        return isinstance(value, str) and expected.strip().casefold() == value.strip().casefold()
    if isinstance(expected, bool) or expected is None:
        return value is expected
    if isinstance(expected, Mapping):
        alike = isinstance(value, Mapping) and expected.keys() == value.keys()
        return alike and all(values_match(expected[k], value[k], staircase) for k in expected)
    if isinstance(expected, list):
        alike = isinstance(value, list) and len(value) == len(expected)
        return alike and all(values_match(e, v, staircase) for e, v in zip(expected, value))
    return _numbers_match(expected, value, staircase)


def _numbers_match(expected: int | float, value: Any, staircase: Staircase) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    tolerance = staircase["integer_tolerance"] if isinstance(expected, int) else TOLERANCE
    if isinstance(expected, int) and (isinstance(value, int) or not tolerance):
        return expected == value  # exact, also between an integer and a float
    try:  # NaN and infinities fail the comparison, whichever side they are on
        return abs(expected - value) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer with more digits than a float can hold
        return False


class FuncallTask(BaseTask):
    """source: "toolbox", or a jsonl or parquet file or a directory (MissingFile; DataError for
    an unknown format, a damaged file, or too many losses). staircase: a name of STAIRCASES.
    ledger: counts of a file's rows, or None."""

    name = "funcall"
    tiers: tuple[str, ...] = TIERS
    grouped_by = "stratum"  # the key of a problem's meta by which evaluations group scores
    clustered_by = "tool"  # the key of a problem's meta whose values name what is not independent
    classified_by = "named"  # the key of a score's parts whose values evaluations count
    classes = NAMED
    ledger: Ledger | None = None

    def __init__(self, source: str = "toolbox", staircase: str = "ours") -> None:
        check_choice("staircase", staircase, STAIRCASES)
        self.staircase = STAIRCASES[staircase]
        if str(source) != "toolbox":
            self.ledger = Ledger(Path(source).name)
            self.rows = list(self.ledger.counted(_read(Path(source))))
            self.ledger.check()
            if not any("stratum" in row.meta for row in self.rows):
                self.grouped_by = ""

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. Without a limit: DEFAULT_LIMIT
        generated ones, or all of a file."""
        if self.ledger or split not in SPLITS:
            return super().problems(split, limit, seed)
        n = DEFAULT_LIMIT if limit is None else limit
        return shuffled(problems.draw(split, n, seed), n, seed)

    def score(self, problem: Problem, completion: str) -> Score:
        offered = tool_lists.offered_names(
            "\n".join(m["content"] for m in problem.messages if m["role"] == "system")
        )
        if isinstance(problem.gold, list):
            return score_calls(completion, problem.gold, self.staircase, offered)
        if "asks_for" in problem.meta:
            about = f"{problem.meta['lacks']} {problem.meta['asks_for']}"
            return score_question(completion, about, self.staircase)
        if "states" in problem.meta:
            told = [m["content"] for m in problem.messages if m["role"] in ("user", "function")]
            states = problem.meta["states"]
            return score_statement(completion, states, "\n".join(told), self.staircase)
        return score_call(completion, problem.gold, self.staircase, offered)

    def gold(self, problem: Problem) -> str:
        """The source's own text of a call, if it has one: the reference-solution check then
        covers its call format."""
        if problem.gold is None:
            about = problem.meta.get("asks_for")
            asks = f"Can you tell me {about}?" if about else NO_CALL
            return problem.meta.get("answer", asks)
        if isinstance(problem.gold, list):
            return "\n".join(_written(gold) for gold in problem.gold)
        return problem.meta.get("gold_text") or _written(problem.gold)


def _written(gold: Mapping[str, Any]) -> str:
    return tool_calls.format_call(gold["name"], gold["arguments"])


def _read(path: Path) -> Iterator[Problem | str]:
    """Problems of a file or of a directory, and for each other row the reason why it is lost."""
    for file in sorted(path.glob("funcall.*.jsonl")) or [path]:
        for number, row in enumerate(require_columns(local_rows(file), COLUMNS, str(file))):
            name = f"{file.stem}-{number}"
            plain = _plain_row(row, name)
            yield plain if isinstance(plain, str) else _problem(plain, name)


def _plain_row(row: Row, name: str) -> Row | str:
    """The row with the columns of a problem, or the reason why it is lost."""
    if "gold" in row:
        return row
    return _of_original(row) if "gt_name" in row else _of_glaive(row, name)


def _of_original(row: Row) -> Row:
    turns = _TURN.findall(str(row["prompt"]))
    messages = [
        {"role": role.removesuffix("_response"), "content": content} for role, content in turns
    ]
    return {"messages": messages, "gold": {"name": row["gt_name"], "arguments": row["gt_args"]}}


def _of_glaive(row: Row, name: str) -> Row | str:
    talk = public_rows.conversation_row(row, name, domain="calls")
    if isinstance(talk, str):
        return talk
    answers = [turn["content"] for turn in glaive_turns(row["chat"]) if turn["role"] == "assistant"]
    own = next((text for text in answers if tool_calls.CALL_TAG in text), "")
    at = _answer_with(talk["messages"], tool_calls.parse_calls(own))
    calls = tool_calls.parse_calls(own or talk["messages"][at]["content"])
    gold = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
    meta = {
        "tools_present": talk["meta"]["tools_present"],
        "gold_text": own if len(calls) == 1 else "",
    }
    prompt = talk["messages"][:at]
    split = talk["meta"]["split"]
    return {
        "id": row.get("id", name),
        "messages": prompt,
        "gold": gold,
        "split": split,
        "meta": meta,
    }


def _answer_with(messages: list[Row], calls: Sequence[tool_calls.Call]) -> int:
    """Index of the first answer with these calls; without any, of the answer to predict. Earlier
    answers of a row may hold calls that no tag marks."""
    wanted = [(call.name, call.arguments) for call in calls]
    for at, message in enumerate(messages):
        found = tool_calls.parse_calls(message["content"]) if message["role"] == "assistant" else []
        if wanted and [(call.name, call.arguments) for call in found][-len(wanted) :] == wanted:
            return at
    return public_rows.answer_at(messages)


def _problem(row: Row, name: str) -> Problem | str:
    """The problem; without a split, equal prompts are in the same one of train, select and test."""
    messages = row["messages"]
    split = row.get("split")
    fits = isinstance(messages, list) and messages and all(map(_is_message, messages))
    golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    read = [_gold(one) for one in golds]
    if (
        not fits
        or split not in (None, *SPLITS)
        or (row["gold"] is not None and None in read)
        or not read
    ):
        return "bad_row"
    gold: Any = read if isinstance(row["gold"], list) else read[0]
    split = split or split_of(digest(repr(messages)))
    return Problem(str(row.get("id", name)), messages, gold, split, row.get("meta") or {})


def _gold(given: Any) -> Row | None:
    """A right call; None where it cannot be read."""
    call = tool_calls.read_call(given)
    if call.form not in tool_calls.READABLE:
        return None
    gold = {"name": call.name, "arguments": call.arguments}
    optional = given.get("optional") if isinstance(given, Mapping) else None
    return gold | {"optional": optional} if isinstance(optional, Mapping) else gold


def _is_message(m: Any) -> bool:
    return (
        isinstance(m, Mapping) and m.get("role") in chat.ROLES and isinstance(m.get("content"), str)
    )
