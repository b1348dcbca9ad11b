"""Loads a checkpoint: audit first, then one module after the other.

Peak memory is what the finished decoder holds, plus the tensors of the one group of linears that is
being prepared. Embeddings stay mapped from the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.kernels.base import DenseTensor, Weight
from terrazzo.kernels.choose import KernelPolicy
from terrazzo.kernels.machine import no_other_threads
from terrazzo.models.audit import HeadWeights, LoadReport, audit
from terrazzo.models.build import build_decoder
from terrazzo.models.config import ModelConfig
from terrazzo.models.decoder import Decoder
from terrazzo.models.parameters import ParameterKind, parameters
from terrazzo.nn.weights import NO_BIAS, AnyBias, Bias, LinearWeight
from terrazzo.spec import Name, QuantSpec


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A `WeightSource` over a checkpoint that passed its audit.

    report: what the audit found. biased: the linears that have a bias.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    report: LoadReport
    biased: frozenset[Name]

    def linear(self, name: Name) -> LinearWeight:
        return LinearWeight(name, self._weight(name), self._bias(name))

    def _weight(self, name: Name) -> Weight:
        layout = self.config.layout
        if name == layout.head and self.report.head is HeadWeights.EMBEDDING:
            return DenseTensor(self.embedding(layout.embedding))
        if isinstance(self.checkpoint.plan[name].spec, QuantSpec):
            return self.checkpoint.quant_tensor(name)
        return DenseTensor(self.checkpoint.tensor(f"{name}.weight"))

    def _bias(self, name: Name) -> AnyBias:
        if name not in self.biased:
            return NO_BIAS
        return Bias(self.checkpoint.tensor(f"{name}.bias").to(torch.float32))

    def norm(self, name: Name) -> Tensor:
        stored = self.checkpoint.tensor(f"{name}.weight").to(torch.float32)
        return stored + self.config.architecture.norm_weight.value

    def embedding(self, name: Name) -> Tensor:
        if name in self.checkpoint.plan:
            return self.checkpoint.dequantize(name).T.contiguous()
        return self.checkpoint.tensor(f"{name}.weight")


def open_source(checkpoint: Checkpoint) -> CheckpointSource:
    """Reads config.json and audits the tensors; no weight is read yet.

    Raises ConfigError, UnsupportedError or TensorError before anything is built.
    """
    config = ModelConfig.of(checkpoint)
    report = audit(checkpoint, config)
    biased = {p.name for p in parameters(config) if p.kind is ParameterKind.LINEAR_BIAS}
    return CheckpointSource(checkpoint, config, report, frozenset({*biased, *report.biases}))


def load(checkpoint: Checkpoint, policy: KernelPolicy = KernelPolicy.SPEED) -> Decoder:
    """The decoder of a checkpoint, every parameter filled.

    policy: which kernel to prefer where several can run a weight. Raises what `open_source` raises,
    and NoKernelError for a weight that no kernel runs.
    """
    source = open_source(checkpoint)
    with no_other_threads():
        return build_decoder(source.config, source, policy)
