"""The chat page in headless Chromium: calls, the token view, streaming, stopping, errors, a
full context, a server that leaves, kept conversations, a phone's width."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from server import Running, Serving
from taught import ANSWER, CODE, EXAMPLE, REQUEST, TOK, WORDS

from codechat.text import chat, tool_calls

pytestmark = pytest.mark.slow
SETTLED = "running === null && messages.length > 1"


@pytest.fixture
def page(chromium: Browser, up: Running) -> Iterator[Browser]:
    """A fresh page, one function offered; nothing may be thrown or blocked while it is used."""
    empty_tab(chromium, up.url)
    chromium.until("model !== '' && document.querySelectorAll('#tools input').length > 20")
    chromium.ask("about.neutral = ''")  # tiny/sft was taught without a system message
    chromium.ask("$('auto').click()")
    chromium.ask(
        "document.querySelectorAll('#tools input').forEach(box => "
        "box.checked = box.schema.name === 'square')"
    )
    chromium.ask("$('say').focus()")
    yield chromium
    assert chromium.problems == []


def empty_tab(page: Browser, url: str) -> None:
    """A page that keeps no conversation."""
    page.fresh()
    page.open(url)
    page.ask("localStorage.clear(), sessionStorage.clear()")
    page.open(url)


def tell(page: Browser, text: str) -> None:
    page.type(text)
    page.enter()


def texts(page: Browser, selector: str) -> list[str]:
    return page.ask(f"[...document.querySelectorAll({selector!r})].map(n => n.textContent)")


@pytest.fixture
def called(page: Browser) -> Browser:
    """The page after a call and the answer to its result."""
    tell(page, REQUEST)
    page.until(SETTLED)
    return page


def test_a_call_is_a_card_and_runs_for_real(called: Browser) -> None:
    shown = texts(called, ".card code, .card .state, .card dt, .card dd")
    assert shown == ["square", "done", "x", "12", "result", "144"]
    assert texts(called, ".assistant .body") == ["", ANSWER]


def test_a_call_and_its_result_are_messages_of_the_conversation(called: Browser) -> None:
    roles = [m["role"] for m in json.loads(called.ask("JSON.stringify(messages)"))]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_the_end_of_an_answer_is_in_sight_with_its_buttons(called: Browser) -> None:
    called.resize(900, 300)
    tell(called, REQUEST)
    called.until("running === null && messages.length === 8")
    hidden = "$('log').scrollHeight - $('log').scrollTop - $('log').clientHeight"
    assert called.ask("$('log').scrollHeight > $('log').clientHeight")
    assert called.ask(hidden) <= 1


@pytest.mark.parametrize("width", [1280, 390])
def test_a_conversation_with_a_call_fits_a_screen_and_a_phone(
    width: int, called: Browser, tmp_path: Path
) -> None:
    called.resize(width, 800)
    assert called.overflow() == 0
    called.shot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000
    assert called.ask(
        """['view', 'more', 'fresh', 'say', 'send'].every(id => {
            const r = $(id).getBoundingClientRect();
            return r.width > 20 && r.right <= innerWidth && r.bottom <= innerHeight; })"""
    )


@pytest.fixture
def coded(page: Browser) -> Browser:
    """The page after an answer of code, without functions."""
    page.ask("document.querySelectorAll('#tools input').forEach(box => box.checked = false)")
    tell(page, "code")
    page.until(SETTLED)
    return page


@pytest.fixture
def token_view(coded: Browser) -> Browser:
    """The same in the token view, which Alt and T open."""
    coded.press("t", 84, modifiers=1)
    return coded


def test_code_is_set_as_code(coded: Browser) -> None:
    body = "document.querySelector('.assistant .body')"
    assert coded.ask(f"{body}.textContent") == CODE
    assert coded.ask(f"getComputedStyle({body}).fontFamily").endswith("monospace")


def test_a_sentence_about_code_is_not_set_as_code(page: Browser) -> None:
    assert not page.ask("CODE.test('Hello. I can define a function, or import it.')")


def test_the_token_view_stands_in_place_of_the_text(token_view: Browser) -> None:
    assert token_view.ask("document.querySelector('.assistant .body').hidden")
    assert token_view.ask("!document.querySelector('.tokens').hidden")
    assert token_view.ask("!$('legend').hidden")


def entries(page: Browser) -> list[dict[str, Any]]:
    """What the server said of each token."""
    return page.ask("[...document.querySelectorAll('.tokens span')].map(n => n.entry)")


def test_the_token_view_shows_every_token(token_view: Browser) -> None:
    assert [e["token_id"] for e in entries(token_view)] == chat.completion_ids(CODE, TOK)
    shown = token_view.ask("document.querySelector('.tokens').textContent")
    assert shown.replace("\u23ce", "").replace("\u25ab", "").startswith(CODE)


def test_every_token_of_the_view_has_its_entropy_and_the_likeliest_five(
    token_view: Browser,
) -> None:
    for entry in entries(token_view):
        assert entry["entropy"] >= 0
        assert len(entry["top_logprobs"]) == 5


def test_the_inspector_follows_the_arrow_keys_and_closes(token_view: Browser) -> None:
    first, second, *_ = entries(token_view)
    token_view.ask("document.querySelector('.tokens span').focus()")
    before = token_view.ask("$('inspector').textContent")
    token_view.press("ArrowRight", 39)
    after = token_view.ask("$('inspector').textContent")
    assert json.dumps(first["token"]) in before
    assert json.dumps(second["token"]) in after
    assert "entropy" in after
    token_view.press("Escape", 27)
    assert token_view.ask("$('inspector').hidden")


def test_stopping_keeps_what_was_said_and_frees_the_server(
    page: Browser, up: Running, slow_down: Any
) -> None:
    slow_down(0.02)
    page.ask("$('temperature').value = 10; $('seed').value = 1")
    tell(page, "hello")
    page.until("document.querySelectorAll('.tokens span').length > 3 && !$('stop').hidden")
    page.press("Escape", 27)
    page.until("running === null")
    assert up.idle()
    assert page.ask("$('stop').hidden && !$('send').hidden && document.activeElement === $('say')")
    said = page.ask("messages.at(-1).content")
    assert page.ask("messages.length") in (0, 2)
    assert page.ask("messages.length") == 0 or len(said) > 0
    assert "stopped" in page.ask("$('log').textContent")
    page.press("n", 78, modifiers=1)
    assert page.ask("messages.length") == 0
    assert "Ask something" in page.ask("$('log').textContent")
    body = {
        "model": "tiny/sft",
        "messages": [{"role": "user", "content": "code"}],
        "temperature": 0,
    }
    assert (
        up.send("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == CODE
    )


def test_text_never_becomes_markup(page: Browser) -> None:
    hostile = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    page.ask("$('max_tokens').value = 2")
    tell(page, hostile)
    page.until(SETTLED)
    assert page.ask("document.querySelector('.user .body').textContent") == hostile
    assert page.ask("document.querySelectorAll('#log img, #log script').length") == 0
    assert page.ask("window.hit") is None


def test_a_small_model_answers_a_new_request_by_itself(page: Browser) -> None:
    """Unless it goes on with the one before, or that is switched off; the whole conversation
    stays in sight and in the export."""
    page.ask("$('auto').checked = true, $('max_tokens').value = 8")
    assert page.ask("$('alone').checked"), "tiny/sft is small"

    def asked(text: str) -> list[str]:
        before = page.ask("messages.length")
        tell(page, text)
        page.until(f"running === null && messages.length > {before}")
        return page.ask("seen().filter(m => m.role === 'user').map(m => m.content)")

    assert asked("hello") == ["hello"]
    assert asked("good morning") == ["good morning"]
    assert page.ask("forgotten") == 2
    assert [
        note.endswith("the model sees this request alone") for note in texts(page, ".offered")
    ] == [
        False,
        True,
    ]
    assert asked("and good night") == ["good morning", "and good night"]
    assert asked("is it late?") == ["good morning", "and good night", "is it late?"]
    page.ask("$('alone').click()")
    assert asked("hello again there")[-1] == "hello again there"
    assert len(asked("good day")) > 2
    assert len(json.loads(page.ask("exported()"))["messages"]) == page.ask("messages.length") == 12
    page.ask("$('auto').checked = false, $('max_tokens').value = ''")


@pytest.fixture
def own(chromium: Browser, root: Path) -> Iterator[Browser]:
    """A fresh page of a server with the functions of examples/my_tools.py."""
    with Serving(tools=(str(EXAMPLE),)) as running:
        empty_tab(chromium, running.url)
        chromium.until("model !== ''")
        chromium.ask("$('say').focus()")
        yield chromium
    assert chromium.problems == []
    chromium.open("about:blank")


def test_functions_of_a_file_run_after_a_confirmation(own: Browser) -> None:
    assert "get_weather, count_words, shipping_cost" in texts(own, ".empty")[0]
    assert texts(own, ".empty button")[0] == "What is the weather in Beijing?"
    tell(own, WORDS)
    own.until("document.querySelector('.ask') !== null")
    assert texts(own, ".card code, .card .state") == ["count_words", "waits for you"]
    own.enter()  # the focus is on Run
    own.until(SETTLED)
    assert texts(own, ".card .state, .card .result dd") == ["done", "4"]
    assert texts(own, ".assistant .body")[-1] == "Four words."


def test_a_call_that_the_user_does_not_allow_is_an_error_for_the_model(own: Browser) -> None:
    own.ask("$('max_tokens').value = 60")
    tell(own, WORDS)
    own.until("document.querySelector('.ask') !== null")
    own.ask("document.querySelectorAll('.ask button')[1].click()")
    own.until("messages.length > 2")
    assert own.ask("messages[2].content") == '{"error":"the user did not allow this call"}'
    assert texts(own, ".card .state")[0] == "failed"
    own.ask("fresh(), $('max_tokens').value = ''")


def test_without_confirmation_calls_run_at_once(own: Browser) -> None:
    own.ask("about.confirm = false")
    tell(own, WORDS)
    own.until(SETTLED)
    assert texts(own, ".card .state, .card .result dd") == ["done", "4"]


def test_an_answer_without_a_tool_says_so(page: Browser) -> None:
    """Where none was offered also that its facts may be invented."""
    page.ask("document.querySelectorAll('#tools input').forEach(box => box.checked = false)")
    tell(page, "code")
    page.until(SETTLED)
    assert texts(page, ".unaided") == [
        "no tool used, since none fits: facts in this answer may be invented"
    ]
    page.ask("fresh()")


def test_a_call_of_a_function_that_was_not_offered_is_a_failed_card(page: Browser) -> None:
    page.ask("document.querySelectorAll('#tools input').forEach(box => box.checked = false)")
    stray = tool_calls.format_call("get_weather", {"city": "Beijing"})
    replace_answers(page, [{"content": stray}])
    tell(page, "What is the weather in Beijing?")
    page.until(SETTLED)
    assert texts(page, ".card code, .card .state") == [
        "call of a function that was not offered",
        "failed",
    ]
    assert page.ask("messages.length") == 2
    page.ask("restore(), fresh()")


def test_an_answer_is_markdown_with_coloured_code_and_no_markup_of_its_own(page: Browser) -> None:
    text = "**bold** <img src=x onerror='window.hit=1'>[a](javascript:window.hit=1)\n```python\ndef f():\n    pass\n```"
    replace_answers(page, [{"content": text}])
    tell(page, "hello")
    page.until(SETTLED)
    assert texts(page, ".assistant strong") == ["bold"]
    assert "<img src=x" in texts(page, ".assistant p")[0]
    assert page.ask("document.querySelectorAll('#log img, .assistant a').length") == 0
    assert page.ask("window.hit") is None
    assert texts(page, ".assistant pre .hljs-keyword") == ["def", "pass"]
    copied = """(async () => {
        let text = '';
        navigator.clipboard.writeText = async got => { text = got; };
        document.querySelector('.assistant pre button').click();
        await new Promise(done => setTimeout(done, 50));
        return text; })()"""
    assert page.ask(copied) == "def f():\n    pass"
    page.ask("restore(), fresh()")


def press_button(page: Browser, name: str) -> None:
    page.ask(
        f"[...document.querySelectorAll('.actions button')].findLast(b => b.textContent === {name!r}).click()"
    )


def test_an_answer_is_sampled_again_in_place_of_the_last(page: Browser) -> None:
    replace_answers(page, [{"content": "one"}, {"content": "two"}])
    tell(page, "hello")
    page.until(SETTLED)
    press_button(page, "Regenerate")
    page.until("running === null && messages.at(-1).content === 'two'")
    assert page.ask("messages.map(m => m.content)") == ["hello", "two"]
    assert "sampled at temperature 0.7" in page.ask("$('log').innerText")
    assert texts(page, ".assistant .body") == ["two"]
    page.ask("restore(), fresh()")


def test_a_request_is_edited_and_what_followed_is_replaced(page: Browser) -> None:
    replace_answers(page, [{"content": "one"}, {"content": "two"}])
    tell(page, "hello")
    page.until(SETTLED)
    press_button(page, "Edit")
    assert page.ask("$('say').value") == "hello"
    page.press("Escape", 27)
    assert page.ask("[$('say').value, $('editing').hidden]") == ["", True]
    press_button(page, "Edit")
    tell(page, " you")
    page.until("running === null && messages.at(-1).content === 'two'")
    assert page.ask("messages.map(m => m.content)") == ["hello you", "two"]
    page.ask("restore(), fresh()")


def test_escape_closes_panels_and_new_clears_the_box(page: Browser) -> None:
    page.ask("$('more').click(), $('older').click()")
    page.press("Escape", 27)
    assert page.ask("[$('settings').hidden, $('kept').hidden]") == [True, True]
    page.ask("$('say').value = 'half a request'")
    page.press("n", 78, modifiers=1)
    assert page.ask("$('say').value") == ""


def test_the_empty_page_says_what_the_model_can_do(page: Browser) -> None:
    (said,) = texts(page, ".empty")
    assert "tiny/sft has 0.1" in said
    assert "reads 384 tokens" in said
    assert "gets most other requests wrong" in said


def test_a_request_that_is_too_long_is_said_plainly_and_returns_to_the_box(page: Browser) -> None:
    long = "x < 1 " * 400
    tell(page, long)
    page.until("document.querySelector('.error') !== null && running === null")
    assert "This is too long" in texts(page, ".error")[0]
    assert "the model reads 384" in texts(page, ".error")[0]
    assert page.ask("$('say').value") == long
    page.problems.clear()  # the browser's own line about status 400
    page.ask("fresh()")


def replace_answers(page: Browser, answers: list[dict[str, Any]]) -> None:
    """The next answers of the server, as the first chunk of each; `unasked()` counts those that
    are left, `restore()` lets the server answer again."""
    page.ask(
        f"""(() => {{ const left = {json.dumps(answers)}, real = ask; window.unasked = () => left.length;
        ask = async (path, ...rest) => {{ if (path !== '/v1/chat/completions') return real(path, ...rest);
          const delta = left.shift(), choice = {{delta, finish_reason: delta.tool_calls ? 'tool_calls' : 'stop'}};
          return new Response(`data: ${{JSON.stringify({{choices: [choice]}})}}\n\ndata: [DONE]\n\n`); }};
        window.restore = () => {{ ask = real; }}; }})()"""
    )


def test_an_unreadable_calls_error_is_fed_back_once_and_a_repeated_call_ends(page: Browser) -> None:
    """The server's answers are replaced: what counts is when the page asks again."""
    unreadable = f'{tool_calls.CALL_TAG} {{"name": "square", "arg'
    one = {"id": "c", "type": "function", "function": {"name": "square", "arguments": '{"x": 12}'}}
    wrong = {"content": unreadable}
    right = {"tool_calls": [one]}
    for answers in ([wrong, wrong, {}], [right, wrong, {}], [right, right, {}]):
        page.ask("fresh()")
        replace_answers(page, answers)
        tell(page, REQUEST)
        page.until(SETTLED)
        assert page.ask("messages.map(m => m.role)") == ["user", "assistant", "tool", "assistant"]
        assert page.ask("unasked()") == 1
        page.ask("restore()")


