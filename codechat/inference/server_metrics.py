"""Counts and times of the server, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from codechat.inference.batching import Engine, Job

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """One registry per server, so that several in one process do not mix."""

    def __init__(self) -> None:
        self.registry = here = CollectorRegistry()
        self.requests = Counter("codechat_requests", "HTTP requests answered", ["path", "status"], registry=here)
        self.tokens = Counter("codechat_tokens", "tokens read and written", ["kind"], registry=here)
        self.ended = Counter("codechat_completions", "completions by how they ended", ["end"], registry=here)
        first = "from a request's arrival at the engine to its first token"
        self.first = Histogram("codechat_first_token_seconds", first, buckets=SECONDS, registry=here)
        self.rows = Histogram("codechat_batch_rows", "rows sampled together", buckets=ROWS, registry=here)

    def watch(self, engine: Engine) -> None:
        running = Gauge("codechat_running", "completions being written", registry=self.registry)
        running.set_function(lambda: len(engine.rows))
        waiting = Gauge("codechat_waiting", "completions in the queue", registry=self.registry)
        waiting.set_function(lambda: engine.waiting)

    def count(self, jobs: list[Job], prompt_tokens: int) -> None:
        """Add what one request used."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        for job in jobs:
            self.tokens.labels("completion").inc(len(job.ids))
            self.ended.labels(job.end or "unfinished").inc()
            if job.ids:
                self.first.observe(job.first_token_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
