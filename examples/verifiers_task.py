"""An environment of the library verifiers as a task: its dataset, its reward functions and their weights, for problems of one turn.

    codechat diagnose --ckpt RUN --task examples/verifiers_task.py:Verifiers:env=my_env
    codechat grpo --init-from RUN --task "examples/verifiers_task.py:Verifiers:env=my_env.py,n=100,reference=<answer>{answer}</answer>" --run-name mine

env: the module of an installed environment, or its file. Two kinds work: a module with load_environment (SingleTurnEnv and Rubric; verifiers up to
0.3), and one whose __all__ has a Taskset (verifiers.v1). Options that are not named below go to load_environment, or to the taskset's configuration.
Asynchronous reward functions are awaited, those of a batch together. `pip install verifiers` first.
"""

import asyncio
import importlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, UserError
from codechat.tasks.base import BaseTask, Problem, Score
from codechat.text.tool_functions import run_file

# the weighted sum, the sum of the weights, each function's value
Scored = tuple[float, float, dict[str, float]]


class Verifiers(BaseTask):
    """reference: a text around {answer} that must earn the full reward, such as "\\boxed{{answer}}"; none = the environment has no reference solutions.
    most: the environment's reward that counts as 1; none = the sum of its weights, for reward functions from 0 to 1.

    Splits: test is the evaluation dataset, select every tenth row of the other. Where there is one dataset only, test is another tenth."""

    name, tiers = "verifiers", ("none", "error", "some", "full")

    def __init__(
        self, env: str, reference: str = "", most: float | None = None, **options: Any
    ) -> None:
        self.name, self.reference, self.most = Path(env).stem.replace("-", "_"), reference, most
        self.no_references = (
            "" if reference else "an environment of verifiers; option reference gives them"
        )
        module = _module(env)
        try:
            self.kind = (Rubrics if hasattr(module, "load_environment") else Tasksets)(
                module, options
            )
            parts = {part: list(items) for part, items in self.kind.parts().items()}
        except UserError:
            raise
        except Exception as error:  # the environment is the user's and may raise anything
            how = f"{type(error).__name__}: {error}; correct it, or its options {options}"
            raise DataError(f"environment {env}: {how}") from error
        self.items: dict[str, Any] = {}  # the row or task of a problem
        self.rows: list[Problem] = []
        for part, items in parts.items():
            for i, (item, messages, answer) in enumerate(items):
                tenths = {8: part or "test", 9: "select"} if part != "test" else {}
                split = tenths.get(i % 10, part or "train")
                if not messages or not all(isinstance(m["content"], str) for m in messages):
                    raise DataError(
                        f"row {i} of {env} has the prompt {str(messages)[:80]}; required: messages of text"
                    )
                problem = Problem(f"{self.name}-{part}{i}", messages, answer, split)
                self.items[problem.id] = item
                self.rows.append(problem)
        # of its own: a notebook's is running, and clients of judges stay with theirs
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def gold(self, problem: Problem) -> str:
        return self.reference.replace("{answer}", str(problem.gold))

    def score(self, problem: Problem, completion: str) -> Score:
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        async def every() -> list[Scored | BaseException]:
            each = (
                self.kind.score(self.items[problem.id], completion) for problem, completion in pairs
            )
            return await asyncio.gather(*each, return_exceptions=True)

        for found in asyncio.run_coroutine_threadsafe(every(), self.loop).result():
            if isinstance(found, BaseException):
                yield Score(
                    0.0, "error", {"error": f"{type(found).__name__}: {found}"[:300]}, False
                )
                continue
            total, weights, terms = found
            reward = total / (self.most or weights or 1.0)
            reward = 1.0 if math.isclose(reward, 1.0) else reward  # as sums of weights are
            tier = "none" if reward == 0 else "full" if reward == 1 else "some"
            yield Score(reward, tier, {}, tier == "full", terms)