def test_a_reload_keeps_the_conversation(called: Browser, up: Running) -> None:
    before = called.ask("JSON.stringify(messages)")
    called.open(up.url)
    called.until("model !== ''")
    assert called.ask("JSON.stringify(messages)") == before


def test_a_kept_conversation_is_reopened_as_it_was(called: Browser, up: Running) -> None:
    before = called.ask("JSON.stringify(messages)")
    shown = texts(called, ".card dd")
    called.press("n", 78, modifiers=1)
    called.open(up.url)
    called.until("model !== ''")
    assert called.ask("messages.length") == 0
    called.ask("$('older').click()")
    assert called.ask("$('list').querySelector('button').textContent") == REQUEST
    called.ask("$('list').querySelector('button').click()")
    assert called.ask("JSON.stringify(messages)") == before
    assert texts(called, ".card dd") == shown
    assert texts(called, ".assistant .body") == ["", ANSWER]


def test_a_conversation_is_exported_with_its_functions(called: Browser) -> None:
    found = json.loads(called.ask("exported()"))
    assert found["messages"] == json.loads(called.ask("JSON.stringify(messages)"))
    assert found["tools"][0]["function"]["name"] == "square"


COPIED = """(async () => {
    let text = '';
    navigator.clipboard.writeText = async got => { text = got; };
    await copy();
    return text; })()"""


