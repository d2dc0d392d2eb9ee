"""Five prompt templates for a question, each with the grader of its layout.

    xml            a system prompt that requests <reasoning> and <answer>, each on their own lines
    r1_zero        DeepSeek-R1-Zero's prompt for a base model (arXiv:2501.12948, table 1); it ends in <think>
    question_only  only the question (Dr. GRPO, arXiv:2503.20783, section 2, "no template")
    alpaca         Stanford Alpaca's instruction template
    zero_shot      a system prompt that requests steps and "The answer is N."

A template makes messages, which are rendered like any other conversation. With tags "raw" they are the text itself, as
those papers ran base models; a stop text ends a completion there.
"""

from __future__ import annotations

from typing import NamedTuple

from codechat.tasks.base import Message

XML_SYSTEM = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first thinks about the "
    "reasoning process in the mind and then provides the User with the answer. The reasoning process is enclosed within <think> </think> and "
    "answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    "User: {question}\nAssistant: <think>"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{question}\n\n### Response:\n"
)
ZERO_SHOT_SYSTEM = {
    "number": 'Solve the problem step by step. End with the sentence "The answer is N.", where N is a number.',
    "letter": 'Answer the question with one of the choices. End with the sentence "The answer is X.", where X is A, B, C or D.',
}


class Template(NamedTuple):
    """grader: of `rewards`. user: the request. system: before it, by the kind of the answer ("number" or "letter")."""

    grader: str
    user: str = "{question}"
    system: dict[str, str] = {}
    stop_texts: tuple[str, ...] = ()

    def messages(self, question: str, kind: str) -> list[Message]:
        """The prompt of a question whose answer is of this kind."""
        system = [{"role": "system", "content": self.system[kind]}] if self.system else []
        return [*system, {"role": "user", "content": self.user.format(question=question)}]


TEMPLATES = {
    "xml": Template("xml", system=dict.fromkeys(("number", "letter"), XML_SYSTEM)),
    "r1_zero": Template("r1_zero", user=R1_ZERO, stop_texts=("</answer>",)),
    "question_only": Template("question_only"),
    "alpaca": Template("plain", user=ALPACA),
    "zero_shot": Template("plain", system=ZERO_SHOT_SYSTEM),
}
