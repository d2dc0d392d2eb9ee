"""Shares of the toolbox's conversations; mixes.toml has the named ones. No torch here: the
command's help reads it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError, check_choice

# beside single calls
KINDS = (
    "multi_turn",
    "series",
    "chained",
    "parallel",
    "unfitting",
    "no_tools",
    "small_talk",
    "forms",
    "turns",
)
NEW_TOOLS = ("invented", "composed", "services")  # beside those of the catalogue
MIXES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("mixes.toml").read_text(encoding="utf-8")
)


def shares_of(name: str) -> dict[str, float]:
    """The shares of a named mix. ConfigError for an unknown name."""
    check_choice("mix", name, MIXES)
    shares = dict(MIXES[name])
    parent = shares.pop("from", None)
    return shares_of(parent) | shares if parent else shares


def named_mix(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted field, with the shares in place of a mix's name; shares that are given
    too win."""
    if not isinstance(given.get("mix"), str):
        return dict(given)
    shares = {f"mix.{field}": share for field, share in shares_of(given["mix"]).items()}
    return shares | {key: value for key, value in given.items() if key != "mix"}


def _share(default: float, of: str) -> Any:
    return opt(default, f"share of {of}", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Mix(Settings):
    """Shares of the conversations. What remains is single calls."""

    # kinds of conversations
    multi_turn: float = _share(0.2, "conversations that continue after the call")
    series: float = _share(
        0.0, "conversations with several requests, each for another tool of one list or for none"
    )
    chained: float = _share(
        0.0, "conversations whose request needs two calls, the second with the first's result"
    )
    parallel: float = _share(
        0.0, "conversations with two or three requests at once, answered by as many calls"
    )
    unfitting: float = _share(0.1, "conversations whose tools do not fit the request")
    no_tools: float = _share(0.05, "conversations that ask for a tool where none is offered")
    small_talk: float = _share(0.05, "conversations that only chat while tools are offered")
    forms: float = _share(
        0.0,
        "conversations with services whose arguments have a described form: one call, several at once, "
        "a lacking value, near misses",
    )
    turns: float = _share(
        0.0,
        "conversations that go on after two to five calls of one answer: it states their results, says which "
        "failed, or calls again with one of them",
    )
    # tools and their names
    renamed: float = _share(0.0, "conversations whose tools and arguments have other names")
    composed: float = _share(0.0, "requests for composed tools")
    invented: float = _share(0.0, "requests for invented tools")
    renamed_arguments: float = _share(
        0.35, "the arguments of a renamed conversation that have another name"
    )
    # requests, values and answers
    unserved: float = _share(0.5, "the series with a request that fits none of its tools")
    informal: float = _share(0.0, "the requests in chat style")
    services: float = _share(0.0, "requests for everyday services")
    talk_first: float = _share(0.0, "the conversations with tools that begin with small talk")
    wordy: float = _share(0.0, "the requests for tools among sentences that nothing needs")
    in_steps: float = _share(0.0, "the requests for several calls that are written as steps")
    instructed: float = _share(
        0.0, "the lists of tools with instructions beside them, some of which speak of declining"
    )
    wordings: float = _share(
        0.0,
        "requests for the catalogue's tools in additional "
        "wordings, and of small talk from small_talk.json",
    )
    rare_words: float = _share(
        0.0,
        "the words in names, invented tools and drills that "
        "come from a list of a thousand, not of 200",
    )
    varied_values: float = _share(
        0.0,
        "the words and names in requests and copying drills that are real, compounds or random letters, not invented "
        "by a grammar",
    )
    plain_answers: float = _share(
        0.0,
        "the answers after calls of renamed or invented tools that "
        "only state the result; half of it after other calls",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for names in (KINDS, NEW_TOOLS):
            if sum(getattr(self, name) for name in names) > 1:
                raise ConfigError(f"the shares {', '.join(names)} add up to more than 1; lower one")

    def kind_of_tools(self, draw: float) -> str:
        """The kind of NEW_TOOLS that a draw of 0 to 1 falls on; empty for tools of the
        catalogue."""
        reached = 0.0
        for kind in NEW_TOOLS:
            reached += getattr(self, kind)
            if draw < reached:
                return kind
        return ""
