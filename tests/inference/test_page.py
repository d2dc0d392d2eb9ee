"""The chat page in headless Chromium: a request that is answered by a call, the token view, stopping, errors, a phone's width."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_server import ANSWER, CODE, REQUEST, TOK, Running, root, say, up  # noqa: F401

from codechat.inference import batching
from codechat.text import chat

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]
SETTLED = "running === null && messages.length > 1"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, up: Running) -> Iterator[Browser]:  # noqa: F811
    """A fresh page, one function offered; nothing may be thrown or blocked while it is used."""
    chromium.problems.clear()
    chromium.resize(1280, 800)
    chromium.open(up.url)
    chromium.until("model !== '' && document.querySelectorAll('#tools input').length > 20")
    chromium.ask("document.querySelectorAll('#tools input').forEach(box => box.checked = box.schema.name === 'square')")
    chromium.ask("$('say').focus()")
    yield chromium
    assert chromium.problems == []


def tell(page: Browser, text: str) -> None:
    page.type(text)
    page.enter()


def test_a_call_is_a_card_and_runs_for_real(page: Browser, tmp_path: Path) -> None:
    tell(page, REQUEST)
    page.until(SETTLED)
    assert page.ask(
        "[...document.querySelectorAll('.card code, .card .state, .card dt, .card dd')].map(n => n.textContent)"
    ) == ["square", "done", "x", "12", "result", "144"]
    assert page.ask("[...document.querySelectorAll('.assistant .body')].map(n => n.textContent)") == ["", ANSWER]
    roles = [m["role"] for m in json.loads(page.ask("JSON.stringify(messages)"))]
    assert roles == ["user", "assistant", "tool", "assistant"]
    for width in (1280, 390):
        page.resize(width, 800)
        assert page.ask(OVERFLOW) == 0
        page.shot(tmp_path / f"{width}.png")
        assert (tmp_path / f"{width}.png").stat().st_size > 5000
        assert page.ask(
            "['view', 'more', 'fresh', 'say', 'send'].every(id => { const r = $(id).getBoundingClientRect(); return r.width > 20 && r.right <= innerWidth && r.bottom <= innerHeight; })"
        )


def test_the_token_view_shows_probability_and_entropy(page: Browser) -> None:
    page.ask("document.querySelectorAll('#tools input').forEach(box => box.checked = false)")
    tell(page, "code")
    page.until(SETTLED)
    assert page.ask("document.querySelector('.assistant .body').textContent") == CODE
    page.press("t", 84, modifiers=1)
    assert page.ask(
        "document.querySelector('.assistant .body').hidden && !document.querySelector('.tokens').hidden && !$('legend').hidden"
    )
    entries = page.ask("[...document.querySelectorAll('.tokens span')].map(n => n.entry)")
    assert [e["token_id"] for e in entries] == chat.completion_ids(CODE, TOK)
    shown = page.ask("document.querySelector('.tokens').textContent")
    assert shown.replace("\u23ce", "").replace("\u25ab", "").startswith(CODE)
    assert all(0 <= e["entropy"] and len(e["top_logprobs"]) == 5 for e in entries)
    page.ask("document.querySelector('.tokens span').focus()")
    before = page.ask("$('inspector').textContent")
    page.press("ArrowRight", 39)
    after = page.ask("$('inspector').textContent")
    assert json.dumps(entries[0]["token"]) in before and json.dumps(entries[1]["token"]) in after and "entropy" in after
    page.press("Escape", 27)
    assert page.ask("$('inspector').hidden")


def test_stopping_keeps_what_was_said_and_frees_the_server(
    page: Browser,
    up: Running,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = batching.SlotCache.positions
    monkeypatch.setattr(batching.SlotCache, "positions", lambda self, new: time.sleep(0.02) or positions(self, new))
    page.ask("$('temperature').value = 10; $('seed').value = 1")
    tell(page, "hello")
    page.until("document.querySelectorAll('.tokens span').length > 3 && !$('stop').hidden")
    page.press("Escape", 27)
    page.until("running === null")
    assert up.idle() and page.ask("$('stop').hidden && !$('send').hidden && document.activeElement === $('say')")
    said = page.ask("messages.at(-1).content")
    assert page.ask("messages.length") in (0, 2) and (page.ask("messages.length") == 0 or len(said) > 0)
    assert "stopped" in page.ask("$('log').textContent")
    page.press("n", 78, modifiers=1)
    assert page.ask("messages.length") == 0 and "Ask something" in page.ask("$('log').textContent")
    assert say(up).choices[0].message.content == CODE


def test_text_never_becomes_markup(page: Browser) -> None:
    hostile = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    page.ask("$('max_tokens').value = 2")
    tell(page, hostile)
    page.until(SETTLED)
    assert page.ask("document.querySelector('.user .body').textContent") == hostile
    assert page.ask("document.querySelectorAll('#log img, #log script').length") == 0 and page.ask("window.hit") is None


def test_an_error_is_shown_and_the_text_comes_back(page: Browser) -> None:
    page.ask("$('max_tokens').value = 9999")
    tell(page, "hello")
    page.until("running === null && !!document.querySelector('[role=alert]')")
    assert "max_tokens" in page.ask("document.querySelector('[role=alert]').textContent")
    assert page.ask("$('say').value") == "hello" and page.ask("messages.length") == 0
    page.problems[:] = [p for p in page.problems if "status of 400" not in p]  # the browser's own line about the answer
