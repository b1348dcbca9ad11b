"""What to prefer where more than one kernel can run a weight."""

from __future__ import annotations

import enum


class KernelPolicy(enum.Enum):
    """INT8 rounds activations, and weights that are not quantized, to 8 bits. SPEED and MEMORY
    compute in float32; where native kernels are missing, SPEED dequantizes a weight once and keeps
    it, MEMORY keeps it small.
    """

    INT8 = "int8"
    SPEED = "speed"
    MEMORY = "memory"

    @property
    def exact(self) -> KernelPolicy:
        """The nearest that computes in float32: for what is small and decides much, as routers."""
        return KernelPolicy.SPEED if self is KernelPolicy.INT8 else self
