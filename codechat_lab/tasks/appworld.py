"""AppWorld (Trivedi et al., 2024, arXiv:2407.18901): its environment over HTTP.

    appworld serve environment --port 8000              # in an environment of its own: pip install appworld
    codechat evaluate --ckpt RUN --task appworld --data-dir ~/appworld --split select --n 1 --ks 1

The policy answers a request with Python in a fenced block and gets the printed output, until
the code calls `apis.supervisor.complete_task(...)` or the interactions are used up. The reward
is pass_count / total_count of AppWorld's own evaluation; `correct` needs every test. Some tests
pass without any action (`parts["idle"]`). A server plays one episode at a time. Endpoints as in
appworld 0.1.3.post1 and 0.2.0.dev0. The code runs at the server, under its rules and time
limit."""

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, MissingFile, RunError, UserError
from codechat.core.http_client import Link
from codechat.tasks.base import BaseTask, Message, Problem, Score, play
from codechat.text import tool_calls

LONGEST = 4000  # characters of an observation; the middle of a longer one is omitted
DEFAULT_URL = "http://127.0.0.1:8000"
SPLIT_FILES = {
    "train": "train",
    "select": "dev",
    "test": "test_normal",
    "test_hard": "test_challenge",
}
SETUP = (
    "start one in an environment of its own: appworld serve "
    "environment --port 8000 (docs/tasks.md, AppWorld)"
)
SYSTEM = Path(__file__).with_name("appworld_system.txt").read_text(encoding="utf-8")
NO_CODE = "No code was found. Write one block of Python between ```python and ```."
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_TAG = re.compile(f"<(?={'|'.join(re.escape(tag[1:]) for tag in tool_calls.TAGS)})")


def code_of(text: str) -> str | None:
    """The first fenced block of an answer, closed or not, or None."""
    block = _BLOCK.search(text)
    return block[1].strip() or None if block else None


def without_tags(text: Any) -> str:
    """The world's text without chat tags, so it cannot open a turn."""
    return _TAG.sub("< ", str(text))


def connect(url: str) -> Link:
    """The environment server at a URL. UserError where none answers."""
    link = Link(url, flag="the AppWorld server's URL", kind="AppWorld server", remedy=SETUP)
    if "AppWorld" not in str(link.ask("/")):
        raise RunError(f"{url} is no AppWorld environment server; {SETUP}")
    return link


def ask(
    server: Link, endpoint: str, body: Mapping[str, Any], read: Callable[[Any], Any] | None = None
) -> Any:
    """The output of an endpoint, or what `read` makes of it. UserError where the server fails
    or says something else."""
    answer = server.ask(f"/{endpoint}", dict(body))
    try:
        return read(answer["output"]) if read else answer["output"]
    except (KeyError, TypeError, ValueError, AttributeError):
        said = f"got {str(answer)[:200]!r} from {server.url}/{endpoint}"
        raise RunError(
            f"{said}; expected an answer of appworld 0.1.3 or newer; update the server"
        ) from None


class AppWorldEnvironment:
    """One episode at a time. free: servers without an episode; the environment takes one from
    reset to the end, and environments may share the list.

    UserError where the server fails and where none is free, never for the content of an answer."""

    def __init__(self, free: list[Link], max_interactions: int = 30) -> None:
        self.free = free
        self.max_interactions = max_interactions
        self.task_id = ""  # of the episode that runs
        self.verdict: Score | None = None

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start the task with the problem's id. The seed has no effect: AppWorld's worlds are
        fixed."""
        self.close()
        self.interactions = 0
        self.completed = False
        self.verdict = None
        if not self.free:
            raise RunError(
                "0 AppWorld servers are free; each plays one episode; start as many as a problem has episodes "
                "(worlds=URL+URL), or lower --n or --group-size to their number"
            )
        self.server = self.free.pop()
        self.task_id = problem.id
        body = {
            "task_id": problem.id,
            "experiment_name": "codechat",
            "max_interactions": self.max_interactions,
        }
        return ask(self.server, "initialize", body, _opening)

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the code of an answer. An answer without code counts as an interaction too. The
        last step has the reward of the whole episode."""
        if not self.task_id:
            return [], 0.0, True
        code = code_of(message["content"])
        output = NO_CODE
        if code is not None:
            printed = ask(self.server, "execute", {"task_id": self.task_id, "code": code})
            output = f"Output:\n```\n{_shortened(str(printed).strip())}\n```"
            self.completed = bool(ask(self.server, "task_completed", {"task_id": self.task_id}))
        self.interactions += 1
        done = self.completed or self.interactions >= self.max_interactions
        reward = self.score().reward if done else 0.0
        return [{"role": "user", "content": output}], reward, done

    def state_diff(self) -> list[dict[str, Any]]:
        """The evaluation's requirements, after the end. The server sends no values, and nothing
        before the end."""
        return self.verdict.parts["requirements"] if self.verdict else []

    def score(self) -> Score:
        """AppWorld's own score of the current state. This ends the episode."""
        if self.verdict is None:
            read = partial(_verdict, interactions=self.interactions, completed=self.completed)
            self.verdict = ask(
                self.server, "evaluate", {"task_id": self.task_id, "suppress_errors": True}, read
            )
            self.close()
        return self.verdict

    def close(self) -> None:
        """Release the world, if there is one. A server that lost it after a restart is no error."""
        task_id = self.task_id
        self.task_id = ""  # first: a failure below must not close it a second time
        if task_id:
            with contextlib.suppress(UserError):
                ask(self.server, "close", {"task_id": task_id})
            self.free.append(self.server)


