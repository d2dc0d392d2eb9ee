"""Token masks that keep an answer's tool calls readable: offered names only, valid JSON,
arguments of the types and enumerations of the schemas.

    grammar = CallGrammar(tokenizer, tags, tools, Rules(required=True))
    state = grammar.begin()                     one per completion
    state.mask(room)                            (n,) bool: ids that may come next; room: tokens that may follow it
    token = state.take(token, room)             the id that counts

The grammar is text without a call, then calls; `required`: calls only. Calls have the form of
`format_call`, or of the model's own template if that writes JSON objects (tags native).
Arguments stand in the order of the schema. llguidance makes masks of it in microseconds a
token.

A call that has begun ends in time: none begins that would not fit, and once the shortest way to
end it would no longer fit, `take` replaces the sampled id by that way, or by the end of the
answer where no call need have begun."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat, tool_calls, tool_lists, tool_schemas
from codechat.text.native_template import native_template_of
from codechat.text.tokenizer import ImportedTokenizer, Tokenizer
from codechat_lab.serve.call_schemas import LEVELS, calls_schema

LONGEST_CLOSING = 512  # tokens of the shortest way to end a call
# Outside of a string, what ends a value: an object, a list, a string, a value before another, a
# key; a digit, since 0 may go on for ever.
CLOSERS = (b"}", b"]", b'"', b",", b":", b"1", b"0")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_QUOTE = re.compile(rb'(?<!\\)(?:\\\\)*"')


@dataclass(frozen=True)
class Rules:
    """What an answer may be."""

    required: bool = False  # a call
    one_call: bool = False  # at most one
    declines: bool = (
        False  # calling `tool_lists.NOTHING` is possible too, unless a call is required
    )
    strict: bool = False  # an unknown type raises ConfigError instead of allowing any value


def call_grammar(
    tokenizer: Tokenizer,
    tags: str,
    tools: Sequence[Mapping[str, Any]],
    rules: Rules = Rules(),
) -> CallGrammar:
    """The last grammars are kept, since reading schemas takes tens of milliseconds. Parts of a
    schema that are not enforced are printed on stderr, once."""
    grammar = _kept(tokenizer, tags, json.dumps(list(tools)), rules)
    for message in grammar.relaxed:
        tool_schemas.say_once(f"constrained calls do not enforce all of a schema: {message}")
    return grammar


def prompt_grammar(
    messages: Sequence[chat.Message], tokenizer: Tokenizer, tags: str
) -> CallGrammar | None:
    """The grammar of the functions that the system messages of a prompt offer; none where they
    offer none.

    The instrument `call_grammar`, which `codechat evaluate --constrain true` takes."""
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    tools = tool_lists.offered_schemas(system)
    return (
        call_grammar(tokenizer, tags, tools, Rules(declines=tool_lists.NOTHING_FITS in system))
        if tools
        else None
    )


@lru_cache(maxsize=64)
def _kept(tokenizer: Tokenizer, tags: str, tools: str, rules: Rules) -> CallGrammar:
    return CallGrammar(tokenizer, tags, json.loads(tools), rules)


class CallGrammar:
    """The calls that `tools` ({"name", "description", "parameters"} each) allow.

    A keyword that llguidance lacks is left out: more is allowed, never less, and `relaxed`
    names it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: str,
        tools: Sequence[Mapping[str, Any]],
        rules: Rules = Rules(),
    ) -> None:
        if not tools:
            raise ConfigError("no functions are offered, so no call is possible; offer one")
        self.vocabulary = _vocabulary(tokenizer, tags)
        # parts of the schemas that are not enforced, with the tool's name
        self.relaxed: list[str] = []
        self._start = self._matcher(tools, rules)
        if rules.required and self.shortest is None:
            needed = (
                f"no call of these functions was found to end within {LONGEST_CLOSING} "
                "tokens of this vocabulary"
            )
            advice = (
                "anchor patterns (^, $), let values that hold their "
                "own kind be absent, or set --constrain off"
            )
            raise ConfigError(f"{needed}; {advice}")
        # ids that a call may still need whatever was sampled: names and values that are fixed
        # stand in the schemas
        self.near_end = max(
            len(tokenizer.encode(json.dumps(tool, ensure_ascii=False))) for tool in tools
        )

    def _matcher(self, tools: Sequence[Mapping[str, Any]], rules: Rules) -> Any:
        """The matcher of the answers, at their begin."""
        import llguidance  # here: only constrained answers need it

        nothing = [{"name": tool_lists.NOTHING}] if rules.declines and not rules.required else []
        for level in range(len(LEVELS)):  # schemas that have a grammar each may have none together
            self.relaxed.clear()
            calls = calls_schema(
                [*tools, *nothing],
                strict=rules.strict,
                level=level,
                relaxed=self.relaxed,
                arguments_key=self.vocabulary.call.arguments_key,
                spaced=self.vocabulary.call.spaced,
            )
            grammar = _lark(self.vocabulary, json.dumps(calls, ensure_ascii=False), rules)
            matcher = llguidance.LLMatcher(self.vocabulary.table, grammar, log_level=0)
            problem = matcher.get_error()
            if not problem:
                return matcher
        raise ConfigError(f"these functions have no grammar ({problem[:200]}); set --constrain off")

    def begin(self) -> GrammarState:
        """The state of a new completion."""
        return GrammarState(self, self._start.deep_copy())

    @cached_property
    def after_tag(self) -> int:
        """Tokens that are enough for some call after its tag; 0 where the tag is no single id."""
        state = self._start.deep_copy()
        tag = self.vocabulary.tag_id
        if tag is None or not state.consume_token(tag):
            return 0
        return len(_closing(state, self.vocabulary) or ())

    @cached_property
    def shortest(self) -> int | None:
        """Tokens that are enough for some call; 0 where none is required, none where no end was
        found."""
        closing = _closing(self._start, self.vocabulary)
        return None if closing is None else len(closing)


