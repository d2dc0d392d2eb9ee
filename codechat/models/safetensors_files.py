"""Weights in the safetensors format: written one tensor at a time, read from one file or from shards without loading them whole.

    8 bytes    length of the header, little-endian
    header     json {name: {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    data       the tensors, without gaps, in the order of the header

Shapes are known before the first tensor is made, so the header is written first and no more than one converted tensor is ever held.
The package `safetensors` reads (it maps the file and checks the header); its writer wants every tensor at once, hence our own.

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
    """A tensor to write: `make` gives it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write(path: Path, entries: Iterable[Entry], dtype: str) -> int:
    """Write a safetensors file, synced; returns its size in bytes. Tensors are converted to `dtype` ("float32", "bfloat16") one by one."""
    entries, (kind, code) = list(entries), DTYPES[dtype]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        begin, end = end, end + torch.Size(entry.shape).numel() * kind.itemsize
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(_bytes(entry, kind))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end


def _bytes(entry: Entry, kind: torch.dtype) -> memoryview:
    tensor = entry.make().detach()
    assert tuple(tensor.shape) == tuple(entry.shape), (
        f"{entry.name} is {tuple(tensor.shape)}, announced as {entry.shape}"
    )
    return memoryview(tensor.to("cpu", kind).contiguous().flatten().view(torch.uint8).numpy())


class Weights(Mapping[str, Tensor]):
    """The tensors of a directory, by name; each is read when it is asked for. `with Weights(directory) as weights:` closes the files."""

    def __init__(self, directory: Path) -> None:
        self._stack, self._place = ExitStack(), dict[str, Any]()
        try:
            for path, names in _files(directory):
                self._open(path, names)
        except BaseException:  # what is open is closed; raised again
            self._stack.close()
            raise

    def _open(self, path: Path, names: list[str] | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no whole safetensors file ({error}); download it again") from None
        found = set(file.keys())
        if missing := [name for name in names or () if name not in found]:
            raise CheckpointError(f"{path} lacks {missing[0]}, which {INDEX} promises; download the directory again")
        self._place.update(dict.fromkeys(names or sorted(found), file))

    def __getitem__(self, name: str) -> Tensor:
        return self._place[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone."""
        return tuple(self._place[name].get_slice(name).get_shape())

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._place.clear()
        self._stack.close()


def _files(directory: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """(file, the tensors to take from it; None = all)."""
    if (directory / ONE_FILE).is_file():
        yield directory / ONE_FILE, None
        return
    if not (directory / INDEX).is_file():
        raise MissingFile(
            f"{directory} holds neither {ONE_FILE} nor {INDEX}; give the directory of a model with safetensors weights"
        )
    try:
        table = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: [name for name in table if table[name] == shard] for shard in sorted(set(table.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / INDEX} is damaged ({error!r}); download it again") from None
    for shard, names in shards.items():
        if Path(shard).name != shard:
            raise CheckpointError(f"{directory / INDEX} names {shard!r}; a shard lies in the same directory")
        if not (directory / shard).is_file():
            raise MissingFile(
                f"{directory / shard} is missing; {INDEX} names {len(shards)} shards; `codechat download` fetches what is not there yet"
            )
        yield directory / shard, names
