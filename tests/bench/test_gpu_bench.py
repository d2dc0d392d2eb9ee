"""`python -m benchmarks gpu`: what a CPU can prove passes, what it cannot is named, a result is written at once and not measured twice."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks as bench
from benchmarks import gpu, gpu_steps
from codechat.core.errors import ConfigError
from codechat.distributed import hardware
from codechat.models import generate, head
from codechat.models.config import PRESETS, GPTConfig


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that end at once: 3 fails a threshold, 5 cannot run here, 7 crashes."""
    ran: list[int] = []

    def run(words: list[str], limit_s: float) -> tuple[str, int]:
        number, out = int(words[-2]), gpu_steps.Result()
        ran.append(number)
        if number == 7:
            return "last words\n", -9
        if number == 5:
            out.not_run.append("MFU: no CUDA device")
        else:
            out.most("waits", number, 2)
            out.measured("seconds", "1.5")
        Path(words[-1]).write_text(json.dumps({"checks": out.checks, "not_run": out.not_run, "figures": {}}))
        return "last words\n", 0

    monkeypatch.setattr(gpu, "run_alone", run)
    return ran


def test_results_are_kept_and_a_crash_is_tried_again(
    quick: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench.run_kind("gpu", ["--out", str(tmp_path), "--json", str(tmp_path / "all.json")])
    assert quick == list(range(1, 11)), "step 11 stands apart"
    assert found["verdicts"] == {str(n): "pass" if n <= 2 else "fail" for n in range(1, 11)} | {"5": "not run"}
    shown = capsys.readouterr().out
    assert (
        "FAIL" in shown
        and "<= 2" in shown
        and "code -9" in shown
        and "last words" in shown
        and "no CUDA device" in shown
    )
    first = json.loads((tmp_path / "gpu-03-flash.json").read_text())
    assert first["step"] == 3 and first["checks"][0] == {
        "what": "waits",
        "value": "3",
        "threshold": "<= 2",
        "ok": False,
    }
    assert first["device"] == gpu.device_name() and first["seconds"] >= 0 and first["commit"] and first["torch"]
    quick.clear()
    again = bench.run_kind("gpu", ["--out", str(tmp_path)])
    assert quick == [7] and again["verdicts"] == found["verdicts"], "only the one without a result"
    assert f"step 3: fail, measured {first['time']} at {first['commit'][:7]}; --steps 3" in capsys.readouterr().out
    assert bench.main(["gpu", "--out", str(tmp_path), "--steps", "5", "1"]) == 0
    assert bench.main(["gpu", "--out", str(tmp_path), "--steps", "3"]) == 1
    bench.run_kind("gpu", ["--out", str(tmp_path), "--steps", "11"])
    assert quick == [7, 5, 1, 3, 11]
    assert len(json.loads((tmp_path / "all.json").read_text())["results"]) == 10


def test_a_result_of_another_device_is_measured_again(quick: list[int], tmp_path: Path) -> None:
    path = tmp_path / "gpu-01-checkpoint.json"
    bench.run_kind("gpu", ["--out", str(tmp_path)])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "NVIDIA H100 80GB HBM3"}))
    quick.clear()
    bench.run_kind("gpu", ["--out", str(tmp_path)])
    assert quick == [1, 7]


def test_a_step_that_hangs_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMIT_S", 0.05)
    found = gpu.run_step(2, tmp_path / "x.json")
    assert "0.05 s" in found["failed"] and gpu.verdict(found) == "fail"
    assert json.loads((tmp_path / "x.json").read_text())["failed"] == found["failed"]


def test_what_a_step_has_started_ends_with_it(tmp_path: Path) -> None:
    """It inherits the pipe, which would be waited for until it ends; on a GPU it would hold memory."""
    mark, began = tmp_path / "pid", time.monotonic()
    starts = f"import subprocess, sys; print('here', flush=True); p = subprocess.Popen(['sleep', '60']); open({str(mark)!r}, 'w').write(str(p.pid)); "
    for last, code in (("sys.exit(3)", 3), ("p.wait()", None)):
        assert gpu.run_alone([sys.executable, "-c", starts + last], 3) == ("here\n", code)
        status = Path(f"/proc/{mark.read_text()}/stat")
        for _ in range(100):
            if not status.exists() or status.read_text().split()[2] == "Z":
                break
            time.sleep(0.05)
        else:
            raise AssertionError("it still runs")
    assert time.monotonic() - began < 30


def test_unknown_steps_raise_and_every_step_has_a_function() -> None:
    with pytest.raises(ConfigError, match="12"):
        gpu.GpuBench(steps=(1, 12))
    assert [f.__name__.removeprefix("step_") for f in gpu_steps.ALL] == [name for name, _ in gpu.STEPS.values()]


