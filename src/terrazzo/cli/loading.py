"""What `generate`, `chat` and `serve` share: opening a model, and flags for sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from terrazzo.engine.request import UNSEEDED, Unseeded

if TYPE_CHECKING:
    from terrazzo.engine.config import EngineConfig
    from terrazzo.engine.llm import LLM

CONFLICTS_SHOWN: Final = 5


class Recommended(Enum):
    """Take the model makers' value: generation_config.json, else no change of the distribution."""

    RECOMMENDED = "recommended"


RECOMMENDED: Final = Recommended.RECOMMENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Parameters
    ----------
    max_tokens
        Most tokens to generate.
    temperature
        0 always takes the likeliest token.
    top_p
        Keep the likeliest tokens that together have this probability.
    top_k
        Keep so many of the likeliest tokens; 0 keeps all.
    min_p
        Keep tokens at least so probable, relative to the likeliest.
    repetition_penalty
        Above 1 makes tokens that have come before less likely.
    seed
        Equal seeds give equal texts.
    """

    max_tokens: int = 512
    temperature: float | Recommended = RECOMMENDED
    top_p: float | Recommended = RECOMMENDED
    top_k: int | Recommended = RECOMMENDED
    min_p: float | Recommended = RECOMMENDED
    repetition_penalty: float | Recommended = RECOMMENDED
    seed: int | Unseeded = UNSEEDED

    def changes(self) -> dict[str, Any]:
        """Fields of SamplingParams that differ from the recommendation."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not RECOMMENDED}


DEFAULT_SAMPLING: Final = Sampling()


def open_model(folder: Path, config: EngineConfig, say: Callable[[str], None]) -> LLM:
    """Load a model and say what it is; disagreements in the folder and what is left out of it, such
    as the encoders of a picture model, come first.
    """
    from terrazzo.checkpoint.checkpoint import Checkpoint
    from terrazzo.cli.threads import use_threads
    from terrazzo.engine.llm import LLM
    from terrazzo.models.loader import open_source

    use_threads()
    start = time.perf_counter()
    checkpoint = Checkpoint(folder)
    conflicts = checkpoint.conflicts
    for conflict in conflicts[:CONFLICTS_SHOWN]:
        say(f"warning: {conflict}")
    if len(conflicts) > CONFLICTS_SHOWN:
        hidden = len(conflicts) - CONFLICTS_SHOWN
        say(f"warning: {hidden} more disagreements; run `terrazzo inspect {folder}` to see them")
    report = open_source(checkpoint).report
    for note in (*report.remarks, *report.ignored):
        say(f"note: {note}")
    llm = LLM(folder, config, announce=lambda plan: say(f"memory: {plan}"))
    plan = checkpoint.plan
    say(
        f"{folder}: {llm.model_config.architecture.name} with {len(plan.quantized)} quantized and "
        f"{len(plan.dense)} dense linear modules, loaded in {time.perf_counter() - start:.1f} s"
    )
    return llm
