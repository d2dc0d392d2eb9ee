"""Headless Chromium by its debugging pipe: JSON messages that end in a null byte on descriptors
3 (to it) and 4 (from it)."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of one browser for the time of the block; every wait has a limit."""

    def __init__(self, profile: Path) -> None:
        self.profile, self.number, self.rest = profile, 0, b""
        self.problems: list[str] = []  # what the page threw or complained about

    def __enter__(self) -> Self:
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()
        flags = (
            "headless=new no-sandbox disable-gpu disable-dev-shm-usage "
            "no-first-run remote-debugging-pipe hide-scrollbars"
        )
        words = [
            *(f"--{flag}" for flag in flags.split()),
            f"--user-data-dir={self.profile}",
            "about:blank",
        ]
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', CHROMIUM, *words]
        self.process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.session: str | None = None
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.fresh()
        return self

    def __exit__(self, *error: Any) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        os.close(self.to)
        os.close(self.back)

    def call(self, method: str, limit_s: float = 60, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._read(limit_s)
            if got.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(got["params"]["exceptionDetails"])[:500])
            if got.get("method") == "Log.entryAdded" and got["params"]["entry"]["level"] == "error":
                self.problems.append(got["params"]["entry"]["text"])
            if got.get("id") == self.number:
                assert "error" not in got, got
                return got["result"]

    def _read(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while b"\0" not in self.rest:
            assert select.select([self.back], [], [], max(0, end - time.monotonic()))[0], (
                "the browser does not answer"
            )
            piece = os.read(self.back, 1 << 16)
            assert piece, "the browser has ended"
            self.rest += piece
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def fresh(self, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        """An empty page of this size, in this colour scheme, without problems."""
        self.open("about:blank")
        self.problems.clear()
        self.resize(width, height)
        self.prefer(scheme)

    def prefer(self, scheme: str) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def overflow(self) -> int:
        return self.ask(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def until(self, condition: str, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not self.ask(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.03)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
        """A key by name and Windows key code; modifiers: 1 Alt, 8 Shift."""
        for event, typed in (("keyDown", text), ("keyUp", "")):
            self.call(
                "Input.dispatchKeyEvent",
                type=event,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                text=typed,
            )

    def enter(self) -> None:
        self.press("Enter", 13, text="\r")

    def shot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
