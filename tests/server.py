"""`codechat serve` in a thread of the test's own process."""

import http.client
import json
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from codechat.inference import serve
from codechat.inference.serve import ServeConfig


@dataclass
class Running:
    url: str
    server: Any

    @cached_property
    def client(self) -> Any:
        """OpenAI's own."""
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
        return answer.status, json.loads(text) if answer.headers["Content-Type"].startswith(
            "application/json"
        ) else text

    def idle(self) -> bool:
        """Nothing runs and nothing waits, soon."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if (h := self.health())["running"] == h["waiting"] == 0:
                return True
            time.sleep(0.02)
        return False


class Serving:
    """A server in a thread for the time of the block."""

    def __init__(self, **settings: Any) -> None:
        self.cfg = ServeConfig(**({"ckpt": "tiny/sft", "port": 0, "max_batch": 8, "timeout_s": 60.0} | settings))
        self.box: list[Any] = []

    def __enter__(self) -> Running:
        self.thread = threading.Thread(
            target=serve.serve, args=(self.cfg,), kwargs={"ready": lambda *found: self.box.extend(found)}, daemon=True
        )
        self.thread.start()
        end = time.monotonic() + 60
        while not self.box:
            assert self.thread.is_alive() and time.monotonic() < end, "the server does not start"
            time.sleep(0.01)
        server, url = self.box
        return Running(url, server)

    def __exit__(self, *error: Any) -> None:
        self.box[0].should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not stop"
