"""Interactive pages without a kernel: static HTML over rows of runs, which opens from disk and from any web server.

    codechat pages                          write every page into reports/pages, from the committed rows
    codechat pages completions xray --source nano --out runs/nano/pages     from the runs of this machine
    codechat pages --standalone --out /some/folder     pages that hold their library and can be sent by mail

    calculator    pass@k from counts, and how many groups of rollouts carry a gradient
    completions   requests with the reference call and the answers of two checkpoints, by rung
    xray          loss mask, advantage, share of the gradient and probability of rollouts over the steps of RL

A page follows the reader's light or dark setting, works with the keyboard and on a phone, and loads nothing from the
network: its rows are in it, and the charts' library (Vega-Lite) is one copy below `templates/pages`, to which every
page refers by a relative path.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from codechat.core import config
from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.reports import frozen_rows, html, xray_steps
from codechat.runs import paths
from codechat.tasks.funcall.staircase import TIERS

if TYPE_CHECKING:
    import pandas as pd

FROZEN = "frozen"  # as frozen_rows.FROZEN, whose module imports pandas
FOLDER = Path(__file__).parent / "templates" / "pages"
LIBRARY = ("vega.min.js", "vega-lite.min.js")
MAX_BYTES = 2_000_000

ABOUT = {
    "calculator": (
        "Will this reward teach anything?",
        "Type the share of correct answers and the group size: how many groups carry a gradient, and what pass@k is.",
    ),
    "completions": (
        "What did RL change? Request by request",
        "Every request with its reference call, the answer after SFT and the answer after RL. Filter by rung, or search.",
    ),
    "xray": (
        "Where the gradient goes, step by step",
        "A small policy learns to call functions. Move the slider: its answers to the same requests, token by token.",
    ),
}
NO_CHARTS = ("completions",)
Page = Literal["calculator", "completions", "xray"]


@dataclass(frozen=True, kw_only=True)
class PagesConfig:
    """Which pages to write, from which rows, and where to."""

    names: tuple[Page, ...] = opt((), "pages: calculator, completions, xray; none = all", positional=True)
    source: str = opt(FROZEN, "rows: frozen = the committed ones, or the recipe whose runs are read, such as nano")
    out: str = opt("reports/pages", "folder of the pages, from the project's root")
    standalone: bool = opt(False, "put the charts' library into each page (0.8 MB), so that a page can be sent alone")


# ---------------------------------------------------------------- one page


def render_page(
    name: str,
    out: Path,
    data: Any,
    *,
    title: str,
    lead: str,
    links: Sequence[tuple[str, str]] = (),
    charts: bool = True,
    standalone: bool = False,
    **values: Any,
) -> str:
    """The template of page `name` filled with `data` (plain JSON). out: the file it is for, from which it refers to the
    library. links: (address, label) of its neighbours. ConfigError above 2 MB."""
    library = Path(os.path.relpath(FOLDER, out.parent.resolve())).as_posix()
    read = {file: (FOLDER / file).read_text(encoding="utf-8") for file in ("pages.css", "pages.js")}
    scripts = [(file, (FOLDER / file).read_text(encoding="utf-8") if standalone else "") for file in LIBRARY]
    about = dict(title=title, lead=lead, links=links, current=out.name, library=library, scripts=scripts, charts=charts)
    values |= about | dict(js=read["pages.js"], data=json_for_html(data))
    text = html.fill(f"pages/{name}.html", more_css=read["pages.css"], **values)
    if (size := len(text.encode())) > MAX_BYTES:
        raise ConfigError(f"page {out.name} has {size:,} bytes; at most {MAX_BYTES:,}; show fewer runs or rows")
    return text


def json_for_html(data: Any) -> str:
    """JSON that ends no script element, whatever its texts hold; NaN, which JSON lacks, is an error."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# ---------------------------------------------------------------- rows of each page


