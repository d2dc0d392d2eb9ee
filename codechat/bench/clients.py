"""Many plain HTTP clients in a process of their own: an order per line on standard input, what came of it per line on standard output.

Standard library only, so that they take as little as possible from the server that is measured.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit


def ask(order: dict[str, Any], prompt: list[int], seed: int, out: list[tuple[int, float]]) -> None:
    """One request on a fresh connection: (tokens, seconds to the first token) is appended to `out`."""
    link = http.client.HTTPConnection(urlsplit(order["url"]).netloc, timeout=600)
    link.connect()
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": order["max_tokens"],
        "seed": seed,
        "stream": order["stream"],
    }
    body |= {"stream_options": {"include_usage": True}} if order["stream"] else {}
    began = time.perf_counter()
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    if order["stream"]:
        first, tokens = 0.0, 0
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                if b'"usage"' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    else:
        tokens = json.loads(answer.read())["usage"]["completion_tokens"]
        first = time.perf_counter() - began
    link.close()
    out.append((tokens, first))


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    """All prompts of an order at once."""
    out: list[tuple[int, float]] = []
    threads = [threading.Thread(target=ask, args=(order, prompt, i, out)) for i, prompt in enumerate(order["prompts"])]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - began, "tokens": sum(n for n, _ in out), "first_s": [s for _, s in out]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), flush=True)
