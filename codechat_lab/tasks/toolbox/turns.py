"""Conversations that go on after an answer with several calls.

    stated     two to five calls have their results: one sentence states each of them
    failed     one of the calls has an error: the sentence says which; nothing is called with its result
    followed   the request goes on: the next call takes one of the results

Calls are those of the toolbox's tools, which really run, and, in mixes with described forms, of
services (`forms`), whose results are drawn. Results stand in the order of their calls, since our
turns hold no ids. `statements` judges the sentence. Requests, values, held-out tools, services
and errors belong to splits as everywhere in the toolbox."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from codechat.tasks.base import Message, Problem
from codechat.text import tool_calls
from codechat_lab.tasks.toolbox import forms, statements
from codechat_lab.tasks.toolbox.catalogue import PHRASES, draw_others, response, say
from codechat_lab.tasks.toolbox.mixes import Mix
from codechat_lab.tasks.toolbox.sampler import MAX_TOOLS, Request, Sampler, call_message, message
from codechat_lab.tasks.toolbox.sampler import Scene as ToolScene
from codechat_lab.tasks.toolbox.statements import ORDINALS
from codechat_lab.tasks.toolbox.values import slot

SHARES = {"stated": 0.4, "failed": 0.25, "followed": 0.35}
COUNTS = (2, 2, 2, 3, 3, 4, 5)  # calls of an answer
OF_SERVICES = 0.5  # conversations of a mix with described forms whose calls are of services
GOES_ON = 0.3  # requests of a failed call that ask for more with its result
LONGEST = 60  # characters of a result
LONGEST_NAME = 40  # of the words by which a sentence tells a call from others
DETAILED = 0.5  # conversations whose services give more back than what is asked


@dataclass(frozen=True)
class Result:
    """A call and what comes back. of: the words of the request that no other call has, or
    nothing. said: the value in words. report: the tool's own sentence. error: why there is no
    value."""

    call: Mapping[str, Any]
    of: str
    value: Any
    said: str
    content: str  # of the function's turn
    report: str = ""
    error: str = ""

    def failed(self, error: str) -> "Result":
        return replace(
            self,
            value=None,
            said="",
            content=json.dumps({"error": error}),
            report="",
            error=error,
        )


@dataclass(frozen=True)
class Talk:
    """A request, its calls with what came back, and the call that follows from them."""

    stratum: str
    opening: Sequence[Message]  # the list of tools and the request
    results: Sequence[Result]
    meta: Mapping[str, Any]
    next: Result | None = None
    stopped: bool = False  # what the request goes on with cannot be done
    states: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def messages(self) -> list[Message]:
        """Up to where the answer states the results or calls again."""
        calls = []
        told = []
        for one in self.results:
            calls.append(tool_calls.format_call(one.call["name"], one.call["arguments"]))
            told.append(message("function", one.content))
        return [*self.opening, message("assistant", "\n".join(calls)), *told]


# ---- the conversation and the problems


def conversation(sampler: Sampler) -> tuple[list[Message], dict[str, Any]]:
    """A conversation of a stratum drawn by SHARES: its messages and meta."""
    stratum = sampler.rng.choices(list(SHARES), list(SHARES.values()))[0]
    talk, answer = _told(sampler, stratum)
    messages = talk.messages()
    if talk.next:
        messages.append(call_message(talk.next.call))
        messages.append(message("function", talk.next.content))
    return [*messages, message("assistant", answer)], dict(talk.meta)


def draw_problems(split: str, seed: int, counts: Mapping[str, int], mix: Mix) -> Iterator[Problem]:
    """Problems of each stratum, each drawn by its number. gold: the next call, or None where
    meta["states"] has what the answer must state (meta["answer"]: one that does)."""
    for stratum, rows in counts.items():
        for number in range(rows):
            rng = random.Random(f"turns {stratum} {number} {split} {seed}")
            talk, answer = _told(Sampler(rng, split, mix), stratum)
            gold = None
            meta = dict(talk.meta) | {"stratum": stratum}
            if talk.next:
                gold = dict(talk.next.call)
            else:
                meta |= {"states": list(talk.states), "answer": answer}
            yield Problem(
                id=f"turns-{split}-{seed}-{stratum}-{number}",
                messages=talk.messages(),
                gold=gold,
                split=split,
                meta=meta,
            )


def _told(sampler: Sampler, stratum: str) -> tuple[Talk, str]:
    """A talk and the sentence that ends it. Both are drawn again where the sentence is not judged
    right: the value of one call may read as the name of another."""
    while True:
        talk = _drawn(sampler, stratum)
        results = [*talk.results, talk.next] if talk.next else talk.results
        answer = _sentence(sampler.rng, results, talk.stopped)
        prompt = "\n".join(one["content"] for one in talk.messages())
        if talk.next or statements.is_right(answer, talk.states, prompt):
            return talk, answer


def _drawn(sampler: Sampler, stratum: str) -> Talk:
    """A talk in which no value is in the request or in another value, so that a sentence which
    states all has read the results."""
    services = sampler.mix.forms > 0 and stratum != "followed"
    of_services = services and sampler.rng.random() < OF_SERVICES
    while True:
        talk = _of_services(sampler, stratum) if of_services else _of_tools(sampler, stratum)
        if talk and _is_plain(talk):
            return replace(talk, states=_states(talk.results))


def _is_plain(talk: Talk) -> bool:
    request = talk.opening[-1]["content"].casefold()
    results = [one for one in talk.results if not one.error]
    every = [*talk.results, talk.next] if talk.next else talk.results
    if any(isinstance(one.value, bool) or len(one.said) > LONGEST for one in every):
        return False
    for one in results:
        if statements.place_of(one.value, request) is not None:
            return False
        others = [other.said.casefold() for other in results if other is not one]
        if any(statements.place_of(one.value, other) is not None for other in others):
            return False
    return True


def _states(results: Sequence[Result]) -> list[dict[str, Any]]:
    called = [one.call["name"] for one in results]
    states = []
    for one, ordinal in zip(results, ORDINALS):
        name = one.call["name"]
        # a plain word may stand in a sentence for itself
        telling = called.count(name) == 1 and not name.isalpha()
        names = [ordinal]
        if telling:
            names.append(name)
        if one.of:
            names.append(one.of)
        states.append(statements.state(one.value, names, one.error))
    return states


# ---- tools


def _of_tools(sampler: Sampler, stratum: str) -> Talk | None:
    """A talk with the toolbox's tools; None where no tool takes the result."""
    rng = sampler.rng
    held_out = sampler.split == "test_hard"
    requests = sampler.several(rng.choice(COUNTS), "tool" if held_out else None)
    at = rng.randrange(len(requests))
    follows = stratum == "followed" or (stratum == "failed" and rng.random() < GOES_ON)
    further = _further(sampler, requests, at) if follows else None
    if follows and further is None:
        return None
    text = sampler.joined([one.text for one in requests])
    if further:
        text = rng.choice(PHRASES["goes_on"]).format(first=text, second=further.text)
    asked = [*requests, further] if further else requests
    tools = list({one.tool.name: one.tool for one in asked}.values())
    spare = rng.randint(0, max(0, MAX_TOOLS - len(tools)))
    named = sampler.named(asked, [*tools, *draw_others(rng, sampler.split, tools, spare)])
    results = [_result(named, number, text) for number in range(len(requests))]
    if stratum == "failed":
        results[at] = results[at].failed(_error(sampler))
    return Talk(
        stratum=stratum,
        opening=[named.system(rng), sampler.said(text)],
        results=results,
        meta=named.meta(stratum),
        next=_result(named, len(requests), text) if stratum == "followed" else None,
        stopped=stratum == "failed" and follows,
    )


