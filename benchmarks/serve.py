"""The server beside in-process sampling: tokens per second for many clients, and the time to the
first token on an idle server. With a checkpoint also what `codechat serve` takes in a process of
its own: seconds until it answers, and memory.

    python -m benchmarks serve                                     16 clients beside generate.sample at batch 16
    python -m benchmarks serve --clients 4 --max-new-tokens 128
    python -m benchmarks serve --ckpt released/smollm2-tools --clients 8

Clients run in a process of their own over plain HTTP; on a machine with few cores they still take
time from the server. "engine" is continuous batching without HTTP. The time to the first token is
measured from the request to the first byte of text, beside one prefill of the same prompt in this
process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import measure
from benchmarks.settings import ServeBench
from codechat.core.errors import RunError
from codechat.distributed import hardware, numerics
from codechat.models import draws, generate, loading
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import tokenizer
from codechat_lab.serve import serve
from codechat_lab.serve.engine import Engine, Request

START_S = 60
IDLE_S = 1.0  # without work for so long: idle


def load(cfg: ServeBench) -> LoadedModel:
    if cfg.ckpt:
        return loading.load_model(cfg.ckpt, hardware.device())
    words = tokenizer.load(f"gpt2:{cfg.model.vocab_size}")
    return LoadedModel(
        GPT(cfg.model).to(hardware.device()).eval(),
        words,
        "reserved",
        {"run": "random"},
        Path(),
    )


def prompts_of(cfg: ServeBench, loaded: LoadedModel) -> list[list[int]]:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(
        loaded.tokenizer.n_vocab - 1, (cfg.clients, cfg.prompt_tokens), generator=rng
    ).tolist()


@contextmanager
def running(cfg: ServeBench, loaded: LoadedModel) -> Iterator[str]:
    """The URL of a server in this process."""
    settings = serve.ServeConfig(
        ckpt="", port=0, name="bench", max_batch=cfg.clients, timeout_s=600
    )
    box: list[Any] = []
    how = dict(loaded=loaded, ready=lambda *found: box.extend(found))
    thread = threading.Thread(target=serve.serve, args=(settings,), kwargs=how, daemon=True)
    thread.start()
    end = time.monotonic() + START_S
    while not box:
        if not thread.is_alive() or time.monotonic() > end:
            raise RunError("the server did not start; read its output above")
        time.sleep(0.01)
    try:
        yield box[1]
    finally:
        box[0].should_exit = True
        thread.join(START_S)


class Crowd:
    """The process of the clients; each line sent to it is one order: url, prompts, max_tokens,
    stream."""

    def __enter__(self) -> Crowd:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.clients"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, **order: Any) -> dict[str, Any]:
        """{"tokens": in total, "first_s": of each client, "seconds": from the first request to
        the last answer}."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RunError("the process of the clients ended; read its output above")
        return json.loads(line)


def race(
    cfg: ServeBench,
    loaded: LoadedModel,
    prompts: list[list[int]],
    crowd: Crowd,
    url: str,
) -> list[measure.Timing]:
    """generate.sample first, then the engine, then the server with whole and with streamed
    answers."""
    last: dict[str, float] = {}
    device = hardware.device()
    units = cfg.clients * cfg.max_new_tokens

    def plain() -> None:
        with numerics.autocast(device):
            for at in range(0, len(prompts), cfg.clients):
                generate.sample(
                    loaded.model,
                    prompts[at : at + cfg.clients],
                    max_new_tokens=cfg.max_new_tokens,
                    seed=0,
                )

    def engine() -> None:
        with Engine(loaded, max_rows=cfg.clients) as running_engine:
            requests = [
                Request(prompt=p, max_new_tokens=cfg.max_new_tokens, draws=draws.row_key(0, i, 0))
                for i, p in enumerate(prompts)
            ]
            for job in running_engine.submit(requests):
                job.ended.wait()

    def http(stream: bool) -> Callable[[], None]:
        def run() -> None:
            got = crowd.ask(url=url, prompts=prompts, max_tokens=cfg.max_new_tokens, stream=stream)
            if got["tokens"] < 0.95 * units:
                raise RunError(
                    f"{got['tokens']} of {units} tokens were generated: the "
                    "model ends its answers early; pass another --ckpt"
                )
            last["seconds"] = got["seconds"]

        return run

    made = [
        measure.Contestant("generate.sample", plain, units),
        measure.Contestant("engine", engine, units),
        *(
            measure.Contestant(
                f"server, {name}", http(stream), units, seconds=lambda: last["seconds"]
            )
            for name, stream in (("whole", False), ("streamed", True))
        ),
    ]
    return measure.race(made, cfg.rounds)


