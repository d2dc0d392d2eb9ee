"""GPUs by name: memory and peak of matrix products, from the vendors' data sheets.

Left out: consumer cards older than bfloat16, and accelerators of other vendors, which were not tried.
"""

from __future__ import annotations

from typing import NamedTuple

from codechat.core.errors import ConfigError, nearest

# share of the memory as sold that CUDA reports: for an A800, 79.33 of 80 GiB were published; error correction takes 1/16
HBM, GDDR_ECC = 0.99, 0.92


class Gpu(NamedTuple):
    """memory_gib as sold; bf16_flops dense, with float32 accumulation; `reports` are words of torch's name for the device."""

    memory_gib: float
    bf16_flops: float
    usable_share: float
    reports: str
    source: str

    @property
    def usable_gib(self) -> float:
        return self.memory_gib * self.usable_share


GPUS = {
    "a100-40gb": Gpu(40, 312e12, HBM, "A100", "NVIDIA A100 Tensor Core GPU data sheet"),
    "a100-80gb": Gpu(80, 312e12, HBM, "A100", "NVIDIA A100 Tensor Core GPU data sheet"),
    "a800-80gb": Gpu(80, 312e12, HBM, "A800", "an A100 with NVLink at 400 GB/s, not 600: NVIDIA A100 data sheet"),
    "h100-80gb": Gpu(80, 989e12, HBM, "H100", "NVIDIA H100 Tensor Core GPU data sheet, SXM; 1,979 with sparsity"),
    "h100-pcie-80gb": Gpu(
        80, 756e12, HBM, "H100 PCIe", "NVIDIA H100 Tensor Core GPU data sheet, PCIe; 1,513 with sparsity"
    ),
    "h100-nvl-94gb": Gpu(
        94, 835e12, HBM, "H100 NVL", "NVIDIA H100 Tensor Core GPU data sheet, NVL; 1,671 with sparsity"
    ),
    "h800-80gb": Gpu(80, 989e12, HBM, "H800", "an H100 with NVLink at 400 GB/s, not 900: NVIDIA H100 data sheet, SXM"),
    "h20-96gb": Gpu(96, 148e12, HBM, "H20", "NVIDIA H20 product brief"),
    "h200-141gb": Gpu(141, 989e12, HBM, "H200", "NVIDIA H200 Tensor Core GPU data sheet, SXM; 1,979 with sparsity"),
    "b200-180gb": Gpu(180, 2250e12, HBM, "B200", "NVIDIA DGX B200 data sheet; 4,500 with sparsity"),
    "l40s-48gb": Gpu(48, 362e12, GDDR_ECC, "L40S", "NVIDIA L40S data sheet; 733 with sparsity"),
    "l4-24gb": Gpu(24, 121e12, GDDR_ECC, "L4", "NVIDIA L4 data sheet; 242 with sparsity"),
    "a10-24gb": Gpu(24, 125e12, GDDR_ECC, "A10", "NVIDIA A10 data sheet; 250 with sparsity"),
    "rtx4090-24gb": Gpu(
        24, 165e12, HBM, "4090", "NVIDIA Ada architecture white paper, appendix A; float32 accumulation"
    ),
}


def find(name: str) -> Gpu:
    """The GPU of this name, in upper or lower case; ConfigError names the known ones."""
    if (key := name.lower().replace("_", "-")) not in GPUS:
        raise ConfigError(f"no GPU {name!r}{nearest(key, GPUS)}; known: {', '.join(GPUS)}")
    return GPUS[key]


def stated_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name in torch ("NVIDIA A100-SXM4-80GB"); None where it is unknown."""
    words = set(device_name.replace("-", " ").split())
    named = [gpu for gpu in GPUS.values() if words.issuperset(gpu.reports.split())]
    # "NVIDIA H100 PCIe" is told apart from "NVIDIA H100 80GB HBM3", whose name has no word of its own
    return max(named, key=lambda gpu: len(gpu.reports.split())).bf16_flops if named else None
