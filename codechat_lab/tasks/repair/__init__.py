"""Repair a small repository: a pocket SWE-bench. Generated packages of 3 to 9 files with a bug,
tests that fail and tests that pass; an answer holds search/replace blocks or a unified diff.
`examples/swebench.py` scores rows of SWE-bench."""
