"""Code problems: MBPP, HumanEval, and files in their columns. Hidden tests in the sandbox score a program; `prepare`
makes SFT data on code."""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["answer_text", "prepare", "rewards", "sources", "task"],
    {"task": ["CodingTask", "HumanEvalTask", "MbppTask"], "answer_text": ["extract"]},
)
