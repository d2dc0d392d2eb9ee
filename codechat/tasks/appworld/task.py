"""AppWorld (Trivedi et al., 2024, arXiv:2407.18901): its environment over HTTP.

The package `appworld` pins versions that conflict with ours, so it is installed in an environment of its own and serves
a world there:

    pip install appworld && appworld install && appworld download data
    appworld serve environment --port 8000

An episode: the prompt holds the instruction and the person who asks (the supervisor). The policy answers with Python in
a fenced block and gets the printed output, until the code calls `apis.supervisor.complete_task(...)` or the
interactions are used up. The reward is pass_count / total_count of AppWorld's own evaluation; `correct` needs every
test. Some tests pass without any action (`parts["idle"]`): a reward of that share means nothing.

    codechat evaluate --ckpt RUN --task appworld --data-dir ~/appworld --split select --n 1 --ks 1

A server holds one world, so it plays one episode at a time; several servers play several. Endpoints as in appworld
0.1.3.post1 (from pip) and 0.2.0.dev0: initialize, execute, task_completed, evaluate, close. The code runs at the
server, under its rules and time limit.

Left out: the contents of the world's databases (the server does not send them), saving and loading states, and
reference solutions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.http_client import Link, Refused
from codechat.tasks.base import Message, Problem, Score, check_split, shuffled
from codechat.text import chat

DEFAULT_URL = "http://127.0.0.1:8000"
TIERS = ("nothing", "as_idle", "partial", "done")
SPLIT_FILES = {"train": "train", "select": "dev", "test": "test_normal", "test_hard": "test_challenge"}
SETUP = (
    "appworld runs in an environment of its own: pip install appworld && appworld install && appworld download data, "
    "then appworld serve environment --port 8000"
)
SYSTEM = """You do tasks for a person by writing Python that calls the apps of a simulated world.

Answer with a short thought and one block of code:

```python
print(apis.api_docs.show_app_descriptions())
```

The code runs at once, and you are told what it printed; variables stay. Ask before you call:
apis.api_docs.show_app_descriptions(), apis.api_docs.show_api_descriptions(app_name=...), apis.api_docs.show_api_doc(app_name=..., api_name=...).
apis.supervisor.show_account_passwords() gives the person's passwords, and each app's login an access token. Lists come in pages: read all.
End with apis.supervisor.complete_task(), with answer=... where the task asks something, or with status="fail" where it cannot be done.

The person is {first_name} {last_name}, e-mail {email}, phone {phone_number}. It is {datetime}."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
NO_CODE = "No code was found. Write one block of Python between ```python and ```."


def code_of(text: str) -> str | None:
    """The first fenced block of an answer, closed or not, or None."""
    found = _BLOCK.search(text)
    return found[1].strip() or None if found else None


class AppWorldServer:
    """An environment server. timeout_s: longest wait for an answer, above the server's own limit on code. ConfigError
    for an invalid URL."""

    def __init__(self, url: str = DEFAULT_URL, timeout_s: float = 300.0) -> None:
        self.link = Link(
            url, flag="the AppWorld server's URL", kind="AppWorld server", remedy=SETUP, timeout_s=timeout_s
        )

    def check(self) -> None:
        """RunError unless an AppWorld environment server answers."""
        if "AppWorld" not in str(self._ask("/")):
            raise RunError(f"{self.link.url} is no AppWorld environment server; {SETUP}")

    def ask(self, endpoint: str, **body: Any) -> Any:
        """The `output` of an endpoint. RunError where the server fails."""
        found = self._ask(f"/{endpoint}", body)
        if not isinstance(found, dict) or "output" not in found:
            raise RunError(
                f"{self.link.url}/{endpoint} answered {str(found)[:100]!r}; required: an object with `output`; {SETUP}"
            )
        return found["output"]

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return self.link.ask(path, body)
        except Refused as error:  # a server's failure, not a wrong setting
            absent = (
                "; check the task id and the server's task data (appworld download data)" if error.status >= 500 else ""
            )
            raise RunError(f"{error}{absent}") from None