def _further(sampler: Sampler, requests: Sequence[Request], at: int) -> Request | None:
    """The request for a tool that takes the result of request `at`."""
    nth = "last" if at == len(requests) - 1 and sampler.rng.random() < 0.3 else ORDINALS[at]
    words = [phrase.format(nth=nth) for phrase in PHRASES["the_nth_result"]]
    tool = requests[at].tool
    result = tool.call(requests[at].arguments)
    used = {request.tool.name for request in requests}
    further = sampler.following(tool, result, words)
    return None if further is None or further.tool.name in used else further


def _result(scene: ToolScene, number: int, text: str) -> Result:
    """What the tool of a request gives back."""
    request = scene.requests[number]
    value = request.tool.call(request.arguments)
    said = dict.fromkeys(say(one) for one in request.arguments.values())
    every = [say(one) for other in scene.requests for one in other.arguments.values()]
    own = []
    for one in said:
        if _tells_apart(one, text) and every.count(one) == 1:
            own.append(one)
    of = min(own, key=text.find, default="")
    report = request.tool.report(request.arguments, value)
    reports = of and of in report and report.endswith(".") and len(report) > len(say(value)) + 4
    return Result(
        call=scene.calls()[number],
        of=of,
        value=value,
        said=say(value),
        content=response(value),
        report=report[:-1] if reports else "",
    )