def completions_data(source: str = FROZEN) -> dict[str, Any]:
    """{rows, tiers, who} of the two checkpoints that the recipe's `evaluate` compared: one answer of each to a request.

    From runs, the first answer that each checkpoint gave to every problem. DataError unless there are two."""
    samples = frozen_rows.rows(source, "evaluate", "samples") if source == FROZEN else _examples(source)
    who = list(dict.fromkeys(samples["checkpoint"]))
    if len(who) != 2:
        raise DataError(
            f"the evaluation of {source} has answers of {len(who)} checkpoints ({', '.join(who)}); the page compares two"
        )
    counts = frozen_rows.rows(source, "evaluate", "per_problem")
    counted = {(r["checkpoint"], r["id"]): r for r in counts.to_dict("records")}
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for sample in samples.to_dict("records"):
        problem, by = sample["problem"], sample["checkpoint"]
        rows.setdefault(problem, {"id": problem} | {k: sample[k] for k in ("split", "request", "gold")})
        count = counted.get((by, problem), {})
        answers.setdefault((by, problem), _answer(sample) | {k: int(count[k]) for k in ("n", "c") if k in count})
    both = [p for p in rows if all((by, p) in answers for by in who)]
    return dict(
        rows=[rows[p] | {"answers": [answers[by, p] for by in who]} for p in both],
        tiers=list(TIERS),
        who=who,
    )


def _answer(sample: Mapping[str, Any]) -> dict[str, Any]:
    return dict(text=sample["completion"], tier=sample["tier"], reward=float(f"{sample['reward']:.4g}"))


def _examples(source: str) -> pd.DataFrame:
    """The first answer of every checkpoint to every problem, of the recipe's own evaluation at T = 1."""
    import pandas as pd

    run = paths.find_run(f"{source}/evaluate")
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read_rows(run / "examples.jsonl"):
        if row.get("sampling", "T=1") == "T=1":
            kept.setdefault((row["checkpoint"], row["problem"]), row)
    if not kept:
        raise MissingFile(f"{run} holds no examples.jsonl; evaluate again: codechat run {source} --force evaluate")
    return pd.DataFrame(kept.values())


def xray_data(source: str = FROZEN) -> dict[str, Any]:
    """{steps, problems, tiers}: rollouts over the steps of RL; committed ones, or sampled from the checkpoints of a run
    RECIPE/rl."""
    rows = xray_steps.frozen() if source == FROZEN else xray_steps.of_run(f"{source}/rl")
    return xray_steps.as_page(rows)


DATA: dict[str, Callable[[str], Any]] = {
    "calculator": lambda source: {},
    "completions": completions_data,
    "xray": xray_data,
}


# ---------------------------------------------------------------- all pages


def render_all(out: Path, names: Iterable[str] = (), source: str = FROZEN, standalone: bool = False) -> dict[Path, str]:
    """The chosen pages (or all) for the folder `out`, and an index of these and of those that are there already."""
    chosen = list(names) or list(ABOUT)
    there = [name for name in ABOUT if name in chosen or (out / f"{name}.html").is_file()]
    files = {name: out / f"{name}.html" for name in ("index", *there)}
    links = [(file.name, {"index": "pages"}.get(name, name)) for name, file in files.items()]
    texts = {}
    for name in chosen:
        title, lead = ABOUT[name]
        shape = dict(title=title, lead=lead, links=links, charts=name not in NO_CHARTS, standalone=standalone)
        texts[files[name]] = render_page(name, files[name], DATA[name](source), **shape)
    cards = [dict(href=f"{name}.html", title=ABOUT[name][0], lead=ABOUT[name][1]) for name in there]
    about = dict(title="CodeChat: try it", lead="Each page works without a server and without a network.")
    texts[files["index"]] = render_page("index", files["index"], {}, charts=False, pages=cards, links=links, **about)
    return texts


def build(out: Path, names: Iterable[str] = (), source: str = FROZEN, standalone: bool = False) -> list[Path]:
    """Write the pages of `render_all`; returns their paths, the index last. Nothing is written if one cannot be made."""
    texts = render_all(out, names, source, standalone)
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)


def main(argv: list[str] | None = None) -> None:
    """`codechat pages [NAME ...]`."""
    cfg = config.parse(PagesConfig, sys.argv[1:] if argv is None else argv, prog="codechat pages", epilog=__doc__)
    for path in build(paths.ROOT / cfg.out, cfg.names, cfg.source, cfg.standalone):
        print(f"page: {path}")


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
