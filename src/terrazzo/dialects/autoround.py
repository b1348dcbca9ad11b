"""AutoRound configs: every engine but GPTQModel has a reader of its own for them."""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.dialects.prediction import CONFIG, Finding, Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.spec import StreamFormat


def is_autoround_config(subject: Subject) -> bool:
    return isinstance(subject.label, StreamFormat)


def read_elsewhere(needs: str = "") -> Iterator[Finding]:
    """needs: what must be installed for that."""
    yield Finding(
        CONFIG,
        Outcome.UNKNOWN,
        f"AutoRound configs are read by another part of the engine{needs}, which was not looked "
        "at. `terrazzo convert --for` writes a GPTQ checkpoint instead",
    )
