"""Token masks that keep an answer's tool calls readable: offered names only, valid JSON, arguments of the types and
enumerations of the schemas.

    grammar = CallGrammar(tokenizer, tags, tools, required=True)
    state = grammar.begin()                     one per completion
    state.mask(room)                            (n,) bool: ids that may come next; room: tokens that may follow it
    token = state.take(token, room)             the id that counts

The grammar is text without a call, then calls; `required`: calls only. Calls have the form of `format_call`, arguments
in the order of the schema; llguidance makes masks of it in microseconds a token. A call that has begun ends in time:
none begins that would not fit, and once the shortest way to end it would no longer fit, `take` replaces the sampled id
by that way. (Where the tag is spelled in ordinary tokens, a call that is not required may still begin too late.)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

Schema = dict[str, Any]
LONGEST_CLOSING = 512  # tokens of the shortest way to end a call
LONGEST_TEXT = 256  # characters of a string with a pattern or format and no maxLength, which must end
CANONICAL = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}  # of `format_call`
# of numbers without bounds in the schema: json readers reject 1e999 and very long digits
BOUNDS = {"minimum": -(10**15), "maximum": 10**15}
# where a schema says nothing; llguidance's own "any" has numbers that no reader takes
ANY: Schema = {"type": ["string", "number", "boolean", "null"], **BOUNDS}
NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
# what ends a string, an object, a list, a value before another; a digit, since 0 may go on for ever
CLOSERS = (b'"', b"}", b"]", b",", b"1", b"0")


def call_grammar(tokenizer: Tokenizer, tags: str, tools: Sequence[Mapping[str, Any]], **how: bool) -> CallGrammar:
    """The CallGrammar of these arguments; the last ones are kept, since reading schemas takes tens of milliseconds."""
    return _kept(tokenizer, tags, json.dumps(list(tools)), **how)


def prompt_grammar(messages: Sequence[chat.Message], tokenizer: Tokenizer, tags: str) -> CallGrammar | None:
    """The grammar of the functions that the system messages of a prompt offer; none where they offer none."""
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    tools = chat.offered_schemas(system)
    return call_grammar(tokenizer, tags, tools, declines=chat.NOTHING_FITS in system) if tools else None


@lru_cache(maxsize=64)
def _kept(tokenizer: Tokenizer, tags: str, tools: str, **how: bool) -> CallGrammar:
    return CallGrammar(tokenizer, tags, json.loads(tools), **how)


class CallGrammar:
    """The calls that `tools` ({"name", "description", "parameters"} each) allow.

    required: the answer is a call. one_call: at most one. declines: calling `chat.NOTHING` is possible too, where no
    call is required. strict: a schema that has no grammar raises ConfigError instead of allowing any object as
    arguments."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool = False,
        one_call: bool = False,
        declines: bool = False,
        strict: bool = False,
    ) -> None:
        import llguidance  # here: only constrained answers need it

        if not tools:
            raise ConfigError("no functions are offered, so no call is possible; offer one")
        self.vocabulary, self.required = _vocabulary(tokenizer, tags), required
        nothing = [{"name": chat.NOTHING}] if declines and not required else []
        each = [_call_schema(tool, strict, f"#/anyOf/{i}") for i, tool in enumerate([*tools, *nothing])]
        calls = {"anyOf": each, "x-guidance": CANONICAL}
        grammar = _lark(self.vocabulary, json.dumps(calls, ensure_ascii=False), required, one_call)
        self._start = llguidance.LLMatcher(self.vocabulary.table, grammar, log_level=0)
        if problem := self._start.get_error():
            raise ConfigError(f"these functions have no grammar ({problem[:200]}); set --constrain off")
        if required and self.shortest is None:
            needed = f"no call of these functions fits into {LONGEST_CLOSING} tokens of this vocabulary"
            raise ConfigError(f"{needed}; anchor patterns (^, $), or set --constrain off")
        # ids that a call may still need whatever was sampled: names and values that are fixed stand in the schemas
        self.near_end = max(len(tokenizer.encode(json.dumps(tool, ensure_ascii=False))) for tool in tools)

    def begin(self) -> GrammarState:
        """The state of a new completion."""
        return GrammarState(self, self._start.deep_copy())

    @cached_property
    def after_tag(self) -> int:
        """Tokens that are enough for some call after its tag; 0 where the tag is no single id."""
        state, tag = self._start.deep_copy(), self.vocabulary.tag_id
        begun = tag is not None and state.consume_token(tag)
        return len(_closing(state, self.vocabulary) or ()) if begun else 0

    @cached_property
    def shortest(self) -> int | None:
        """Tokens that are enough for some call; 0 where none is required, none where no end was found."""
        closing = _closing(self._start, self.vocabulary)
        return None if closing is None else len(closing)


