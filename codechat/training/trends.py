"""What the evaluations of a run warn of."""

import pandas as pd


def warnings(evals: pd.DataFrame) -> list[str]:
    """What the rows of eval.jsonl warn of: held-out losses that rose in each of the last three;
    a reward that rose since an earlier row while pass@1 fell, each beyond both intervals."""
    found = []
    now = evals.iloc[-1]
    # the first difference is NaN: the first row has none before it
    for name, changes in evals.filter(like="heldout_loss/").diff()[1:][-3:].items():
        if len(changes) == 3 and (changes > 0).all():
            remedy = "this domain is being overwritten: raise its --mix share or lower --lr"
            found.append(
                f"{name} rose three evaluations in a row, to {now[name]:.3f} "
                f"at step {now['step']:.0f}; {remedy}"
            )
    if {"reward_mean/lo", "pass@1/lo"} <= {*evals}:
        parted = evals[
            (evals["reward_mean/hi"] < now["reward_mean/lo"])
            & (evals["pass@1/lo"] > now["pass@1/hi"])
        ]
        for _, was in parted[-1:].iterrows():
            moved = "; ".join(
                f"{name} {was[name]:.3f} -> {now[name]:.3f}" for name in ("reward_mean", "pass@1")
            )
            remedy = (
                "the reward is met without the task: read "
                "samples.jsonl, and pay for right or wrong only"
            )
            found.append(f"since step {was['step']:.0f} {moved}; {remedy}")
    return found
