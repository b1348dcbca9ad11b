"""One tokenizer for all tests, and one server for those that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from helpers.live_server import EOS, Live, ScriptedRunner, live_server, write_speaking_folder
from terrazzo.engine.tokenizer import Tokenizer

ANSWER = "the quick brown fox, 你好"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_speaking_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def answer() -> str:
    return ANSWER


@pytest.fixture(scope="session")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server whose every answer is `answer`, then EOS."""
    with live_server(tokenizer, ScriptedRunner([*tokenizer.encode(ANSWER), EOS])) as running:
        yield running


@pytest.fixture(scope="session")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client
