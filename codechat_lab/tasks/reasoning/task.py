"""The reasoning tasks: generated word problems and GSM8K, with six prompt templates; and
`codechat data reasoning`.

    xml            a system prompt that requests <reasoning> and <answer>, each on their own lines
    r1_zero        DeepSeek-R1-Zero's prompt for a base model (arXiv:2501.12948, table 1); it ends in <think>
    question_only  only the question (Dr. GRPO, arXiv:2503.20783, section 2, "no template")
    boxed          a chat model's own form, in the words of Qwen2.5-Math's card: steps, the answer in \\boxed{}
    alpaca         Stanford Alpaca's instruction template
    zero_shot      a system prompt that requests steps and "The answer is N."

A template may also be a file (`template_of`). With tags "raw" its messages are the text itself,
as the papers ran base models. Without `reward` the template's own grader scores.
`Score.correct` is the answer alone. A file's name gives its split; one in 16 of GSM8K's
training rows is `select`, by a hash of the question. SFT never sees the questions of generated
problems; RL must set the template of the solutions."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat.core.config import opt
from codechat.core.errors import DataError, check_choice
from codechat.data.sources import digest, fraction
from codechat.tasks.base import BaseTask, Message, Problem, Score
from codechat_lab.data.public_rows import asked_in_test, reject_benchmark
from codechat_lab.tasks import preparation
from codechat_lab.tasks.preparation import Row, write_task
from codechat_lab.tasks.reasoning import rewards
from codechat_lab.tasks.reasoning.answers import gsm8k_gold

GOLD = ("answer", "steps")
SELECT_SHARE = 1 / 16
_NOTE = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator notes


class Template(NamedTuple):
    """grader: of `rewards`. user: the request. system: before it, by the kind of the answer
    ("number" or "letter"). ends: the last line of a worked solution, where the grader has no
    layout of its own."""

    grader: str
    user: str = "{question}"
    system: dict[str, str] = {}
    stop_texts: Sequence[str] = ()
    ends: str = "The answer is {answer}."

    def messages(self, question: str, kind: str) -> list[Message]:
        """The prompt of a question whose answer is of this kind."""
        system = [{"role": "system", "content": self.system[kind]}] if self.system else []
        return [*system, {"role": "user", "content": self.user.replace("{question}", question)}]


TEMPLATES = {
    name: Template(**row)
    for name, row in json.loads(
        Path(__file__).with_name("templates.json").read_text(encoding="utf-8")
    ).items()
}
ALPACA = TEMPLATES["alpaca"].user


def template_of(name: str) -> Template:
    """One of TEMPLATES, or a file: its text before {response}, with {question} or
    {instruction}, is the user's turn; the last heading above that place (a line that begins
    with #) ends an answer where there are no turns. DataError without either."""
    if not Path(name).is_file():
        return TEMPLATES[check_choice("template (or a file)", name, TEMPLATES)]
    text = (
        Path(name)
        .read_text(encoding="utf-8")
        .replace("{instruction}", "{question}")
        .partition("{response}")[0]
    )
    above, found, _ = text.partition("{question}")
    if not found:
        raise DataError(
            f"{name} holds no {{question}} and no "
            "{instruction}; write one where the question "
            "belongs"
        )
    return Template(
        "plain", text, stop_texts=[line for line in above.splitlines() if line.startswith("#")][-1:]
    )


class AnswerTask(BaseTask):
    """One question, one answer. max_reward: that of the grader (4 for xml, else 1)."""

    kind = "number"
    default_template = "xml"
    domain = "worked"
    asked = "text"
    tiers = rewards.OUTCOMES
    formatted = rewards.FORMATTED

    def __init__(self, template: str = "", reward: str | None = None) -> None:
        self.template = template_of(template or self.default_template)
        self.reward = reward or self.template.grader
        check_choice("reward", self.reward, rewards.MAXIMUM)
        self.max_reward = rewards.MAXIMUM[self.reward]
        self.stop_texts = tuple(self.template.stop_texts)

    def prompt(self, problem: Problem) -> list[Message]:
        return self.template.messages(problem.messages[-1]["content"], self.kind)

    def score(self, problem: Problem, completion: str) -> Score:
        return rewards.grade(self.reward, completion, problem.gold["answer"], self.kind)

    def gold(self, problem: Problem) -> str:
        answer = problem.gold["answer"]
        ends = self.template.ends.replace("{answer}", answer)
        return rewards.written(self.reward, problem.gold["steps"], answer, ends)

    def conversation(self, problem: Problem) -> Row:
        """The prompt and the solution, in the layout of the template and the grader."""
        return preparation.worked_example(self, problem, problem.meta)


def make_problem(
    id: str, question: str, answer: str, steps: str, split: str, meta: dict[str, Any] | None = None
) -> Problem:
    return Problem(
        id,
        [{"role": "user", "content": question}],
        {"answer": answer, "steps": steps},
        split,
        meta or {},
    )


# 1 one step, numbers up to 9; 2 one step, up to 20, times tables and even sharing; 3 two steps;
# 4 three steps and a number without use
LEVELS = (1, 2, 3, 4)
# cumulative shares of a question's hash
STORY_PARTS = {
    "worked": 0.5,
    "train": 0.8,
    "select": 0.88,
    "test": 1.0,
}


class Story(NamedTuple):
    """says: wordings; the last is held out. steps: equations over the numbers a to e and the
    earlier results r and s.
    low, high: range of each number. Every result is a whole number above 0."""

    name: str
    level: int
    says: Sequence[str]
    steps: Sequence[str]
    low: Sequence[int]
    high: Sequence[int]


