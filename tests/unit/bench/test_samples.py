"""Repeated measurements as one figure."""

from __future__ import annotations

from terrazzo.bench.samples import Samples


def test_the_median_stands_between_the_ends() -> None:
    samples = Samples((4.0, 1.0, 2.0))
    assert samples.to_json() == {"median": 2.0, "min": 1.0, "max": 4.0, "values": [4.0, 1.0, 2.0]}
    assert str(samples) == "2 (1 to 4)"
