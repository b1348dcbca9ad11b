"""Act-order of `down_proj`, folded into whatever makes its inputs.

The outputs of gate and up are multiplied element by element and become the inputs of down; put in
another order together, they give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from terrazzo.dialects.exact import input_order, with_inputs, with_outputs
from terrazzo.dialects.subject import SEQUENTIAL, Linear
from terrazzo.packing import QuantTensor
from terrazzo.spec import Name, QuantSpec

MAKERS = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Folds:
    """New orders of features between linears. inputs, outputs: module -> int64 order."""

    inputs: Mapping[Name, Tensor] = field(default_factory=dict)
    outputs: Mapping[Name, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, linears: Sequence[Linear], weight_of: Callable[[Name], QuantTensor]) -> Folds:
        """Of every `down_proj` that becomes sequential so, and has both its makers."""
        names = {linear.name for linear in linears}
        inputs: dict[Name, Tensor] = {}
        outputs: dict[Name, Tensor] = {}
        for linear in linears:
            parent, _, leaf = linear.name.rpartition(".")
            makers = [f"{parent}.{maker}" for maker in MAKERS]
            if leaf == "down_proj" and linear.order != SEQUENTIAL and names.issuperset(makers):
                weight = weight_of(linear.name)
                order = input_order(weight)
                if not with_inputs(weight, order).spec.desc_act:
                    inputs[linear.name] = order
                    outputs |= dict.fromkeys(makers, order)
        return cls(inputs, outputs)

    def planned(self, linear: Linear) -> Linear:
        if linear.name not in self.inputs:
            return linear
        assert isinstance(linear.spec, QuantSpec)
        return replace(linear, spec=replace(linear.spec, desc_act=False), order=SEQUENTIAL)

    def weight(self, weight: QuantTensor, name: Name) -> QuantTensor:
        if name in self.inputs:
            weight = with_inputs(weight, self.inputs[name])
        return with_outputs(weight, self.outputs[name]) if name in self.outputs else weight

    def rows(self, tensor: Tensor, name: str) -> Tensor:
        """A dense weight or a bias, whose rows are outputs."""
        module = name.rpartition(".")[0]
        return tensor[self.outputs[module]] if module in self.outputs else tensor
