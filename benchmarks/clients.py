"""Many plain HTTP clients in a process of their own: reads one order (json) per line from stdin,
writes one result per line to stdout.

Standard library only, so that the clients use as little of the machine as possible beside the
measured server.
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
    """One request on a new connection; appends (tokens, seconds to the first token) to `out`."""
    connection = http.client.HTTPConnection(urlsplit(order["url"]).netloc, timeout=600)
    connection.connect()
    body = {
        "model": "bench",
        "prompt": prompt,
        "seed": seed,
        **{k: order[k] for k in ("max_tokens", "stream")},
    }
    body |= {"stream_options": {"include_usage": True}} if order["stream"] else {}
    began = time.perf_counter()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
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
    connection.close()
    out.append((tokens, first))


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    """Send all prompts of an order at once; returns {"seconds", "tokens", "first_s"}."""
    out: list[tuple[int, float]] = []
    threads = [
        threading.Thread(target=ask, args=(order, prompt, i, out))
        for i, prompt in enumerate(order["prompts"])
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "seconds": time.perf_counter() - began,
        "tokens": sum(n for n, _ in out),
        "first_s": [s for _, s in out],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), flush=True)
