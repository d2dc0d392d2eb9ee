"""Tokens around calls that were never trained: found, and given rows of their own."""

from pathlib import Path

import pytest
import torch
from imported import tokenizer_json
from raising import raising

from codechat.core.errors import ConfigError
from codechat.formats import call_marks, exchange
from codechat.formats.settings import ExportConfig, ImportConfig
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEMPLATE = Path(__file__).parents[1] / "text" / "templates" / "tools_hermes.jinja"
MARKS = ("<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_json("bytes"))
    made.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in MARKS])
    names = dict(bos_token="<s>", eos_token="<|im_end|>")
    template = TEMPLATE.read_text(encoding="utf-8")
    about = dict(spec="hf:theirs", json=made.to_str(), special=names, template=template)
    return tokenizer.from_dict(about)


@pytest.fixture
def model(tok: Tokenizer) -> GPT:
    """With eight unused rows, all alike."""
    shape = GPTConfig(
        depth=1, n_embd=32, n_head=2, vocab_size=tok.n_vocab, rows=tok.n_vocab + 8, n_tags=0
    )
    model = GPT(shape, seed=0)
    with torch.no_grad():
        model.wte.weight[tok.n_vocab :] = torch.randn(32)
    return model


def ids_of(tok: Tokenizer) -> list[int]:
    return [tok.encode_inside(mark)[0] for mark in MARKS]


def untrain(model: GPT, tok: Tokenizer) -> None:
    """As quantization leaves rows that were equal."""
    with torch.no_grad():
        for id in ids_of(tok):
            model.wte.weight[id] = model.wte.weight[-1] + 1e-3 * torch.randn(32)


def test_trained_tokens_are_left_alone(model: GPT, tok: Tokenizer) -> None:
    assert call_marks.untrained_marks(model, tok) == {}


def test_tokens_whose_rows_are_those_of_unused_ones_are_found(model: GPT, tok: Tokenizer) -> None:
    untrain(model, tok)
    assert call_marks.untrained_marks(model, tok) == dict(zip(ids_of(tok), MARKS))


def test_their_new_rows_differ_from_all_others_and_are_as_long(model: GPT, tok: Tokenizer) -> None:
    untrain(model, tok)
    call_marks.give_rows(model, call_marks.untrained_marks(model, tok))
    assert call_marks.untrained_marks(model, tok) == {}
    rows = model.wte.weight[ids_of(tok)]
    assert torch.cosine_similarity(rows[:1], rows[1:]).abs() < 0.9
    typical = model.wte.weight[: tok.n_vocab].norm(dim=1).median()
    assert torch.allclose(rows.norm(dim=1), typical.expand(2), rtol=0.1)


def test_the_same_tokens_get_the_same_rows(model: GPT, tok: Tokenizer) -> None:
    untrain(model, tok)
    again = GPT(model.cfg, seed=0)
    again.load_state_dict(model.state_dict())
    for one in (model, again):
        call_marks.give_rows(one, call_marks.untrained_marks(one, tok))
    assert torch.equal(model.wte.weight, again.wte.weight)


def test_without_unused_rows_nothing_is_known(tok: Tokenizer) -> None:
    rows = tok.n_vocab
    shape = GPTConfig(depth=1, n_embd=32, n_head=2, vocab_size=rows, rows=rows, n_tags=0)
    assert call_marks.untrained_marks(GPT(shape, seed=0), tok) == {}


def test_the_marks_are_those_of_a_call_as_it_is_written(tok: Tokenizer) -> None:
    call = chat.completion_ids('<functioncall> {"name": "f", "arguments": {}}', tok, "native")
    assert set(ids_of(tok)) <= set(call)


@pytest.mark.parametrize("own_rows", [False, True])
def test_an_import_says_what_became_of_them(
    model: GPT,
    tok: Tokenizer,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_rows: bool,
) -> None:
    untrain(model, tok)
    monkeypatch.setattr(exchange, "_read_source", lambda cfg: exchange.Source(tok, None, None))
    monkeypatch.setattr(exchange, "_read_model", lambda *_: (model, 0))
    cfg = ImportConfig(source=home, run_name="theirs", own_rows=own_rows)
    exchange.import_model(cfg)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("<tool_call> and </tool_call> were never trained")
    assert ("--own-rows true" in line) is not own_rows
    assert bool(call_marks.untrained_marks(model, tok)) is not own_rows


def test_an_adapter_of_own_rows_names_the_import_that_users_have(
    home: Path, tmp_path: Path
) -> None:
    lineage = [{"run": "start", "kind": "import", "source": "qwen-coder", "own_rows": True}]
    with Run.create("tuned", {}, kind="sft") as run:
        checkpoint.save(run.path, 1, model=torch.nn.Linear(2, 2), meta={"lineage": lineage})
    cfg = ExportConfig(ckpt="tuned", out=tmp_path / "given", format="adapter")
    with raising(ConfigError, "start was imported with --own-rows true", "set --base"):
        exchange.export(cfg)
