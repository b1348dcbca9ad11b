"""What a run did, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from terrazzo.rules import layer_relative
from terrazzo.spec import Name, QuantSpec


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One quantized linear.

    loss: relative square error of its outputs on the calibration text. rtn_loss: the same for plain
    rounding to nearest with min-max scales. num_bytes: of its tensors on disk. tokens: calibration
    tokens that it saw. log: few tokens and dampings that failed, in words.
    """

    name: Name
    spec: QuantSpec
    loss: float
    rtn_loss: float
    num_bytes: int
    tokens: int
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

    def kinds(self) -> tuple[KindReport, ...]:
        """One line per kind of module, such as all `mlp.down_proj`, in order of appearance."""
        grouped: dict[Name, list[ModuleReport]] = {}
        for module in self.modules:
            grouped.setdefault(layer_relative(module.name), []).append(module)
        return tuple(KindReport(kind, tuple(modules)) for kind, modules in grouped.items())


@dataclass(frozen=True, slots=True)
class KindReport:
    """The modules of one layer-relative name over all layers; at least one."""

    kind: Name
    modules: tuple[ModuleReport, ...]

    @property
    def specs(self) -> tuple[QuantSpec, ...]:
        """Each that occurs, in order of appearance."""
        return tuple(dict.fromkeys(module.spec for module in self.modules))

    @property
    def median_loss(self) -> float:
        return median(module.loss for module in self.modules)

    @property
    def median_rtn_loss(self) -> float:
        return median(module.rtn_loss for module in self.modules)

    @property
    def worst(self) -> ModuleReport:
        return max(self.modules, key=lambda module: module.loss)