class GrammarState:
    """Where one completion is in the grammar."""

    def __init__(self, grammar: CallGrammar, matcher: Any) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.ended = False
        self._closing: deque[int] = deque()  # ids that must come next
        self._text = b""  # the completion
        # no way to end was found once; looking again at each token would hold up all other rows
        self._endless = False

    @property
    def inside(self) -> bool:
        """Whether the answer is inside a call, where no stop sequence ends it."""
        return not self.ended and not self.matcher.is_accepting()

    def mask(self, room: int) -> np.ndarray | None:
        """(n,) bool: ids that may come next, with `room` tokens after it; None = all. A call
        begins only if it could end."""
        if self.ended:
            return None
        allowed = _allowed(self.matcher, self.grammar.vocabulary)
        tag = self.grammar.vocabulary.tag_id
        if tag is not None and allowed[tag] and allowed.sum() > 1 and room < self.grammar.after_tag:
            allowed[tag] = False
        return allowed

    def take(self, token: int, room: int) -> int:
        """Go on with the sampled id, or with the next one of the shortest ending where that
        would no longer fit into `room` tokens after it. Sets `ended` with the end of the
        answer."""
        if self.ended or room < 0:
            return token
        if not self._closing:
            far = room >= self.grammar.near_end or self._endless
            before = self._text
            self._step(token)
            if far or not self.inside:
                return token
            closing = self._way_out()
            if closing is not None and len(closing) <= room:
                return token
            # too long: as if the token had not been sampled
            self.matcher.rollback(1)
            self._text = before
            way = self._way_out()
            if way == [] and closing is not None:
                # it began a call that need not be: the answer ends instead
                way = list(self.grammar.vocabulary.stop)
            self._closing.extend(way or ())
            self._endless = not self._closing
        if self._closing:
            token = self._closing.popleft()
        self._step(token)
        return token

    def _way_out(self) -> list[int] | None:
        """A short way to end the call that is being written."""
        mark = self.grammar.vocabulary.call.mark.encode()
        call = self._text.rpartition(mark)[2] if mark else self._text
        return _closing(self.matcher, self.grammar.vocabulary, call)

    def _step(self, token: int) -> None:
        # not consumed: the mask was not applied, or llguidance reached one of its limits
        self.ended = not self.matcher.consume_token(token) or self.matcher.is_stopped()
        self._text += self.grammar.vocabulary.tokens[token]


@dataclass(frozen=True)
class CallText:
    """What a model writes around the JSON object of a call."""

    mark: str  # before it, up to what never occurs in other text; empty for bare objects
    gap: str  # between the mark and the object
    between: str | None  # between two objects behind one mark; None where each has its own
    closing: str  # behind the object
    arguments_key: str
    several: bool  # whether an answer may hold several calls
    spaced: bool  # whether objects have other white space than ours
    lead: str = ""  # white space before a mark
    apart: str = "\n"  # white space between what ends a call and the mark of the next


OURS = CallText(tool_calls.CALL_TAG, " ", None, "", "arguments", several=True, spaced=False)


