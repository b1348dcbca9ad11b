"""The function that opens the gate of an MLP."""

from __future__ import annotations

import enum

from torch import Tensor
from torch.nn.functional import gelu, silu


class Activation(enum.Enum):
    """The value is its name in messages."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh tensor of the same shape."""
        return silu(x) if self is Activation.SILU else gelu(x, approximate="tanh")
