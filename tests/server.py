"""`codechat serve` in a thread of the test's own process."""

import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from codechat_lab.serve import serve
from codechat_lab.serve.settings import ServeConfig


@dataclass
class Running:
    url: str

    @cached_property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def health(self) -> dict[str, Any]:
        return self.send("GET", "/health")[1]

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        link = http.client.HTTPConnection(*self.place, timeout=300)
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        link.request(method, path, data, {"Content-Type": "application/json", **headers})
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        kind = answer.headers["Content-Type"]
        return answer.status, json.loads(text) if kind.startswith("application/json") else text

    def idle(self) -> bool:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            h = self.health()
            if h["running"] == h["waiting"] == 0:
                return True
            time.sleep(0.02)
        return False


@contextmanager
def Serving(**settings: Any) -> Iterator[Running]:  # noqa: N802
    cfg = ServeConfig(
        **({"ckpt": "tiny/sft", "port": 0, "max_batch": 8, "timeout_s": 60.0} | settings)
    )
    box: queue.Queue[Any] = queue.Queue()
    how = dict(ready=lambda *found: box.put(found))
    thread = threading.Thread(target=serve.serve, args=(cfg,), kwargs=how, daemon=True)
    thread.start()
    server, url = box.get(timeout=60)
    try:
        yield Running(url)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"