def _call_text(tokenizer: Tokenizer, tags: str) -> CallText:
    """How calls are written. ConfigError for a template whose calls are no JSON objects."""
    if tags != chat.NATIVE:
        return OURS
    template = native_template_of(tokenizer)
    form = template.call_form
    if not form.arguments_key:
        raise ConfigError(
            f"the chat template of {tokenizer.spec} writes calls "
            "that no mask knows; set --constrain off"
        )
    mark = template.mark.strip()
    lead, _, gap = form.opening.partition(mark) if mark else ("", "", form.opening)
    # between two calls that have a mark each stand the end of one and the beginning of the next
    ends = form.between.startswith(form.closing)
    apart = form.between.removeprefix(form.closing).removesuffix(mark + gap)
    repeats = bool(mark) and ends and form.between.endswith(mark + gap) and not apart.strip()
    return CallText(
        mark,
        gap,
        between=None if repeats else form.between,
        closing=form.closing,
        arguments_key=form.arguments_key,
        several=form.several,
        spaced=form.spaced,
        lead=lead,
        apart=apart or "\n" if repeats else "",
    )


def _lark(vocabulary: _Vocabulary, calls: str, rules: Rules) -> str:
    """The grammar in llguidance's dialect of Lark."""
    tag = vocabulary.call_tag
    closing = vocabulary.closing
    written = vocabulary.call
    several = written.several and not rules.one_call
    listed = more = ""
    if several and written.between is None:
        more = f"({vocabulary.apart}? {tag} call)*"
    elif several:
        listed = f"({vocabulary.between} object)*"
    end = f"{vocabulary.end}?" if closing is None else f"({vocabulary.end}? {closing})?"
    call = f"call: {vocabulary.gap} object {listed} {vocabulary.call_end}\nobject: %json {calls}\n"
    if rules.required:
        lead = f"{json.dumps(written.lead)}?" if written.lead else ""
        return f"start: first call {more} {end}\n{call}first: {vocabulary.opening} {lead} {tag}"
    if not tag:  # bare: an answer that begins as a call does is one
        begins = r"{\[" if written.gap.startswith("[") else "{"
        text = f"TEXT: /([^{begins}](?s:.*))?/"
        return f"start: TEXT | {vocabulary.opening} call {more} {end}\n{call}{text}"
    # a text that may go on takes in all it can, so a tag of ordinary tokens must be said to end it
    first = (
        f"first: TEXT {tag} | {tag}" if tag.startswith("<[") else f"first[suffix={tag}]: /(?s:.*)/"
    )
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){_literal(written.mark)}(?s:.*)/"
    return f"start: TEXT | first call {more} {end}\n{call}{first}\n{text}"


def _literal(text: str) -> str:
    """A text as a regular expression of the grammar, which slashes enclose."""
    return re.escape(text).replace("/", r"\/")


class _Vocabulary:
    """The ids of a tokenizer and its tags, as llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tags: str) -> None:
        import llguidance

        layout = chat.layout(tokenizer, tags)
        self.tokenizer = tokenizer
        self.call = _call_text(tokenizer, tags)
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        if tags == "reserved":
            self.tokens += [tag.encode() for tag in tool_calls.TAGS]
            call = layout.call
        elif tags == chat.NATIVE:
            call = _marked(tokenizer, self.call.mark)
        else:
            call = tokenizer.encode_inside(self.call.mark)
        special = {
            tokenizer.eot_id,
            *range(tokenizer.n_vocab, len(self.tokens)),
            *tokenizer.special_tokens.values(),
        }
        self.special_token_ids = sorted(special)
        # terms of the grammar
        self.opening = (
            f"{json.dumps(layout.opening, ensure_ascii=False)}?" if layout.opening else ""
        )
        self.end = json.dumps(layout.closing or "\n", ensure_ascii=False)
        self.call_tag = self._term(call) if call else ""
        self.gap = json.dumps(self.call.gap) if self.call.gap else ""
        self.between = self._marked_term(self.call.between)
        self.apart = json.dumps(self.call.apart)
        self.call_end = self._marked_term(self.call.closing)
        self.tag_id = call[0] if len(call) == 1 else None
        if len(layout.stop) == 1:
            self.closing = None  # one id ends an answer
            self.eos_token_id = layout.stop[0]
        else:
            self.closing = self._term(layout.stop)
            self.eos_token_id = tokenizer.eot_id
        self.stop = layout.stop
        self.lengths = np.array([len(token) for token in self.tokens])
        self.lengths[self.special_token_ids] = 0
        # the end of an answer too: where its tag is text, it begins as that of another call does
        self.closers = [
            *(self.tokens.index(text) for text in CLOSERS if text in self.tokens),
            *layout.stop,
        ]
        self.text_closers = [i for i in self.closers if self.tokens[i] == b'"']
        try:
            self.table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        except ValueError as error:
            raise ConfigError(
                f"{tokenizer.spec} allows no constrained calls ({error}); set --constrain off"
            ) from None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text that the grammar forces."""
        try:
            return self.tokenizer.encode_inside(
                text if isinstance(text, str) else text.decode("utf-8", "replace")
            )
        except DataError:  # a character that the alphabet lacks
            return []

    def _term(self, ids: Sequence[int]) -> str:
        """Ids as a term of the grammar: special ones by number, others as text."""
        if any(i in self.special_token_ids for i in ids):
            return " ".join(f"<[{i}]>" for i in ids)
        return json.dumps(chat.decode(ids, self.tokenizer), ensure_ascii=False)

    def _marked_term(self, text: str | None) -> str:
        return self._term(_marked(self.tokenizer, text)) if text else ""


