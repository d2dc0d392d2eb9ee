"""Token attribution: coloured tokens are the supervised ones, tokens never become markup,
gradient shares are those of the loss."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonl import write
from raising import raising
from random_models import perturbed

from codechat.core.errors import DataError, MissingFile
from codechat.core.registry import COMMANDS
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs.run import Run
from codechat.text import chat, tokenizer
from codechat_lab.instruments.token_attribution import gradient_share, xray_mask, xray_values
from codechat_lab.instruments.token_view import LINE_END, XRay, visible

CALL = '<functioncall> {"name": "square", "arguments": {"x": 12}}'
CODE = "def f(a, b):\n    return a < b | b > 0  # end 日本 🎉\n"
MESSAGES = [
    {"role": "system", "content": "Functions:\nsquare(x: number)"},
    {"role": "user", "content": "12 squared? <script>alert('&')</script>"},
    {"role": "assistant", "content": CALL},
    {"role": "function", "content": '{"result": 144}'},
    {"role": "assistant", "content": CODE},
]
SUPERVISED = f"{CALL}\n<|end|>{CODE}\n<|end|>"
ANSI = re.compile(r"\x1b\[[\d;]*m")


class Spans(HTMLParser):
    """(text, style, title) of every span; the tags met."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.spans: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "span":
            about = dict(attrs)
            self.spans.append(["", about.get("style") or "", about.get("title") or ""])

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("span", "i"):
            self.spans[-1][0] += data


@pytest.fixture(scope="module")
def tok() -> tokenizer.Tokenizer:
    return tokenizer.load("gpt2:512")


@pytest.fixture(scope="module")
def model(tok: tokenizer.Tokenizer) -> GPT:
    shape = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=256, vocab_size=tok.n_vocab)
    return perturbed(GPT(shape), 0.1)


@pytest.fixture(scope="module")
def rendered(tok: tokenizer.Tokenizer) -> chat.Rendered:
    return chat.render(MESSAGES, tok)


@pytest.fixture(
    params=[("gpt2:512", "text"), ("gpt2", "reserved"), ("bytes", "text")],
    ids=["gpt2:512-text", "gpt2-reserved", "bytes-text"],
)
def image(request: pytest.FixtureRequest) -> XRay:
    spec, tags = request.param
    return xray_mask(MESSAGES, tokenizer.load(spec), tags)


def test_the_coloured_text_is_the_supervised_text(image: XRay) -> None:
    assert image.coloured() == SUPERVISED


def test_the_page_colours_exactly_the_supervised_text(image: XRay) -> None:
    spans = Spans(image.html()).spans
    assert "".join(text for text, style, _ in spans if style) == SUPERVISED


def test_the_terminal_colours_exactly_the_supervised_text(image: XRay) -> None:
    # green background until the colours end
    green = "".join(re.findall(r"\x1b\[30;48;[\d;]+m([^\x1b]*)", image.terminal()))
    assert green.replace(LINE_END, "\n").removesuffix("\n") == SUPERVISED


def test_plain_text_marks_exactly_the_supervised_text(image: XRay) -> None:
    _legend, *marked = re.findall(r"\[\[(.*?)\]\]", str(image), re.DOTALL)
    assert "".join(marked) == SUPERVISED


def conversation(request: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]


MARKUP = '"><script>alert(1)</script><img src=x onerror=alert(1)>&lt;'


@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "one token"])
def test_tokens_never_become_markup(whole: bool, tok: tokenizer.Tokenizer) -> None:
    if whole:
        image = XRay("mask", [5], [MARKUP], [1.0], [MARKUP])
    else:
        image = xray_mask(conversation(MARKUP, MARKUP), tok)
    shown = Spans(image.html())
    assert not shown.tags & {"script", "img"}
    assert "<script" not in image.html()
    assert MARKUP in "".join(text for text, _, _ in shown.spans)


