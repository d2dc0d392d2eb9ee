"""Only `models/fast` asks what device a tensor is on: the files that explain the model do not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from codechat import models
from codechat.models.fast.device import on_cpu

ROOM = Path(models.__file__).parent
EXPLAINING = sorted(path for path in ROOM.glob("*.py"))  # fast/ is a folder
ATTRIBUTES = {"is_cuda", "is_cpu", "cuda"}  # of tensors, and torch.cuda


def device_questions(source: str) -> Iterator[str]:
    """What asks for a device: on_cpu, torch.cuda, tensor.is_cuda, and comparisons of a device
    or its type."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield ast.unparse(node)
        elif isinstance(node, ast.Name | ast.alias) and "on_cpu" in (
            getattr(node, "id", ""),
            getattr(node, "name", ""),
        ):
            yield "on_cpu"
        elif isinstance(node, ast.Compare) and any(map(is_device, (node.left, *node.comparators))):
            yield ast.unparse(node)


def is_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("device", "type")


@pytest.mark.parametrize("path", EXPLAINING, ids=lambda path: path.name)
def test_no_module_but_those_of_fast_asks_for_the_device(path: Path) -> None:
    assert list(device_questions(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "x.device.type == 'cpu'",
        "'cuda' != device.type",
        "a.device == b.device",
        "device.type in KINDS",
        "x.is_cuda",
        "torch.cuda.mem_get_info()",
        "on_cpu(x.device)",
        "from codechat.models.fast.device import on_cpu",
    ],
)
def test_every_form_of_the_question_is_seen(source: str) -> None:
    assert list(device_questions(source))


def test_passing_a_device_on_is_no_question() -> None:
    assert not list(
        device_questions(
            "torch.zeros(3, device=x.device); torch.autocast(x.device.type, enabled=False)"
        )
    )


def test_a_cpu_is_known_from_other_devices() -> None:
    assert on_cpu(torch.device("cpu"))
    assert not on_cpu(torch.device("cuda:1"))
    assert not on_cpu(torch.device("meta"))
