"""What to prefer where more than one kernel can run a weight."""

from __future__ import annotations

import enum


class KernelPolicy(enum.Enum):
    """What activations round to, and what else decides.

    INT8 rounds activations, and weights that are not quantized, to 8 bits. SPEED and MEMORY
    compute in float32; where native kernels are missing, SPEED dequantizes a weight once and keeps
    it, MEMORY keeps it small. BFLOAT16 and FLOAT16 are for cards: activations, and weights that are
    not quantized, have 16 bits.
    """

    INT8 = "int8"
    SPEED = "speed"
    MEMORY = "memory"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def exact(self) -> KernelPolicy:
        """The nearest that computes in float32: for what is small and decides much, as routers."""
        return KernelPolicy.MEMORY if self is KernelPolicy.MEMORY else KernelPolicy.SPEED