def test_tokens_never_steer_the_terminal(tok: tokenizer.Tokenizer) -> None:
    image = xray_mask(conversation("\x1b]0;title\x07\x1b[2J\r\x9b1m\x7f", "ok"), tok)
    steering = set("\x1b\x07\r\x9b\x7f")
    assert not steering & set(ANSI.sub("", image.terminal()))
    assert not steering & set(str(image) + image.html())


def test_tabs_and_line_ends_stay_as_they_are() -> None:
    assert visible("a\tb\n") == "a\tb\n"


@pytest.fixture(scope="module")
def mask(rendered: chat.Rendered) -> list[bool]:
    """Which tokens are supervised."""
    return [bool(on) for on in rendered.loss_mask]


def test_the_gradient_at_the_outputs_lies_on_supervised_tokens(
    model: GPT, rendered: chat.Rendered, mask: list[bool]
) -> None:
    shares = gradient_share(model, rendered.ids, mask, at="hidden")
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert [share > 0 for share in shares] == mask


def test_the_gradient_at_the_inputs_lies_before_the_last_supervised_token(
    model: GPT, rendered: chat.Rendered, mask: list[bool]
) -> None:
    shares = gradient_share(model, rendered.ids, mask, at="embedding")
    last = max(i for i, on in enumerate(mask) if on)
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert all(shares[:last])
    assert not any(shares[last:])


def test_share_is_the_gradient_of_the_real_loss(model: GPT, rendered: chat.Rendered) -> None:
    """Closed form at the last norm's output: (softmax - onehot) @ head, one row per target."""
    ids = torch.tensor([rendered.ids])
    supervised = torch.tensor(rendered.loss_mask[1:])
    with torch.no_grad():
        hidden = model.hidden(ids[:, :-1])[0]
        error = (hidden @ model.head_weight().T).softmax(-1)
        error[torch.arange(len(error)), ids[0, 1:]] -= 1
        norms = (error @ model.head_weight()).norm(dim=-1) * supervised
    expected = [0.0, *(norms / norms.sum()).tolist()]
    found = gradient_share(model, rendered.ids, rendered.loss_mask)
    assert found == pytest.approx(expected, abs=1e-6)


def test_looking_works_where_gradients_are_off_and_changes_nothing(
    model: GPT, rendered: chat.Rendered
) -> None:
    with torch.no_grad():  # as in a notebook that only evaluates
        found = gradient_share(model, rendered.ids, rendered.loss_mask)
    assert found == gradient_share(model, rendered.ids, rendered.loss_mask)
    assert all(weight.grad is None for weight in model.parameters())
    assert not model.norm._forward_hooks
    assert not model.wte._forward_hooks


def test_share_follows_the_advantage(model: GPT, rendered: chat.Rendered) -> None:
    first = rendered.loss_mask.index(1)
    other = rendered.loss_mask.index(1, first + 1)
    advantages = [-0.5 * on for on in rendered.loss_mask]
    advantages[first] = 2.0
    even = gradient_share(model, rendered.ids, rendered.loss_mask, policy=True)
    uneven = gradient_share(model, rendered.ids, advantages, policy=True)
    assert uneven[first] / uneven[other] == pytest.approx(4 * even[first] / even[other], rel=1e-4)


@pytest.mark.parametrize("at", ["hidden", "embedding"])
def test_no_advantage_has_no_share(at: str, model: GPT, rendered: chat.Rendered) -> None:
    nothing = [0.0] * len(rendered.ids)
    assert gradient_share(model, rendered.ids, nothing, at=at) == nothing


def test_no_share_has_no_colour(rendered: chat.Rendered, tok: tokenizer.Tokenizer) -> None:
    nothing = [0.0] * len(rendered.ids)
    assert xray_values(rendered.ids, nothing, tok, "gradient").coloured() == ""


