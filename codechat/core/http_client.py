"""A client of a server that speaks json over HTTP: its URL, its key, and user errors for all that can go wrong.

link = Link("http://127.0.0.1:8000", flag="--server")
link.ask("/v1/completions", {"model": link.model(), "prompt": "def f("})
"""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, MissingFile, RunError

BUSY = (408, 429, 502, 503, 504)  # HTTP statuses after which the same request may succeed
PAUSES_S = (0.5, 15.0)  # before a busy server is asked again: the first pause, and the longest
TIMEOUT_S = 300.0  # without a byte from the server
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0")
BROKEN = (OSError, OverflowError, ValueError, http.client.HTTPException)  # OverflowError: of a port above 65535


class NoAnswer(RunError):
    """No server listens there, or its answer broke off."""


class Refused(ConfigError):
    """The server answered with an error. status: the HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:  # unpickled on other ranks by its message
        super().__init__(message)
        self.status = status


def read_key(path: Path) -> str:
    """The API key that a file holds: its first line."""
    try:
        key = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFile(f"{path}: {error}; --api-key-file takes a text file whose first line is the key") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path} holds no key; its first line must be printable ASCII")
    return key


class Link:
    """A server by its URL, with or without /v1. flag: the flag that set the URL; kind, remedy: what error messages call
    the server, and how to get one."""

    def __init__(
        self,
        url: str,
        api_key_file: Path | None = None,
        *,
        flag: str = "--server",
        kind: str = "server",
        remedy: str = "start one with codechat serve --ckpt RUN",
    ) -> None:
        self.url, self.kind, self.remedy = url.rstrip("/").removesuffix("/v1"), kind, remedy
        if not (parts := re.fullmatch(r"https?://([\w.-]+|\[[\w:]+\])(:\d{1,5})?(/.*)?", url)):
            raise ConfigError(f"{flag} {url}: it must be a URL such as http://127.0.0.1:8000")
        self.headers = {"Content-Type": "application/json"}
        if api_key_file:
            self.headers["Authorization"] = f"Bearer {read_key(api_key_file)}"
        # a proxy cannot reach the loopback address of this machine
        direct = [urllib.request.ProxyHandler({})] if parts[1] in LOOPBACK else []
        self.opener = urllib.request.build_opener(*direct)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer as json, None where it is empty; to a GET without a body, else a POST. Refused where the server answers with an
        error, NoAnswer where it does not answer."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self.headers)
            with self.opener.open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            message = f"the {self.kind} at {self.url} refuses {path} ({error.code}): {_complaint(error)}"
            raise Refused(message, error.code) from None
        except BROKEN as error:
            reason = getattr(error, "reason", error)
            raise NoAnswer(f"no {self.kind} answers at {self.url} ({reason}); {self.remedy}") from None

    def answer(self, body: Mapping[str, Any], patience_s: float = 0.0) -> tuple[dict[str, Any], str, int]:
        """(message, finish reason, number of tokens) of a chat completion. ConfigError where the answer has none. A busy
        server is asked again for patience_s seconds."""
        answer = self._patiently(body, patience_s)
        try:
            choice, used = answer["choices"][0], answer.get("usage") or {}
            return dict(choice["message"]), str(choice.get("finish_reason")), int(used.get("completion_tokens", 0))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigError(f"{self.url} answers without a message; it must speak OpenAI's API") from None

    def _patiently(self, body: Mapping[str, Any], patience_s: float) -> Any:
        (pause, longest), until = PAUSES_S, time.monotonic() + patience_s
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
            raise ConfigError(f"{self.url} lists no model; give the URL of a server such as codechat serve") from None


def _complaint(error: urllib.error.HTTPError) -> str:
    text = ""
    try:
        text = error.read(10_000).decode("utf-8", "replace")
        answer = json.loads(text)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])[:1000]
    except (*BROKEN, KeyError, TypeError):
        return text[:200] or str(error.reason)