def first_token(
    cfg: ServeBench,
    loaded: LoadedModel,
    prompt: list[int],
    crowd: Crowd,
    url: str,
) -> tuple[float, float]:
    """Median seconds of one prefill in this process, and from one request to its first token,
    in turns."""
    ids = torch.tensor([prompt], device=hardware.device())
    alone = []
    served = []
    for _ in range(cfg.first_tokens + 1):
        with torch.no_grad(), numerics.autocast(hardware.device()):
            began = time.perf_counter()
            loaded.model(ids)[0, -1].argmax().item()
            alone.append(time.perf_counter() - began)
        served.append(crowd.ask(url=url, prompts=[prompt], max_tokens=2, stream=True)["first_s"][0])
    return statistics.median(alone[1:]), statistics.median(served[1:])


@dataclass(frozen=True)
class Moment:
    """What the process of a server has taken so far. cpu_s: seconds of all its threads;
    resident: bytes, the pages of files included; anonymous: bytes of its own."""

    name: str
    cpu_s: float
    resident: int
    anonymous: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.resident / 2**20:,.0f} MiB resident, "
            f"{self.anonymous / 2**20:,.0f} anonymous, {self.cpu_s:.1f} s of CPU"
        )


def moment(name: str, process: psutil.Process) -> Moment:
    """Once the process has nothing to do."""
    cpu_s = -1.0
    while sum(process.cpu_times()[:2]) > cpu_s + IDLE_S / 10:
        cpu_s = sum(process.cpu_times()[:2])
        time.sleep(IDLE_S)
    kept = dict(
        line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
    )
    resident, anonymous = (1024 * int(kept[key].split()[0]) for key in ("VmRSS", "RssAnon"))
    return Moment(name, cpu_s, resident, anonymous)


def apart(cfg: ServeBench, prompts: list[list[int]], crowd: Crowd) -> tuple[float, list[Moment]]:
    """Seconds until `codechat serve` answers in a process of its own, and what it has taken when
    idle, after one request, and after all clients at once."""
    words = [sys.executable, "-m", "codechat", "serve", "--ckpt", cfg.ckpt, "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen([*words, "--name", "bench"], stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next((line for line in server.stdout if " answers at " in line), None)
            if line is None:
                raise RunError("codechat serve did not start; read its output above")
            start_s = time.perf_counter() - began
            order = dict(url=line.split(" answers at ")[1].split()[0], stream=False)
            process = psutil.Process(server.pid)
            moments = [moment("idle", process)]
            for name, some in (("after one request", prompts[:1]), ("after all clients", prompts)):
                crowd.ask(**order, prompts=some, max_tokens=cfg.max_new_tokens)
                moments.append(moment(name, process))
        finally:
            server.terminate()
    return start_s, moments


def bench(cfg: ServeBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    loaded = load(cfg)
    prompts = prompts_of(cfg, loaded)
    with running(cfg, loaded) as url, Crowd() as crowd:
        timings = race(cfg, loaded, prompts, crowd, url)
        prefill, first = first_token(cfg, loaded, prompts[0], crowd, url)
    start_s = None
    moments: list[Moment] = []
    if cfg.ckpt:
        with Crowd() as crowd:
            start_s, moments = apart(cfg, prompts, crowd)
    shape = loaded.model.cfg
    title = (
        f"serving: {shape.depth} x {shape.n_embd}, vocabulary {shape.vocab_size:,}, {cfg.clients} clients, prompts of {cfg.prompt_tokens} tokens, "
        f"{cfg.max_new_tokens} new, {measure.dtype()}"
    )
    measure.show(title, "tokens", timings)
    print(
        f"first token on an idle server {1e3 * first:.1f} ms, one prefill {1e3 * prefill:.1f} "
        f"ms: {first / prefill:.1f} x (median of {cfg.first_tokens})"
    )
    if start_s is not None:
        print(f"codechat serve answers after {start_s:.1f} s", *moments, sep="\n")
    return {
        "title": title,
        "timings": measure.rows(timings),
        "prefill_s": prefill,
        "first_token_s": first,
        "start_s": start_s,
        "moments": [asdict(one) for one in moments],
    }
