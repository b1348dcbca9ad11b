"""Reads how positions turn: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable

from terrazzo.errors import UnsupportedError
from terrazzo.models.keys import Keys
from terrazzo.nn.rope import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope

DEFAULT_THETA = 10000.0
"""What transformers assumes where config.json has no `rope_theta`."""


def read_rope(keys: Keys, max_positions: int) -> Rope:
    """keys: the whole config.json. Raises UnsupportedError naming a rope type we have no code for,
    and ConfigError naming a missing or illegal parameter.
    """
    scaling = keys.object("rope_parameters" if keys.has("rope_parameters") else "rope_scaling")
    theta_keys = scaling if scaling.has("rope_theta") else keys
    theta = theta_keys.number_or("rope_theta", DEFAULT_THETA)
    _refuse_partial(scaling)
    _refuse_partial(keys)
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text_or(kind_key, "default")
    if kind not in _READERS:
        raise UnsupportedError(
            f"{keys.source}: {scaling.prefix}{kind_key} is {kind!r}; supported are "
            f"{', '.join(map(repr, _READERS))}. Where the model also works without scaling, remove "
            f"{scaling.prefix.rstrip('.')} and use it up to its original context length"
        )
    return _READERS[kind](scaling, theta, max_positions)


def _refuse_partial(keys: Keys) -> None:
    if keys.number_or("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"{keys.source}: {keys.prefix}partial_rotary_factor is "
            f"{keys.values['partial_rotary_factor']!r}; only 1.0 is supported, where every feature "
            "of a head turns"
        )


def _default(scaling: Keys, theta: float, max_positions: int) -> Rope:
    return DefaultRope(theta)


def _linear(scaling: Keys, theta: float, max_positions: int) -> Rope:
    return LinearRope(theta, scaling.number("factor"))


def _llama3(scaling: Keys, theta: float, max_positions: int) -> Rope:
    rope = Llama3Rope(
        theta=theta,
        factor=scaling.number("factor"),
        low_factor=scaling.number("low_freq_factor"),
        high_factor=scaling.number("high_freq_factor"),
        original_context=scaling.integer_or("original_max_position_embeddings", max_positions),
    )
    if rope.high_factor <= rope.low_factor:
        raise scaling.illegal("high_freq_factor", "legal is more than low_freq_factor")
    return rope


def _yarn(scaling: Keys, theta: float, max_positions: int) -> Rope:
    factor = scaling.number("factor")
    return YarnRope(
        theta=theta,
        factor=factor,
        magnitude=scaling.number_or("attention_factor", _yarn_magnitude(scaling, factor)),
        fast_turns=scaling.number_or("beta_fast", 32.0),
        slow_turns=scaling.number_or("beta_slow", 1.0),
        original_context=scaling.integer_or("original_max_position_embeddings", max_positions),
        whole_pairs=scaling.switch_or("truncate", default=True),
    )


def _yarn_magnitude(scaling: Keys, factor: float) -> float:
    """What transformers computes where `attention_factor` is absent."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return grown(scaling.number("mscale")) / grown(scaling.number("mscale_all_dim"))
    return grown(1.0)


_READERS: dict[str, Callable[[Keys, float, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
