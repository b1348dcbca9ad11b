"""Terrazzo: GPTQ checkpoints whose modules each have their own quantization: run, make, explain.

The names below are the public API. They are imported on first use, because torch takes seconds to
import and the command line must answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.checkpoint.checkpoint import Checkpoint
    from terrazzo.engine.llm import LLM
    from terrazzo.engine.request import SamplingParams
    from terrazzo.errors import TerrazzoError
    from terrazzo.quantization.pipeline import quantize
    from terrazzo.rules import Plan, RuleSet, resolve
    from terrazzo.spec import DENSE, QuantSpec

__version__ = "0.1.0"

_HOMES = {
    "DENSE": "terrazzo.spec",
    "LLM": "terrazzo.engine.llm",
    "Checkpoint": "terrazzo.checkpoint.checkpoint",
    "Plan": "terrazzo.rules",
    "QuantSpec": "terrazzo.spec",
    "RuleSet": "terrazzo.rules",
    "SamplingParams": "terrazzo.engine.request",
    "TerrazzoError": "terrazzo.errors",
    "quantize": "terrazzo.quantization.pipeline",
    "resolve": "terrazzo.rules",
}

__all__ = [
    "DENSE",
    "LLM",
    "Checkpoint",
    "Plan",
    "QuantSpec",
    "RuleSet",
    "SamplingParams",
    "TerrazzoError",
    "quantize",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'terrazzo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
