"""Imported models' templates and tokenizers: what is trained is what is sampled, tokenised as
transformers does."""

from pathlib import Path
from typing import Any

import pytest
from imported import TAKING, both, talk

from codechat.core.errors import DataError
from codechat.text import chat
from codechat.text.tokenizer import ImportedTokenizer

# TinyLlama's line end belongs to the answer
LLAMA2, TINYLLAMA, PHI3, CHATML, THINKS_LAST = (
    (Path(__file__).parent / f"templates/{name}.jinja").read_text().removesuffix("\n")
    for name in ("llama2", "tinyllama", "phi3", "chatml", "thinks_last")
)
# thinks_last, as Qwen 3: an empty thought before the last answer only, none in prompts; earlier
# thoughts are dropped
TOOLS_NONE = (
    "{% if tools is not none or documents is not none %}{{ '# Tools' }}{% endif %}" + CHATML
)
NO_SAMPLING = {  # why answers of these templates are not sampled where they would be trained
    "thinks first": CHATML.replace("assistant\n'", "assistant\n<think>\n'"),
    "ends only the last": CHATML.replace(
        "'<|im_end|>\n'", "('<|im_end|>' if loop.last else '<|return|>')"
    ),
    "never ends": CHATML.replace("'<|im_end|>\n'", "'\n'"),
    "numbers answers": CHATML.replace("m['role']", "m['role'] + messages|length|string"),
    "raises": "{{ raise_exception('no') }}",
    "is no text": "{{ messages[0].content + 1 }}",
}
CODE = "    return x\n\n    if y:\n"


TALKS = (
    talk("hi", "yes"),
    talk("hi", CODE),
    talk("hi", "yes and no", "print", "so it is\n", "and", CODE),
    talk("be brief", "hi", "yes", roles="sua"),
    talk("how?", '<functioncall> {"name": "f"}', "7", " so: 7", roles="uafa"),
    talk("hi", "<think>\nwhy?\n</think>\n\nyes"),
    talk("hi", "<think>\nwhy?\n</think>\n\nyes", "and", "no"),
    talk("hi", "", "é\u200b漢", "🎉 x"),
)


def their_ids(theirs: Any, messages: list[dict[str, str]], prompt: bool = False) -> list[int]:
    named = [m | {"role": "tool"} if m["role"] == "function" else m for m in messages]
    return theirs.apply_chat_template(named, add_generation_prompt=prompt, return_dict=True)[
        "input_ids"
    ]


def check_sampling(
    messages: list[dict[str, str]], tok: ImportedTokenizer, trims: bool = False
) -> None:
    """Each answer stands behind its prompt, as it is sampled, alone under the loss, and is read
    back."""
    rendered = chat.render(messages, tok, "template")
    learned = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.prompt(messages[:i], tok, "template")
            answer = chat.completion_ids(message["content"], tok, "template")
            assert rendered.ids[: len(prompt + answer)] == prompt + answer
            learned += answer
            content = message["content"].strip() if trims else message["content"]
            assert chat.completion_text(answer, tok, "template") == content
            between = messages[i + 1 : i + 2]
            if between:
                onwards = prompt + answer + chat.between_turns(between, tok, "template")
                assert onwards == chat.prompt(messages[: i + 2], tok, "template")
    assert [i for i, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on] == learned


@pytest.mark.parametrize("kind", ["bytes", "prepend", "first"])
def test_answers_are_trained_where_they_are_sampled_or_refused_by_name(
    kind: str, shared_data: Path
) -> None:
    public = {
        path.stem: path.read_text()
        for path in sorted((shared_data / "chat_templates").glob("*.jinja"))
    }
    ends = dict(phi3="<|endoftext|>", deepseekv3="<｜end▁of▁sentence｜>")
    refused = set()
    for name, template in public.items():
        tok, _ = both(
            kind, template, TAKING if name == "phi3" else (), eos_token=ends.get(name, "<|im_end|>")
        )
        try:
            chat.stop_sequences(tok, "template")
        except DataError as error:
            assert "hf:theirs" in str(error)
            refused.add(name)
        for messages in TALKS:
            try:
                chat.render(messages, tok, "template")
            except DataError:
                assert name in refused or len(messages) > 3, (name, messages)
            else:
                check_sampling(messages, tok)
    assert refused == {"deepseekv3", "glm4moe", "gptoss"}


