"""The engines that Terrazzo knows the habits of, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from terrazzo.dialects import gptqmodel, sglang, transformers, vllm
from terrazzo.dialects.prediction import Finding, Prediction
from terrazzo.dialects.subject import Subject
from terrazzo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Engine:
    """name: as given on the command line. title: with the version whose code was read.

    checked: when. findings: everything that goes wrong with a subject.
    """

    name: str
    title: str
    checked: str
    findings: Callable[[Subject], Iterator[Finding]]

    def predict(self, subject: Subject) -> Prediction:
        return Prediction(self.title, self.checked, tuple(self.findings(subject)))


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vllm", "vLLM 0.33.0", "2026-12-01", vllm.findings),
        Engine("sglang", "SGLang 0.5.23 on CUDA", "2026-12-01", sglang.findings),
        Engine("gptqmodel", "GPTQModel 7.7.0", "2026-12-01", gptqmodel.findings),
        Engine(
            "transformers",
            "transformers 5.24.0 with optimum 2.3.0",
            "2026-12-01",
            transformers.findings,
        ),
    )
}


def engine_named(name: str) -> Engine:
    """ConfigError when nobody here knows it."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r}; legal are {', '.join(ENGINES)}")
    return ENGINES[name]
