"""Token attribution: coloured tokens are the supervised ones, tokens never become markup,
gradient shares are those of the loss."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
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
            self.spans.append(["", dict(attrs).get("style") or "", dict(attrs).get("title") or ""])

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("span", "i"):
            self.spans[-1][0] += data


@pytest.fixture(scope="module")
def tok() -> tokenizer.Tokenizer:
    return tokenizer.load("gpt2:512")


@pytest.fixture(scope="module")
def model(tok: tokenizer.Tokenizer) -> GPT:
    return perturbed(
        GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=256, vocab_size=tok.n_vocab)), 0.1
    )


@pytest.fixture(scope="module")
def rendered(tok: tokenizer.Tokenizer) -> chat.Rendered:
    return chat.render(MESSAGES, tok)


@pytest.mark.parametrize(
    "spec, tags", [("gpt2:512", "text"), ("gpt2", "reserved"), ("bytes", "text")]
)
def test_every_view_colours_exactly_the_supervised_text(spec: str, tags: str) -> None:
    image = xray_mask(MESSAGES, tokenizer.load(spec), tags)
    assert image.coloured() == SUPERVISED
    assert "".join(text for text, style, _ in Spans(image.html()).spans if style) == SUPERVISED
    # green background until the colours end
    green = "".join(re.findall(r"\x1b\[30;48;[\d;]+m([^\x1b]*)", image.terminal()))
    assert green.replace(LINE_END, "\n").removesuffix("\n") == SUPERVISED
    # 1: the legend
    assert "".join(re.findall(r"\[\[(.*?)\]\]", str(image), re.DOTALL)[1:]) == SUPERVISED


def test_tokens_never_become_markup_nor_steer_the_terminal(tok: tokenizer.Tokenizer) -> None:
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>&lt;'
    turns = [{"role": "user", "content": hostile}, {"role": "assistant", "content": hostile}]
    one_token = XRay("mask", [5], [hostile], [1.0], [hostile])
    for image in (xray_mask(turns, tok), one_token):
        assert not Spans(image.html()).tags & {"script", "img"}
        assert "<script" not in image.html()
        assert hostile in "".join(span[0] for span in Spans(image.html()).spans)
    hostile = "\x1b]0;title\x07\x1b[2J\r\x9b1m\x7f"
    image = xray_mask(
        [{"role": "user", "content": hostile}, {"role": "assistant", "content": "ok"}], tok
    )
    assert not set("\x1b\x07\r\x9b\x7f") & set(ANSI.sub("", image.terminal()))
    assert not set("\x1b\x07\r\x9b\x7f") & set(str(image) + image.html())
    assert visible("a\tb\n") == "a\tb\n"


def test_gradient_lies_on_supervised_tokens_and_at_the_inputs_before(
    model: GPT, rendered: chat.Rendered
) -> None:
    mask = [bool(m) for m in rendered.loss_mask]
    at_outputs, at_inputs = (
        gradient_share(model, rendered.ids, mask, at=at) for at in ("hidden", "embedding")
    )
    assert sum(at_outputs) == pytest.approx(1, abs=1e-6)
    assert sum(at_inputs) == pytest.approx(1, abs=1e-6)
    assert [share > 0 for share in at_outputs] == mask
    last = max(i for i, m in enumerate(mask) if m)
    assert all(at_inputs[:last])
    assert not any(at_inputs[last:])


def test_share_is_the_gradient_of_the_real_loss(model: GPT, rendered: chat.Rendered) -> None:
    """Closed form at the last norm's output: (softmax - onehot) @ head, one row per target.
    Looking changes nothing."""
    ids = torch.tensor([rendered.ids])
    with torch.no_grad():  # as in a notebook that only evaluates
        found = gradient_share(model, rendered.ids, rendered.loss_mask)
        hidden = model.hidden(ids[:, :-1])[0]
        error = (hidden @ model.head_weight().T).softmax(-1)
        error[torch.arange(len(error)), ids[0, 1:]] -= 1
        norms = (error @ model.head_weight()).norm(dim=-1) * torch.tensor(rendered.loss_mask[1:])
    expected = [0.0, *(norms / norms.sum()).tolist()]
    assert found == pytest.approx(expected, abs=1e-6)
    assert all(weight.grad is None for weight in model.parameters())
    assert not model.norm._forward_hooks
    assert not model.wte._forward_hooks


def test_share_follows_the_advantage(
    model: GPT, rendered: chat.Rendered, tok: tokenizer.Tokenizer
) -> None:
    first = rendered.loss_mask.index(1)
    advantages = [2.0 if i == first else -0.5 * m for i, m in enumerate(rendered.loss_mask)]
    even = gradient_share(model, rendered.ids, rendered.loss_mask, policy=True)
    uneven = gradient_share(model, rendered.ids, advantages, policy=True)
    other = rendered.loss_mask.index(1, first + 1)
    assert uneven[first] / uneven[other] == pytest.approx(4 * even[first] / even[other], rel=1e-4)
    nothing = [0.0] * len(rendered.ids)
    assert all(
        gradient_share(model, rendered.ids, nothing, at=at) == nothing
        for at in ("hidden", "embedding")
    )
    assert xray_values(rendered.ids, nothing, tok, "gradient").coloured() == ""


@pytest.fixture
def tuned(home: Path, make_run: Callable[..., Run]) -> Path:
    """A run "b", fine-tuned on data/mine; returns that folder with its conversations."""
    folder = home / "data" / "mine"
    folder.mkdir(parents=True)
    for name in ("chat.select", "calls.select", "calls.train"):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"in {name}"}]
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "funcall.select.jsonl").write_text(
        json.dumps({"messages": turns[:1], "gold": None}) + "\n"
    )
    lineage = [
        dict(run="a", kind="sft", data_dir="data/mine"),
        dict(run="b", kind="grpo", data_dir="data/gone"),
    ]
    make_run("b", "gpt2:512", lineage=lineage, kind="grpo", block_size=256)
    return folder


def test_a_checkpoint_alone_shows_validation_rows_of_its_data(
    tuned: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("calls.select", "chat.select"):
        COMMANDS["xray"].run(["--ckpt", "b"])
        said = capsys.readouterr()
        assert f"[[in {name}\n<|end|>]]" in said.out
        assert f"{name}.jsonl" in said.err
        assert "\x1b" not in said.out
        (tuned / f"{name}.jsonl").unlink()
    with raising(MissingFile, "data/mine", "--data"):
        COMMANDS["xray"].run(["--ckpt", "b"])


def test_a_row_by_mask_or_gradient(
    tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tuned / "rows.jsonl"
    words = ["--ckpt", "b", "--data", str(tuned / "rows.jsonl"), "--row", "1"]
    good = json.dumps({"input_ids": [64, 65, 66], "labels": [-100, 65, 66]})  # a, b, c
    rows.write_text(f"{good}\n{good}\n")
    COMMANDS["xray"].run(words)
    assert "\n\na[[bc]]\n\n" in capsys.readouterr().out
    rows.write_text(
        "".join(json.dumps({"messages": turns}) + "\n" for turns in (MESSAGES[:3], MESSAGES))
    )
    COMMANDS["xray"].run([*words, "--gradient"])
    assert "has a share of the gradient" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    COMMANDS["xray"].run(words)
    coloured = capsys.readouterr().out
    assert "\x1b[30;48;2;" in coloured
    assert re.search(r"^all +\d+ +\d+ +\d+ %$", coloured, re.MULTILINE)
    strange = [
        f'{{"input_ids": [1, {i}], "labels": [-100, {label}]}}'
        for i, label in ((9999, 9999), (2, -100))
    ]
    for text in ('{"messages": []}', '{"messages": [{"role": "user"}]}', "[", *strange):
        rows.write_text(f"{good}\n{text}\n")
        with pytest.raises(DataError):
            COMMANDS["xray"].run(words)
    rows.write_text(good)
    with raising(DataError, "no row 1"):
        COMMANDS["xray"].run(words)
