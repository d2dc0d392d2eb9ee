"""Code problems: MBPP, HumanEval and files in their columns, judged by hidden tests in the sandbox; data for SFT on code."""
