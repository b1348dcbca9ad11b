"""Environment variables are typed, and a bad one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.env import Environment, let_idle_threads_sleep, read_environment
from terrazzo.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    assert read_environment({}) == Environment(threads=0)


def test_threads_are_read() -> None:
    assert read_environment({"TERRAZZO_THREADS": "2"}).threads == 2


@pytest.mark.parametrize("text", ["two", "-1", "1.5", ""])
def test_a_bad_value_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="TERRAZZO_THREADS"):
        read_environment({"TERRAZZO_THREADS": text})


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "~/.cache/terrazzo"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/terrazzo"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/terrazzo"),
        ({"XDG_CACHE_HOME": "/c", "TERRAZZO_CACHE": "/mine"}, "/mine"),
    ],
)
def test_the_cache_is_where_the_user_has_it(variables: dict[str, str], folder: str) -> None:
    assert read_environment(variables).cache_folder == Path(folder)


def test_idle_threads_sleep_unless_the_user_says_otherwise() -> None:
    variables = {"OMP_WAIT_POLICY": "ACTIVE"}
    let_idle_threads_sleep(variables)
    assert variables == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}