def _module(env: str) -> Any:
    """The module of an environment. ConfigError, MissingFile, DataError."""
    needed = "required: an installed environment of verifiers, or its file"
    if env.endswith(".py"):
        return run_file(Path(env), "environment", needed)
    try:
        return importlib.import_module(env.rpartition("/")[2].replace("-", "_"))
    except ImportError as error:
        raise ConfigError(f"environment {env!r}: {error}; {needed}") from None


# split, or "" for all -> (item, messages, answer)
Parts = dict[str, Iterable[tuple[Any, list[dict[str, str]], Any]]]


class Rubrics:
    """vf.SingleTurnEnv with a vf.Rubric (or RubricGroup, JudgeRubric)."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self.env = module.load_environment(**options)
        if (turns := getattr(self.env, "max_turns", 1)) != 1:
            raise ConfigError(
                f"{module.__name__} has {turns} turns; required: an environment of one turn"
            )

    def parts(self) -> Parts:
        own = any(
            getattr(self.env, name, None) is not None
            for name in ("eval_dataset", "eval_dataset_source")
        )
        parts = (
            {"train": self.env.get_dataset(), "test": self.env.get_eval_dataset()}
            if own
            else {"": self.env.get_dataset()}
        )
        return {
            split: ((row, _messages(row["prompt"]), row.get("answer", "")) for row in rows)
            for split, rows in parts.items()
        }

    async def score(self, row: dict[str, Any], completion: str) -> Scored:
        said = (
            completion
            if isinstance(row["prompt"], str)
            else [{"role": "assistant", "content": completion}]
        )
        state = (
            {"answer": "", "info": {}}
            | dict(row)
            | {"input": dict(row), "completion": said, "trajectory": []}
        )
        await self.env.rubric.score_rollout(state)
        return state["reward"], sum(self.env.rubric._get_reward_weights()), state["metrics"]


class Tasksets:
    """vf.Taskset of verifiers.v1, whose tasks have rewards that need no runtime and no tools."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.generic import concrete_type

        classes = [getattr(module, name) for name in getattr(module, "__all__", ())]
        found = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, vf.Taskset)]
        if len(found) != 1:
            raise ConfigError(
                f"{module.__name__} has neither load_environment nor a Taskset in __all__; required: one of them"
            )
        config = concrete_type(found[0], vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        self.vf, self.tasks = vf, found[0](config(**options))
        if not self.tasks.bounded:
            self.tasks = self.tasks.take(1000)

    def parts(self) -> Parts:
        return {
            "": (
                (task, self._messages(task.data), getattr(task.data, "answer", ""))
                for task in self.tasks
            )
        }

    def _messages(self, data: Any) -> list[dict[str, str]]:
        prompt = (
            data.prompt
            if isinstance(data.prompt, str)
            else [dict(role=m.role, content=m.content) for m in data.prompt or []]
        )
        return [
            *([{"role": "system", "content": data.system_prompt}] if data.system_prompt else []),
            *_messages(prompt),
        ]

    async def score(self, task: Any, completion: str) -> Scored:
        vf, made = (
            self.vf,
            {
                "system": self.vf.SystemMessage,
                "user": self.vf.UserMessage,
                "assistant": self.vf.AssistantMessage,
            },
        )
        said = [*self._messages(task.data), {"role": "assistant", "content": completion}]
        nodes = [
            vf.MessageNode(
                parent=i - 1 if i else None, message=made[m["role"]](content=m["content"])
            )
            for i, m in enumerate(said)
        ]
        nodes[-1].sampled = True
        about = dict(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        trace = vf.Trace(**about, nodes=nodes, is_completed=True, ok=True)
        await task.score(trace)
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        terms = {name: reward.score for name, reward in rewards.items()} | trace.metrics
        return trace.reward, sum(reward.weight for reward in rewards.values()), terms


def _messages(prompt: Any) -> list[dict[str, str]]:
    return (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [{"role": m["role"], "content": m["content"]} for m in prompt]
    )