def test_a_conversation_is_copied_as_it_is_exported(called: Browser) -> None:
    assert json.loads(called.ask(COPIED)) == json.loads(called.ask("exported()"))


def test_a_fresh_conversation_keeps_the_one_before(called: Browser) -> None:
    called.ask("$('fresh').click()")
    assert called.ask("messages.length") == 0
    assert called.ask("kept().length") == 1


def test_kept_conversations_are_forgotten_when_told_so(called: Browser) -> None:
    called.ask("$('fresh').click()")
    called.ask("$('older').click()")
    called.ask("[...$('list').querySelectorAll('button')].at(-1).click()")
    assert called.ask("kept().length") == 0


def test_a_server_that_leaves_and_returns(chromium: Browser, root: Path, slow_down: Any) -> None:
    """In the middle of an answer: the request comes back, the page waits, and the request can
    be sent again."""
    chromium.problems.clear()
    with Serving(timeout_s=600) as running:
        slow_down(0.3)  # a server that stops lets answers end for three seconds
        port = running.place[1]
        chromium.open(running.url)
        chromium.until("model !== '' && about.tools.length > 20")
        chromium.ask("about.neutral = ''")
        chromium.ask("$('auto').click(), localStorage.clear(), $('say').focus()")
        tell(chromium, "code")
        chromium.until("(document.querySelector('.assistant .body')?.textContent || '').length > 2")
    chromium.until("running === null && away")
    assert chromium.ask("$('say').value") == "code"
    assert chromium.ask("messages.length") == 0
    assert chromium.ask("document.querySelector('.assistant')") is None, (
        "half an answer is not kept"
    )
    assert chromium.ask("$('model').classList.contains('away')")
    slow_down(0)
    with Serving(port=port):
        # asked again
        chromium.until("!away && !$('model').classList.contains('away') && about.neutral !== ''")
        chromium.ask("about.neutral = ''")
        chromium.ask("$('say').focus()")
        chromium.enter()
        chromium.until(SETTLED)
        assert chromium.ask("messages.at(-1).content") == CODE
    chromium.problems.clear()  # the browser's own lines about connections
