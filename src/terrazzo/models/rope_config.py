"""Reads how positions turn: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.models.architectures import Architecture, Modality, WholeHead
from terrazzo.models.keys import Keys
from terrazzo.nn.rope import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    StretchedRope,
    TurningRope,
    YarnRope,
)

DEFAULT_THETA = 10000.0
"""What transformers assumes where config.json has no `rope_theta`."""

LOCAL_THETA = "rope_local_base_freq"
"""Base of the windowed layers of an architecture that has its own for them."""

THREE_AXES = "mrope"
"""Height, width and time turn apart; of text all three are the position, as in `default`."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """full, windowed: of the layers of either kind. rotary_dim: features of a head that turn.
    exact_length: positions up to which they are what the model was trained with.
    """

    full: TurningRope
    windowed: TurningRope
    rotary_dim: int
    exact_length: int


@dataclass(frozen=True, slots=True)
class _Reading:
    scaling: Keys
    theta: float
    rotary_dim: int
    max_positions: int
    original_context: int


def read_ropes(keys: Keys, architecture: Architecture, head_dim: int, max_positions: int) -> Ropes:
    """keys: the whole config.json. Raises UnsupportedError naming a rope type we have no code for,
    and ConfigError naming a missing or illegal parameter.
    """
    scaling = keys.object("rope_parameters" if keys.has("rope_parameters") else "rope_scaling")
    rotary_dim = _rotary_dim(keys, scaling, architecture, head_dim)

    def read(parameters: Keys, theta_key: str) -> TurningRope:
        reading = _reading(keys, parameters, theta_key, rotary_dim, max_positions)
        return _READERS[_kind(parameters, architecture)](reading)

    local_key = LOCAL_THETA if LOCAL_THETA in architecture.defaults else "rope_theta"
    if scaling.has("full_attention") or scaling.has("sliding_attention"):
        full = read(scaling.object("full_attention"), "rope_theta")
        windowed = read(scaling.object("sliding_attention"), local_key)
    else:
        full = read(scaling, "rope_theta")
        windowed = DefaultRope(keys.number(LOCAL_THETA)) if local_key == LOCAL_THETA else full
    return Ropes(full, windowed, rotary_dim, _exact_length(keys, scaling, full, max_positions))


def _kind(scaling: Keys, architecture: Architecture) -> str:
    key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text_or(key, "default")
    if kind == THREE_AXES and architecture.modality is Modality.TOWERS:
        return "default"
    if kind not in _READERS:
        raise UnsupportedError(
            f"{scaling.source}: {scaling.prefix}{key} is {kind!r}; supported are "
            f"{', '.join(map(repr, _READERS))}. Where the model also works without scaling, remove "
            f"{scaling.prefix.rstrip('.')} and use it up to its original context length"
        )
    return kind


def _reading(
    keys: Keys, scaling: Keys, theta_key: str, rotary_dim: int, max_positions: int
) -> _Reading:
    top_theta = keys.number_or(theta_key, DEFAULT_THETA)
    theta = scaling.number_or("rope_theta", top_theta)
    original = _original_context(keys, scaling, max_positions)
    return _Reading(scaling, theta, rotary_dim, max_positions, original)


def _original_context(keys: Keys, scaling: Keys, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    return scaling.integer_or(key, keys.integer_or(key, max_positions))


def _exact_length(keys: Keys, scaling: Keys, rope: TurningRope, max_positions: int) -> int:
    """Beyond the original context LongRoPE turns with other factors, also the keys that are cached
    by then, and Ministral 3 scales queries by their positions: there we stop.
    """
    if isinstance(rope, StretchedRope) or scaling.has("llama_4_scaling_beta"):
        return min(max_positions, _original_context(keys, scaling, max_positions))
    return max_positions


def _rotary_dim(keys: Keys, scaling: Keys, architecture: Architecture, head_dim: int) -> int:
    rule = architecture.rotary
    usual = 1.0 if isinstance(rule, WholeHead) else rule.default
    holder = scaling if scaling.has("partial_rotary_factor") else keys
    share = holder.number_or("partial_rotary_factor", usual)
    if isinstance(rule, WholeHead) and share != 1.0:
        raise UnsupportedError(
            f"{keys.source}: {holder.prefix}partial_rotary_factor is {share!r}; of "
            f"{architecture.name} only 1.0 is supported, where every feature of a head turns"
        )
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 != 0 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"{keys.source}: {rotary_dim} of head_dim, {head_dim}, turn; legal is an even number, "
            "because rotary positions turn pairs of features"
        )
    return rotary_dim


def _default(reading: _Reading) -> TurningRope:
    return DefaultRope(reading.theta)


def _linear(reading: _Reading) -> TurningRope:
    return LinearRope(reading.theta, reading.scaling.number("factor"))


def _llama3(reading: _Reading) -> TurningRope:
    scaling = reading.scaling
    rope = Llama3Rope(
        theta=reading.theta,
        factor=scaling.number("factor"),
        low_factor=scaling.number("low_freq_factor"),
        high_factor=scaling.number("high_freq_factor"),
        original_context=reading.original_context,
    )
    if rope.high_factor <= rope.low_factor:
        raise scaling.illegal("high_freq_factor", "legal is more than low_freq_factor")
    return rope


def _yarn(reading: _Reading) -> TurningRope:
    scaling = reading.scaling
    factor = scaling.number("factor")
    return YarnRope(
        theta=reading.theta,
        factor=factor,
        magnitude=scaling.number_or("attention_factor", _yarn_magnitude(scaling, factor)),
        fast_turns=scaling.number_or("beta_fast", 32.0),
        slow_turns=scaling.number_or("beta_slow", 1.0),
        original_context=reading.original_context,
        whole_pairs=scaling.switch_or("truncate", default=True),
    )


def _yarn_magnitude(scaling: Keys, factor: float) -> float:
    """What transformers computes where `attention_factor` is absent."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return grown(scaling.number("mscale")) / grown(scaling.number("mscale_all_dim"))
    return grown(1.0)


def _longrope(reading: _Reading) -> TurningRope:
    scaling, pairs = reading.scaling, reading.rotary_dim // 2
    factors = scaling.numbers("short_factor")
    if len(factors) != pairs:
        raise scaling.illegal("short_factor", f"legal is a list of {pairs}, one per pair")
    grown = reading.max_positions / reading.original_context
    factor = scaling.number_or("factor", grown)
    magnitude = (
        math.sqrt(1 + math.log(factor) / math.log(reading.original_context)) if factor > 1 else 1.0
    )
    return StretchedRope(reading.theta, factors, scaling.number_or("attention_factor", magnitude))


_READERS: dict[str, Callable[[_Reading], TurningRope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
