"""The MLP of a layer with experts, as three stages that take the place of two.

    stage 2     router, shared gate of x -> routing          -> rows of x, sorted by expert
    stage 3     gate, up of each expert -> act(gate) * up    -> that product, sorted by expert
    stage 4     down of each expert -> weighted sum          -> hidden of the next layer

In stages 3 and 4 every expert has an input of its own: the rows that were routed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrazzo.models.block import Flow, Step
from terrazzo.nn.activation import Activation
from terrazzo.nn.attention import Pass
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.moe import ExpertBank, Router, Routing
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class RoutedFlow(Flow):
    """rows: float32 [R_e, K_e], the input of each expert. x_TK: what all routed experts read,
    each row once for every expert it goes to, or once at all.
    """

    routing: Routing
    rows: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.rows


@dataclass(frozen=True, slots=True)
class RouteStep:
    """Logits of the router, and of the gate of a shared expert, become a routing."""

    router: Router

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        routing = self.router(y_TN)
        x_RK = routing.gather(flow.x_TK)
        rows = tuple(x_RK[rows] for rows in routing.slices)
        return RoutedFlow(flow.residual_TH, flow.x_TK, routing, rows)


@dataclass(frozen=True, slots=True)
class GateExperts:
    """gate, up side by side of each expert -> activation(gate) * up. num_routed: experts without
    the shared one, whose width may be another.
    """

    activation: Activation
    num_routed: int

    def __call__(self, flow: RoutedFlow, ys: Sequence[Tensor], forward: Pass) -> Flow:
        products = [self._product(y_RN) for y_RN in ys]
        routed_RI = torch.cat(products[: self.num_routed])
        routed = tuple(routed_RI[rows] for rows in flow.routing.slices[: self.num_routed])
        rows = (*routed, *products[self.num_routed :])
        return RoutedFlow(flow.residual_TH, routed_RI, flow.routing, rows)

    def _product(self, y_RN: Tensor) -> Tensor:
        gate_RI, up_RI = y_RN.chunk(2, dim=-1)
        return self.activation(gate_RI).mul_(up_RI)


@dataclass(frozen=True, slots=True)
class CombineExperts:
    """The weighted sum over experts goes where the output of a dense MLP would go."""

    step: Step

    def __call__(self, flow: RoutedFlow, ys: Sequence[Tensor], forward: Pass) -> Flow:
        y_TN = flow.routing.combine(torch.cat(list(ys)), flow.residual_TH.shape[0])
        return self.step(flow, y_TN, forward)


@dataclass(frozen=True, slots=True)
class ExpertStage:
    """One projection of all experts, and the step after it.

    num_routed: experts that see only the rows routed to them; those after them see every token.
    """

    bank: ExpertBank
    step: GateExperts | CombineExperts
    num_routed: int

    @property
    def groups(self) -> tuple[tuple[Name, ...], ...]:
        """Un-fused names of the linears that read each of `Flow.inputs`."""
        return self.bank.names

    def with_linears(self, linears: Sequence[FusedLinear]) -> ExpertStage:
        """This stage with other weights; their names and order must be the same."""
        bank = ExpertBank(linears)
        assert bank.names == self.groups, f"{bank.names} cannot stand in for {self.groups}"
        return replace(self, bank=bank)

    def __call__(self, flow: Flow, forward: Pass) -> Flow:
        assert isinstance(flow, RoutedFlow), "experts come after a router"
        return self.step(flow, self.bank(flow.rows), forward)