class AppWorldEnvironment:
    """One episode at a time. free: servers without an episode; the environment takes one from reset to the end, and
    environments may share the list. longest: characters of an observation; the middle of a longer one is omitted.

    RunError where the server fails and where none is free, never for the content of an answer."""

    def __init__(
        self, free: list[AppWorldServer], max_interactions: int = 30, longest: int = 4000, experiment: str = "codechat"
    ) -> None:
        for name, value in (("max_interactions", max_interactions), ("longest", longest)):
            if value < 1:
                raise ConfigError(f"{name} {value}; it must be at least 1")
        self.free, self.max_interactions, self.longest, self.experiment = free, max_interactions, longest, experiment
        self.task_id = ""
        self.verdict: Score | None = None

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start the task with the problem's id. The seed has no effect: AppWorld's worlds are fixed."""
        self.close()
        self.interactions, self.completed, self.verdict, self.requirements = 0, False, None, []
        if not self.free:
            raise RunError(
                "0 AppWorld servers are free; each plays one episode; start as many as a problem has episodes (worlds=URL+URL), or lower --n or "
                "--group-size to their number"
            )
        self.server, self.task_id = self.free.pop(), problem.id
        world = self.server.ask(
            "initialize", task_id=problem.id, experiment_name=self.experiment, max_interactions=self.max_interactions
        )
        try:
            about = {
                **{k: _safe(str(v)) for k, v in world["supervisor"].items()},
                "datetime": _safe(str(world["datetime"])),
            }
            self.opening = [
                {"role": "system", "content": SYSTEM.format(**about)},
                {"role": "user", "content": _safe(str(world["instruction"]))},
            ]
            return list(self.opening)
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{self.server.link.url}/initialize sent no instruction and supervisor ({error!r}); required: appworld 0.1.3 or newer"
            ) from None

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the code of an answer. An answer without code counts as an interaction too. The last step has the reward
        of the whole episode."""
        if self.verdict or not self.task_id:
            return [], 0.0, True
        code = code_of(message["content"])
        output = NO_CODE
        if code is not None:
            output = f"Output:\n```\n{self._shortened(str(self.server.ask('execute', task_id=self.task_id, code=code)).strip())}\n```"
            self.completed = bool(self.server.ask("task_completed", task_id=self.task_id))
        self.interactions += 1
        done = self.completed or self.interactions >= self.max_interactions
        return [{"role": "user", "content": output}], self.score().reward if done else 0.0, done

    def state_diff(self) -> list[Any]:
        """The evaluation's requirements, after the end. The server sends no values, and nothing before the end."""
        return self.requirements

    def score(self) -> Score:
        """AppWorld's own score of the current state. This ends the episode."""
        if self.verdict is None:
            found = self.server.ask("evaluate", task_id=self.task_id, suppress_errors=True)
            verdict, self.requirements = _verdict(found, self.interactions, self.completed)
            self.verdict = replace(verdict, parts={**verdict.parts, "opening": self.opening})  # for `data appworld`
            self.close()
        return self.verdict

    def close(self) -> None:
        """Release the world, if there is one. A server that lost it after a restart is no error."""
        task_id, self.task_id = self.task_id, ""
        if task_id:
            with contextlib.suppress(RunError):
                self.server.ask("close", task_id=task_id)
            self.free.append(self.server)

    def _shortened(self, text: str) -> str:
        if len(text) > self.longest:
            half = self.longest // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
        return _safe(text)


def _safe(text: str) -> str:
    """The world's text without chat tags, so it cannot open a turn."""
    for tag in chat.TAGS:
        text = text.replace(tag, f"< {tag[1:]}")
    return text


