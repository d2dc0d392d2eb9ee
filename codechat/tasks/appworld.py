"""AppWorld (Trivedi et al., 2024, arXiv:2407.18901): its environment over HTTP, and `codechat data appworld`.

    appworld serve environment --port 8000              # in an environment of its own: pip install appworld
    codechat evaluate --ckpt RUN --task appworld --data-dir ~/appworld --split select --n 1 --ks 1

The policy answers a request with Python in a fenced block and gets the printed output, until the code calls
`apis.supervisor.complete_task(...)` or the interactions are used up. The reward is pass_count / total_count of AppWorld's
own evaluation; `correct` needs every test. Some tests pass without any action (`parts["idle"]`). A server plays one episode
at a time. Endpoints as in appworld 0.1.3.post1 and 0.2.0.dev0. The code runs at the server, under its rules and time limit.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.http_client import Link, Refused
from codechat.data.sources import Ledger, digest, read_jsonl
from codechat.data.synthetic import SPLITS, split_of
from codechat.runs.paths import find_run
from codechat.tasks.base import BaseTask, Message, Problem, Score, play
from codechat.tasks.preparation import PreparedConfig, prepare
from codechat.text import chat

Row = dict[str, Any]
DOMAIN = "appworld"
LONGEST = 4000  # characters of an observation; the middle of a longer one is omitted
DEFAULT_URL = "http://127.0.0.1:8000"
TIERS = ("nothing", "as_idle", "partial", "done")
SPLIT_FILES = {"train": "train", "select": "dev", "test": "test_normal", "test_hard": "test_challenge"}
SETUP = "start one in an environment of its own: appworld serve environment --port 8000 (docs/tasks.md, AppWorld)"
SYSTEM = Path(__file__).with_name("appworld_system.txt").read_text(encoding="utf-8")
NO_CODE = "No code was found. Write one block of Python between ```python and ```."
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def code_of(text: str) -> str | None:
    """The first fenced block of an answer, closed or not, or None."""
    block = _BLOCK.search(text)
    return block[1].strip() or None if block else None


def _safe(text: Any) -> str:
    """The world's text without chat tags, so it cannot open a turn."""
    text = str(text)
    for tag in chat.TAGS:
        text = text.replace(tag, f"< {tag[1:]}")
    return text


