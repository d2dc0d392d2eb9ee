"""The C++ programs: the same losses and the same greedy tokens as Python's. Skipped where no
compiler is."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import perturbed

from codechat.formats import hf_format
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat_lab.chars import lab as chars
from codechat_lab.chars import task as text_task

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("cmake", "g++")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)), reason=f"no compiler: {' and '.join(TOOLS)} are needed"
    ),
]
SMALL = GPTConfig(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=90)
MODELS = {
    "arcee": SMALL,
    "arcee, grouped heads": dataclasses.replace(SMALL, n_kv_head=2, rope_theta=500.0),
    "qwen3 with relu": dataclasses.replace(SMALL, qk_norm=True),
    "llama, own head": dataclasses.replace(SMALL, mlp="swiglu", tied=False),
    "qwen2": dataclasses.replace(SMALL, mlp="swiglu", qkv_bias=True, n_kv_head=1),
    "qwen3": dataclasses.replace(SMALL, mlp="swiglu", qk_norm=True, head_width=16),
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("cpp")
    for words in (
        [
            "cmake",
            "-S",
            str(ROOT / "cpp"),
            "-B",
            str(build),
            f"-DPython3_EXECUTABLE={sys.executable}",
        ],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(words, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build


def run(program: Path, *words: object, code: int = 0) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture(params=MODELS)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GPT, Path]:
    model = perturbed(GPT(MODELS[request.param]), seed=1)
    return model, export(model, tmp_path / "hf")


def export(model: GPT, directory: Path) -> Path:
    directory.mkdir()
    family = hf_format.family_of(model.cfg, imported=True)
    found = hf_format.to_hf(model.cfg, family, dtype="float32", bos_id=0, eos_ids=[0])
    (directory / "config.json").write_text(json.dumps(found))
    tensors = hf_format.tensors(model.cfg, model.state_dict())
    hf_format.save(directory / "model.safetensors", tensors, "float32")
    return directory


def test_greedy_tokens_are_those_of_python(programs: Path, exported: tuple[GPT, Path]) -> None:
    model, directory = exported
    for prompt in ([5], [1, 2, 3, 4, 5, 6, 7]):
        (done,) = generate.sample(model, [prompt], max_new_tokens=50, temperature=0)
        words = (directory, 50, ",".join(map(str, prompt)), "--ids", model.cfg.n_ids)
        tokens, speed = run(programs / "generate", *words).splitlines()
        assert list(map(int, tokens.split())) == list(done.ids)
        assert len(set(done.ids)) > 3
        assert speed.endswith("tokens/s")


def test_bfloat16_weights_are_read(programs: Path, tmp_path: Path) -> None:
    model = GPT(SMALL).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                (
                    p
                    + torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3
                ).bfloat16()
            )
    directory = export(model, tmp_path / "hf")
    tensors = hf_format.tensors(model.cfg, model.state_dict())
    hf_format.save(directory / "model.safetensors", tensors, "bfloat16")
    (done,) = generate.sample(model, [[7, 8]], max_new_tokens=20, temperature=0)
    found = run(programs / "generate", directory, 20, "7,8", "--ids", SMALL.n_ids).splitlines()[0]
    assert list(map(int, found.split())) == list(done.ids)


@pytest.mark.parametrize("seed", [0, 3])
def test_training_has_the_losses_of_the_python_loop(
    seed: int,
    programs: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """30 steps: warm-up and the beginning of the cosine. Then the weights that C++ wrote, read
    by Python."""
    from pydoc_data.topics import topics

    source = tmp_path / "text.txt"
    source.write_text("\n\n".join([*sorted(topics.values())[:40], "naïve – ∀ 😀"]))
    cfg = chars.CharsConfig(
        objective="supervised",
        source=str(source),
        max_tokens=30 * 32 * 70,
        seed=seed,
        log_every=1,
        eval_every=0,
        save_every=0,
    )
    expected = chars.train(cfg).metrics()["train_loss"].tolist()
    *lines, speed = run(programs / "train", source, 30, tmp_path / "out", seed).splitlines()
    found = [float(line.split()[1]) for line in lines]
    assert len(found) == 30
    assert expected[0] - expected[-1] > 1
    assert found == pytest.approx(expected, abs=1e-4)
    assert speed.endswith("tokens/s")
    text = text_task.load(str(source), "chars")
    shape = dataclasses.replace(cfg.model, n_tags=0, vocab_size=text.tokenizer.n_vocab)
    model = hf_format.read_model(shape, hf_format.read_weights(tmp_path / "out").items())
    windows = text.val_windows(71, 70, 20)
    assert model.loss(windows[:, :-1], windows[:, 1:]).item() < expected[0] - 1
    (done,) = generate.sample(model, [[3, 4]], max_new_tokens=30, temperature=0)
    tokens = run(
        programs / "generate", tmp_path / "out", 30, "3,4", "--ids", shape.n_ids
    ).splitlines()[0]
    assert list(map(int, tokens.split())) == list(done.ids)
