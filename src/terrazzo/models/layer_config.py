"""Reads in what the layers of a model differ: who sees how far, and who turns how."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UnsupportedError
from terrazzo.models.architectures import Architecture, WindowRule
from terrazzo.models.keys import Keys
from terrazzo.models.rope_config import Ropes
from terrazzo.nn.grouped import NO_WINDOW
from terrazzo.nn.rope import NoRope, Rope

SWITCHED = (
    WindowRule.LATE_LAYERS,
    WindowRule.STANDING_LAYERS,
    WindowRule.EVERY_SWITCHED_LAYER,
    WindowRule.EVERY_OTHER_EARLY_LAYER,
)
"""Rules that hold only where config.json has `use_sliding_window: true`."""

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """window: tokens a query sees, itself included. rope: how its positions turn."""

    window: int
    rope: Rope


def read_layers(
    keys: Keys, architecture: Architecture, num_layers: int, ropes: Ropes
) -> tuple[LayerAttention, ...]:
    """Raises ConfigError or UnsupportedError for lists that do not fit the layers."""
    turning = _turning(keys, architecture, num_layers)
    windowed = _windowed(keys, architecture, turning)
    window = keys.integer("sliding_window") if any(windowed) else NO_WINDOW
    return tuple(
        LayerAttention(
            window if is_windowed else NO_WINDOW,
            (ropes.windowed if is_windowed else ropes.full) if turns else NoRope(),
        )
        for is_windowed, turns in zip(windowed, turning, strict=True)
    )


def _turning(keys: Keys, architecture: Architecture, num_layers: int) -> list[bool]:
    if "no_rope_layer_interval" not in architecture.defaults:
        return [True] * num_layers
    interval = keys.integer("no_rope_layer_interval")
    usual = tuple(int((layer + 1) % interval != 0) for layer in range(num_layers))
    given = keys.wholes_or("no_rope_layers", usual)
    if len(given) != num_layers:
        raise keys.illegal("no_rope_layers", f"legal is a list of {num_layers}, one per layer")
    return [flag != 0 for flag in given]


def _windowed(keys: Keys, architecture: Architecture, turning: list[bool]) -> list[bool]:
    layers = range(len(turning))
    if not _has_window(keys, architecture.window):
        return [False for _ in layers]
    if keys.has("layer_types"):
        return _by_type(keys, len(turning))
    if architecture.window is WindowRule.LATE_LAYERS:
        (first,) = keys.wholes_or("max_window_layers", (0,))
        return [layer >= first for layer in layers]
    if architecture.window is WindowRule.EVERY_OTHER_EARLY_LAYER:
        (end,) = keys.wholes_or("max_window_layers", (0,))
        return [layer % 2 == 0 and layer < end for layer in layers]
    if architecture.window is WindowRule.ALL_BUT_EVERY_NTH:
        nth = keys.integer("sliding_window_pattern")
        return [(layer + 1) % nth != 0 for layer in layers]
    if architecture.window is WindowRule.STANDING_LAYERS:
        return [not turns for turns in turning]
    return [True for _ in layers]


def _has_window(keys: Keys, rule: WindowRule) -> bool:
    if rule is WindowRule.NEVER or not keys.has("sliding_window"):
        return False
    if rule in SWITCHED:
        return keys.switch_or("use_sliding_window", default=False)
    return True


def _by_type(keys: Keys, num_layers: int) -> list[bool]:
    types = keys.texts_or("layer_types", ())
    if len(types) != num_layers:
        raise keys.illegal("layer_types", f"legal is a list of {num_layers}, one per layer")
    others = sorted(set(types) - set(LAYER_TYPES))
    if others:
        raise UnsupportedError(
            f"{keys.source}: {keys.prefix}layer_types has {others[0]!r}; supported are "
            f"{' and '.join(map(repr, LAYER_TYPES))}"
        )
    return [kind == "sliding_attention" for kind in types]