def _tells_apart(words: str, text: str) -> bool:
    """Whether the words stand once in a request."""
    found = re.findall(statements.whole_words(words.casefold()), text.casefold())
    return 0 < len(words) <= LONGEST_NAME and len(found) == 1


def _error(sampler: Sampler) -> str:
    """An error that a call gives back; in test_hard a held-out one."""
    held_out = sampler.split == "test_hard"
    return str(sampler.rng.choice(PHRASES["hard_call_errors" if held_out else "call_errors"]))


# ---- services


def _of_services(sampler: Sampler, stratum: str) -> Talk | None:
    """A talk with services; None where the words of the request do not tell its calls apart."""
    rng = sampler.rng
    kind = rng.choice(("at_once", "at_once_mixed"))
    scene = forms.Draws(rng, sampler.split, sampler.mix.in_steps).scene(kind)
    names = [_name(part, scene) for part in scene.parts]
    if not all(names) or len(names) < 2:
        return None
    detailed = rng.random() < DETAILED
    results = []
    for part, name in zip(scene.parts, names, strict=True):
        results.append(_given(sampler, part, name, detailed))
    if stratum == "failed":
        at = rng.randrange(len(results))
        results[at] = results[at].failed(_error(sampler))
    return Talk(
        stratum=stratum,
        opening=scene.messages(rng),
        results=results,
        meta=scene.meta(sampler.split) | {"kind": stratum},
    )


def _name(part: forms.Asked, scene: forms.Scene) -> str:
    """The words of a required value that no other call has."""
    for argument in part.service.required:
        schema = argument.form.schema
        said = part.spoken[argument.name].said
        single = schema["type"] in ("string", "number", "integer") and "enum" not in schema
        if single and _tells_apart(said, scene.text):
            return said
    return ""


def _given(sampler: Sampler, part: forms.Asked, name: str, detailed: bool) -> Result:
    """What a service gives back: its value, in a share of the conversations among others."""
    rng = sampler.rng
    gives = forms.SERVICES[part.service.key].get("gives", forms.PHRASED["gives"])
    kind, key, words = gives
    value = slot(kind).sample(rng, sampler.split)
    content = {key: value}
    if detailed:
        content = {
            "status": "ok",
            key: value,
            "took_ms": rng.randint(20, 900),
        }
    return Result(
        call=part.call,
        of=name,
        value=value,
        said=words.format(say(value)),
        content=json.dumps(content, ensure_ascii=False),
    )


# ---- the sentence


def _sentence(rng: random.Random, results: Sequence[Result], stopped: bool) -> str:
    """One sentence that states each result and says which call failed."""
    ways = ["nth"]
    if all(one.of for one in results):
        ways += ["of", "of"]
    if all(one.report or (one.error and one.of) for one in results):
        ways += ["report", "report"]
    if not any(one.error for one in results):
        ways.append("list")
    way = rng.choice(ways)
    if way == "list":
        listed = _listed([one.said for one in results])
        return str(rng.choice(PHRASES["stated_list"])).format(results=listed)
    begin = ""
    form = rng.choice(PHRASES["stated_nth"])
    if way == "of":
        begin, form = rng.choice(PHRASES["stated_of"])
    clauses = []
    for one, nth in zip(results, ORDINALS):
        if one.error:
            fault = rng.choice(PHRASES["failed_nth" if way == "nth" else "failed_of"])
            clauses.append(fault.format(of=one.of, nth=nth, error=one.error))
        elif way == "report":
            clauses.append(one.report)
        else:
            clauses.append(form.format(result=one.said, of=one.of, nth=nth))
    end = rng.choice(PHRASES["stopped"]) if stopped else ""
    text = f"{begin}{_listed(clauses)}{end}."
    return text[0].upper() + text[1:] if text.startswith(("the ", "no ")) else text


def _listed(clauses: Sequence[str]) -> str:
    """A, B and C; clauses that hold commas are told apart by semicolons."""
    between = "; " if any("," in one for one in clauses) else ", "
    last = "; and " if between == "; " else " and "
    return last.join(filter(None, [between.join(clauses[:-1]), clauses[-1]]))