@pytest.fixture
def tuned(home: Path, make_run: Callable[..., Run]) -> Path:
    """A run "b", fine-tuned on data/mine; returns that folder with its conversations."""
    folder = home / "data" / "mine"
    folder.mkdir(parents=True)
    for name in ("chat.select", "calls.select", "calls.train"):
        write(folder / f"{name}.jsonl", [{"messages": conversation("x", f"in {name}")}])
    problem = {"messages": [{"role": "user", "content": "x"}], "gold": None}
    write(folder / "funcall.select.jsonl", [problem])
    lineage = [
        {"run": "a", "kind": "sft", "data_dir": "data/mine"},
        {"run": "b", "kind": "grpo", "data_dir": "data/gone"},
    ]
    make_run("b", "gpt2:512", lineage=lineage, kind="grpo", block_size=256)
    return folder


@pytest.mark.parametrize("name, absent", [("calls.select", []), ("chat.select", ["calls.select"])])
def test_a_checkpoint_alone_shows_validation_rows_of_its_data(
    name: str, absent: list[str], tuned: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of the first domain that has some, in a plain text where nobody looks at a terminal."""
    for other in absent:
        (tuned / f"{other}.jsonl").unlink()
    COMMANDS["xray"].run(["--ckpt", "b"])
    said = capsys.readouterr()
    assert f"[[in {name}\n<|end|>]]" in said.out
    assert f"{name}.jsonl" in said.err
    assert "\x1b" not in said.out


def test_a_checkpoint_without_validation_rows_asks_for_a_file(tuned: Path) -> None:
    (tuned / "calls.select.jsonl").unlink()
    (tuned / "chat.select.jsonl").unlink()
    with raising(MissingFile, "data/mine", "--data"):
        COMMANDS["xray"].run(["--ckpt", "b"])


IDS = {"input_ids": [64, 65, 66], "labels": [-100, 65, 66]}  # a, b, c


@pytest.fixture
def look(tuned: Path) -> Callable[..., None]:
    """look(rows, ...): `codechat xray` on the second of the rows, with further flags."""

    def run(rows: list[Any], *flags: str) -> None:
        path = write(tuned / "rows.jsonl", rows)
        COMMANDS["xray"].run(["--ckpt", "b", "--data", str(path), "--row", "1", *flags])

    return run


def test_a_row_of_ids_and_labels_shows_its_labels(
    look: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    look([IDS, IDS])
    assert "\n\na[[bc]]\n\n" in capsys.readouterr().out


TALKS = [{"messages": MESSAGES[:3]}, {"messages": MESSAGES}]


def test_a_row_by_its_gradient_says_that_it_is_the_gradient(
    look: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    look(TALKS, "--gradient")
    assert "has a share of the gradient" in capsys.readouterr().out


def test_a_terminal_shows_a_row_in_colours_and_counts_its_tokens(
    look: Callable[..., None], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    look(TALKS)
    coloured = capsys.readouterr().out
    assert "\x1b[30;48;2;" in coloured
    assert re.search(r"^all +\d+ +\d+ +\d+ %$", coloured, re.MULTILINE)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"input_ids": [1, 9999], "labels": [-100, 9999]},
        {"input_ids": [1, 2], "labels": [-100, -100]},
    ],
    ids=["no messages", "no content", "unknown id", "no label"],
)
def test_a_row_that_nothing_can_be_shown_of_is_an_error(
    row: dict[str, Any], look: Callable[..., None]
) -> None:
    with pytest.raises(DataError):
        look([IDS, row])


def test_a_line_that_is_not_json_is_an_error(tuned: Path) -> None:
    path = write(tuned / "rows.jsonl", [IDS])
    path.write_text(path.read_text() + "[\n")
    with pytest.raises(DataError):
        COMMANDS["xray"].run(["--ckpt", "b", "--data", str(path), "--row", "1"])


def test_a_row_after_the_last_is_an_error(look: Callable[..., None]) -> None:
    with raising(DataError, "no row 1"):
        look([IDS])
