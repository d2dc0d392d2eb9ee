"""The protocol: what is supervised, what a prompt is, where a completion ends; no text forges a
turn."""

import json
import random
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import Any

import pytest

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat, tokenizer, tool_calls
from codechat.text.chat import MODES
from codechat.text.tokenizer import Tokenizer
from codechat.text.tool_calls import TAGS

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
    marked = zip(rendered.ids, rendered.loss_mask, strict=True)
    return chat.decode([id for id, learned in marked if learned], tok)


ROLE_TAGS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "function": "<|function_response|>",
}


def turn_of(message: dict[str, str]) -> str:
    """The text of a turn by hand."""
    return f"{ROLE_TAGS[message['role']]}\n{message['content']}\n<|end|>\n"


def test_a_conversation_is_the_text_of_its_turns(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    rendered = chat.render(TALK, tok, mode)
    assert chat.decode(rendered.ids, tok) == "".join(map(turn_of, TALK))
    assert (mode == "reserved") == (max(rendered.ids) >= tok.n_vocab)


def test_what_assistants_say_is_supervised(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    rendered = chat.render(TALK, tok, mode)
    assert supervised(rendered, tok) == LEARNED
    assert set(rendered.loss_mask) == {0, 1}


def test_every_id_has_the_role_of_its_turn(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    rendered = chat.render(TALK, tok, mode)
    for start, end, message in zip(*turns_of(rendered), TALK, strict=True):
        assert chat.decode(rendered.ids[start:end], tok) == turn_of(message)
        assert {*rendered.roles[start:end]} == {message["role"]}
        assert any(rendered.loss_mask[start:end]) == (message["role"] == "assistant")


def test_only_the_role_decides_what_is_supervised(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    roles = ("system", "user", "function", "assistant")
    same = [{"role": role, "content": "It is 3."} for role in roles]
    assert supervised(chat.render(same, tok, mode), tok) == "It is 3.\n<|end|>"


def test_an_empty_answer_has_its_end_supervised(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert supervised(chat.render(empty, tok, mode), tok) == "\n<|end|>"


def test_an_answer_of_weight_0_is_not_supervised(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    silent = [m | {"weight": 0} if m["content"] == "It is 3." else m for m in TALK]
    rendered = chat.render(silent, tok, mode)
    assert rendered.ids == chat.render(TALK, tok, mode).ids
    assert supervised(rendered, tok) == LEARNED.replace("It is 3.\n<|end|>", "")


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


CONTENTS = [
    *(message["content"] for message in TALK),
    "",
    "\n",
    "ends with lines\n\n",
    "end",
    "<",
    "x <|end",
    "\n<|",
    # the pieces of <|end|> apart
    CODE + "\n<|en d|> | end > < <|endoftext|>",
]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_completion_gives_back_its_content_and_ends_with_the_first_stop(
    setting: tuple[Tokenizer, str], content: str
) -> None:
    """Code may hold the pieces of <|end|>, their sequence stands only at its end."""
    tok, mode = setting
    ((*stop,),) = chat.stop_sequences(tok, mode)
    ids = chat.completion_ids(content, tok, mode)
    places = [i for i in range(len(ids)) if ids[i : i + len(stop)] == stop]
    assert places == [len(ids) - len(stop)]
    assert chat.completion_text(ids, tok, mode) == content


def test_code_holds_all_the_pieces_of_the_stop_in_text_mode() -> None:
    tok = tokenizer.load("gpt2")
    ((*stop,),) = chat.stop_sequences(tok, "text")
    ids = chat.completion_ids(CONTENTS[-1], tok, "text")
    assert set(stop) <= set(ids[: -len(stop)])


def test_a_completion_without_its_end_is_kept_whole(setting: tuple[Tokenizer, str]) -> None:
    tok, mode = setting
    cut = "if a<b:\n    end = 1\n"
    assert chat.completion_text(tok.encode(cut), tok, mode) == cut
    assert chat.completion_text([], tok, mode) == ""


def test_reserved_tags_are_one_id_each() -> None:
    tok = tokenizer.load("gpt2")
    names = ["system", "user", "assistant", "function_response", "assistant", "user", "assistant"]
    expected = []
    for name in names:
        expected += [TAGS.index(f"<|{name}|>"), TAGS.index("<|end|>")]
    expected.insert(5, TAGS.index("<functioncall>"))
    ids = chat.render(TALK, tok).ids
    assert [id - tok.n_vocab for id in ids if id >= tok.n_vocab] == expected


def test_no_text_spells_a_reserved_tag() -> None:
    """But for the call of an assistant."""
    tok = tokenizer.load("gpt2")
    call = tok.n_vocab + TAGS.index("<functioncall>")
    draw = random.Random(1)
    pieces = [*TAGS, "<|", "|>", "<", "end", "\n", " ", "é", "x"]
    for _ in range(300):
        contents = ["".join(draw.choices(pieces, k=8)) for _ in range(4)]
        contents.append(contents[0])
        roles = ("user", "system", "function", "user", "assistant")
        talk = [{"role": role, "content": c} for role, c in zip(roles, contents, strict=True)]
        rendered = chat.render(talk, tok)
        # without tags and line ends
        bodies = [rendered.ids[start + 2 : end - 3] for start, end in zip(*turns_of(rendered))]
        assert [chat.decode(body, tok) for body in bodies] == contents
        assert all(max(body) < tok.n_vocab for body in bodies[:-1])
        assert {id for id in bodies[-1] if id >= tok.n_vocab} <= {call}
        assert supervised(rendered, tok) == f"{contents[0]}\n<|end|>"


FORBIDDEN = [pair for pair in product(chat.ROLES, TAGS) if pair != ("assistant", "<functioncall>")]


@pytest.mark.parametrize("role, tag", FORBIDDEN)
def test_a_content_with_a_tag_is_refused_in_text_mode(role: str, tag: str) -> None:
    talk = [{"role": role, "content": f"see {tag} here"}, {"role": "user", "content": "x"}]
    with pytest.raises(DataError) as caught:
        chat.prompt(talk, tokenizer.load("gpt2"), "text")
    assert tag in str(caught.value)
    assert role in str(caught.value)


def test_a_call_of_an_assistant_is_allowed_in_text_mode() -> None:
    tok = tokenizer.load("gpt2")
    said = {"role": "assistant", "content": "see <functioncall> here"}
    prompt = chat.prompt([said, {"role": "user", "content": "x"}], tok, "text")
    assert "<functioncall>" in chat.decode(prompt, tok)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_about_tags_is_read_back(mode: str) -> None:
    tok = tokenizer.load("gpt2")
    arguments = {"text": "".join(TAGS), "<|end|>": ["<|user|>"]}
    ids = chat.completion_ids(tool_calls.format_call("count", arguments), tok, mode)
    text = chat.completion_text(ids, tok, mode)
    assert tool_calls.parse_calls(text) == [tool_calls.Call("count", arguments, "object")]


ASSISTANT = {"role": "assistant", "content": "yes"}


BYTES = tokenizer.load("bytes")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        [{"role": "user", "content": "x"}],  # no assistant
        [ASSISTANT, {"role": "tool", "content": "x"}],
        [ASSISTANT, {"role": ["user"], "content": "x"}],
        [ASSISTANT, {"role": "user"}],
        [ASSISTANT, {"content": "x"}],
        [ASSISTANT, "user: x"],
        [ASSISTANT, {"role": "user", "content": None}],
        [ASSISTANT, {"role": "user", "content": ["x"]}],
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(DataError):
        chat.render(messages, BYTES)


@pytest.mark.parametrize("messages", [TALK, []], ids=["answered", "empty"])
def test_a_prompt_ends_before_the_assistant(messages: list[dict[str, str]]) -> None:
    with pytest.raises(DataError):
        chat.prompt(messages, BYTES)


@pytest.mark.parametrize("use", [chat.render, chat.prompt])
def test_a_mode_that_is_not_known_is_refused(use: Any) -> None:
    with pytest.raises(ConfigError):
        use(TALK[:3], BYTES, "plain")


def test_the_last_tag_is_the_last_id() -> None:
    assert chat.decode([BYTES.n_vocab + 5], BYTES) == "<functioncall>"
    with pytest.raises(DataError):
        chat.decode([BYTES.n_vocab + 6], BYTES)


RAW = [message for message in TALK if message["role"] != "function"][:3]
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS)


@EVERY_SPEC
def test_raw_text_is_the_contents_and_the_end_of_text(spec: str) -> None:
    tok = tokenizer.load(spec)
    ids = chat.render(RAW, tok, "raw").ids
    system, user, answer = [message["content"] for message in RAW]
    assert chat.decode(ids[:-1], tok) == f"{system}\n\n{user}{answer}"
    assert ids[-1] == tok.eot_id


@EVERY_SPEC
def test_raw_text_supervises_the_answer_and_the_end_of_text(spec: str) -> None:
    tok = tokenizer.load(spec)
    rendered = chat.render(RAW, tok, "raw")
    assert supervised(rendered, tok).startswith("Sure. <functioncall>")
    assert rendered.loss_mask[-1] == 1


@EVERY_SPEC
def test_a_raw_prompt_and_its_completion_are_the_raw_text(spec: str) -> None:
    tok = tokenizer.load(spec)
    written = chat.completion_ids(RAW[2]["content"], tok, "raw")
    assert chat.prompt(RAW[:2], tok, "raw") + written == chat.render(RAW, tok, "raw").ids
    assert chat.completion_text(written, tok, "raw") == RAW[2]["content"]


@EVERY_SPEC
def test_raw_text_goes_on_behind_its_end(spec: str) -> None:
    tok = tokenizer.load(spec)
    later = [{"role": "user", "content": "Now code."}, {"role": "system", "content": "x"}]
    begun = chat.render(RAW, tok, "raw").ids
    whole = chat.prompt([*RAW, *later], tok, "raw")
    assert begun + chat.between_turns(later, tok, "raw") == whole


@EVERY_SPEC
def test_raw_text_stops_at_the_end_of_text(spec: str) -> None:
    tok = tokenizer.load(spec)
    assert chat.stop_sequences(tok, "raw") == ((tok.eot_id,),)


@EVERY_SPEC
def test_a_tag_in_raw_text_is_text_like_any_other(spec: str) -> None:
    tok = tokenizer.load(spec)
    prompt = chat.prompt([{"role": "user", "content": "<|end|>\n"}], tok, "raw")
    assert chat.decode(prompt, tok) == "<|end|>\n"


@EVERY_SPEC
def test_raw_text_is_made_of_text(spec: str) -> None:
    message: Any = {"role": "user", "content": 3}
    with pytest.raises(DataError):
        chat.prompt([message], tokenizer.load(spec), "raw")


ANSWER = "so 7</answer>\n"


@EVERY_SPEC
@pytest.mark.parametrize("by_letters", [False, True], ids=["words", "letters"])
def test_a_completion_is_cut_behind_a_stop_text_however_tokens_spell_it(
    by_letters: bool, spec: str
) -> None:
    tok = tokenizer.load(spec)
    pieces = list(ANSWER) if by_letters else [ANSWER]
    ids = [id for piece in pieces for id in tok.encode(piece)]
    ids += [*tok.encode("User: more"), tok.eot_id]
    n, text = chat.cut_after(ids, ("</answer>", "User:"), tok) or (0, "")
    assert text == "so 7</answer>"
    assert chat.decode(ids[:n], tok).startswith(text)
    assert "</answer>" not in chat.decode(ids[: n - 1], tok)


@EVERY_SPEC
@pytest.mark.parametrize("text", ["User: more", ""])
def test_a_completion_without_a_stop_text_is_not_cut(text: str, spec: str) -> None:
    tok = tokenizer.load(spec)
    assert chat.cut_after(tok.encode(text), ("</answer>",), tok) is None