def _verdict(found: Any, interactions: int, completed: bool) -> tuple[Score, list[dict[str, Any]]]:
    """The score from an answer of /evaluate, and its requirements in words."""
    try:
        passes, failures = found["passes"], found["failures"]
        total = max(int(found["num_tests"]), len(passes) + len(failures))
        requirements = [
            {"requirement": str(row["requirement"]).strip(), "passed": ok}
            for rows, ok in ((passes, True), (failures, False))
            for row in rows
        ]
        idle = sum(row.get("label") == "no_op_pass" for row in (*passes, *failures))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"the AppWorld server's evaluation is unreadable ({error!r}): {str(found)[:100]}; required: appworld 0.1.3 or newer"
        ) from None
    correct = bool(found.get("success")) and total > 0 and len(passes) == total
    tier = "done" if correct else "nothing" if not passes else "as_idle" if len(passes) <= idle else "partial"
    parts = {
        "passed": len(passes),
        "total": total,
        "idle": idle,
        "interactions": interactions,
        "completed": completed,
        "difficulty": found.get("difficulty"),
    }
    return Score(len(passes) / total if total else 0.0, tier, parts, correct), requirements


class AppWorldTask:
    """AppWorld's problems as episodes. source: the directory of appworld's data, a file of ids, or ids joined by +.
    worlds: URLs of servers joined by +, at least as many as a problem has episodes. max_turns: most answers of an
    episode. longest: see `AppWorldEnvironment`.

    ConfigError for invalid settings, RunError where a server does not answer."""

    name, tiers, max_reward = "appworld", TIERS, 1.0
    no_references = "AppWorld does not publish its solutions"

    def __init__(self, source: str = "", worlds: str = DEFAULT_URL, max_turns: int = 30, longest: int = 4000) -> None:
        if not source:
            raise ConfigError(
                "task appworld got no source; set --data-dir to the directory of appworld's data, or source=ID+ID"
            )
        self.source, self.max_turns, self.longest = str(source), max_turns, longest
        self.free = [AppWorldServer(url) for url in worlds.split("+")]
        self.episodes_at_once = len(self.free)
        self.environment()  # checks the settings
        for server in self.free:
            server.check()

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. Ids given by name belong to any split."""
        return shuffled(problems_of(task_ids(self.source.split("+"), split), split), limit, seed)

    def environment(self) -> AppWorldEnvironment:
        return AppWorldEnvironment(self.free, self.max_turns, self.longest)

    def prompt(self, problem: Problem) -> list[Message]:
        """Only the name of the task. The server sends its instruction at the start of an episode."""
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        """The score of an episode with this one answer."""
        world = self.environment()
        world.reset(problem)
        world.step({"role": "assistant", "content": completion})
        return world.score()

    def gold(self, problem: Problem) -> str:
        return ""


# ------------------------------------------------------------------ which tasks


def task_ids(words: Sequence[str], split: str) -> list[str]:
    """Ids of tasks: ids as words, a file with one id per line, or a split of appworld's data directory (SPLIT_FILES).

    MissingFile for a missing file, ConfigError for an unknown split and for no ids."""
    found: list[str] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            check_split(split, tuple(SPLIT_FILES))
            name = f"{SPLIT_FILES[split]}.txt"
            path = next(
                (p for p in (path / name, path / "datasets" / name, path / "data" / "datasets" / name) if p.is_file()),
                path / name,
            )
        elif not path.is_file() and re.fullmatch(r"[0-9a-z]+_\d+", word):
            found.append(word)
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise MissingFile(
                f"{path} is not a readable file of task ids; give ids such as 82e2fac_1, a file with one per line, or the directory of "
                f"appworld's data; {SETUP}"
            ) from None
        found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise ConfigError(
            "got 0 AppWorld tasks; give ids such as 82e2fac_1, a file with one per line, or the directory of appworld's data"
        )
    return list(dict.fromkeys(found))


def problems_of(ids: Sequence[str], split: str) -> list[Problem]:
    """Problems that only name their task. The server sends its instruction at the start of an episode."""
    return [
        Problem(
            name,
            [{"role": "user", "content": f"AppWorld task {name}"}],
            None,
            split,
            {"scenario": name.partition("_")[0]},
        )
        for name in ids
    ]
