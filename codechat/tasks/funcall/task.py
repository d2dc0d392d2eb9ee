"""Function calling: one request, the tools on offer, one call, graded by the staircase.

Problems come from the toolbox (generated, any number) or from files:

    problems  {id, messages, gold: {name, arguments} | null, split}, as `codechat data calls` writes them
    glaive    {system, chat}: the first assistant call is gold; without one, no call is correct
    original  {prompt, gt_name, gt_args}: prompt is rendered text with tags, of the original project

The columns of the first row give a file's format. Of a directory, the files funcall.*.jsonl are read. A row without a
split gets one from the hash of its prompt, as in `codechat data`. Every row is kept or lost for a declared reason. Too
many losses are an error. The same `score_call` gives the training reward and the exact match of evaluation.

Left out: problems that need several calls. The staircase grades the first call, and further ones cost.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import check_choice
from codechat.data.chat_formats import NO_CALL, glaive_turns, messages_of
from codechat.data.sources import Ledger, digest, local_rows, require_columns
from codechat.data.synthetic import split_of
from codechat.tasks.base import SPLITS, BaseTask, Message, Problem, Score, shuffled
from codechat.tasks.funcall.staircase import NAMED, STAIRCASES, TIERS, score_call
from codechat.tasks.preparation import DEFAULT_LIMIT
from codechat.tasks.toolbox import problems
from codechat.text import chat

Row = dict[str, Any]
COLUMNS = (("messages", "gold"), ("system", "chat"), ("prompt", "gt_name", "gt_args"))
_TURN = re.compile(r"<\|(system|user|assistant|function_response)\|>\n(.*?)\n<\|end\|>\n", re.DOTALL)


class FuncallTask(BaseTask):
    """source: "toolbox", or a jsonl or parquet file or a directory (MissingFile; DataError for an unknown format, a
    damaged file, or too many losses). staircase: the reward's values, a name of STAIRCASES.

    shares: strata of the toolbox's problems (`problems.SHARES`; none = those of the split). ledger: counts of a file's
    rows, or None."""

    name, tiers = "funcall", TIERS
    grouped_by = "stratum"  # the key of a problem's meta by which evaluations group scores
    clustered_by = "tool"  # the key of a problem's meta whose values name what is not independent
    classified_by, classes = "named", NAMED  # the key of a score's parts whose values evaluations count

    def __init__(
        self,
        source: str | Path = "toolbox",
        shares: Mapping[str, float] | None = None,
        staircase: str = "ours",
    ) -> None:
        check_choice("staircase", staircase, STAIRCASES)
        self.staircase, self.shares = STAIRCASES[staircase], shares
        self.ledger: Ledger | None = None
        if str(source) != "toolbox":
            self.ledger = Ledger(Path(source).name)
            self.rows = list(self.ledger.counted(_read(Path(source))))
            self.ledger.check()
            if not any("stratum" in row.meta for row in self.rows):
                self.grouped_by = ""

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. Without a limit: DEFAULT_LIMIT generated ones, or all of a
        file."""
        if self.ledger or split not in SPLITS:
            return super().problems(split, limit, seed)
        n = DEFAULT_LIMIT if limit is None else limit
        return shuffled(problems.draw(split, n, seed, shares=self.shares), n, seed)

    def score(self, problem: Problem, completion: str) -> Score:
        offered = chat.offered_names("\n".join(m["content"] for m in problem.messages if m["role"] == "system"))
        return score_call(completion, problem.gold, self.staircase, offered)

    def gold(self, problem: Problem) -> str:
        """The source's own text of a call, if it has one: the reference-solution check then covers its call format."""
        if problem.gold is None:
            return NO_CALL
        return problem.meta.get("gold_text") or chat.format_call(**problem.gold)


# ---------------------------------------------------------------- files


def _read(path: Path) -> Iterator[Problem | str]:
    """Problems of a file or of a directory, and for each other row the reason why it is lost."""
    for file in sorted(path.glob("funcall.*.jsonl")) or [path]:
        for number, row in enumerate(require_columns(local_rows(file), COLUMNS, str(file))):
            name = f"{file.stem}-{number}"
            if "gold" in row:
                yield _from_problem(row, name)
            elif "gt_name" in row:
                yield _from_original(row, name)
            else:
                yield _from_glaive(row, name)


def _problem(
    name: Any, messages: list[Message], gold: Row | None, split: str | None, meta: Mapping[str, Any]
) -> Problem:
    """The problem; without a split, equal prompts are in the same one of train, select and test."""
    return Problem(str(name), messages, gold, split or split_of(digest(repr(messages))), meta)


def _from_glaive(row: Row, name: str) -> Problem | str:
    messages = messages_of(row, name)
    if isinstance(messages, str):
        return messages
    raw = glaive_turns(row["chat"])
    answers = [i for i, m in enumerate(raw) if m["role"] == "assistant"]
    if not answers:
        return "no_assistant"
    at = next((i for i in answers if chat.CALL_TAG in raw[i]["content"]), answers[0])
    calls, prompt = chat.parse_calls(raw[at]["content"]), messages[: at + len(messages) - len(raw)]
    gold = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
    own = {"gold_text": raw[at]["content"]} if len(calls) == 1 else {}
    return _problem(row.get("id", name), prompt, gold, None, {"tools_present": "{" in row["system"], **own})


def _from_problem(row: Row, name: str) -> Problem | str:
    split, messages, gold = row.get("split"), row["messages"], _gold(row["gold"])
    fits = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, Mapping) and m.get("role") in chat.ROLES and isinstance(m.get("content"), str)
            for m in messages
        )
    )
    if not fits or split not in (None, *SPLITS) or (gold is None) != (row["gold"] is None):
        return "bad_row"
    meta = row.get("meta") if isinstance(row.get("meta"), Mapping) else {}
    return _problem(row.get("id", name), messages, gold, split, meta)


def _gold(gold: Any) -> Row | None:
    """The call of a row's gold; None where it cannot be read."""
    call = chat.read_call(gold)
    return {"name": call.name, "arguments": call.arguments} if call.form in chat.READABLE else None


def _from_original(row: Row, name: str) -> Problem | str:
    gold = _gold({"name": row["gt_name"], "arguments": row["gt_args"]})
    turns = _TURN.findall(row["prompt"]) if isinstance(row["prompt"], str) else []
    if not turns or gold is None:
        return "bad_row" if turns else "unreadable_prompt"
    messages = [{"role": role.removesuffix("_response"), "content": content} for role, content in turns]
    return _problem(name, messages, gold, None, {"tools_present": True})
