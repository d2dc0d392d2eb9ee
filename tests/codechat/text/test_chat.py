"""The protocol: what is supervised, what a prompt is, where a completion ends; no text forges a
turn."""

import json
import random
from itertools import accumulate, groupby, product
from pathlib import Path

import pytest

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat, tokenizer
from codechat.text.chat import MODES, TAGS
from codechat.text.tokenizer import Tokenizer

SPECS = ("gpt2", "python:4096", "bytes")
TALK = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))["talk"]
CODE = TALK[-1]["content"]  # with pieces of tags
SURE = 'Sure. <functioncall> {"name": "add", "arguments": {"a": 1, "b": 2}}'
LEARNED = f"{SURE}\n<|end|>It is 3.\n<|end|>{CODE}\n<|end|>"


@pytest.fixture(params=[(spec, mode) for spec in SPECS for mode in MODES], ids="-".join)
def setting(request: pytest.FixtureRequest) -> tuple[Tokenizer, str]:
    spec, mode = request.param
    return tokenizer.load(spec), mode


def turns_of(rendered: chat.Rendered) -> tuple[list[int], list[int]]:
    """Where turns of different roles begin and end in the ids."""
    ends = [*accumulate(len([*group]) for _, group in groupby(rendered.roles))]
    return [0, *ends[:-1]], ends


def supervised(rendered: chat.Rendered, tok: Tokenizer) -> str:
    return chat.decode(
        [i for i, learned in zip(rendered.ids, rendered.loss_mask, strict=True) if learned], tok
    )


