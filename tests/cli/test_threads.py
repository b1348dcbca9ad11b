"""TERRAZZO_THREADS decides how many threads compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from terrazzo.cli.threads import use_threads
from terrazzo.errors import ConfigError


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_variable_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRAZZO_THREADS", "3")
    use_threads()
    assert torch.get_num_threads() == 3


def test_zero_leaves_the_choice_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("TERRAZZO_THREADS", "0")
    use_threads()
    assert torch.get_num_threads() == before


def test_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRAZZO_THREADS", "many")
    with pytest.raises(ConfigError, match="TERRAZZO_THREADS is 'many'"):
        use_threads()