def _opening(world: Any) -> list[Message]:
    """The first messages, from an answer of /initialize."""
    names = {name: without_tags(value) for name, value in world["supervisor"].items()}
    system = SYSTEM.format_map(names | {"datetime": without_tags(world["datetime"])})
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": without_tags(world["instruction"])},
    ]


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return without_tags(text)


def _verdict(answer: Any, interactions: int, completed: bool) -> Score:
    """The score from an answer of /evaluate. parts: the requirements in words, and what is
    known of the episode."""
    passes = answer["passes"]
    rows = [*passes, *answer["failures"]]
    words = [str(row["requirement"]).strip() for row in rows]
    requirements = [
        {"requirement": text, "passed": i < len(passes)} for i, text in enumerate(words)
    ]
    total = max(int(answer["num_tests"]), len(rows))
    idle = sum(row.get("label") == "no_op_pass" for row in rows)
    correct = bool(answer.get("success")) and total > 0 and len(passes) == total
    if correct:
        tier = "done"
    elif not passes:
        tier = "nothing"
    else:
        tier = "as_idle" if len(passes) <= idle else "partial"
    parts = {
        "passed": len(passes),
        "total": total,
        "idle": idle,
        "difficulty": answer.get("difficulty"),
        "requirements": requirements,
        "interactions": interactions,
        "completed": completed,
    }
    reward = len(passes) / total if total else 0.0
    return Score(reward, tier, parts, correct)


class AppWorldTask(BaseTask):
    """AppWorld's problems as episodes. source: the directory of appworld's data, a file of ids,
    or ids joined by +.
    worlds: URLs of servers joined by +, at least as many as a problem has episodes. max_turns:
    most answers of an episode."""

    name = "appworld"
    tiers = ("nothing", "as_idle", "partial", "done")
    no_references = "AppWorld does not publish its solutions"

    def __init__(self, source: str, worlds: str = DEFAULT_URL, max_turns: int = 30) -> None:
        if max_turns < 1:
            raise ConfigError(f"got max_turns {max_turns}; expected 1 or more; set another")
        self.source = source
        self.max_turns = max_turns
        self.free = [connect(url) for url in worlds.split("+")]
        self.episodes_at_once = len(self.free)

    def read(self, split: str) -> list[Problem]:
        """Problems that only name their task: the server sends its instruction at the start of
        an episode. Ids given by name or in a file belong to any split."""
        return [_problem(id, split) for id in dict.fromkeys(task_ids(self.source, split))]

    def environment(self) -> AppWorldEnvironment:
        return AppWorldEnvironment(self.free, self.max_turns)

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def gold(self, problem: Problem) -> str:
        return ""


def _problem(id: str, split: str) -> Problem:
    messages = [{"role": "user", "content": f"AppWorld task {id}"}]
    return Problem(id, messages, None, split, {"scenario": id.partition("_")[0]})


def task_ids(source: str, split: str) -> list[str]:
    """Ids of tasks: joined by +, a file with one per line, or a split of appworld's data
    directory (SPLIT_FILES)."""
    path = Path(source)
    if path.is_dir():
        places = [
            path / folder / f"{SPLIT_FILES[split]}.txt"
            for folder in ("", "datasets", "data/datasets")
        ]
        path = next((place for place in places if place.is_file()), places[0])
    elif re.fullmatch(r"[0-9a-z]+_\d+(\+[0-9a-z]+_\d+)*", source):
        return source.split("+")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        needed = (
            "give ids such as 82e2fac_1, a file with one per "
            "line, or the directory of appworld's data"
        )
        raise MissingFile(f"{path} is not a readable file of task ids; {needed}") from None
    return [line.strip() for line in lines if line.strip() and line[0] != "#"]
