"""Checkpoints of sharded models, by torch.distributed.checkpoint: each rank writes its shard,
any number of ranks reads them.

    step_000120/shards/.metadata       which part of which tensor is in which file
                       __R_0.distcp    written by rank R

Tensors are named `model.NAME` and `optim.NAME.KEY` (NAME as in `model.named_parameters()`), so
that reading does not depend on the sharding, the number of ranks or the order of parameters.
All ranks must see the same file system."""

import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from codechat.core.atomic_files import file_record
from codechat.core.errors import CheckpointError
from codechat.distributed import dist

FOLDER = "shards"

# ---- writing


def write(
    temp: Path, states: Mapping[str, Mapping[str, Tensor]], group: td.ProcessGroup
) -> dict[str, Any]:
    """Write this rank's shard of {model, optim: {name: tensor}}; {file: record} of all ranks'
    files. A collective over `group`. OSError, on every rank, where a disk fails; the temporary
    directory is then removed."""
    td.barrier(group)
    problem = None
    mine = {}
    tensors = {}
    for kind, state in states.items():
        for name, tensor in state.items():
            tensors[f"{kind}.{name}"] = tensor
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one about its own use of a deprecated function
            dcp.save(
                tensors, storage_writer=dcp.FileSystemWriter(temp / FOLDER), process_group=group
            )
        paths = list((temp / FOLDER).glob(f"__{dist.rank()}_*.distcp"))
        if dist.is_main():
            paths.append(temp / FOLDER / ".metadata")
        mine = {f"{FOLDER}/{path.name}": file_record(path) for path in paths}
    except CheckpointException as e:  # on every rank, with the failures of all
        problem = next(iter(e.failures.values()))[0]
    except OSError as e:
        problem = e
    every: list[Any] = [None] * td.get_world_size(group)
    td.all_gather_object(every, (str(problem) if problem else None, mine), group)
    problems = [text for text, _ in every if text]
    if problems:
        if dist.is_main():
            shutil.rmtree(temp, ignore_errors=True)
        raise OSError(problems[0])
    records: dict[str, Any] = {}
    for _, files in every:
        records |= files
    return records


# ---- reading

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "pathlib": {"PosixPath", "Path"},
}


class _Metadata(pickle.Unpickler):
    """Reads .metadata, which is a pickle, and constructs nothing but the tables of torch's
    format."""

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
            raise CheckpointError(
                f"{path} cannot be read by torch {torch.__version__} ({e})"
            ) from e
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Shards(Mapping[str, Tensor]):
    """The tensors of a sharded checkpoint whose names begin with `prefix`, which is cut off;
    each is read, whole, on access."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder / FOLDER
        self.prefix = prefix
        table = _Reader(self.folder).read_metadata().state_dict_metadata
        self.about = {  # shapes and dtypes
            name.removeprefix(prefix): torch.empty(
                about.size, dtype=about.properties.dtype, device="meta"
            )
            for name, about in table.items()
            if name.startswith(prefix) and isinstance(about, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        target = torch.empty_like(self.about[name], device="cpu")
        self.read_into({name: target})
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self.about)

    def __len__(self) -> int:
        return len(self.about)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, whole or sharded tensors, in place; a rank reads its own shard. No
        communication."""
        tensors = {self.prefix + name: target.detach() for name, target in targets.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=_Reader(self.folder), no_dist=True)