class AppWorldServer:
    """An environment server. RunError where none answers."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        words = dict(flag="the AppWorld server's URL", kind="AppWorld server", remedy=SETUP)
        self.link = Link(url, **words)
        if "AppWorld" not in str(self._ask("/")):
            raise RunError(f"{url} is no AppWorld environment server; {SETUP}")

    def ask(self, endpoint: str, read: Callable[[Any], Any] = lambda output: output, **body: Any) -> Any:
        """What `read` makes of the output of an endpoint. RunError where the server fails or says something else."""
        answer = self._ask(f"/{endpoint}", body)
        try:
            return read(answer["output"])
        except (KeyError, TypeError, ValueError, AttributeError):
            said = f"{self.link.url}/{endpoint} answered {str(answer)[:200]!r}"
            raise RunError(f"{said}; required: appworld 0.1.3 or newer") from None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return self.link.ask(path, body)
        except Refused as error:  # a server's failure, not a wrong setting
            remedy = "; check the task id and the server's data (appworld download data)" if error.status >= 500 else ""
            raise RunError(f"{error}{remedy}") from None


class AppWorldEnvironment:
    """One episode at a time. free: servers without an episode; the environment takes one from reset to the end, and
    environments may share the list.

    RunError where the server fails and where none is free, never for the content of an answer."""

    def __init__(self, free: list[AppWorldServer], max_interactions: int = 30) -> None:
        self.free, self.max_interactions = free, max_interactions
        self.task_id = ""
        self.verdict: Score | None = None

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start the task with the problem's id. The seed has no effect: AppWorld's worlds are fixed."""
        self.close()
        self.interactions, self.completed, self.verdict, self.requirements = 0, False, None, list[Row]()
        if not self.free:
            raise RunError(
                "0 AppWorld servers are free; each plays one episode; start as many as a problem has episodes "
                "(worlds=URL+URL), or lower --n or --group-size to their number"
            )
        self.server, self.task_id = self.free.pop(), problem.id
        settings = {"experiment_name": "codechat", "max_interactions": self.max_interactions}
        self.opening = self.server.ask("initialize", _opening, task_id=problem.id, **settings)
        return list(self.opening)

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the code of an answer. An answer without code counts as an interaction too. The last step has the reward
        of the whole episode."""
        if self.verdict or not self.task_id:
            return [], 0.0, True
        code, output = code_of(message["content"]), NO_CODE
        if code is not None:
            printed = _shortened(str(self.server.ask("execute", task_id=self.task_id, code=code)).strip())
            output = f"Output:\n```\n{printed}\n```"
            self.completed = bool(self.server.ask("task_completed", task_id=self.task_id))
        self.interactions += 1
        done = self.completed or self.interactions >= self.max_interactions
        return [{"role": "user", "content": output}], self.score().reward if done else 0.0, done

    def state_diff(self) -> list[Row]:
        """The evaluation's requirements, after the end. The server sends no values, and nothing before the end."""
        return self.requirements

    def score(self) -> Score:
        """AppWorld's own score of the current state. This ends the episode."""
        if self.verdict is None:
            body = {"task_id": self.task_id, "suppress_errors": True}
            verdict, self.requirements = self.server.ask("evaluate", _verdict, **body)
            episode = {"interactions": self.interactions, "completed": self.completed, "opening": self.opening}
            self.verdict = replace(verdict, parts={**verdict.parts, **episode})  # the opening is for `data appworld`
            self.close()
        return self.verdict

    def close(self) -> None:
        """Release the world, if there is one. A server that lost it after a restart is no error."""
        task_id, self.task_id = self.task_id, ""
        if task_id:
            with contextlib.suppress(RunError):
                self.server.ask("close", task_id=task_id)
            self.free.append(self.server)


def _opening(world: Any) -> list[Message]:
    """The first messages, from an answer of /initialize."""
    person = {name: _safe(value) for name, value in world["supervisor"].items()}
    system = SYSTEM.format(**person, datetime=_safe(world["datetime"]))
    return [{"role": "system", "content": system}, {"role": "user", "content": _safe(world["instruction"])}]


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return _safe(text)


def _verdict(answer: Any) -> tuple[Score, list[Row]]:
    """The score from an answer of /evaluate, and its requirements in words."""
    passes, failures = answer["passes"], answer["failures"]
    rows = [(row, True) for row in passes] + [(row, False) for row in failures]
    requirements = [{"requirement": str(row["requirement"]).strip(), "passed": ok} for row, ok in rows]
    total = max(int(answer["num_tests"]), len(rows))
    idle = sum(row.get("label") == "no_op_pass" for row, _ in rows)
    correct = bool(answer.get("success")) and total > 0 and len(passes) == total
    tier = "done" if correct else "nothing" if not passes else "as_idle" if len(passes) <= idle else "partial"
    parts = {"passed": len(passes), "total": total, "idle": idle, "difficulty": answer.get("difficulty")}
    return Score(len(passes) / total if total else 0.0, tier, parts, correct), requirements


class AppWorldTask(BaseTask):
    """AppWorld's problems as episodes. source: the directory of appworld's data, a file of ids, or ids joined by +.
    worlds: URLs of servers joined by +, at least as many as a problem has episodes. max_turns: most answers of an
    episode.

    ConfigError for invalid settings, RunError where a server does not answer."""

    name, tiers = "appworld", TIERS
    no_references = "AppWorld does not publish its solutions"

    def __init__(self, source: str = "", worlds: str = DEFAULT_URL, max_turns: int = 30) -> None:
        if not source:
            raise ConfigError("appworld got no source; set --data-dir to appworld's data directory, or source=ID+ID")
        if max_turns < 1:
            raise ConfigError(f"max_turns {max_turns}; required: 1 or more")
        self.source, self.max_turns = str(source), max_turns
        self.free = [AppWorldServer(url) for url in worlds.split("+")]
        self.episodes_at_once = len(self.free)

    def read(self, split: str) -> Iterator[Problem]:
        """Ids given by name belong to any split."""
        return (problem_of(id, split) for id in task_ids(self.source.split("+"), split))

    def environment(self) -> AppWorldEnvironment:
        return AppWorldEnvironment(self.free, self.max_turns)

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def gold(self, problem: Problem) -> str:
        return ""


