"""The interactive pages: what they hold, and what they do in headless Chromium."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import Browser

from codechat.core.errors import ConfigError, DataError
from codechat.evaluation.intervals import estimate_pass_at_k, wilson_interval
from codechat.runs.run import Run
from codechat_lab.reports import pages, run_frames

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "reports" / "pages"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!-- ]]> \u2028"


def data_of(page: str) -> str:
    """The text of a page's element #data."""
    return re.search(r'<script [^>]*id="data"[^>]*>(.*?)</script', page, re.DOTALL | re.IGNORECASE)[
        1
    ]


def test_the_committed_pages_are_what_the_committed_rows_give() -> None:
    texts = pages.render_all(COMMITTED)
    assert sorted(texts) == sorted(COMMITTED.glob("*.html"))
    assert len(texts) == len(pages.ABOUT) + 1
    for path, text in texts.items():
        assert path.read_text() == text, "run `codechat pages`"
        assert len(text) < 2_000_000
        assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|sendBeacon", text)
        for link in re.findall(r"<[a-z][^<>]*\b(?:src|href)=[\"']?([^\"' >]+)", text):
            assert not re.match(r"[a-z]+:|//", link) and (path.parent / link).is_file(), (
                "only files beside it"
            )


def test_no_text_ends_the_element_that_holds_the_rows() -> None:
    rows = {"text": HOSTILE, "<": [1.5, None]}
    page = f'<script type="application/json" id="data">{pages.json_for_html(rows)}</script>'
    assert json.loads(data_of(page)) == rows
    with pytest.raises(ValueError):
        pages.json_for_html(float("nan"))


def test_completions_compare_two_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pages.completions_data()
    assert len(data["rows"]) == 80
    assert len(data["who"]) == 2
    for row in data["rows"]:
        assert len(row["answers"]) == 2
        assert all(0 <= a["c"] <= a["n"] == 4 for a in row["answers"])
        assert row["gold"]
        assert row["request"]
        assert {a["tier"] for a in row["answers"]} <= set(data["tiers"])
    real = run_frames.stage_rows
    first = data["who"][0]
    monkeypatch.setattr(
        run_frames, "stage_rows", lambda *a: (f := real(*a))[f["checkpoint"] == first]
    )
    with pytest.raises(DataError):
        pages.completions_data()


@pytest.mark.parametrize("out", ["runs/x", "runs/x/pages"])
def test_no_page_is_written_into_a_run(out: str, home: Path) -> None:
    Run.create("x", {}, kind="sft").finish()
    before = sorted(home.rglob("*"))
    with pytest.raises(
        ConfigError, match="within run x; expected no folder of a run; choose another --out"
    ):
        pages.main(pages.PagesConfig(out=out))
    assert sorted(home.rglob("*")) == before


CHARTS = "document.querySelectorAll('.chart svg').length"


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """Nothing may be thrown, and nothing but files may be loaded."""
    chromium.fresh()
    yield chromium
    loaded = chromium.ask("performance.getEntriesByType('resource').map(e => e.name)")
    assert not [name for name in loaded if not name.startswith("file:")]
    assert chromium.problems == []


def show(page: Browser, path: Path, fragment: str = "") -> None:
    page.open("about:blank")
    page.open(path.resolve().as_uri() + fragment)


def put(page: Browser, field: str, value: object) -> None:
    page.ask(
        f"{{ const f = $('{field}'); f.value = {json.dumps(str(value))}; "
        "f.dispatchEvent(new Event('input')); }"
    )


