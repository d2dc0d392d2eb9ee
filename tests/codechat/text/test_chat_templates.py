"""Imported models' templates and tokenizers: what is trained is what is sampled, tokenised as transformers does."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from codechat.core.errors import DataError
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import ImportedTokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
TURNS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|observation|>"]
TURNS += ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "[gMASK]", "<sop>"]
TAKING = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]  # as in Phi 3, they take in the blanks behind them

# TinyLlama's line end belongs to the answer
LLAMA2, TINYLLAMA, PHI3, CHATML, THINKS_LAST = (
    (Path(__file__).parent / f"templates/{name}.jinja").read_text().removesuffix("\n")
    for name in ("llama2", "tinyllama", "phi3", "chatml", "thinks_last")
)
# thinks_last, as Qwen 3: an empty thought before the last answer only, none in prompts; earlier thoughts are dropped
TOOLS_NONE = "{% if tools is not none or documents is not none %}{{ '# Tools' }}{% endif %}" + CHATML
NO_SAMPLING = {  # why answers of these templates are not sampled where they would be trained
    "thinks first": CHATML.replace("assistant\n'", "assistant\n<think>\n'"),
    "ends only the last": CHATML.replace("'<|im_end|>\n'", "('<|im_end|>' if loop.last else '<|return|>')"),
    "never ends": CHATML.replace("'<|im_end|>\n'", "'\n'"),
    "numbers answers": CHATML.replace("m['role']", "m['role'] + messages|length|string"),
    "raises": "{{ raise_exception('no') }}",
    "is no text": "{{ messages[0].content + 1 }}",
}
CODE = "    return x\n\n    if y:\n"


def talk(*contents: str, roles: str = "ua") -> list[dict[str, str]]:
    names = dict(s="system", u="user", a="assistant", f="function")
    roles = roles * (len(contents) // len(roles))
    return [{"role": names[role], "content": content} for role, content in zip(roles, contents)]


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


@lru_cache
def tokenizer_json(kind: str) -> str:
    """ "bytes" as GPT-2's and Qwen's, else SentencePiece's: a blank before a text and each piece between special tokens
    ("prepend", Llama 2), or only before the text ("first")."""
    corpus = [Path(__file__).read_text(encoding="utf-8")]
    if kind == "bytes":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        more = dict(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        more = dict(special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))])
        corpus = corpus[0].replace("\t", "").split("\n")
    how = dict(vocab_size=900, special_tokens=SPECIAL, show_progress=False) | more
    made.train_from_iterator(corpus, tokenizers.trainers.BpeTrainer(**how))
    about = json.loads(made.to_str())
    if kind != "bytes":
        about["added_tokens"] = about["added_tokens"][: len(SPECIAL)]
        blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        ways = [{"type": "Prepend", "prepend": "▁"}, blank]
        about["normalizer"] = {"type": "Sequence", "normalizers": ways} if kind == "prepend" else None
        about["pre_tokenizer"] = None if kind == "prepend" else about["pre_tokenizer"] | {"split": False}
        steps = [blank | {"pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
        about["decoder"] = {
            "type": "Sequence",
            "decoders": [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        }
    made = tokenizers.Tokenizer.from_str(json.dumps(about))
    made.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in TURNS])
    return made.to_str()


def both(kind: str, template: str, special: Sequence[str] = (), **names: str) -> tuple[ImportedTokenizer, Any]:
    """Our tokenizer and transformers'. special: further special tokens, which take in the blanks behind them."""
    made = tokenizers.Tokenizer.from_str(tokenizer_json(kind))
    made.add_special_tokens([tokenizers.AddedToken(token, rstrip=True, normalized=False) for token in special])
    names = dict(bos_token="<s>", eos_token="</s>") | names
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    theirs.chat_template = template
    ours = dict(spec="hf:theirs", json=made.to_str(), special=names, template=template)
    return tokenizer.from_dict(ours), theirs


def their_ids(theirs: Any, messages: list[dict[str, str]], prompt: bool = False) -> list[int]:
    named = [m | {"role": "tool"} if m["role"] == "function" else m for m in messages]
    return theirs.apply_chat_template(named, add_generation_prompt=prompt, return_dict=True)["input_ids"]


