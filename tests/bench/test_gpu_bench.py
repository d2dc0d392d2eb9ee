"""`codechat bench gpu`: what a CPU can prove passes, what it cannot is named, a result is written at once and not measured twice."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from codechat import bench
from codechat.bench import gpu, gpu_steps
from codechat.core.errors import ConfigError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that end at once: 3 fails a threshold, 5 cannot run here, 7 crashes."""
    ran: list[int] = []

    class Done:
        returncode, stdout = 0, "last words\n"

    plain = gpu.subprocess.run

    def run(words: list[str], **how: Any) -> Any:
        if "codechat.bench.gpu_steps" not in words:  # git, uname
            return plain(words, **how)
        number, out, done = int(words[-2]), gpu_steps.Result(), Done()
        ran.append(number)
        if number == 7:
            done.returncode = -9
            return done
        if number == 5:
            out.not_run.append("MFU: no CUDA device")
        else:
            out.most("waits", number, 2)
            out.measured("seconds", "1.5")
        Path(words[-1]).write_text(json.dumps({"checks": out.checks, "not_run": out.not_run, "figures": {}}))
        return done

    monkeypatch.setattr(gpu.subprocess, "run", run)
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
@pytest.mark.parametrize("number, checks", [(1, 3), (2, 5), (3, 4), (4, 9), (6, 2), (7, 1), (8, 2), (9, 10)])
def test_a_cpu_proves_what_it_can(number: int, checks: int, tmp_path: Path) -> None:
    found = proved(number, tmp_path)
    assert len(found["checks"]) == checks and all(check["ok"] for check in found["checks"]), found["checks"]
