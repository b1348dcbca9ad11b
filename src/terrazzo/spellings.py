"""What the modules of a text tower are called: the same tower has three names in the world.

A decoder that stands beside encoders for pictures is `model.language_model` in transformers today,
`language_model.model` in older files and in vLLM, and `model` in other older files and in SGLang.
"""

from __future__ import annotations

import enum

from terrazzo.spec import Name

LM_HEAD: Name = "lm_head"
NESTED_HEAD: Name = f"language_model.{LM_HEAD}"
HEADS = (LM_HEAD, NESTED_HEAD)


class Spelling(enum.Enum):
    """Where the layers of a decoder are; the first is no place, but whatever a file says."""

    AS_STORED = "as stored"
    ALONE = "model.layers"
    INSIDE = "model.language_model.layers"
    OUTSIDE = "language_model.model.layers"

    def of(self, name: Name) -> Name:
        """A module by the name it has in this spelling; what is in no text tower is unchanged."""
        if self is Spelling.AS_STORED:
            return name
        if name in HEADS:
            return NESTED_HEAD if self is Spelling.OUTSIDE else LM_HEAD
        for spelling in TOWERS:
            if name.startswith(f"{spelling.value}."):
                return f"{self.value}{name.removeprefix(spelling.value)}"
        return name


TOWERS = (Spelling.ALONE, Spelling.INSIDE, Spelling.OUTSIDE)


def layer_relative(name: Name) -> Name:
    """`model.layers.3.self_attn.q_proj` -> `self_attn.q_proj`; other names are unchanged."""
    parts = name.split(".")
    for index in range(len(parts) - 2):
        if parts[index] == "layers" and parts[index + 1].isdecimal():
            return ".".join(parts[index + 2 :])
    return name
