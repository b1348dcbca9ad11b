"""Environment variables are typed, and a bad one is named."""

from __future__ import annotations

import pytest

from terrazzo.env import Environment, read_environment
from terrazzo.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    assert read_environment({}) == Environment(threads=0)


def test_threads_are_read() -> None:
    assert read_environment({"TERRAZZO_THREADS": "2"}).threads == 2


@pytest.mark.parametrize("text", ["two", "-1", "1.5", ""])
def test_a_bad_value_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="TERRAZZO_THREADS"):
        read_environment({"TERRAZZO_THREADS": text})