class GrammarState:
    """Where one completion is in the grammar."""

    def __init__(self, grammar: CallGrammar, matcher: Any) -> None:
        self.grammar, self.matcher, self.ended = grammar, matcher, False
        self._closing: deque[int] = deque()  # ids that must come next
        self._endless = False  # no way to end was found once; looking again at each token would hold up all other rows

    @property
    def inside(self) -> bool:
        """Whether the answer is inside a call, where no stop sequence ends it."""
        return not self.ended and not self.matcher.is_accepting()

    def mask(self, room: int) -> np.ndarray | None:
        """(n,) bool: ids that may come next, with `room` tokens after it; none = all. No call begins that could not end."""
        if self.ended:
            return None
        allowed, tag = _allowed(self.matcher, self.grammar.vocabulary), self.grammar.vocabulary.tag_id
        if tag is not None and allowed[tag] and allowed.sum() > 1 and room < self.grammar.after_tag:
            allowed[tag] = False
        return allowed

    def take(self, token: int, room: int) -> int:
        """Go on with the sampled id, or with the next one of the shortest ending where that would no longer fit into
        `room` tokens after it. Sets `ended` with the end of the answer."""
        if self.ended or room < 0:
            return token
        if not self._closing:
            may_end = not self.inside or room >= self.grammar.near_end or self._endless
            self._step(token)
            closing = None if may_end else _closing(self.matcher, self.grammar.vocabulary)
            if may_end or (closing is not None and len(closing) <= room):
                return token
            self.matcher.rollback(1)
            self._closing.extend(_closing(self.matcher, self.grammar.vocabulary) or ())
            self._endless = not self._closing
        if self._closing:
            token = self._closing.popleft()
        self._step(token)
        return token

    def _step(self, token: int) -> None:
        # not consumed: the mask was not applied, or llguidance reached one of its limits
        self.ended = not self.matcher.consume_token(token) or self.matcher.is_stopped()


def _lark(vocabulary: _Vocabulary, calls: str, required: bool, one_call: bool) -> str:
    """The grammar in llguidance's dialect of Lark."""
    tag, closing = vocabulary.call_tag, vocabulary.closing
    more = "" if one_call else f'("\\n"? {tag} call)*'
    end = f"{vocabulary.end}?" if closing is None else f"({vocabulary.end}? {closing})?"
    rules = f'call: " " object\nobject: %json {calls}\n'
    if required:
        return f"start: first call {more} {end}\n{rules}first: {vocabulary.opening} {tag}"
    # a text that may go on takes in all it can, so a tag of ordinary tokens must be said to end it
    first = f"first: TEXT {tag} | {tag}" if tag.startswith("<[") else f"first[suffix={tag}]: /(?s:.*)/"
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){chat.CALL_TAG}(?s:.*)/"
    return f"start: TEXT | first call {more} {end}\n{rules}{first}\n{text}"


