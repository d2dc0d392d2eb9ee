"""Batches that are ready when a step asks for them: on a GPU a thread prepares the next ones in pinned memory while a step
runs. Elsewhere a batch is prepared when it is asked for, since a thread would take its time from the step."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Prefetched:
    """A loader (next, state, load_state) with a thread that works `ahead` batches ahead. beside: whether to have the
    thread; None = on a GPU. `state()` is that of the batches handed out."""

    def __init__(self, loader: Any, device: torch.device, ahead: int = 1, beside: bool | None = None) -> None:
        self.loader, self.pins, self.ahead = loader, device.type == "cuda", ahead
        self.load_state = loader.load_state  # before the first batch
        self._waiting: deque[Future[tuple[Any, Any]]] = deque()
        self._thread = ThreadPoolExecutor(1, "batches") if (self.pins if beside is None else beside) else None
        self._state: Any = None

    def next(self) -> Any:
        if self._thread is None:
            return self.loader.next()
        while len(self._waiting) <= self.ahead:
            self._waiting.append(self._thread.submit(self._prepare))
        batch, self._state = self._waiting.popleft().result()
        return batch

    def _prepare(self) -> tuple[Any, Any]:
        batch = self.loader.next()
        if self.pins:
            batch = getattr(batch, "_make", tuple)(part.pin_memory() for part in batch)
        return batch, self.loader.state()

    def state(self) -> Any:
        return self.loader.state() if self._state is None else self._state
