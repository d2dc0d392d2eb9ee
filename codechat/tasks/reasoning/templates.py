"""Five prompt templates for a question, each with the grader of its layout.

    xml            a system prompt that requests <reasoning> and <answer>, each on their own lines
    r1_zero        DeepSeek-R1-Zero's prompt for a base model (arXiv:2501.12948, table 1); it ends in <think>
    question_only  only the question (Dr. GRPO, arXiv:2503.20783, section 2, "no template")
    alpaca         Stanford Alpaca's instruction template
    zero_shot      a system prompt that requests steps and "The answer is N."

A template makes messages, which are rendered like any other conversation. With tags "raw" they are the text itself, as
those papers ran base models; `STOP_TEXTS` ends a completion there.
"""

from __future__ import annotations

from collections.abc import Callable

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
STOP_TEXTS = {"r1_zero": ("</answer>",)}
GRADING = {
    "xml": "xml",
    "r1_zero": "r1_zero",
    "question_only": "question_only",
    "alpaca": "plain",
    "zero_shot": "plain",
}


def messages(template: str, question: str, kind: str) -> list[Message]:
    """The prompt of a question whose answer is of `kind` ("number" or "letter")."""
    return _MAKE[template](question, kind)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


_MAKE: dict[str, Callable[[str, str], list[Message]]] = {
    "xml": lambda question, kind: [_system(XML_SYSTEM), _user(question)],
    "r1_zero": lambda question, kind: [_user(R1_ZERO.format(question=question))],
    "question_only": lambda question, kind: [_user(question)],
    "alpaca": lambda question, kind: [_user(ALPACA.format(question=question))],
    "zero_shot": lambda question, kind: [_system(ZERO_SHOT_SYSTEM[kind]), _user(question)],
}