def _call_schema(tool: Mapping[str, Any], strict: bool, place: str) -> Schema:
    """{"name": this name, "arguments": an object of its parameters}. place: pointer to where it will stand, which
    pointers within it begin with."""
    from llguidance import LLMatcher

    parameters = {"type": "object", "properties": {}, **(tool.get("parameters") or {})}
    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(_bounded(parameters))), None)
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem and strict:
        raise ConfigError(f"the schema of {tool['name']!r} has no grammar ({problem[:200]}); simplify it")
    arguments = _bounded({"type": "object"} if problem else parameters, f"{place}/properties/arguments")
    properties = {"name": {"const": tool["name"]}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _bounded(schema: Any, place: str = "#") -> Any:
    """The schema with bounds for numbers, without further keys in objects whose keys are listed, and with its pointers
    ("#/$defs/Item") as they are where it stands at `place` of a larger one."""
    if isinstance(schema, list):
        return [_bounded(one, place) for one in schema]
    if not isinstance(schema, dict):
        return ANY if schema is True else schema
    if not {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", *NAMED} & schema.keys():
        return ANY
    out = {key: _bounded(value, place) if key in NESTED else value for key, value in schema.items()}
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            out[key] = {name: _bounded(value, place) for name, value in schema[key].items()}
    if isinstance(pointer := schema.get("$ref"), str) and pointer.startswith("#"):
        out["$ref"] = place + pointer[1:]
    kinds = schema.get("type")
    kinds = set(map(str, kinds if isinstance(kinds, list) else [kinds]))
    if "object" in kinds or "properties" in schema:
        out.setdefault("additionalProperties", False if "properties" in schema else ANY)
    if "array" in kinds and "prefixItems" not in schema:
        out.setdefault("items", ANY)
    if {"integer", "number"} & kinds and "enum" not in schema:
        out = BOUNDS | out
    if {"pattern", "format"} & schema.keys():
        out.setdefault("maxLength", max(LONGEST_TEXT, schema.get("minLength", 0)))
    return out


class _Vocabulary:
    """The ids of a tokenizer and its tags, as llguidance reads them. call_tag, closing: terms of the grammar; closing
    is none where one id ends an answer."""

    def __init__(self, tokenizer: Tokenizer, tags: str) -> None:
        import llguidance

        reserved = tags == "reserved"
        self.tokenizer, self.bos_token_id = tokenizer, None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.tokens += [tag.encode() for tag in chat.TAGS] if reserved else []
        special = {tokenizer.eot_id, *range(tokenizer.n_vocab, len(self.tokens))}
        self.special_token_ids = sorted(special | set(tokenizer.special_tokens.values()))
        opening, end, closing, tag, _ = chat.layout(tokenizer, tags)
        tag = tag if reserved else tokenizer.encode_inside(chat.CALL_TAG)
        self.opening = f"{json.dumps(opening, ensure_ascii=False)}?" if opening else ""
        self.end = json.dumps(end or "\n", ensure_ascii=False)
        self.call_tag, self.tag_id = self._term(tag), tag[0] if len(tag) == 1 else None
        self.closing = None if len(closing) == 1 else self._term(closing)
        self.eos_token_id = closing[0] if len(closing) == 1 else tokenizer.eot_id
        self.lengths = np.array([len(token) for token in self.tokens])
        self.lengths[self.special_token_ids] = 0
        # the end of an answer too: where its tag is text, it begins as that of another call does
        self.closers = [*(self.tokens.index(text) for text in CLOSERS if text in self.tokens), *closing]
        try:
            self.table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        except ValueError as error:
            raise ConfigError(f"{tokenizer.spec} allows no constrained calls ({error}); set --constrain off") from None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text that the grammar forces."""
        try:
            return self.tokenizer.encode_inside(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        except DataError:  # a character that the alphabet lacks
            return []

    def _term(self, ids: Sequence[int]) -> str:
        """Ids as a term of the grammar: special ones by number, others as text."""
        if any(i in self.special_token_ids for i in ids):
            return " ".join(f"<[{i}]>" for i in ids)
        return json.dumps(chat.decode(ids, self.tokenizer), ensure_ascii=False)


_vocabulary = lru_cache(maxsize=4)(_Vocabulary)


def _allowed(matcher: Any, vocabulary: _Vocabulary) -> np.ndarray:
    """(n,) bool: ids that the grammar allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, bitorder="little")[: len(vocabulary.tokens)].astype(bool)
    if vocabulary.closing is not None:  # the end of a text is written out; llguidance's own end would be shown as text
        without = allowed.copy()
        without[vocabulary.eos_token_id] = False
        return without if without.any() else allowed
    return allowed


def _closing(matcher: Any, vocabulary: _Vocabulary) -> list[int] | None:
    """A short way from a state to where the answer may end, not always the shortest; none beyond LONGEST_CLOSING."""
    probe, ids, begun = matcher.deep_copy(), [], 0  # begun: where the last string begins
    tried: dict[bytes, list[int]] = {}  # mask -> [place of its last visit, number of the byte that is taken there]
    while not probe.is_accepting():
        if forced := probe.compute_ff_tokens():
            ids += forced
            begun = len(ids) if any(b'"' in vocabulary.tokens[i] for i in forced) else begun
            if not probe.consume_tokens(forced):
                return None
            continue
        allowed = _allowed(probe, vocabulary)
        known, mask = np.flatnonzero(allowed), allowed.tobytes()
        if len(ids) >= LONGEST_CLOSING or not len(known):
            return None
        single = known[vocabulary.lengths[known] == 1]
        if mask in tried and len(single) and not allowed[vocabulary.closers[0]]:
            visit = tried[mask]  # again in this string: the next byte, until one leads out, as the "@" of an address
            visit[:] = len(ids), visit[1] + (visit[0] >= begun)
            token = int(single[visit[1] % len(single)])
        else:  # among what is forced, the longest piece leaves the fewest to write
            longest = int(known[vocabulary.lengths[known].argmax()])
            token = next((i for i in vocabulary.closers if allowed[i]), longest)
            tried[mask] = [len(ids), -1]
        if not probe.consume_token(token):
            return None
        ids.append(token)
    return ids
