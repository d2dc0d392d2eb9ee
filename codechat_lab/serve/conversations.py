"""What the page and the terminal share: how a conversation opens, which of its messages the
model still sees, and which functions fit a request."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TextIO

from codechat.distributed import hardware
from codechat.models import loading
from codechat.models.gpt import GPT
from codechat.runs import paths
from codechat_lab.serve.settings import DEFAULT_TOKENS
from codechat_lab.tasks.toolbox.catalogue import TOOLS, family

# conversations without functions begin like this in training
NEUTRAL = "You are a helpful assistant."
# parameters. released/mini answered 32 of 55 second requests sensibly, and 50 of them alone
SMALL = 100_000_000

OFFERED = 4  # as many as a training prompt offers at most
NEAR = 0.7  # least share of the best score: others distract a small model more often than they help
# not what a request is about
ASKING = frozenset("write show give tell make find please program function code".split())
# begins like a follow-up
GOES_ON = re.compile(r"\s*(and|also|or|now|then|(what|how) about)\b", re.IGNORECASE)
POINTS_BACK = re.compile(r"\b(it|its|them|again)\b", re.IGNORECASE)
STEM = 5  # letters of a word that count: "squared" finds "square"


def load_checkpoint(ref: str, to: TextIO) -> tuple[loading.LoadedModel, str]:
    """The model of a checkpoint, ready to decode, and what a reference such as `latest` means,
    which is also printed to `to`."""
    path, meaning = paths.chosen_checkpoint(ref)
    if meaning:
        print(f"[{meaning}]", file=to, flush=True)
    device = hardware.device()
    hardware.keep_freed_memory(device)
    return loading.load_model(path, device, decodes=True), meaning


def has_seen_conversations(loaded: loading.LoadedModel) -> bool:
    """Whether the model was trained further than on plain text, as far as is known."""
    kinds = {entry.get("kind") for entry in loaded.meta.get("lineage", ())}
    return not kinds or not kinds <= {"pretrain", "chars"}


def room_for_an_answer(block_size: int, longest: int | None) -> int:
    """Tokens that a conversation must leave for the next answer."""
    return longest or min(DEFAULT_TOKENS, block_size // 4)


def mixes_requests(model: GPT) -> bool:
    """Whether a request that does not go on with the one before is answered better without it,
    as in small models."""
    return sum(weights.numel() for weights in model.parameters()) < SMALL


def drop_oldest(
    messages: Sequence[Any], role: Callable[[Any], str], too_long: Callable[[list[Any]], bool]
) -> list[Any]:
    """The messages without the oldest exchanges, from a user's turn to the next, while the rest
    is too long. The last one stays. A message is a dictionary here, and a `protocol.Message` in
    the server; role: reads it."""
    kept = list(messages)
    while too_long(kept):
        users = [i for i, message in enumerate(kept) if role(message) == "user"]
        if len(users) < 2:
            break
        system = [message for message in kept[: users[0]] if role(message) == "system"]
        kept = system + kept[users[1] :]
    return kept


def goes_on(request: str) -> bool:
    """Whether a request needs the one before it: by how it begins, a word that points back, or
    no word of its own."""
    return _continues(request) or bool(POINTS_BACK.search(request))


def _continues(request: str) -> bool:
    return bool(GOES_ON.match(request)) or not _words(request)


# ---- functions of the toolbox that fit a request: BM25 over names, descriptions, and the
# arguments' names and choices.
# Those that could serve the same request (`catalogue.FAMILIES`) are never offered together,
# as in training.


def tools_for(request: str, before: Sequence[str] = ()) -> list[str]:
    """Names of at most OFFERED functions that fit a request, best first. Where no word of it is
    in any description: the functions offered `before`, if the request goes on ("and of
    13?")."""
    index = _index()
    known = sorted(set(_words(request)) & index.vocab_dict.keys())
    if not known:
        return list(before) if _continues(request) else []
    scores = index.get_scores(known)
    chosen: list[str] = []
    for score, name in sorted(zip(scores, TOOLS), reverse=True):
        near = score >= NEAR * scores.max() and len(chosen) < OFFERED
        if near and not any(name in family(other) for other in chosen):
            chosen.append(name)
    return chosen


@lru_cache(maxsize=1)
def _index() -> Any:
    """The index of the toolbox, in the order of `TOOLS`."""
    import bm25s  # here: only a request needs it

    texts = []
    for tool in TOOLS.values():
        properties = tool.schema["parameters"]["properties"].items()
        arguments = " ".join(
            f"{name} {' '.join(map(str, about.get('enum', ())))}" for name, about in properties
        )
        # the name counts twice: its words are chosen to be told apart
        texts.append(
            f"{tool.name} {tool.name} {tool.schema['description']} {arguments}".replace("_", " ")
        )
    index = bm25s.BM25()
    index.index([_words(text) for text in texts], show_progress=False)
    return index


def _words(text: str) -> list[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return [
        word[:STEM]
        for word in re.findall(r"[a-z]+", text.lower())
        if word not in ASKING.union(STOPWORDS_EN)
    ]