def test_text_mask_and_spans_are_those_of_the_conversation(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    rendered = chat.render(TALK, tok, mode)
    assert supervised(rendered, tok) == LEARNED
    assert set(rendered.loss_mask) == {0, 1}
    tag = dict(
        system="<|system|>",
        user="<|user|>",
        assistant="<|assistant|>",
        function="<|function_response|>",
    )
    assert chat.decode(rendered.ids, tok) == "".join(
        f"{tag[m['role']]}\n{m['content']}\n<|end|>\n" for m in TALK
    )
    assert (mode == "reserved") == (max(rendered.ids) >= tok.n_vocab)
    for start, end, message in zip(*turns_of(rendered), TALK, strict=True):
        turn = f"{tag[message['role']]}\n{message['content']}\n<|end|>\n"
        assert chat.decode(rendered.ids[start:end], tok) == turn
        assert {*rendered.roles[start:end]} == {message["role"]}
        assert any(rendered.loss_mask[start:end]) == (message["role"] == "assistant")
    same = [
        {"role": role, "content": "It is 3."}
        for role in ("system", "user", "function", "assistant")
    ]
    assert supervised(chat.render(same, tok, mode), tok) == "It is 3.\n<|end|>"
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert supervised(chat.render(empty, tok, mode), tok) == "\n<|end|>"
    silent = chat.render(
        [m | {"weight": 0} if m["content"] == "It is 3." else m for m in TALK], tok, mode
    )
    assert silent.ids == rendered.ids
    assert supervised(silent, tok) == LEARNED.replace("It is 3.\n<|end|>", "")


def test_a_prompt_is_a_prefix_of_the_conversation(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    for n in (2, 4, 6):
        prompt = chat.prompt(TALK[:n], tok, mode)
        completion = chat.completion_ids(TALK[n]["content"], tok, mode)
        ids = chat.render(TALK[: n + 1], tok, mode).ids
        assert prompt + completion + tok.encode("\n") == ids
        assert chat.decode(prompt, tok).endswith("<|end|>\n<|assistant|>\n")
        assert chat.render(TALK, tok, mode).ids[: len(ids)] == ids
        if n < 6:
            between = chat.between_turns(TALK[n + 1 : n + 2], tok, mode)
            assert prompt + completion + between == chat.prompt(TALK[: n + 2], tok, mode)


def test_a_completion_gives_back_its_content_and_ends_with_the_first_stop(
    setting: tuple[Tokenizer, str],
) -> None:
    """Code may hold the pieces of <|end|>, their sequence stands only at its end."""
    tok, mode = setting
    ((*stop,),) = chat.stop_sequences(tok, mode)
    code = CODE + "\n<|en d|> | end > < <|endoftext|>"
    contents = [m["content"] for m in TALK] + [
        "",
        "\n",
        "ends with lines\n\n",
        "end",
        "<",
        "x <|end",
        "\n<|",
        code,
    ]
    for content in contents:
        ids = chat.completion_ids(content, tok, mode)
        assert [i for i in range(len(ids)) if ids[i : i + len(stop)] == stop] == [
            len(ids) - len(stop)
        ]
        assert chat.completion_text(ids, tok, mode) == content
    if (mode, tok.spec) == ("text", "gpt2"):
        assert set(stop) <= set(ids[: -len(stop)])
    cut = "if a<b:\n    end = 1\n"  # without its end all is kept
    assert chat.completion_text(tok.encode(cut), tok, mode) == cut
    assert chat.completion_text([], tok, mode) == ""


def test_reserved_tags_are_one_id_each_and_no_text_spells_them() -> None:
    tok = tokenizer.load("gpt2")
    draw = random.Random(1)
    names = ["system", "user", "assistant", "function_response", "assistant", "user", "assistant"]
    expected = [piece for n in names for piece in (TAGS.index(f"<|{n}|>"), TAGS.index("<|end|>"))]
    expected.insert(5, TAGS.index("<functioncall>"))
    assert [i - tok.n_vocab for i in chat.render(TALK, tok).ids if i >= tok.n_vocab] == expected
    for _ in range(300):
        contents = [
            "".join(draw.choices([*TAGS, "<|", "|>", "<", "end", "\n", " ", "é", "x"], k=8))
            for _ in range(4)
        ]
        talk = [
            {"role": role, "content": c}
            for role, c in zip(("user", "system", "function", "user"), contents)
        ]
        rendered = chat.render([*talk, {"role": "assistant", "content": contents[0]}], tok)
        # without tags and line ends
        bodies = [rendered.ids[start + 2 : end - 3] for start, end in zip(*turns_of(rendered))]
        assert [chat.decode(body, tok) for body in bodies] == [*contents, contents[0]]
        assert all(max(body) < tok.n_vocab for body in bodies[:-1])
        assert {i for i in bodies[-1] if i >= tok.n_vocab} <= {
            tok.n_vocab + TAGS.index("<functioncall>")
        }
        assert supervised(rendered, tok) == f"{contents[0]}\n<|end|>"


def test_contents_with_a_tag_raise_in_text_mode_and_a_call_about_tags_does_not() -> None:
    tok = tokenizer.load("gpt2")
    for role, tag in product(chat.ROLES, TAGS):
        talk = [{"role": role, "content": f"see {tag} here"}, {"role": "user", "content": "x"}]
        if (role, tag) == ("assistant", "<functioncall>"):
            assert "<functioncall>" in chat.decode(chat.prompt(talk, tok, "text"), tok)
            continue
        with pytest.raises(DataError) as caught:
            chat.prompt(talk, tok, "text")
        assert tag in str(caught.value)
        assert role in str(caught.value)
    arguments = {"text": "".join(TAGS), "<|end|>": ["<|user|>"]}
    call = chat.format_call("count", arguments)
    for mode in MODES:
        text = chat.completion_text(chat.completion_ids(call, tok, mode), tok, mode)
        assert chat.parse_calls(text) == [chat.Call("count", arguments, "object")]


ASSISTANT = {"role": "assistant", "content": "yes"}


def test_what_is_no_conversation_raises() -> None:
    tok = tokenizer.load("bytes")
    malformed = [{"role": role, "content": "x"} for role in ("tool", ["user"])]
    malformed += [{"role": "user"}, {"content": "x"}, "user: x"]
    malformed += [{"role": "user", "content": content} for content in (None, ["x"])]
    no_assistant = [{"role": "user", "content": "x"}]
    for messages in (
        [],
        "hello",
        None,
        no_assistant,
        *([ASSISTANT, message] for message in malformed),
    ):
        with pytest.raises(DataError):
            chat.render(messages, tok)
    for messages in (TALK, []):  # a prompt ends before the assistant
        with pytest.raises(DataError):
            chat.prompt(messages, tok)
    for use in (chat.render, chat.prompt):
        with pytest.raises(ConfigError):
            use(TALK[:3], tok, "plain")
    assert chat.decode([tok.n_vocab + 5], tok) == "<functioncall>"
    with pytest.raises(DataError):
        chat.decode([tok.n_vocab + 6], tok)


@pytest.mark.parametrize("spec", SPECS)
def test_raw_text_has_no_turns(spec: str) -> None:
    tok = tokenizer.load(spec)
    talk = [m for m in TALK if m["role"] != "function"][:4]
    rendered = chat.render(talk[:3], tok, "raw")
    first = f"{TALK[0]['content']}\n\n{TALK[1]['content']}"
    assert chat.decode(rendered.ids[:-1], tok) == first + TALK[2]["content"]
    assert rendered.ids[-1] == tok.eot_id
    assert supervised(rendered, tok).startswith("Sure. <functioncall>")
    assert rendered.loss_mask[-1] == 1
    prompt = chat.prompt(talk[:2], tok, "raw")
    written = chat.completion_ids(TALK[2]["content"], tok, "raw")
    assert prompt + written == rendered.ids
    assert chat.completion_text(written, tok, "raw") == TALK[2]["content"]
    later = [{"role": "user", "content": "Now code."}, {"role": "system", "content": "x"}]
    assert rendered.ids + chat.between_turns(later, tok, "raw") == chat.prompt(
        [*talk[:3], *later], tok, "raw"
    )
    assert chat.stop_sequences(tok, "raw") == ((tok.eot_id,),)
    # a user's tag is text like any other
    assert (
        chat.decode(chat.prompt([{"role": "user", "content": "<|end|>\n"}], tok, "raw"), tok)
        == "<|end|>\n"
    )
    with pytest.raises(DataError):
        chat.prompt([{"role": "user", "content": 3}], tok, "raw")  # type: ignore[dict-item]


@pytest.mark.parametrize("spec", SPECS)
def test_a_completion_is_cut_behind_a_stop_text_however_tokens_spell_it(spec: str) -> None:
    tok = tokenizer.load(spec)
    rest = [*tok.encode("User: more"), tok.eot_id]
    ways = [tok.encode("so 7</answer>\n"), [i for c in "so 7</answer>\n" for i in tok.encode(c)]]
    for ids in ways:
        n, text = chat.cut_after(ids + rest, ("</answer>", "User:"), tok) or (0, "")
        assert text == "so 7</answer>"
        assert chat.decode(ids[:n], tok).startswith(text)
        assert "</answer>" not in chat.decode(ids[: n - 1], tok)
    assert chat.cut_after(rest, ("</answer>",), tok) is None
    assert chat.cut_after([], ("x",), tok) is None
