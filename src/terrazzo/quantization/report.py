"""What a run did, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terrazzo.spec import Name, QuantSpec


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One quantized linear.

    loss: relative square error of its outputs on the calibration text. rtn_loss: the same for plain
    rounding to nearest with min-max scales. num_bytes: of its tensors on disk. log: dampings that
    failed, in words.
    """

    name: Name
    spec: QuantSpec
    loss: float
    rtn_loss: float
    num_bytes: int
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """folder: the finished checkpoint. modules: in the order they were quantized.
    calibration_sha256: of the token ids. seconds: of the whole run.
    """

    folder: Path
    modules: tuple[ModuleReport, ...]
    calibration_tokens: int
    calibration_sha256: str
    seconds: float