def test_thinking_is_no_part_of_a_turn_that_is_sampled_without_it() -> None:
    tok, theirs = both("bytes", THINKS_LAST)
    for messages in (m for m in TALKS if "</think>" not in m[1]["content"] or len(m) == 2):
        check_sampling(messages, tok)
        assert "<think>\n\n" not in tok.decode(chat.render(messages, tok, "template").ids)
        assert chat.prompt(messages[:-1], tok, "template") == their_ids(
            theirs, messages[:-1], prompt=True
        )
    with pytest.raises(DataError, match="hf:theirs"):  # the second prompt has lost the thought
        chat.render(talk("hi", "<think>\nwhy?\n</think>\n\nyes", "and", "no"), tok, "template")


def test_templates_whose_answers_cannot_be_sampled_are_refused() -> None:
    for why, template in NO_SAMPLING.items():
        tok, _ = both("bytes", template)
        for use in (
            lambda t: chat.stop_sequences(t, "template"),
            lambda t: chat.render(TALKS[2], t, "template"),
        ):
            with pytest.raises(DataError):
                use(tok)
                pytest.fail(why)


def test_a_template_that_writes_the_date_gets_that_of_the_process() -> None:
    tok, theirs = both("bytes", "{{ strftime_now('%d %B %Y') + '\n' }}" + CHATML)
    messages = talk("hi", "yes", "and", roles="uau")
    assert chat.prompt(messages, tok, "template") == their_ids(theirs, messages, prompt=True)
    check_sampling(talk("hi", "yes"), tok)


def test_an_answer_may_come_first_and_tools_and_documents_are_none_where_none_are_offered() -> None:
    greets = "{% if messages[0]['role'] != 'user' %}{{ 'Hello.' }}{% endif %}" + CHATML
    for template, messages in (
        (greets, talk("hello", "hi", "yes", roles="aua")),
        (TOOLS_NONE, TALKS[0]),
    ):
        tok, theirs = both("bytes", template)
        assert chat.render(messages, tok, "template").ids == their_ids(theirs, messages)
        assert "# Tools" not in tok.decode(chat.prompt(messages[:-1], tok, "template"))


@pytest.mark.parametrize("kind", ["prepend", "first"])
@pytest.mark.parametrize(
    "template", [LLAMA2, TINYLLAMA, PHI3, CHATML], ids=["llama2", "tinyllama", "phi3", "chatml"]
)
def test_a_tokenizer_that_leads_with_a_blank_gives_the_ids_of_transformers(
    kind: str, template: str
) -> None:
    eos = "<|endoftext|>" if template is PHI3 else "</s>"
    tok, theirs = both(kind, template, TAKING if template is PHI3 else (), eos_token=eos)
    for messages in TALKS:
        if template is LLAMA2 and messages[-2]["role"] == "function":
            continue  # it has no results
        check_sampling(messages, tok, trims=template is LLAMA2)
        # transformers loses blanks
        if not (template is PHI3 and any(m["content"][:1] in (" ", "") for m in messages)):
            assert chat.render(messages, tok, "template").ids == their_ids(theirs, messages)
            assert chat.prompt(messages[:-1], tok, "template") == their_ids(
                theirs, messages[:-1], prompt=True
            )


@pytest.mark.parametrize("kind", ["prepend", "first"])
def test_a_sampled_answer_keeps_its_leading_blanks(kind: str) -> None:
    for template in (LLAMA2, TINYLLAMA, PHI3):
        tok, theirs = both(kind, template, TAKING if template is PHI3 else ())
        opening = {LLAMA2: " ", TINYLLAMA: "\n", PHI3: ""}[template]
        ids = theirs("x" + opening + CODE, add_special_tokens=False)["input_ids"]
        sampled = ids[len(theirs("x", add_special_tokens=False)["input_ids"]) :]
        if template is PHI3 and kind == "prepend":
            sampled = theirs(CODE, add_special_tokens=False)["input_ids"]
        for n in range(1, len(sampled) + 1):  # an answer that has not ended yet
            assert CODE.startswith(
                chat.completion_text(sampled[:n], tok, "template").rstrip("\ufffd")
            )
        assert chat.completion_text(sampled, tok, "template") == CODE
    tok, theirs = both(kind, TINYLLAMA)
    for tags in ("raw", "text", "reserved"):
        for content in (CODE, " 5", "5", ""):
            ids = chat.completion_ids(content, tok, tags)
            assert chat.completion_text(ids, tok, tags) == content
    tags = "".join(f"<|{m['role']}|>\n{m['content']}\n<|end|>\n" for m in TALKS[2])
    assert (
        chat.render(TALKS[2], tok, "text").ids
        == theirs(tags, add_special_tokens=False)["input_ids"]
    )
    raw = talk("def f(x):\n", CODE)
    whole = theirs(raw[0]["content"] + CODE, add_special_tokens=False)["input_ids"]
    assert chat.render(raw, tok, "raw").ids == [*whole, tok.eot_id]
