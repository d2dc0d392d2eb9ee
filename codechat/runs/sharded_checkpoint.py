"""Checkpoints of sharded models, by torch.distributed.checkpoint: each rank writes its shard, any number of ranks reads them.

    step_000120/shards/.metadata       which part of which tensor is in which file
                       __R_0.distcp    written by rank R

Tensors are named `model.NAME` and `optim.NAME.KEY` (NAME as in `model.named_parameters()`), so that reading does not
depend on the sharding, the number of ranks or the order of parameters. All ranks must see the same file system.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from codechat.core.atomic_files import file_record
from codechat.core.errors import CheckpointError
from codechat.distributed import dist, sharding

FOLDER = "shards"

# ---- writing


def named_states(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor of the model and its optimizers under its name in the checkpoint."""
    states = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = parameter_names(model, optimizers)
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            states |= {f"optim.{names[p]}.{key}": value for key, value in state.items()}
    return states


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameter_names(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, str]:
    """The name of every parameter; those that the model does not have, such as a value head's, are numbered in the order of the optimizers."""
    names = {p: name for name, p in model.named_parameters()}
    beside = [p for optimizer in optimizers for p in parameters_of(optimizer) if p not in names]
    return names | {p: f"beside.{i}" for i, p in enumerate(beside)}


def write(temp: Path, tensors: Mapping[str, Tensor], group: td.ProcessGroup) -> dict[str, Any]:
    """Write this rank's shard below the temporary directory of a step; {file: record} of all ranks' files.

    A collective over `group`. OSError, on every rank, where a disk fails; the temporary directory is then removed."""
    if dist.is_main():
        shutil.rmtree(temp, ignore_errors=True)
    td.barrier(group)
    problem, mine = None, {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one about its own use of a deprecated function
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(temp / FOLDER), process_group=group)
        patterns = [f"__{dist.rank()}_*.distcp", *([".metadata"] if dist.is_main() else [])]
        paths = [path for pattern in patterns for path in (temp / FOLDER).glob(pattern)]
        mine = {f"{FOLDER}/{path.name}": file_record(path) for path in paths}
    except CheckpointException as e:  # on every rank, with the failures of all
        problem = next(iter(e.failures.values()))[0]
    except OSError as e:
        problem = e
    every: list[Any] = [None] * td.get_world_size(group)
    td.all_gather_object(every, (str(problem) if problem else None, mine), group)
    if problems := [text for text, _ in every if text]:
        if dist.is_main():
            shutil.rmtree(temp, ignore_errors=True)
        raise OSError(problems[0])
    return {name: record for _, files in every for name, record in files.items()}


# ---- reading

_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
    "_MEM_FORMAT_ENCODING"
)
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": set(_METADATA.split()),
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "Path"},
}


class _Metadata(pickle.Unpickler):
    """Reads .metadata, which is a pickle, and constructs nothing but the tables of torch's format."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _Metadata(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError) as e:
            raise CheckpointError(f"{path} cannot be read by torch {torch.__version__} ({e})") from e
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Shards(Mapping[str, Tensor]):
    """The tensors of a sharded checkpoint whose names begin with `prefix`, which is cut off; each is read, whole, on access."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder / FOLDER, prefix
        table = _Reader(self.folder).read_metadata().state_dict_metadata
        self._about = {
            name.removeprefix(prefix): about
            for name, about in table.items()
            if name.startswith(prefix) and isinstance(about, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        about = self._about[name]
        target = torch.empty(about.size, dtype=about.properties.dtype)
        self.read_into({name: target})
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self._about)

    def __len__(self) -> int:
        return len(self._about)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(about.size) for name, about in self._about.items()}

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, whole or sharded tensors, in place; a rank reads its own shard. No communication."""
        tensors = {self.prefix + name: target.detach() for name, target in targets.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=_Reader(self.folder), no_dist=True)

    def restore_optimizers(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the optimizer states of each parameter, by its name, sharded as it is. Before the first update there are none. ValueError where
        a parameter has none and others have."""
        if not len(self):
            return
        names, targets = parameter_names(model, optimizers), {}
        for optimizer in optimizers:
            for p in parameters_of(optimizer):
                keys = [key for key in self if key.rpartition(".")[0] == names[p]]
                if not keys:
                    raise ValueError(f"nothing is saved for {names[p]}")
                empty = {key: _empty(p, self._about[key].size, self._about[key].properties.dtype) for key in keys}
                optimizer.state[p] = {key.rpartition(".")[2]: tensor for key, tensor in empty.items()}
                targets |= empty
        self.read_into(targets)


def _empty(p: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor to fill: sharded as p is where it has p's shape, else whole on p's device."""
    same = tuple(shape) == tuple(p.shape)
    return torch.zeros_like(p, dtype=dtype) if same else torch.zeros(tuple(shape), dtype=dtype, device=p.device)


def restore_whole(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put a `state_dict` that was saved whole into an optimizer of sharded parameters. ValueError where their numbers differ."""
    numbers, params = [n for group in saved["param_groups"] for n in group["params"]], parameters_of(optimizer)
    if len(numbers) != len(params):
        raise ValueError(f"{len(numbers)} parameters there, {len(params)} here")
    for n, p in zip(numbers, params):
        optimizer.state[p] = {}
        for key, value in saved["state"].get(n, {}).items():
            dtype = p.dtype if value.shape == p.shape else value.dtype
            optimizer.state[p][key] = _empty(p, value.shape, dtype)
            sharding.fill(optimizer.state[p][key], value)
