"""One shared input at a time: measure, quantize what reads it, write it, hand it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.errors import QuantizationError
from terrazzo.kernels.base import DenseTensor
from terrazzo.models.block import AnyStage, Flow
from terrazzo.nn.weights import LinearWeight
from terrazzo.quantization.capture import NO_PRIOR, AnyPrior, Prior, measure_hessian
from terrazzo.quantization.curvature import Curvature, measure_curvature
from terrazzo.quantization.gptq import nearest, sweep
from terrazzo.quantization.job import Job
from terrazzo.quantization.options import GptqOptions, ScaleSearch
from terrazzo.quantization.progress import Progress
from terrazzo.quantization.report import ModuleReport
from terrazzo.quantization.work import hessian_work, module_work
from terrazzo.spec import Name, QuantSpec, packed_shapes


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the linears of a job are quantized, one shared input after the other.

    calibration_tokens: all of them. modules: what was done so far.
    """

    job: Job
    options: GptqOptions
    writer: CheckpointWriter
    progress: Progress
    calibration_tokens: int
    modules: list[ModuleReport]

    def quantize_stage(
        self, stage: AnyStage, flows: Sequence[Flow]
    ) -> Iterator[list[LinearWeight]]:
        """The linears of each group of a stage, in order, for the inputs that they read."""
        routed = [name for group in stage.groups[: stage.num_routed] for name in group]
        prior: AnyPrior = NO_PRIOR
        if any(name in self.job.plan.quantized for name in routed):
            prior = Prior(measure_hessian([flow.x_TK for flow in flows]))
        for index, names in enumerate(stage.groups):
            inputs = [flow.inputs[index] for flow in flows]
            yield self.quantize_linears(
                names, inputs, prior if index < stage.num_routed else NO_PRIOR
            )

    def quantize_linears(
        self, names: Sequence[Name], inputs_TK: Sequence[Tensor], prior: AnyPrior = NO_PRIOR
    ) -> list[LinearWeight]:
        """Those of `names` that the plan quantizes, for the inputs they all read; others as is."""
        specs = self.job.plan.quantized
        linears = {name: self.job.source.linear(name) for name in names}
        wanted = [name for name in names if name in specs]
        if wanted:
            tokens = sum(x_TK.shape[0] for x_TK in inputs_TK)
            hessian_KK = prior.blend(inputs_TK)
            self.progress.advance(hessian_work(self.job, wanted, self.calibration_tokens))
            for damp in sorted({self._damp(name) for name in wanted}):
                curvature = _measure(hessian_KK, damp, wanted)
                for name in (name for name in wanted if self._damp(name) == damp):
                    linears[name] = self._quantize_one(
                        linears[name], curvature, specs[name], tokens
                    )
        return list(linears.values())

    def _few_tokens(self, tokens: int, in_features: int) -> Iterator[str]:
        if tokens < min(in_features, self.calibration_tokens):
            yield (
                f"a router sent it {tokens} of {self.calibration_tokens} calibration tokens, fewer "
                f"than its {in_features} inputs: what its fellow experts saw counts more"
            )

    def _damp(self, name: Name) -> float:
        return self.job.damp_of(name, self.options.damp)

    def _quantize_one(
        self, linear: LinearWeight, curvature: Curvature, spec: QuantSpec, tokens: int
    ) -> LinearWeight:
        assert isinstance(linear.weight, DenseTensor), "jobs start from dense models"
        self.progress.doing(linear.name)
        weight_NK = linear.weight.weight_NK.to(torch.float32)
        try:
            swept = sweep(weight_NK, curvature, spec, self.options)
        except QuantizationError as error:
            raise QuantizationError(f"{linear.name}: {error}") from error
        plain = replace(self.options, search=ScaleSearch.MIN_MAX)
        packed = swept.packed()
        self.writer.add_quantized(linear.name, packed)
        self.modules.append(
            ModuleReport(
                linear.name,
                swept.spec,
                swept.loss,
                nearest(weight_NK, curvature, spec, plain).loss,
                packed_shapes(spec, *weight_NK.shape).num_bytes,
                tokens,
                (*self._few_tokens(tokens, weight_NK.shape[1]), *swept.log),
            )
        )
        self.progress.advance(module_work(self.job, linear.name))
        return replace(linear, weight=packed)


def _measure(hessian_KK: Tensor, damp: float, names: Iterable[Name]) -> Curvature:
    try:
        return measure_curvature(hessian_KK, damp)
    except QuantizationError as error:
        raise QuantizationError(f"input of {', '.join(names)}: {error}") from error
