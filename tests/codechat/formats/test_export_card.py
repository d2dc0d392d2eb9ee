"""README.md of an export: what its head says, and what it leaves to the owner."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from codechat.formats.export_card import export_card
from codechat.runs.checkpoint import Checkpoint

OWN = [{"run": "own/sft", "kind": "sft", "step": 7, "data_dir": "data/own"}]


def head_of(lineage: list[dict[str, Any]], folder: Path, format: str = "huggingface") -> Any:
    path = folder / "checkpoints" / "step_000007"
    path.mkdir(parents=True, exist_ok=True)
    ckpt = Checkpoint(
        path=path,
        step=7,
        meta={"run": "own/sft", "lineage": lineage},
        model_state=dict[str, torch.Tensor](),
        optim_state=None,
        extra={},
        rng=None,
    )
    text = export_card(ckpt, format=format, dtype="bfloat16", about="a model")
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head) | {"body": body}


def test_a_base_whose_origin_is_known_is_named_with_its_licence(tmp_path: Path) -> None:
    imported = {"run": "base", "kind": "import", "step": 0, "source": "smollm2"}
    head = head_of([imported, *OWN], tmp_path)
    assert head["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert head["license"] == "apache-2.0"


def test_a_model_of_ones_own_gets_no_licence_and_no_base(tmp_path: Path) -> None:
    head = head_of(OWN, tmp_path)
    assert "license" not in head
    assert "base_model" not in head


def test_an_import_from_elsewhere_gets_no_licence_that_nobody_gave(tmp_path: Path) -> None:
    imported = {"run": "base", "kind": "import", "step": 0, "source": "/somewhere/model"}
    assert "license" not in head_of([imported, *OWN], tmp_path)


@pytest.mark.parametrize(
    ("format", "library"), [("huggingface", "transformers"), ("run", "codechat")]
)
def test_the_library_is_the_one_that_reads_the_format(
    format: str, library: str, tmp_path: Path
) -> None:
    assert head_of(OWN, tmp_path, format)["library_name"] == library


def test_figures_are_those_of_the_exported_step(tmp_path: Path) -> None:
    rows = '{"step": 3, "split": "select", "pass@1": 0.25}\n{"step": 7, "split": "select", "pass@1": 0.5}\n'
    (tmp_path / "eval.jsonl").write_text(rows)
    head = head_of(OWN, tmp_path)
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "pass@1", "value": 0.5}]
    assert "| select | pass@1 | 0.5 |" in head["body"]


def test_domains_that_a_model_wrote_are_named_with_its_licence(tmp_path: Path) -> None:
    teacher = {
        "model": "qwen-coder",
        "licence": "apache-2.0",
        "temperature": 1.0,
    }
    domains = {
        "calls": {"supervised_tokens": 75},
        "solved": {"supervised_tokens": 25},
    }
    manifest = {"domains": domains, "teachers": {"solved": teacher}}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/manifest.json").write_text(json.dumps(manifest))
    body = head_of([OWN[0] | {"data_dir": str(tmp_path / "rows")}], tmp_path)["body"]
    told = "25% of the supervised tokens in rows (domain solved) are right answers of qwen-coder"
    assert f"{told}, licence apache-2.0." in body


def test_without_an_evaluation_no_figure_is_given(tmp_path: Path) -> None:
    head = head_of(OWN, tmp_path)
    assert "model-index" not in head
    assert "## Figures" not in head["body"]


def test_a_folder_of_this_machine_is_named_without_its_path(tmp_path: Path) -> None:
    body = head_of([OWN[0] | {"data_dir": str(tmp_path / "rows")}], tmp_path)["body"]
    assert "| rows |" in body
    assert str(tmp_path) not in body
