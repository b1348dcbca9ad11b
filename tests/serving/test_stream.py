"""Server-sent events, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.live_server import EOS, Live, ScriptedRunner, live_server
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.stream import KEEP_ALIVE, with_keep_alive

HELLO = [{"role": "user", "content": "hello"}]


def events_of(raw: str) -> list[dict[str, Any]]:
    """The objects of a stream that ends as it should."""
    *events, done, rest = raw.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_chat_chunks(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {
        "messages": HELLO,
        "stream": True,
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    first, second = (tokenizer.decode([t]) for t in tokenizer.encode("the quick brown")[:2])
    assert [event["choices"] for event in events] == [
        [_choice({"role": "assistant", "content": ""})],
        [_choice({"content": first})],
        [_choice({"content": second})],
        [_choice({}, "length")],
        [],
    ]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    prompt = len(tokenizer.encode_chat(HELLO))
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 2)


def _choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def test_completion_chunks(http: httpx.Client) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 1}
    events = events_of(http.post("/v1/completions", json=body).text)
    choices = [event["choices"] for event in events]
    assert [choice["finish_reason"] for (choice,) in choices] == [None, "length"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert all("usage" not in event for event in events)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Co", "Cn"]), max_size=12))
def test_no_character_is_ever_cut(tokenizer: Tokenizer, text: str) -> None:
    script = [*tokenizer.encode(f"<{text}>🙂"), EOS]
    with live_server(tokenizer, ScriptedRunner(script)) as live:
        body = {"prompt": "a", "stream": True, "max_tokens": len(script)}
        events = events_of(httpx.post(f"{live.url}/v1/completions", json=body).text)
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == f"<{text}>🙂"
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_bytes_that_never_become_a_character_are_shown_as_such(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🙂")[0]
    with live_server(tokenizer, ScriptedRunner([half, EOS])) as live:
        body = {"prompt": "a", "stream": True}
        events = events_of(httpx.post(f"{live.url}/v1/completions", json=body).text)
    assert "".join(event["choices"][0]["text"] for event in events) == "\ufffd"


def test_pauses_are_filled_with_comments() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(0.25)
        yield b"two"

    async def collect() -> list[bytes]:
        return [event async for event in with_keep_alive(slow(), 0.1)]

    first, *pause, last = asyncio.run(collect())
    assert (first, last) == (b"one", b"two")
    assert pause
    assert set(pause) == {KEEP_ALIVE}


def test_closing_a_lively_stream_closes_its_source() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave_in_a_pause() -> None:
        events = with_keep_alive(endless(), 0.01)
        assert await anext(events) == b"one"
        assert await anext(events) == KEEP_ALIVE
        await events.aclose()

    asyncio.run(leave_in_a_pause())
    assert closed == [True]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_streams_are_not_to_be_cached(live: Live, route: str) -> None:
    body = {"stream": True, "prompt": "a"} if "chat" not in route else {"stream": True}
    asked = body if "prompt" in body else {**body, "messages": HELLO}
    response = httpx.post(f"{live.url}{route}", json=asked)
    assert response.headers["cache-control"] == "no-cache"
