"""GPUs by name: memory and peak of matrix products, from the vendors' data sheets (gpus.csv)."""

import csv
from pathlib import Path
from typing import NamedTuple

from codechat.core.errors import check_choice


class Gpu(NamedTuple):
    """memory_gib as sold; bf16_flops dense, with float32 accumulation; usable_share: what CUDA
    reports of the memory (error correction of GDDR takes 1/16); reports: words of torch's name
    for the device."""

    memory_gib: float
    bf16_flops: float
    usable_share: float
    reports: str
    source: str

    @property
    def usable_gib(self) -> float:
        return self.memory_gib * self.usable_share


with Path(__file__).with_name("gpus.csv").open(encoding="utf-8") as _file:
    GPUS = {
        row[0]: Gpu(float(row[1]), float(row[2]), float(row[3]), *row[4:])
        for row in list(csv.reader(_file))[1:]
    }


def find(name: str) -> Gpu:
    """The GPU of this name; ConfigError names the known ones."""
    return GPUS[check_choice("GPU", name, GPUS)]


def stated_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name in torch ("NVIDIA A100-SXM4-80GB"); None where
    it is unknown."""
    words = set(device_name.replace("-", " ").split())
    named = [gpu for gpu in GPUS.values() if words.issuperset(gpu.reports.split())]
    # "NVIDIA H100 PCIe" is told apart from "NVIDIA H100 80GB HBM3", whose name has no word of
    # its own
    return max(named, key=lambda gpu: len(gpu.reports.split())).bf16_flops if named else None
