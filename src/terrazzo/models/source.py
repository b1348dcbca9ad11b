"""Where a decoder gets its weights from, one module at a time."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from terrazzo.nn.weights import LinearWeight
from terrazzo.spec import Name


class WeightSource(Protocol):
    """Reads a module when it is asked for, so that building block by block streams.

    Names are un-fused on-disk module names. The source knows which linears have a bias and whether
    the head is tied.
    """

    def linear(self, name: Name) -> LinearWeight:
        """One linear, quantized or dense, with its bias where the architecture has one."""

    def norm(self, name: Name) -> Tensor:
        """float32 [H]: the weight of a normalization."""

    def embedding(self, name: Name) -> Tensor:
        """[vocabulary, hidden] in the dtype of the file; float32 where it is quantized."""