class VLLM(ModuleType):
    """vLLM as far as it is called, and what it was asked for."""

    def __init__(self, fails: bool) -> None:
        super().__init__("vllm")
        self.__spec__, self.fails, self.asked = ModuleSpec("vllm", None), fails, []

    def SamplingParams(self, **how: Any) -> dict[str, Any]:
        return how

    def LLM(self, folder: str, **how: Any) -> Any:
        assert Path(folder).is_dir() and how["skip_tokenizer_init"]
        if self.fails:
            raise RuntimeError("no kernel for this shape")
        return SimpleNamespace(generate=lambda prompts, how, use_tqdm: self.asked.append((prompts, how)))


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_is_asked_for_what_ours_samples_and_its_failure_is_named(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, saved = VLLM(fails), []
    peer = SimpleNamespace(to=lambda dtype: SimpleNamespace(save_pretrained=saved.append))
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(gpu_steps.peers, "huggingface", lambda kind, cfg: peer)
    out = gpu_steps.Result(figures={"d12/128/graph": 1e12})
    gpu_steps._vllm_sampling(out, "d12", gpu_steps.TINY, 128)
    gpu_steps._vllm_sampling(out, "2b", gpu_steps.TINY, 128)
    assert out.not_run[-1] == "2b beside vLLM: 128 rows do not fit here" and len(saved) == 1
    if fails:
        assert not out.checks and "no kernel for this shape" in out.not_run[0]
        return
    (check,) = out.checks
    assert check["ok"] and check["threshold"] == "<= ours"
    prompts, how = stand_in.asked[-1]
    assert len(prompts) * how["n"] == 128 and {len(p["prompt_token_ids"]) for p in prompts} == {128}
    assert how["max_tokens"] == 256 and how["ignore_eos"]


def test_the_busy_share_counts_kernels_beside_each_other_once_and_the_table_is_by_time() -> None:
    assert gpu_steps.covered([(5, 9), (0, 4), (1, 2), (3, 6), (20, 21)]) == 10 and gpu_steps.covered([]) == 0
    found = gpu_steps.longest([("gemm", 3000), ("copy", 1000), ("gemm", 6000)])
    assert found == [
        {"kernel": "gemm", "calls": 2, "ms": 9.0, "share": 0.9},
        {"kernel": "copy", "calls": 1, "ms": 1.0, "share": 0.1},
    ]
    assert gpu_steps.longest([]) == []


# ---- the branches of a GPU, with small models on a CPU: that they run, not what they measure


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu_steps.Result]:
    """`CUDA` true on a CPU: presets are TINY, calls of the driver answer something."""
    small = dict(depth=2, n_embd=64, n_head=2, block_size=384, vocab_size=500)
    for name in ("d12", "d20", "2b"):
        monkeypatch.setitem(PRESETS, name, small)
    answers = dict(synchronize=None, max_memory_reserved=2**33, max_memory_allocated=2**32, memory_allocated=0)
    answers |= dict(reset_peak_memory_stats=None, set_sync_debug_mode=None, empty_cache=None)
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_steps, "CUDA", True)
    monkeypatch.setattr(gpu_steps, "MATRIX", 64)
    monkeypatch.setattr(generate, "free_memory", lambda device: 2**31)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(hardware, "compile_blocks", lambda model, **_: None)
    yield gpu_steps.Result()


@pytest.mark.slow
def test_training_is_measured_with_what_the_issue_asks_for(
    as_cuda: gpu_steps.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_steps, "TOKENS_PER_STEP", dict.fromkeys(("d12", "d20", "2b"), 768))
    ways: list[bool] = []
    monkeypatch.setattr(gpu_steps, "_compiled_peer_rate", lambda cfg, rows, by_block: ways.append(by_block) or 1.0)
    gpu_steps.step_mfu(as_cuda)
    limits = {check["what"][:8].strip(): check["threshold"] for check in as_cuda.checks if "MFU" in check["what"]}
    assert limits == {"d12: MFU": ">= 40%", "d20: MFU": ">= 45%", "2b: MFU,": ">= 50%"}
    assert [c["threshold"] for c in as_cuda.checks if "first step" in c["what"]] == ["<= 120"] * 3
    assert as_cuda.figures["2b"]["microbatches"] * 8 * 2048 == 65_536, "of the recipe"
    assert sum("transformers" in c["what"] for c in as_cuda.checks) == 3
    assert ways == [False, False, True], "the peer of 2b by block"
    assert {"d12/bf16_residual", "d12/elementwise"} <= set(as_cuda.figures)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), gpu_steps.MissingFile("x")], ids=str)