class TestInChromium:
    pytestmark = pytest.mark.slow

    @pytest.mark.parametrize("name", ["index", *pages.ABOUT])
    def test_a_page_fits_a_phone_and_follows_the_dark_setting(
        self, page: Browser, name: str
    ) -> None:
        colours = []
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            show(page, COMMITTED / f"{name}.html")
            colours.append(page.ask("getComputedStyle(document.body).backgroundColor"))
            for width in (1280, 390):
                page.resize(width, 800)
                assert page.overflow() == 0
        assert colours[0] == "rgb(255, 255, 255)"
        assert colours[1] != colours[0]
        assert page.ask("$('missing').hidden")

    def test_the_calculator_agrees_with_the_library_and_with_counting(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        for n, c, k in ((16, 2, 4), (8, 8, 3), (10, 0, 5), (200, 3, 50), (7, 3, 6)):
            assert page.ask(f"passAtK({n}, {c}, {k})") == pytest.approx(
                estimate_pass_at_k(n, c, k), abs=1e-9
            )
        low, high = page.ask("wilson(3, 20)")
        expected = wilson_interval(3, 20)
        assert (low, high) == pytest.approx((expected.lo, expected.hi), abs=1e-6)
        assert page.ask("withVariance(0.2, 8, 0)") == pytest.approx(1 - 0.2**8 - 0.8**8)
        assert page.ask("withVariance(0.3, 8, 1)") == pytest.approx(0)
        torch.manual_seed(0)
        # mean 0.2, correlation 0.3
        p = torch.distributions.Beta(0.2 * 7 / 3, 0.8 * 7 / 3).sample((200_000,))
        correct = torch.distributions.Binomial(8, p).sample()
        counted = float(((correct > 0) & (correct < 8)).float().mean())
        assert page.ask("withVariance(0.2, 8, 0.3)") == pytest.approx(counted, abs=0.005)

    def test_the_calculator_answers_what_is_typed(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        for field, value in (("p", 0.5), ("G", 2), ("rho", 0), ("P", 1), ("steps", 100)):
            put(page, field, value)
        shown = {
            name: page.ask(f"$('{name}').textContent")
            for name in ("share", "effective", "empty", "cost")
        }
        assert shown == {"share": "50 %", "effective": "50", "empty": "50 %", "cost": "4"}
        page.until(f"{CHARTS} === 3")
        put(page, "G", 1)
        assert page.ask("$('share').textContent") == "?"
        assert page.ask("$('G').getAttribute('aria-invalid')") == "true"
        put(page, "G", 8)
        assert "G=8" in page.ask("location.hash")
        assert page.ask("$('share').textContent") == "99.2 %"

    def test_completions_are_searched_and_filtered(self, page: Browser) -> None:
        data = pages.completions_data()
        show(page, COMMITTED / "completions.html")
        assert page.ask("document.querySelectorAll('article').length") == 25
        page.press("/", 191, text="/")
        assert page.ask("document.activeElement.id") == "search"
        page.type("prime")
        expected = [r for r in data["rows"] if "prime" in json.dumps(r).lower()]
        assert page.ask("document.querySelectorAll('article').length") == len(expected) > 0
        page.ask("$('reset').click()")
        best = data["tiers"][-1]
        both = [r for r in data["rows"] if {x["tier"] for x in r["answers"]} == {best}]
        button = f"find(x => x.ariaLabel.endsWith('{best}, then {best}'))"
        page.ask(f"[...document.querySelectorAll('.matrix button')].{button}.click()")
        assert page.ask("$('count').textContent").startswith(
            f"{len(both)} of {len(data['rows'])} requests"
        )
        show(page, COMMITTED / "completions.html", "#q=prime")
        assert page.ask("document.querySelectorAll('article').length") == len(expected), (
            "a view can be linked"
        )

    def test_the_xray_moves_with_the_arrow_keys(self, page: Browser) -> None:
        data = pages.xray_data()
        show(page, COMMITTED / "xray.html")
        page.ask("$('step').focus()")
        page.press("ArrowRight", 39)
        assert page.ask("$('at').textContent").startswith(f"{data['steps'][1]['step']} of")
        first = data["problems"][0]["groups"][1]["rollouts"]
        shown = "".join(first[0]["tokens"]).replace("\n", "⏎\n")
        assert page.ask("document.querySelector('#rollouts .tokens').textContent") == shown
        painted = (
            "[...document.querySelectorAll('#rollouts .tokens "
            "span')].filter(s => s.style.background).length"
        )
        every = sum(len(r["tokens"]) for r in first)
        for layer, count in (
            ("mask", every),
            ("advantage", sum(len(r["tokens"]) for r in first if r["advantage"])),
            ("share", sum(s > 0 for r in first for s in r["share"])),
        ):
            page.ask(f"document.querySelector('[value={layer}]').click()")
            assert page.ask(painted) == count, layer
        assert page.ask("document.querySelectorAll('#prompt .tokens span').length") == 0, (
            "a prompt is never painted"
        )
        page.until(f"{CHARTS} === 1")
