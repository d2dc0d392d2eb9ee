"""The interactive pages: what they hold, and what they do in headless Chromium."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
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
    element = r'<script [^>]*id="data"[^>]*>(.*?)</script'
    return re.search(element, page, re.DOTALL | re.IGNORECASE)[1]


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """The pages that the committed rows give."""
    return pages.render_all(COMMITTED)


def test_the_committed_pages_are_what_the_committed_rows_give(texts: dict[Path, str]) -> None:
    assert sorted(texts) == sorted(COMMITTED.glob("*.html"))
    assert len(texts) == len(pages.ABOUT) + 1
    for path, text in texts.items():
        assert path.read_text() == text, "run `codechat pages`"


def test_a_page_is_smaller_than_two_megabytes(texts: dict[Path, str]) -> None:
    assert max(map(len, texts.values())) < 2_000_000


def test_a_page_needs_only_files_beside_it(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|sendBeacon", text)
        for link in re.findall(r"<[a-z][^<>]*\b(?:src|href)=[\"']?([^\"' >]+)", text):
            assert not re.match(r"[a-z]+:|//", link)
            assert (path.parent / link).is_file()


def test_no_text_ends_the_element_that_holds_the_rows() -> None:
    rows = {"text": HOSTILE, "<": [1.5, None]}
    page = f'<script type="application/json" id="data">{pages.json_for_html(rows)}</script>'
    assert json.loads(data_of(page)) == rows


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError):
        pages.json_for_html(float("nan"))


def test_completions_compare_two_checkpoints() -> None:
    data = pages.completions_data()
    assert len(data["who"]) == 2
    assert len(data["rows"]) == 80
    for row in data["rows"]:
        assert row["gold"]
        assert row["request"]
        assert len(row["answers"]) == 2


def test_an_answer_of_completions_has_a_tier_and_counts_of_four_samples() -> None:
    data = pages.completions_data()
    for row in data["rows"]:
        for answer in row["answers"]:
            assert answer["tier"] in data["tiers"]
            assert 0 <= answer["c"] <= answer["n"] == 4


def test_rows_of_one_checkpoint_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = run_frames.stage_rows
    first = pages.completions_data()["who"][0]

    def of_first(source: str, stage: str, table: str) -> pd.DataFrame:
        frame = rows_of(source, stage, table)
        return frame[frame["checkpoint"] == first]

    monkeypatch.setattr(run_frames, "stage_rows", of_first)
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


ARTICLES = "document.querySelectorAll('article').length"


def text_of(page: Browser, name: str) -> str:
    return page.ask(f"$('{name}').textContent")


class TestInChromium:
    pytestmark = pytest.mark.slow

    @pytest.mark.parametrize("name", ["index", *pages.ABOUT])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_page_fits_a_screen_and_a_phone(self, page: Browser, name: str, scheme: str) -> None:
        page.prefer(scheme)
        show(page, COMMITTED / f"{name}.html")
        for width in (1280, 390):
            page.resize(width, 800)
            assert page.overflow() == 0

    @pytest.mark.parametrize("name", ["index", *pages.ABOUT])
    def test_a_page_is_white_or_dark_as_its_reader_prefers(self, page: Browser, name: str) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        page.prefer("light")
        show(page, COMMITTED / f"{name}.html")
        assert page.ask(colour) == "rgb(255, 255, 255)"
        page.prefer("dark")
        show(page, COMMITTED / f"{name}.html")
        assert page.ask(colour) != "rgb(255, 255, 255)"

    @pytest.mark.parametrize("name", ["index", *pages.ABOUT])
    def test_a_page_misses_nothing(self, page: Browser, name: str) -> None:
        show(page, COMMITTED / f"{name}.html")
        assert page.ask("$('missing').hidden")

    @pytest.mark.parametrize(
        "n, c, k", [(16, 2, 4), (8, 8, 3), (10, 0, 5), (200, 3, 50), (7, 3, 6)]
    )
    def test_the_calculators_pass_at_k_is_the_librarys(
        self, page: Browser, n: int, c: int, k: int
    ) -> None:
        show(page, COMMITTED / "calculator.html")
        expected = estimate_pass_at_k(n, c, k)
        assert page.ask(f"passAtK({n}, {c}, {k})") == pytest.approx(expected, abs=1e-9)

    def test_the_calculators_interval_is_the_librarys(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        expected = wilson_interval(3, 20)
        found = page.ask("wilson(3, 20)")
        assert found == pytest.approx([expected.lo, expected.hi], abs=1e-6)

    def test_the_calculators_share_of_live_groups_in_closed_form(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        assert page.ask("withVariance(0.2, 8, 0)") == pytest.approx(1 - 0.2**8 - 0.8**8)
        assert page.ask("withVariance(0.3, 8, 1)") == pytest.approx(0)

    def test_the_calculators_share_of_live_groups_is_what_counting_gives(
        self, page: Browser
    ) -> None:
        show(page, COMMITTED / "calculator.html")
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
        assert text_of(page, "share") == "50 %"
        assert text_of(page, "effective") == "50"
        assert text_of(page, "empty") == "50 %"
        assert text_of(page, "cost") == "4"
        page.until(f"{CHARTS} === 3")

    def test_the_calculator_marks_a_value_that_has_no_answer(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        put(page, "G", 1)
        assert text_of(page, "share") == "?"
        assert page.ask("$('G').getAttribute('aria-invalid')") == "true"

    def test_what_is_typed_into_the_calculator_can_be_linked(self, page: Browser) -> None:
        show(page, COMMITTED / "calculator.html")
        for field, value in (("p", 0.5), ("rho", 0), ("G", 8)):
            put(page, field, value)
        assert "G=8" in page.ask("location.hash")
        assert text_of(page, "share") == "99.2 %"

    def test_completions_are_searched_from_the_keyboard(self, page: Browser) -> None:
        show(page, COMMITTED / "completions.html")
        assert page.ask(ARTICLES) == 25
        page.press("/", 191, text="/")
        assert page.ask("document.activeElement.id") == "search"
        page.type("prime")
        assert page.ask(ARTICLES) == rows_with("prime") > 0

    def test_a_search_of_completions_can_be_linked(self, page: Browser) -> None:
        show(page, COMMITTED / "completions.html", "#q=prime")
        assert page.ask(ARTICLES) == rows_with("prime") > 0

    def test_completions_are_filtered_by_the_tiers_of_both_checkpoints(self, page: Browser) -> None:
        data = pages.completions_data()
        best = data["tiers"][-1]
        tiers = [{answer["tier"] for answer in row["answers"]} for row in data["rows"]]
        show(page, COMMITTED / "completions.html")
        button = f"find(x => x.ariaLabel.endsWith('{best}, then {best}'))"
        page.ask(f"[...document.querySelectorAll('.matrix button')].{button}.click()")
        counted = f"{tiers.count({best})} of {len(data['rows'])} requests"
        assert text_of(page, "count").startswith(counted)

    def test_the_xray_moves_with_the_arrow_keys(self, page: Browser) -> None:
        data = pages.xray_data()
        show_second_step(page)
        assert text_of(page, "at").startswith(f"{data['steps'][1]['step']} of")
        first = data["problems"][0]["groups"][1]["rollouts"][0]
        shown = "".join(first["tokens"]).replace("\n", "⏎\n")
        assert page.ask("document.querySelector('#rollouts .tokens').textContent") == shown
        page.until(f"{CHARTS} === 1")

    def test_the_mask_of_the_xray_paints_every_token(self, page: Browser) -> None:
        assert painted(page, "mask") == sum(len(row["tokens"]) for row in second_group())

    def test_the_advantage_of_the_xray_paints_the_tokens_of_rollouts_that_have_one(
        self, page: Browser
    ) -> None:
        live = [row for row in second_group() if row["advantage"]]
        assert painted(page, "advantage") == sum(len(row["tokens"]) for row in live)

    def test_the_share_of_the_xray_paints_the_tokens_that_have_one(self, page: Browser) -> None:
        shares = [share for row in second_group() for share in row["share"]]
        assert painted(page, "share") == sum(share > 0 for share in shares)

    def test_the_xray_never_paints_a_prompt(self, page: Browser) -> None:
        show_second_step(page)
        assert page.ask("document.querySelectorAll('#prompt .tokens span').length") == 0


def rows_with(word: str) -> int:
    """How many rows of completions hold a word, in any case."""
    rows = pages.completions_data()["rows"]
    return sum(word in json.dumps(row).lower() for row in rows)


def second_group() -> list[dict[str, Any]]:
    """The rollouts of the first problem at the second step."""
    return pages.xray_data()["problems"][0]["groups"][1]["rollouts"]


def show_second_step(page: Browser) -> None:
    show(page, COMMITTED / "xray.html")
    page.ask("$('step').focus()")
    page.press("ArrowRight", 39)


def painted(page: Browser, layer: str) -> int:
    """How many tokens of the second step a layer of the X-ray paints."""
    show_second_step(page)
    page.ask(f"document.querySelector('[value={layer}]').click()")
    tokens = "[...document.querySelectorAll('#rollouts .tokens span')]"
    return page.ask(f"{tokens}.filter(s => s.style.background).length")
