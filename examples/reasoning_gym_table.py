"""Which tasks of reasoning-gym would RL help? `codechat diagnose` on each, as one table.

    pip install 'codechat[reasoning-gym]'
    python examples/reasoning_gym_table.py released/mini                          # all of them, at level 0
    python examples/reasoning_gym_table.py my-run --tasks chain_sum spell_backward --run-name verdicts

One run a task, RUN_NAME/TASK; a task whose run has finished is read, not sampled again, so the command goes on where it
was stopped. Tasks without a curriculum have their default configuration. RL needs groups with unlike rewards: LIVE and
PARTIAL, some WEAK. Sorted by the share of such groups.
"""

import argparse
import re
import sys

import pandas as pd

from codechat.cli import guarded
from codechat.core.errors import UserError
from codechat.evaluation.diagnose import diagnose
from codechat.evaluation.settings import DiagnoseConfig
from codechat.runs import paths
from codechat.runs.run import Run
from codechat_lab.tasks.reasoning_gym import installed_factory


def judged(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The row of a task: its verdict, or why there is none."""
    run_name = f"{args.run_name}/{name}"
    task = f"reasoning_gym:{name},size={args.size}"
    if name in installed_factory().CURRICULA:
        task += ",level=0"  # the default configuration is harder for most
    # 64 groups, the least for a verdict: a small task's questions come again
    cfg = DiagnoseConfig(
        run_name=run_name,
        ckpt=args.ckpt,
        task=task,
        group_size=args.group_size,
        max_new_tokens=args.max_new_tokens,
        overwrite=paths.exists(run_name),  # one that was cut off
    )
    finished = paths.exists(run_name) and Run.open(run_name).status["status"] == "finished"
    try:
        if not finished:
            diagnose(cfg)
    except UserError as error:
        return {"task": name, "verdict": "none", "why": re.sub(r"\s+", " ", str(error))[:90]}
    found = Run.open(run_name).status["summary"]
    live = found["effective_groups"] / found["n_groups"]
    row = {name: round(found[name], 3) for name in ("reward_mean", "exact_match")}
    return {"task": name, "verdict": found["verdict"], "live_groups": round(live, 3), **row}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ckpt", help="a run or checkpoint")
    parser.add_argument("--tasks", nargs="*", help="names of tasks; all where left out")
    parser.add_argument("--run-name", default="reasoning-gym", help="runs are RUN_NAME/TASK")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--size", type=int, default=100, help="questions drawn of each task")
    args = parser.parse_args(words)
    names = args.tasks or sorted(installed_factory().DATASETS)
    table = pd.DataFrame([judged(name, args) for name in names])
    if "live_groups" in table:
        table = table.sort_values("live_groups", ascending=False)
    print(table.to_string(index=False, na_rep=""))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