def check_sampling(messages: list[dict[str, str]], tok: ImportedTokenizer, trims: bool = False) -> None:
    """Each answer stands behind its prompt, as it is sampled, alone under the loss, and is read back."""
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
def test_answers_are_trained_where_they_are_sampled_or_refused_by_name(kind: str, shared_data: Path) -> None:
    public = {path.stem: path.read_text() for path in sorted((shared_data / "chat_templates").glob("*.jinja"))}
    ends = dict(phi3="<|endoftext|>", deepseekv3="<｜end▁of▁sentence｜>")
    refused = set()
    for name, template in public.items():
        tok, _ = both(kind, template, TAKING if name == "phi3" else (), eos_token=ends.get(name, "<|im_end|>"))
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
        assert chat.prompt(messages[:-1], tok, "template") == their_ids(theirs, messages[:-1], prompt=True)
    with pytest.raises(DataError, match="hf:theirs"):  # the second prompt has lost the thought
        chat.render(talk("hi", "<think>\nwhy?\n</think>\n\nyes", "and", "no"), tok, "template")


def test_templates_whose_answers_cannot_be_sampled_are_refused() -> None:
    for why, template in NO_SAMPLING.items():
        tok, _ = both("bytes", template)
        for use in (lambda t: chat.stop_sequences(t, "template"), lambda t: chat.render(TALKS[2], t, "template")):
            with pytest.raises(DataError):
                use(tok)
                pytest.fail(why)


def test_an_answer_may_come_first_and_tools_and_documents_are_none_where_none_are_offered() -> None:
    greets = "{% if messages[0]['role'] != 'user' %}{{ 'Hello.' }}{% endif %}" + CHATML
    for template, messages in ((greets, talk("hello", "hi", "yes", roles="aua")), (TOOLS_NONE, TALKS[0])):
        tok, theirs = both("bytes", template)
        assert chat.render(messages, tok, "template").ids == their_ids(theirs, messages)
        assert "# Tools" not in tok.decode(chat.prompt(messages[:-1], tok, "template"))


@pytest.mark.parametrize("kind", ["prepend", "first"])
@pytest.mark.parametrize("template", [LLAMA2, TINYLLAMA, PHI3, CHATML], ids=["llama2", "tinyllama", "phi3", "chatml"])
def test_a_tokenizer_that_leads_with_a_blank_gives_the_ids_of_transformers(kind: str, template: str) -> None:
    eos = "<|endoftext|>" if template is PHI3 else "</s>"
    tok, theirs = both(kind, template, TAKING if template is PHI3 else (), eos_token=eos)
    for messages in TALKS:
        if template is LLAMA2 and messages[-2]["role"] == "function":
            continue  # it has no results
        check_sampling(messages, tok, trims=template is LLAMA2)
        if not (template is PHI3 and any(m["content"][:1] in (" ", "") for m in messages)):  # transformers loses blanks
            assert chat.render(messages, tok, "template").ids == their_ids(theirs, messages)
            assert chat.prompt(messages[:-1], tok, "template") == their_ids(theirs, messages[:-1], prompt=True)


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
            assert CODE.startswith(chat.completion_text(sampled[:n], tok, "template").rstrip("\ufffd"))
        assert chat.completion_text(sampled, tok, "template") == CODE
    tok, theirs = both(kind, TINYLLAMA)
    for tags in ("raw", "text", "reserved"):
        for content in (CODE, " 5", "5", ""):
            ids = chat.completion_ids(content, tok, tags)
            assert chat.completion_text(ids, tok, tags) == content
    tags = "".join(f"<|{m['role']}|>\n{m['content']}\n<|end|>\n" for m in TALKS[2])
    assert chat.render(TALKS[2], tok, "text").ids == theirs(tags, add_special_tokens=False)["input_ids"]
    raw = talk("def f(x):\n", CODE)
    whole = theirs(raw[0]["content"] + CODE, add_special_tokens=False)["input_ids"]
    assert chat.render(raw, tok, "raw").ids == [*whole, tok.eot_id]
