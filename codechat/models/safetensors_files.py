"""Weights in the safetensors format: written one tensor at a time, read from one file or from shards without loading them whole.

    8 bytes    length of the header, little-endian
    header     json {name: {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    data       the tensors, without gaps, in the order of the header

The package `safetensors` reads: it maps the file and checks the header. Its writer, also below `huggingface_hub.save_torch_state_dict`, holds
every converted tensor of a shard in memory. All shapes are known beforehand, so `write` writes the header first and holds one converted tensor.

Left out: quantised dtypes, writing shards (one file of any size loads everywhere).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codechat.core.errors import CheckpointError, MissingFile

DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor to write; `make` is called when its turn comes. dtype: where it is not that of the file."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: str | None = None


def write(path: Path, entries: Iterable[Entry], dtype: str) -> int:
    """Write a safetensors file, synced; returns its size in bytes. Tensors are converted to `dtype` ("float32", "bfloat16") one by one."""
    entries = list(entries)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        kind, code = DTYPES[entry.dtype or dtype]
        begin, end = end, end + torch.Size(entry.shape).numel() * kind.itemsize
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(_bytes(entry, DTYPES[entry.dtype or dtype][0]))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end


def _bytes(entry: Entry, kind: torch.dtype) -> memoryview:
    tensor = entry.make().detach()
    assert tuple(tensor.shape) == tuple(entry.shape), f"{entry.name}: {tuple(tensor.shape)}, not {entry.shape}"
    return memoryview(tensor.to("cpu", kind).contiguous().flatten().view(torch.uint8).numpy())


class Weights(Mapping[str, Tensor]):
    """The tensors of a directory by name, each read when it is accessed. `with Weights(directory) as weights:` closes the files."""

    def __init__(self, directory: Path) -> None:
        self._place: dict[str, Any] = {}  # the open file of each tensor
        self.shapes: dict[str, tuple[int, ...]] = {}  # from the headers
        with ExitStack() as stack:
            for path, names in _files(directory):
                file = stack.enter_context(_opened(path))
                found = sorted(file.keys()) if names is None else names
                if missing := set(found) - set(file.keys()):
                    raise CheckpointError(
                        f"{path} lacks {min(missing)}, which {INDEX} names; download the directory again"
                    )
                self._place |= dict.fromkeys(found, file)
                self.shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in found}
            self._stack = stack.pop_all()

    def __getitem__(self, name: str) -> Tensor:
        return self._place[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._place.clear()
        self._stack.close()


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error}); download it again") from None


def _files(directory: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """(file, the tensors to take from it; None = all)."""
    if (directory / ONE_FILE).is_file():
        yield directory / ONE_FILE, None
        return
    if not (directory / INDEX).is_file():
        raise MissingFile(
            f"{directory} holds neither {ONE_FILE} nor {INDEX}; give a directory with safetensors weights"
        )
    try:
        table = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: [name for name in table if table[name] == shard] for shard in sorted(set(table.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / INDEX} is damaged ({error!r}); download it again") from None
    for shard, names in shards.items():
        if Path(shard).name != shard:
            raise CheckpointError(f"{directory / INDEX} names {shard!r}; shards must be files of the same directory")
        if not (directory / shard).is_file():
            raise MissingFile(f"{directory / shard} is missing; {INDEX} names it; `codechat download` fetches the rest")
        yield directory / shard, names
