"""What to prefer where more than one kernel can run a weight."""

from __future__ import annotations

import enum


class KernelPolicy(enum.Enum):
    """SPEED may dequantize a weight once and keep it; MEMORY keeps it small."""

    SPEED = "speed"
    MEMORY = "memory"
