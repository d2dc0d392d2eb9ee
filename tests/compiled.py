"""Libraries of cpp/ as the Makefile builds them."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from codechat.distributed import numerics

SOURCES = Path(__file__).parents[1] / "cpp"
COMPILER = shutil.which("gcc")


def compiled(
    folder: Path, library: str, runs_here: str, *sources: str, float32: bool = False
) -> Path:
    """The library of these C sources, in `folder`. Skips the test without gcc, the sources
    or a processor that they are for. runs_here: the function that says so."""
    places = [SOURCES / name for name in sources]
    there = all(place.exists() for place in places)
    processor = platform.machine() == "x86_64" if float32 else numerics._cpu_has_bf16()
    if COMPILER is None or not processor or not there:
        pytest.skip("no gcc, or no avx512_bf16")
    objects = list[str]()
    for place in places:  # OpenMP is torch's: compiled with it, not linked
        objects.append(str(folder / f"{place.stem}.o"))
        command = [COMPILER, "-O3", "-fopenmp", "-fPIC", "-Wall", "-Werror", "-c", str(place)]
        command += ["-DFLOAT32"] if float32 else []
        subprocess.run([*command, "-o", objects[-1]], check=True, timeout=120)
    made = folder / library
    subprocess.run([COMPILER, "-shared", *objects, "-o", str(made)], check=True, timeout=120)
    if not getattr(ctypes.CDLL(str(made)), runs_here)():
        pytest.skip("this processor lacks what the library needs")
    return made
