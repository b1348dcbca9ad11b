"""One decoder layer as four stages, each the linears of one shared input and what follows them.

    enter       hidden                                -> x = norm of hidden
    stage 0     q, k, v of x -> attention             -> x = heads side by side
    stage 1     o of x -> norm -> residual sum        -> x = norm of the sum
    stage 2     gate, up of x -> act(gate) * up       -> x = that product
    stage 3     down of x -> norm -> residual sum     -> hidden of the next layer

An architecture has some of the four norms; the others pass everything as it is. Layers with
experts have other stages 2 and 3, and a stage 4, see `experts`.

Between two stages stands a `Flow`: the residual stream and the exact inputs of the next linears.
That is the seam quantization works at, without a second description of the layer:

    flows = [block.enter(hidden) for hidden in batches]
    for stage in block.stages:
        for group, names in enumerate(stage.groups):
            hessian = ...(flow.inputs[group] for flow in flows)  # one for all linears in names
        stage = stage.with_linears([FusedLinear(...), ...])      # the weights just quantized
        flows = [stage(flow, forward) for flow, forward in zip(flows, passes)]
    batches = [flow.residual_TH for flow in flows]

and inference is the same loop without the middle lines. A `Pass` is a context with the rotation of
its positions: `Pass(context, build_rotary(config)(context.positions))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from terrazzo.nn.activation import Activation
from terrazzo.nn.attention import Attention, Pass
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.norm import Norm
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class Flow:
    """What is alive between two stages.

    residual_TH: float32 [T, hidden]. x_TK: float32 [T, in_features], input of the next linears;
    after the last stage of a block it is the residual itself.
    """

    residual_TH: Tensor
    x_TK: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What each group of linears of the next stage reads."""
        return (self.x_TK,)


class Step(Protocol):
    """What follows the linears of a stage."""

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow: ...


class AnyStage(Protocol):
    """Linears of one or more shared inputs, and the step after them."""

    @property
    def groups(self) -> tuple[tuple[Name, ...], ...]:
        """Un-fused names of the linears that read each of `Flow.inputs`, in output order."""

    @property
    def num_routed(self) -> int:
        """How many groups, from the first on, see only what a router sends them."""

    def with_linears(self, linears: Sequence[FusedLinear]) -> AnyStage:
        """This stage with other weights, one for each group; names and order stay the same."""

    def __call__(self, flow: Flow, forward: Pass) -> Flow: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """The linears of one shared input, and the step after them."""

    linear: FusedLinear
    step: Step

    @property
    def groups(self) -> tuple[tuple[Name, ...], ...]:
        return (self.linear.names,)

    @property
    def num_routed(self) -> int:
        return 0

    def with_linears(self, linears: Sequence[FusedLinear]) -> Stage:
        (linear,) = linears
        assert linear.names == self.linear.names, f"{linear.names} are not {self.linear.names}"
        return replace(self, linear=linear)

    def __call__(self, flow: Flow, forward: Pass) -> Flow:
        return self.step(flow, self.linear(flow.x_TK), forward)


@dataclass(frozen=True, slots=True)
class AttendStep:
    """q, k, v -> the attended heads."""

    attention: Attention

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        return Flow(flow.residual_TH, self.attention(y_TN, forward))


@dataclass(frozen=True, slots=True)
class AddNormStep:
    """Adds to the residual stream and norms it for the linears that come next.

    after: of what is added. multiplier: of it. before: of the sum.
    """

    after: Norm
    multiplier: float
    before: Norm

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        residual_TH = torch.add(flow.residual_TH, self.after(y_TN), alpha=self.multiplier)
        return Flow(residual_TH, self.before(residual_TH))


@dataclass(frozen=True, slots=True)
class GateStep:
    """gate, up side by side -> activation(gate) * up."""

    activation: Activation

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        gate_TI, up_TI = y_TN.chunk(2, dim=-1)
        return Flow(flow.residual_TH, self.activation(gate_TI).mul_(up_TI))


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer, born with its weights. stages: see the file's first lines."""

    input_norm: Norm
    stages: tuple[AnyStage, ...]

    def enter(self, hidden_TH: Tensor) -> Flow:
        return Flow(hidden_TH, self.input_norm(hidden_TH))

    def __call__(self, hidden_TH: Tensor, forward: Pass) -> Tensor:
        """float32 [T, hidden] -> float32 [T, hidden]."""
        flow = self.enter(hidden_TH)
        for stage in self.stages:
            flow = stage(flow, forward)
        return flow.residual_TH
