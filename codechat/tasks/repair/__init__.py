"""Repair a small repository: a pocket SWE-bench. Generated packages of 3 to 9 files with a bug, tests that fail and tests that
pass; edits in one answer, or over several turns with tools. Rows of the real SWE-bench are scored in checkouts of your own.

task = RepairTask(levels=[1])                      answers are search/replace blocks or a unified diff
task = RepairTask(actions="tools")                 episodes with view, edit and run_tests
task = SweBenchTask("rows.jsonl", checkouts="checkouts", trusted=True)
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["checkouts", "edits", "environment", "generator", "parts", "prepare", "scoring", "swebench", "task"],
    {"task": ["RepairTask"], "swebench": ["SweBenchTask"]},
)
