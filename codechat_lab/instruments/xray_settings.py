"""Settings of `codechat xray`. Importing this loads no torch: `--help` reads the class."""

from dataclasses import dataclass
from pathlib import Path

from codechat.core.config import REQUIRED, opt


@dataclass(frozen=True, kw_only=True)
class XRayConfig:
    """Which conversation to colour, and by what."""

    ckpt: str = opt(REQUIRED, "run name, run directory or checkpoint", reads="run")
    data: Path | None = opt(
        None, "jsonl file of conversations or ids; none = validation rows of the checkpoint's data"
    )
    row: int = opt(0, "row of the file, from 0", least=0)
    gradient: bool = opt(False, "colour by share of the gradient instead of the loss mask")
