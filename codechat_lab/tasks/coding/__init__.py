"""Code problems: MBPP, HumanEval, and files in their columns. Hidden tests in the sandbox score
a program."""
