"""A client of a server that speaks json over HTTP: its URL, its key, and user errors for all
that can go wrong.

link = Link("http://127.0.0.1:8000", flag="--server")
link.ask("/v1/completions", {"model": link.model(), "prompt": "def f("})
"""

import http.client
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, MissingFile, RunError

BUSY = (408, 429, 502, 503, 504)  # HTTP statuses after which the same request may succeed
PAUSES_S = (0.5, 15.0)  # before a busy server is asked again: the first pause, and the longest
TIMEOUT_S = 300.0  # without a byte from the server
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0")
# the whole distribution: a server with defaults of its own, as llama.cpp's, would cut it
UNCUT: Mapping[str, Any] = MappingProxyType({"top_p": 1.0, "min_p": 0.0, "top_k": 0})
# finish reasons of answers that were cut off: OpenAI's and Mistral's, Anthropic's, Google's,
# Cohere's
CUT = ("length", "model_length", "max_tokens", "MAX_TOKENS")
UNKNOWN_FIELD = (400, 422)  # HTTP statuses with which servers refuse a field
# OverflowError: of a port above 65535
BROKEN = (
    OSError,
    OverflowError,
    ValueError,
    http.client.HTTPException,
)


class NoAnswer(RunError):
    """No server listens there, or its answer broke off."""


class Refused(ConfigError):
    """The server answered with an error. status: the HTTP status; reason: the server's words."""

    # with defaults: another rank unpickles it from its message alone
    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def read_key(path: Path) -> str:
    """The API key that a file holds: its first line."""
    try:
        key = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFile(
            f"{path}: {error}; --api-key-file takes a text file whose first line is the key"
        ) from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path} holds no key; its first line must be printable ASCII")
    return key


class Answer(NamedTuple):
    """A chat completion. cut: its length ended it; n_tokens: none where the server does not
    count them."""

    message: dict[str, Any]
    cut: bool
    n_tokens: int | None


class Link:
    """A server by its URL, with or without /v1. flag: the flag that set the URL; kind, remedy:
    what error messages call the server, and how to get one."""

    def __init__(
        self,
        url: str,
        api_key_file: Path | None = None,
        *,
        flag: str = "--server",
        kind: str = "server",
        remedy: str = "start one with codechat serve --ckpt RUN",
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind = kind
        self.remedy = remedy
        parts = re.fullmatch(r"https?://([\w.-]+|\[[\w:]+\])(:\d{1,5})?(/.*)?", url)
        if not parts:
            raise ConfigError(f"{flag} {url}: it must be a URL such as http://127.0.0.1:8000")
        self.headers = {"Content-Type": "application/json"}
        if api_key_file:
            self.headers["Authorization"] = f"Bearer {read_key(api_key_file)}"
        # a proxy cannot reach the loopback address of this machine
        direct = [urllib.request.ProxyHandler({})] if parts[1] in LOOPBACK else []
        self.opener = urllib.request.build_opener(*direct)
        self.unknown: set[str] = set()  # fields that the server was found to refuse
        self._noting = threading.Lock()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer as json, None where it is empty; to a GET without a body, else a POST.
        Refused where the server answers with an error, NoAnswer where it does not answer."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self.headers)
            with self.opener.open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            complaint = _complaint(error)
            message = f"the {self.kind} at {self.url} refuses {path} ({error.code}): {complaint}"
            raise Refused(message, error.code, complaint) from None
        except BROKEN as error:
            reason = getattr(error, "reason", error)
            raise NoAnswer(
                f"no {self.kind} answers at {self.url} ({reason}); {self.remedy}"
            ) from None

    def answer(
        self,
        body: Mapping[str, Any],
        patience_s: float = 0.0,
        dispensable: Mapping[str, Any] = MappingProxyType({}),
    ) -> Answer:
        """The chat completion of a request. ConfigError where the answer has none. A busy
        server is asked again for patience_s seconds. dispensable: fields that the server may
        refuse; it is then asked without them, and stderr names them once."""
        answer = self._without_unknown(body, patience_s, dispensable)
        try:
            choice = answer["choices"][0]
            usage = answer.get("usage") or {}
            n_tokens = usage.get("completion_tokens")
            return Answer(
                message=dict(choice["message"]),
                cut=choice.get("finish_reason") in CUT,
                n_tokens=None if n_tokens is None else int(n_tokens),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            said = _message(answer)
            why = f" ({said[:200]})" if said else ""
            raise ConfigError(
                f"{self.url} answers without a message{why}; it must speak OpenAI's API"
            ) from None

    def _without_unknown(
        self,
        body: Mapping[str, Any],
        patience_s: float,
        dispensable: Mapping[str, Any],
    ) -> Any:
        """The answer, without the dispensable fields that the server refuses."""
        more = {name: value for name, value in dispensable.items() if name not in self.unknown}
        while True:
            try:
                answer = self._patiently({**body, **more}, patience_s)
                break
            except Refused as error:
                if error.status not in UNKNOWN_FIELD or not more:
                    raise
                named = [(error.reason.find(name), name) for name in more if name in error.reason]
                if named:
                    # the first that is named: later ones may be listed as what is known
                    _, first = min(named)
                    del more[first]
                else:  # some servers name none
                    more = {}
        self._note_refused([name for name in dispensable if name not in more])
        return answer

    def _note_refused(self, names: Sequence[str]) -> None:
        """Remember fields that the server refuses; stderr names each once, whichever of many
        requests finds it."""
        with self._noting:
            new = [name for name in names if name not in self.unknown]
            if new:
                self.unknown.update(new)
                how = "it is asked without, and samples as it does by default"
                print(f"{self.url} refuses {', '.join(new)}; {how}", file=sys.stderr)

    def _patiently(self, body: Mapping[str, Any], patience_s: float) -> Any:
        pause, longest = PAUSES_S
        until = time.monotonic() + patience_s
        while True:
            try:
                return self.ask("/v1/chat/completions", body)
            except Refused as error:
                if error.status not in BUSY or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def model(self) -> str:
        """The name of the first served model."""
        try:
            return str(self.ask("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"{self.url} lists no model; give the URL of a server such as codechat serve"
            ) from None


def _complaint(error: urllib.error.HTTPError) -> str:
    text = ""
    try:
        text = error.read(10_000).decode("utf-8", "replace")
        return _message(json.loads(text))[:1000] or text[:200]
    except BROKEN:
        return text[:200] or str(error.reason)


def _message(answer: Any) -> str:
    """What a server says in place of an answer, in the forms of OpenAI, FastAPI, Ollama,
    Mistral; or ""."""
    found = answer
    for name in ("error", "message", "detail"):
        if isinstance(found, Mapping) and found.get(name):
            found = found[name]
    if found is answer:
        return ""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
