from __future__ import annotations

import math
from typing import Any

import pytest

from terrazzo.engine.request import NO_LOGPROBS, UNSEEDED, SamplingParams, TopLogprobs
from terrazzo.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("stop", ("", "a")),
        ("stop_token_ids", (-1,)),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("n", 0),
        ("n", 129),
    ],
)
def test_an_illegal_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{field} is .*; legal values are "):
        SamplingParams(**{field: value})


def test_logprobs_are_limited() -> None:
    with pytest.raises(RequestError, match="logprobs is 21; legal values are 0 to 20"):
        TopLogprobs(21)


def test_the_defaults_mean_plain_sampling() -> None:
    params = SamplingParams()
    assert (params.seed, params.logprobs) == (UNSEEDED, NO_LOGPROBS)
    assert not params.is_greedy
    assert SamplingParams(temperature=0.0).is_greedy
