"""Interactive pages without a kernel: static HTML with the rows of runs. They open from disk or
from any web server.

    codechat pages                                         write the pages into reports/pages, from the committed rows
    codechat pages --source nano --out runs/nano/pages     with the completions of the runs of this machine

    calculator    pass@k from counts, and the number of rollout groups that carry a gradient
    completions   requests with the reference call and the answers of two checkpoints, by tier
    xray          loss mask, advantage, share of the gradient and probability of rollouts over the steps of RL, as
                  notebook 00 recorded them

A page loads nothing from the network: it contains its rows, and the chart library (Vega-Lite)
is one shared copy below `templates/pages`, linked by a relative path."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.errors import DataError
from codechat.runs import paths
from codechat_lab.reports import html, run_frames
from codechat_lab.reports.settings import PagesConfig
from codechat_lab.tasks.funcall import TIERS

FOLDER = Path(__file__).parent / "templates" / "pages"
ABOUT = json.loads((FOLDER / "about.json").read_text())  # name -> title, lead
Row = dict[str, Any]
INDEX = ("CodeChat: try it", "Each page works without a server and without a network.")


def json_for_html(data: Any) -> str:
    """JSON that ends no script element, whatever its texts hold; NaN, which JSON lacks, is an
    error."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def completions_data(source: str = "frozen") -> Row:
    """{rows, tiers, who} of the two checkpoints that the recipe's `evaluate` compared: one
    answer of each to a request. DataError unless there are two."""
    samples = run_frames.stage_rows(source, "evaluate", "samples").to_dict("records")
    who = list(dict.fromkeys(sample["checkpoint"] for sample in samples))
    if len(who) != 2:
        raise DataError(
            f"the evaluation of {source} has answers of {len(who)} "
            f"checkpoints ({who}); required are two"
        )
    counts = run_frames.stage_rows(source, "evaluate", "per_problem").to_dict("records")
    counted = {
        (row["checkpoint"], row["id"]): {"n": int(row["n"]), "c": int(row["c"])} for row in counts
    }
    rows: dict[str, Row] = {}
    for sample in samples:
        problem = sample["problem"]
        checkpoint = sample["checkpoint"]
        about = {key: sample[key] for key in ("split", "request", "gold")}
        row = rows.setdefault(problem, {"id": problem} | about | {"answers": {}})
        answer = {
            "text": sample["completion"],
            "tier": sample["tier"],
            "reward": float(f"{sample['reward']:.4g}"),
        }
        row["answers"].setdefault(checkpoint, answer | counted.get((checkpoint, problem), {}))
    answered = [row for row in rows.values() if len(row["answers"]) == len(who)]
    for row in answered:
        row["answers"] = [row["answers"][checkpoint] for checkpoint in who]
    return {"rows": answered, "tiers": list(TIERS), "who": who}


def xray_data() -> Row:
    """{steps, problems, tiers} of the committed rollouts, from one row for each step and
    request."""
    rows = list(read_rows(run_frames.frozen_dir() / "xray" / "rollouts.jsonl"))
    problems = []
    for seen in _grouped(rows, "id"):
        about = {key: seen[0][key] for key in ("id", "request", "gold", "prompt")}
        problems.append(about | {"groups": [{"rollouts": row["rollouts"]} for row in seen]})
    steps = [_step(seen) for seen in _grouped(rows, "step")]
    return {"steps": steps, "problems": problems, "tiers": rows[0]["tiers"]}


def _step(seen: list[Row]) -> Row:
    """Mean reward, exact match and share of groups with variance of the rows of a step."""
    rollouts = [rollout for row in seen for rollout in row["rollouts"]]
    live = []
    for row in seen:
        rewards = {rollout["reward"] for rollout in row["rollouts"]}
        live.append(len(rewards) > 1)
    return {
        "step": seen[0]["step"],
        "reward": _mean(rollouts, "reward"),
        "exact": _mean(rollouts, "correct"),
        "live": sum(live) / len(live),
    }


def _mean(rollouts: list[Row], key: str) -> float:
    return float(f"{sum(float(rollout[key]) for rollout in rollouts) / len(rollouts):.3g}")


def _grouped(rows: list[Row], key: str) -> Iterable[list[Row]]:
    """The rows of each value, in the order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups.values()


def render_all(out: Path, source: str = "frozen") -> dict[Path, str]:
    """The pages for the folder `out`, and an index of them."""
    cards = [
        {"href": f"{name}.html", "title": title, "lead": lead}
        for name, (title, lead) in ABOUT.items()
    ]
    return {
        out / "calculator.html": _page(out, "calculator", {}),
        out / "completions.html": _page(out, "completions", completions_data(source)),
        out / "xray.html": _page(out, "xray", xray_data()),
        out / "index.html": _page(out, "index", {}, cards),
    }


def _page(out: Path, name: str, data: Any, cards: Iterable[Row] = ()) -> str:
    title, lead = ABOUT.get(name, INDEX)
    return html.fill(
        f"pages/{name}.html",
        more_css=(FOLDER / "pages.css").read_text(encoding="utf-8"),
        js=(FOLDER / "pages.js").read_text(encoding="utf-8"),
        links=[("index.html", "pages"), *((f"{page}.html", page) for page in ABOUT)],
        library=Path(os.path.relpath(FOLDER, out.resolve())).as_posix(),
        charts=name in ("calculator", "xray"),
        title=title,
        lead=lead,
        current=f"{name}.html",
        data=json_for_html(data),
        pages=cards,
    )


def main(cfg: PagesConfig) -> None:
    """`codechat pages`. Nothing is written if one page cannot be made, or into the folder of a
    run (ConfigError)."""
    out = paths.ROOT / cfg.out
    paths.check_outside(out)
    texts = render_all(out, cfg.source)
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomic(path, text)
        print(f"page: {path}")
