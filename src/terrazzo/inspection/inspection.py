"""What `terrazzo inspect` knows of a folder, as values; no weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.config import DEFAULT_CONFIG, EngineConfig
from terrazzo.engine.memory import MemoryPlan, available_memory
from terrazzo.engine.needs import plan_memory
from terrazzo.errors import TerrazzoError
from terrazzo.idle_rules import idle_rules
from terrazzo.kernels.choose import Verdict
from terrazzo.models.audit import audit
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import LinearPlan, plan_linears
from terrazzo.spec import Dense, Name, QuantSpec

_NO_KERNEL = "none"


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """One linear. shape: (out, in). num_bytes: of its tensors on disk. kernel: what will run it.

    verdicts: every kernel with its reason; empty where the folder is unservable.
    """

    name: Name
    spec: QuantSpec | Dense
    shape: tuple[int, int]
    num_bytes: int
    decided_by: str
    kernel: str
    verdicts: tuple[Verdict, ...]

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Serving:
    """The folder can be served. notes: tensors that loading ignores, and where it overrules."""

    architecture: str
    memory: MemoryPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unservable:
    """The folder cannot be served. reason: the message that serving it would end with."""

    reason: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """conflicts: config against tensors. remarks: on the config files and idle rules."""

    folder: Path
    modules: tuple[ModuleLine, ...]
    other_bytes: int
    conflicts: tuple[str, ...]
    remarks: tuple[str, ...]
    outcome: Serving | Unservable

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(module.num_bytes for module in self.modules)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per weight of the linears, everything that belongs to them counted."""
        weights = sum(module.num_weights for module in self.modules)
        return 8 * sum(module.num_bytes for module in self.modules) / max(1, weights)

    @property
    def is_servable(self) -> bool:
        return isinstance(self.outcome, Serving)


def inspect(folder: str | Path, config: EngineConfig = DEFAULT_CONFIG) -> Inspection:
    """Look at a folder as serving would.

    Raises what `Checkpoint` raises when the folder cannot be opened at all; a folder that opens but
    cannot be served is described, with the reason in `outcome`.
    """
    checkpoint = Checkpoint(folder)
    linears: tuple[LinearPlan, ...] = ()
    outcome: Serving | Unservable
    try:
        model_config = ModelConfig.of(checkpoint)
        report = audit(checkpoint, model_config)
        memory = plan_memory(checkpoint, model_config, config, available_memory())
        linears = plan_linears(checkpoint, model_config, memory.needs.kernel_policy)
        notes = (*report.remarks, *(str(ignored) for ignored in report.ignored))
        outcome = Serving(model_config.architecture.name, memory, notes)
    except TerrazzoError as error:
        outcome = Unservable(str(error))
    modules = tuple(_modules(checkpoint, {linear.name: linear for linear in linears}))
    everything = sum(checkpoint.num_bytes(tensor) for tensor in checkpoint.tensor_names)
    return Inspection(
        folder=checkpoint.folder,
        modules=modules,
        other_bytes=everything - sum(module.num_bytes for module in modules),
        conflicts=tuple(str(conflict) for conflict in checkpoint.conflicts),
        remarks=(*checkpoint.remarks, *_idle(checkpoint)),
        outcome=outcome,
    )


def _modules(checkpoint: Checkpoint, linears: Mapping[Name, LinearPlan]) -> Iterator[ModuleLine]:
    num_bytes: dict[Name, int] = {}
    for tensor in checkpoint.tensor_names:
        module = tensor.rpartition(".")[0]
        num_bytes[module] = num_bytes.get(module, 0) + checkpoint.num_bytes(tensor)
    names = [name for name in linears if name in checkpoint.plan]
    for name in names or list(checkpoint.plan):
        resolution = checkpoint.plan[name]
        yield ModuleLine(
            name=name,
            spec=resolution.spec,
            shape=checkpoint.linear_shape(name),
            num_bytes=num_bytes[name],
            decided_by=str(resolution.decided_by),
            kernel=linears[name].choice.kernel.name if name in linears else _NO_KERNEL,
            verdicts=linears[name].choice.verdicts if name in linears else (),
        )


def _idle(checkpoint: Checkpoint) -> Iterator[str]:
    yield from (str(idle) for idle in idle_rules(checkpoint.rules, list(checkpoint.plan)))
