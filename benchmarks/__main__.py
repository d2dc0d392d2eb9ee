"""`python -m benchmarks KIND`."""

from benchmarks import main
from codechat.core.command import run_main

run_main(main)