_DATA = json.loads(Path(__file__).with_name("stories.json").read_text(encoding="utf-8"))
PEOPLE = _DATA["people"]
THINGS = _DATA["things"]
STORIES = tuple(Story(**story) for story in _DATA["stories"])


def part_of(text: str) -> str:
    """The part of a question with an ordinary wording."""
    at = fraction(digest(text))
    return next(part for part, end in STORY_PARTS.items() if at < end)


def draw_story(story: Story, rng: random.Random, held_out: bool = False) -> tuple[str, str, str]:
    """(question of this story, worked solution with an equation per line, answer); results are
    whole numbers above 0."""
    wording = story.says[-1] if held_out else rng.choice(story.says[:-1])
    first, second = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    lines = list[str]()
    while not lines:
        numbers = {
            name: rng.randint(low, high) for name, low, high in zip("abcde", story.low, story.high)
        }
        lines = _worked(story.steps, numbers)
    text = wording.format_map({"A": first, "B": second, "x": thing} | numbers)
    return text, "\n".join(lines), lines[-1].split()[-1]


def _worked(steps: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    """ "6 + 3 = 9" for each step; empty where a result is not a whole number above 0."""
    known = dict(numbers)
    lines = list[str]()
    for step, name in zip(steps, "rst"):
        left, sign, right = step.split()
        x = known[left]
        y = known[right]
        known[name] = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if x % y == 0 else 0}[sign]
        if known[name] < 1:
            return []
        lines.append(f"{x} {sign} {y} = {known[name]}")
    return lines


class ReasoningTask(AnswerTask, preparation.DrawnTask):
    """Generated word problems. levels: a repeated level is sampled more often. Worked
    solutions, training, `select` and `test` never share a question; `test_hard` has wordings
    that occur nowhere else."""

    name = "reasoning"
    known_levels = LEVELS
    gold_fields = GOLD
    stream = "stories"
    worked_part = "worked"

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = LEVELS,
        template: str = "xml",
        reward: str | None = None,
    ) -> None:
        super().__init__(template, reward)
        self.set_levels(source, levels)

    def draw(self, level: int, part: str, split: str, rng: random.Random) -> Problem | None:
        story = rng.choice([s for s in STORIES if s.level == level])
        text, steps, answer = draw_story(story, rng, held_out=part == "test_hard")
        if part not in ("test_hard", part_of(text)):
            return None
        id = f"reasoning-{digest(text)[:12]}"
        return make_problem(id, text, answer, steps, split, {"story": story.name, "level": level})


class Gsm8kTask(AnswerTask, preparation.PublicTask):
    """Grade school mathematics (Cobbe et al., 2021, arXiv:2110.14168). source: hub, a path, or
    a hub set with training rows by its name. columns: OURS=THEIRS where it has no question and
    answer."""

    name = "gsm8k"
    splits = ("train", "select", "test")
    other = "train"
    checked = None
    hub = {part: ("openai/gsm8k", f"main/{part}-*.parquet") for part in ("train", "test")}
    accepted = [("question", "answer"), ("messages", "ground_truth")]
    gold_fields = GOLD

    def __init__(
        self,
        source: str = "hub",
        template: str = "",
        reward: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        super().__init__(template, reward)
        self.source = str(source)
        self.columns = (columns,) if isinstance(columns, str) else tuple(columns)

    def make(self, row: Row, number: int, part: str) -> Problem:
        if "question" in row:
            solution = row["answer"]
            question = row["question"].strip()
        else:  # a prompt and a bare number, as rows for RL have them
            solution = f"#### {row['ground_truth']}"
            question = row["messages"][-1]["content"].strip()
        gold = gsm8k_gold(solution)
        if gold is None:
            raise ValueError(f'got an answer that ends in {solution[-40:]!r}; expected "#### N"')
        if part == "train":
            reject_benchmark(asked_in_test(question), f"row {number}")
        split = "select" if part == "train" and fraction(digest(question)) < SELECT_SHARE else part
        steps = _NOTE.sub("", solution.rpartition("####")[0]).strip()
        return make_problem(f"gsm8k-{part}-{number - 1}", question, gold, steps, split)


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(preparation.GeneratedConfig, preparation.ColumnsConfig):
    """Word problems or GSM8K -> worked.SPLIT.jsonl (conversations), reasoning.SPLIT.jsonl or
    gsm8k.SPLIT.jsonl (problems)."""

    source: str = opt(
        "embedded",
        "embedded (generated word problems), hub (GSM8K), a "
        "path to GSM8K's files, or a hub set's name",
        reads="path",
    )
    out: str = "data/reasoning"
    template: Literal["xml", "r1_zero", "question_only", "boxed", "alpaca", "zero_shot"] = opt(
        "xml", "prompt, and layout of a worked solution"
    )
    max_examples: int = 4000
    eval_examples: int = 500
    levels: tuple[int, ...] = LEVELS

    def task(self) -> ReasoningTask:
        return ReasoningTask(levels=self.levels, template=self.template)


def prepare_reasoning(cfg: ReasoningConfig) -> Row:
    """Write conversations and problems. Returns the manifest of the directory. Raises
    UserError, also where a solution does not score the maximum."""
    if cfg.source == "embedded":
        return preparation.prepare_generated(cfg)
    task = Gsm8kTask(cfg.source, template=cfg.template, columns=cfg.columns)
    problems = {"train": task.problems("train", seed=cfg.seed)}
    problems |= {
        split: task.problems(split, cfg.eval_examples, cfg.seed) for split in preparation.HELD_OUT
    }
    solved = {"train": problems["train"][: cfg.max_examples], "select": problems["select"]}
    return write_task(
        cfg,
        task,
        {split: map(task.conversation, part) for split, part in solved.items()},
        problems,
    )