def _marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text whose special tokens are themselves."""
    if isinstance(tokenizer, ImportedTokenizer):
        return tokenizer.encode_behind("", text)[0]
    return tokenizer.encode_inside(text)


_vocabulary = lru_cache(maxsize=4)(_Vocabulary)


def _allowed(matcher: Any, vocabulary: _Vocabulary) -> np.ndarray:
    """(n,) bool: ids that the grammar allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, bitorder="little")[: len(vocabulary.tokens)].astype(bool)
    # the end of a text is written out; llguidance's own end would be shown as text
    if vocabulary.closing is not None:
        without = allowed.copy()
        without[vocabulary.eos_token_id] = False
        return without if without.any() else allowed
    return allowed


# ---- the shortest ending


def _closing(matcher: Any, vocabulary: _Vocabulary, before: bytes = b"") -> list[int] | None:
    """A short way from a state to where the answer may end, not always the shortest; none
    beyond LONGEST_CLOSING.

    before: the text since the call began, which tells whether the state is inside a string."""
    probe = matcher.deep_copy()
    chooser = _Chooser(vocabulary)
    ids: list[int] = []
    text = before
    while not probe.is_accepting():
        new = probe.compute_ff_tokens()  # what the grammar forces
        if not new:
            allowed = _allowed(probe, vocabulary)
            if len(ids) >= LONGEST_CLOSING or not allowed.any():
                return None
            new = [chooser.choose(allowed, text)]
        if not probe.consume_tokens(new):
            return None
        ids += new
        text += b"".join(vocabulary.tokens[token] for token in new)
    return ids


@dataclass
class _Visit:
    """The last visit of a state in `_Chooser`."""

    quotes: int
    depth: int
    byte: int = -1  # number, among the allowed single bytes, of the one that was taken


class _Chooser:
    """Chooses tokens that lead out of a call: those that close something, else the longest
    piece."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.visits: dict[bytes, _Visit] = {}  # by the mask of the state

    def _behind_an_object(self, allowed: np.ndarray, text: bytes) -> int | None:
        """The longest allowed piece of what ends a call, where its object has ended: another
        object of a list may follow as well."""
        bare = _STRING.sub(b"", text)
        if b"}" not in bare or bare.count(b"{") != bare.count(b"}"):
            return None
        left = self.vocabulary.call.closing.encode()
        written = bare.rpartition(b"}")[2]
        if not left.startswith(written):
            return None
        left = left[len(written) :]
        longest = None
        length = 0
        for i in np.flatnonzero(allowed):
            piece = self.vocabulary.tokens[i]
            if len(piece) > length and left.startswith(piece):
                longest = int(i)
                length = len(piece)
        return longest

    def choose(self, allowed: np.ndarray, text: bytes) -> int:
        """One of the allowed ids (n,) after the text of the call."""
        ending = self._behind_an_object(allowed, text)
        if ending is not None:
            return ending
        quotes = len(_QUOTE.findall(text))
        closers = self.vocabulary.text_closers if quotes % 2 else self.vocabulary.closers
        for closer in closers:
            if allowed[closer]:
                return closer
        known = np.flatnonzero(allowed)
        lengths = self.vocabulary.lengths[known]
        single = known[lengths == 1]
        depth = text.count(b"{") + text.count(b"[") - text.count(b"}") - text.count(b"]")
        visit = self.visits.get(allowed.tobytes())
        if visit is None or not len(single):
            self.visits[allowed.tobytes()] = _Visit(quotes, depth)
            # of a fixed text, the longest piece leaves the fewest to write
            return int(known[lengths.argmax()])
        # again in this string, or deeper in a value that holds its own kind: the next byte,
        # until one leads out, as the "@" of an address or the name of a leaf
        if visit.quotes == quotes or depth > visit.depth:
            visit.byte += 1
        visit.quotes = quotes
        visit.depth = max(depth, visit.depth)
        return int(single[visit.byte % len(single)])
