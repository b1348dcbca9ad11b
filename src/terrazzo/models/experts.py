"""The MLP of a layer with experts, as three stages that take the place of two.

    stage 2     router, shared gate of x -> routing          -> rows of x, sorted by expert
    stage 3     gate, up of each expert -> act(gate) * up    -> that product, sorted by expert
    stage 4     down of each expert -> weighted sum          -> hidden of the next layer

In stages 3 and 4 every routed expert has an input of its own: the rows that were routed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from terrazzo.models.block import Flow, Step
from terrazzo.nn.activation import Activation
from terrazzo.nn.attention import Pass
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.moe import ExpertBank, Router, Routing
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class RoutedFlow(Flow):
    """x_RK: float32 [R, K], the inputs of the routed experts, sorted by expert. shared: float32
    [T, K], the input of each shared expert. x_TK: what all routed experts read, each row once for
    every expert it goes to, or once at all.
    """

    routing: Routing
    x_RK: Tensor
    shared: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.routing.rows(self.x_RK), *self.shared)


@dataclass(frozen=True, slots=True)
class RouteStep:
    """Logits of the router, and of the gate of a shared expert, become a routing."""

    router: Router

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        routing = self.router(y_TN)
        shared = (flow.x_TK,) * len(routing.shared_weights)
        return RoutedFlow(flow.residual_TH, flow.x_TK, routing, routing.gather(flow.x_TK), shared)


@dataclass(frozen=True, slots=True)
class GateExperts:
    """gate, up side by side of each expert -> activation(gate) * up."""

    activation: Activation

    def __call__(
        self, flow: RoutedFlow, y_RN: Tensor, shared: Sequence[Tensor], forward: Pass
    ) -> Flow:
        x_RI = self._product(y_RN)
        others = tuple(self._product(y_TN) for y_TN in shared)
        return RoutedFlow(flow.residual_TH, x_RI, flow.routing, x_RI, others)

    def _product(self, y_MN: Tensor) -> Tensor:
        gate_MI, up_MI = y_MN.chunk(2, dim=-1)
        return self.activation(gate_MI).mul_(up_MI)


@dataclass(frozen=True, slots=True)
class CombineExperts:
    """The weighted sum over experts goes where the output of a dense MLP would go."""

    step: Step

    def __call__(
        self, flow: RoutedFlow, y_RN: Tensor, shared: Sequence[Tensor], forward: Pass
    ) -> Flow:
        y_TN = flow.routing.combine(y_RN, shared, flow.residual_TH.shape[0])
        return self.step(flow, y_TN, forward)


@dataclass(frozen=True, slots=True)
class ExpertStage:
    """One projection of all experts, and the step after it. shared: those that see every token."""

    bank: ExpertBank
    shared: tuple[FusedLinear, ...]
    step: GateExperts | CombineExperts

    @property
    def groups(self) -> tuple[tuple[Name, ...], ...]:
        """Un-fused names of the linears that read each of `Flow.inputs`."""
        return (*self.bank.names, *(linear.names for linear in self.shared))

    @property
    def num_routed(self) -> int:
        return len(self.bank.experts)

    def with_linears(self, linears: Sequence[FusedLinear]) -> ExpertStage:
        """This stage with other weights; their names and order must be the same."""
        routed, shared = linears[: self.num_routed], linears[self.num_routed :]
        stage = replace(self, bank=ExpertBank(routed), shared=tuple(shared))
        assert stage.groups == self.groups, f"{stage.groups} cannot stand in for {self.groups}"
        return stage

    def __call__(self, flow: Flow, forward: Pass) -> Flow:
        assert isinstance(flow, RoutedFlow), "experts come after a router"
        y_RN = self.bank(flow.x_RK, flow.routing.offsets)
        shared = [linear(x_TK) for linear, x_TK in zip(self.shared, flow.shared, strict=True)]
        return self.step(flow, y_RN, shared, forward)
