"""Interactive pages without a kernel: static HTML with the rows of runs. They open from disk or from any web server.

    codechat pages                                         write the pages into reports/pages, from the committed rows
    codechat pages --source nano --out runs/nano/pages     with the completions of the runs of this machine

    calculator    pass@k from counts, and the number of rollout groups that carry a gradient
    completions   requests with the reference call and the answers of two checkpoints, by tier
    xray          loss mask, advantage, share of the gradient and probability of rollouts over the steps of RL, as
                  notebook 00 recorded them

A page loads nothing from the network: it contains its rows, and the chart library (Vega-Lite) is one shared copy
below `templates/pages`, linked by a relative path."""

import json
import os
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.errors import DataError
from codechat.runs import paths
from codechat_lab.reports import html, run_frames
from codechat_lab.reports.settings import PagesConfig
from codechat_lab.tasks.funcall import TIERS

FOLDER = Path(__file__).parent / "templates" / "pages"
ABOUT = json.loads((FOLDER / "about.json").read_text())  # name -> title, description


def json_for_html(data: Any) -> str:
    """JSON that ends no script element, whatever its texts hold; NaN, which JSON lacks, is an error."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def completions_data(source: str = "frozen") -> dict[str, Any]:
    """{rows, tiers, who} of the two checkpoints that the recipe's `evaluate` compared: one answer of each to a
    request. DataError unless there are two."""
    samples = run_frames.stage_rows(source, "evaluate", "samples").to_dict("records")
    who = list(dict.fromkeys(sample["checkpoint"] for sample in samples))
    if len(who) != 2:
        raise DataError(f"the evaluation of {source} has answers of {len(who)} checkpoints ({who}); required are two")
    counts = run_frames.stage_rows(source, "evaluate", "per_problem").to_dict("records")
    counted = {(r["checkpoint"], r["id"]): {k: int(r[k]) for k in ("n", "c")} for r in counts}
    answers: dict[str, dict[str, dict[str, Any]]] = {}
    about: dict[str, dict[str, Any]] = {}
    for sample in samples:
        problem = sample["problem"]
        by = sample["checkpoint"]
        about.setdefault(problem, {"id": problem} | {k: sample[k] for k in ("split", "request", "gold")})
        answer = dict(
            text=sample["completion"],
            tier=sample["tier"],
            reward=float(f"{sample['reward']:.4g}"),
        )
        answers.setdefault(problem, {}).setdefault(by, answer | counted.get((by, problem), {}))
    rows = [about[p] | {"answers": [a[by] for by in who]} for p, a in answers.items() if len(a) == len(who)]
    return dict(rows=rows, tiers=list(TIERS), who=who)


def xray_data() -> dict[str, Any]:
    """{steps, problems, tiers} of the committed rollouts, from one row for each step and request."""
    rows = list(read_rows(run_frames.frozen_dir() / "xray" / "rollouts.jsonl"))
    by_step, by_problem = (_grouped(rows, key) for key in ("step", "id"))
    problems = [
        {k: seen[0][k] for k in ("id", "request", "gold", "prompt")}
        | {"groups": [dict(rollouts=row["rollouts"]) for row in seen]}
        for seen in by_problem.values()
    ]
    steps = []
    for step, seen in by_step.items():
        groups = [row["rollouts"] for row in seen]
        every = [rollout for group in groups for rollout in group]
        reward, exact = (float(f"{sum(float(r[k]) for r in every) / len(every):.3g}") for k in ("reward", "correct"))
        live = sum(len({r["reward"] for r in group}) > 1 for group in groups) / len(groups)
        steps.append(dict(step=step, reward=reward, exact=exact, live=live))
    return dict(steps=steps, problems=problems, tiers=rows[0]["tiers"])


def _grouped(rows: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def render_all(out: Path, source: str = "frozen") -> dict[Path, str]:
    """The pages for the folder `out`, and an index of them."""
    css, js = ((FOLDER / file).read_text(encoding="utf-8") for file in ("pages.css", "pages.js"))
    links = [("index.html", "pages"), *((f"{name}.html", name) for name in ABOUT)]
    library = Path(os.path.relpath(FOLDER, out.resolve())).as_posix()

    def page(name: str, title: str, lead: str, data: Any, **more: Any) -> str:
        charts = name in ("calculator", "xray")
        values = dict(js=js, links=links, library=library, charts=charts, data=json_for_html(data))
        about = dict(title=title, lead=lead, current=f"{name}.html")
        return html.fill(f"pages/{name}.html", more_css=css, **values, **about, **more)

    data = dict(calculator=dict, completions=lambda: completions_data(source), xray=xray_data)
    texts = {out / f"{name}.html": page(name, *ABOUT[name], data[name]()) for name in ABOUT}
    cards = [dict(href=f"{name}.html", title=ABOUT[name][0], lead=ABOUT[name][1]) for name in ABOUT]
    lead = "Each page works without a server and without a network."
    return texts | {out / "index.html": page("index", "CodeChat: try it", lead, {}, pages=cards)}


def main(cfg: PagesConfig) -> None:
    """`codechat pages`. Nothing is written if one page cannot be made."""
    texts = render_all(paths.ROOT / cfg.out, cfg.source)
    (paths.ROOT / cfg.out).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomic(path, text)
        print(f"page: {path}")