def task_ids(words: Sequence[str], split: str) -> list[str]:
    """Ids of tasks: ids as words, a file with one id per line, or a split of appworld's data directory (SPLIT_FILES)."""
    needed = "give ids such as 82e2fac_1, a file with one per line, or the directory of appworld's data"
    ids: list[str] = []
    for word in words:
        if not (path := Path(word)).exists() and re.fullmatch(r"[0-9a-z]+_\d+", word):
            ids.append(word)
            continue
        if path.is_dir():
            places = [path / folder / f"{SPLIT_FILES[split]}.txt" for folder in ("", "datasets", "data/datasets")]
            path = next((place for place in places if place.is_file()), places[0])
        try:
            ids += [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        except (OSError, UnicodeDecodeError):
            raise MissingFile(f"{path} is not a readable file of task ids; {needed}") from None
    if not any(ids):
        raise ConfigError(f"got 0 AppWorld tasks; {needed}")
    return list(dict.fromkeys(filter(None, ids)))


def problem_of(id: str, split: str) -> Problem:
    """A problem that only names its task. The server sends its instruction at the start of an episode."""
    messages = [{"role": "user", "content": f"AppWorld task {id}"}]
    return Problem(id, messages, None, split, {"scenario": id.partition("_")[0]})


# ---------------------------------------------------------------- codechat data appworld


@dataclass(frozen=True, kw_only=True)
class AppWorldDataConfig(PreparedConfig):
    """Successful episodes of evaluations -> appworld.SPLIT.jsonl (conversations)."""

    run_name: tuple[str, ...] = opt(("appworld",), "runs of codechat evaluate --task appworld --split train")
    out: str = "data/appworld"


def prepare_appworld(cfg: AppWorldDataConfig) -> Row:
    """Write the conversations. Only episodes of AppWorld's training split are used: the others are evaluation data."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        ledgers.append(ledger := Ledger("appworld"))
        rows = list(_conversations(cfg, ledger))
        return {f"{DOMAIN}.{split}": [row for row in rows if row["meta"]["split"] == split] for split in SPLITS}

    return prepare(cfg, collect)


def _conversations(cfg: AppWorldDataConfig, ledger: Ledger) -> Iterator[Row]:
    names: set[str] = set()
    for row in (row for run_name in cfg.run_name for row in _episodes(run_name)):
        if not row.keys() >= {"problem", "split", "turns", "reward", "correct"}:
            ledger.lose("no trajectory")
        elif row["split"] != "train":
            ledger.skip("not of AppWorld's training split")
        elif not row["correct"]:
            ledger.skip("too few checks passed")
        elif (name := digest(repr(messages := _messages(row)))[:16]) in names:
            ledger.skip("the same again")
        else:
            names.add(name)
            ledger.kept += 1
            scenario = row["problem"].partition("_")[0]  # its tasks are similar: all in one split
            meta = {"split": split_of(digest(scenario)), "asked": "code", "tools_present": True}
            meta |= {"task": row["problem"], "reward": row["reward"]}
            yield {"id": f"{DOMAIN}-{name}", "messages": messages, "domain": DOMAIN, "meta": meta}


def _episodes(run_name: str) -> Iterator[Row]:
    path = find_run(run_name) / "examples.jsonl"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; `codechat evaluate --task appworld --split train` writes it")
    yield from (row for _, row in read_jsonl(path))


def _messages(row: Row) -> list[Message]:
    """The episode as a conversation, up to its last answer."""
    messages = list(row["parts"]["opening"])
    for turn in row["turns"]:
        told = [{"role": "user", "content": text} for text in turn["told"]]
        messages += [{"role": "assistant", "content": turn["text"]}, *told]
    while messages[-1]["role"] == "user":
        messages.pop()
    return messages