def test_a_peer_that_does_not_fit_costs_no_figure_of_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise error

    monkeypatch.setattr(gpu_steps.peers, "huggingface", fails)
    out = gpu_steps.Result(figures={"d20/16/graph": 1.0})
    gpu_steps._peer_rate(out, "d20", gpu_steps.TINY, 2, 1.0)
    gpu_steps._peer_sampling(out, "d20", gpu_steps.TINY, 16)
    assert not out.checks and len(out.not_run) == 2 and all("d20 beside transformers" in what for what in out.not_run)


def test_a_peer_takes_the_most_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def rate(cfg: GPTConfig, rows: int, by_block: bool) -> float:
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError
        return 3.0

    monkeypatch.setattr(gpu_steps, "_compiled_peer_rate", rate)
    out = gpu_steps.Result()
    gpu_steps._peer_rate(out, "2b", gpu_steps.TINY, 8, 4.0)
    assert tried == [8, 4, 2] and not out.not_run
    assert [(c["what"], c["ok"]) for c in out.checks] == [
        (f"2b: transformers compiled by block, 2 x {gpu_steps.TINY.block_size} tokens, tokens/s", True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("by_block", [False, True])
def test_a_peer_is_trained_compiled_whole_or_by_block(by_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda fn, **_: compiled.append(fn) or fn)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    assert gpu_steps._compiled_peer_rate(gpu_steps.TINY, 1, by_block) > 0
    assert len(compiled) == (gpu_steps.TINY.depth if by_block else 1)


@pytest.mark.slow
def test_sampling_is_measured_at_four_sizes_with_and_without_graphs(
    as_cuda: gpu_steps.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(gpu_steps, "seconds", lambda run: 1.0)
    monkeypatch.setattr(
        generate, "sample", lambda model, prompts, **how: asked.append((how["batch_size"], how["graph"]))
    )
    monkeypatch.setattr(gpu_steps, "_peer_sampling", lambda out, name, cfg, rows: None)
    gpu_steps.step_sampling(as_cuda)
    sizes = (1, 16, 128, 512)
    assert asked == [(rows, graph) for _ in range(2) for rows in sizes for graph in (True, False)]
    assert {(c["what"], c["threshold"]) for c in as_cuda.checks if c["threshold"]} == {
        ("2b: 128 rows, graph, tokens/s", ">= 15,000")
    }


@pytest.mark.slow
def test_memory_and_busy_shares_run(as_cuda: gpu_steps.Result) -> None:
    gpu_steps.step_memory(as_cuda)
    gpu_steps.step_busy(as_cuda)
    thresholds = [check["threshold"] for check in as_cuda.checks if check["threshold"]]
    assert thresholds == ["falling", "within 8 %", ">= 0.95", ">= 0.8"]


def test_what_does_not_fit_is_gone_before_the_next_size_is_tried() -> None:
    """A compiled block refers to itself; of 2b what stayed would be half of a GPU's memory."""
    alive: list[weakref.ref[Any]] = []
    gc.disable()
    try:

        def make(rows: int) -> gpu_steps.Trainer:
            assert not any(ref() for ref in alive), "the model before is still there"
            made = gpu_steps.Trainer(gpu_steps.TINY, rows, 16, compiled=True)
            alive.append(weakref.ref(made.model))
            if rows > 2:
                made.step = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("too large"))  # type: ignore[method-assign]
            else:
                made.step = lambda: None  # type: ignore[method-assign]
            return made

        assert gpu_steps.fitting(make, 8).rows == 2 and len(alive) == 3
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_heads_graph_is_none_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the head's body is compiled too."""
    monkeypatch.setattr(head, "_body", lambda body, device: torch.compile(body, backend="eager"))
    out = gpu_steps.Result()
    gpu_steps.step_compiled(out)
    found = {c["what"]: c["value"] for c in out.checks if "graphs" in c["what"]}
    assert found == {f"{kind}: graphs of 12 blocks; breaks": "1; 0" for kind in ("pretrain", "sft", "rl")}
    assert all(check["ok"] for check in out.checks), out.checks


def proved(number: int, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert gpu_steps.main([str(number), str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.skipif(gpu_steps.CUDA, reason="on a GPU the command itself is run")
@pytest.mark.parametrize("number", [5, 10, 11])
def test_what_needs_a_gpu_is_named(number: int, tmp_path: Path) -> None:
    found = proved(number, tmp_path)
    assert not found["checks"] and all("no CUDA device" in what for what in found["not_run"]) and found["not_run"]


@pytest.mark.slow
@pytest.mark.skipif(gpu_steps.CUDA, reason="on a GPU the command itself is run")
@pytest.mark.parametrize("number, checks", [(1, 3), (2, 5), (3, 4), (4, 9), (6, 2), (7, 2), (8, 2), (9, 10)])
def test_a_cpu_proves_what_it_can(number: int, checks: int, tmp_path: Path) -> None:
    found = proved(number, tmp_path)
    assert len(found["checks"]) == checks and all(check["ok"] for check in found["checks"]), found["checks"]
