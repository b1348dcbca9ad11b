"""Clients that leave, queues that fill, engines that crash, servers that stop."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from helpers.live_server import (
    EOS,
    CrashingRunner,
    GatedRunner,
    Live,
    RandomRunner,
    ScriptedRunner,
    live_server,
)
from terrazzo.engine.tokenizer import Tokenizer

MANY = 10_000
ROUTE = "/v1/completions"


@pytest.fixture
def gate(tokenizer: Tokenizer) -> Iterator[tuple[Live, GatedRunner]]:
    """Room for 6 requests, 4 of which run; each step needs a permit."""
    runner = GatedRunner(RandomRunner())
    with live_server(tokenizer, runner, max_requests=6, keep_alive_seconds=0.05) as live:
        try:
            yield live, runner
        finally:
            runner.permit(MANY)


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 50, "ignore_eos": True, **changes}


@contextmanager
def raw_call(live: Live, asked: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has sent one POST, to be dropped at will."""
    address = urlsplit(live.url)
    content = json.dumps(asked)
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(f"{head}{content}".encode())
        yield connection


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_requests(
    gate: tuple[Live, GatedRunner], streams: bool
) -> None:
    live, runner = gate
    with raw_call(live, body(prompt=["a", "b"], n=2, stream=streams)):
        runner.permit(3)
        wait_until(lambda: runner.num_steps > 3)
        assert live.engine.stats.num_running == 4
    wait_until(lambda: live.worker.num_requests == 0)
    runner.permit(2)
    wait_until(lambda: not live.engine.has_work)
    assert runner.num_steps <= 5
    live.engine.check_integrity()


def test_a_queued_client_that_leaves_ends_its_request(gate: tuple[Live, GatedRunner]) -> None:
    live, runner = gate
    with ThreadPoolExecutor() as pool:
        running = pool.submit(_status, live, body(prompt=["a", "b", "c", "d"]))
        wait_until(runner.begun.is_set)
        with raw_call(live, body(prompt="queued")):
            wait_until(lambda: live.worker.num_requests == 5)
            runner.permit(1)
            wait_until(lambda: live.engine.stats.num_waiting == 1)
        wait_until(lambda: live.worker.num_requests == 4)
        runner.permit(1)
        wait_until(lambda: live.engine.stats.num_waiting == 0)
        assert live.engine.stats.num_running == 4
        runner.permit(MANY)
        assert running.result() == 200


def _status(live: Live, asked: dict[str, Any]) -> int:
    return httpx.post(f"{live.url}{ROUTE}", json=asked, timeout=20).status_code


def test_a_full_queue_says_when_to_come_back(gate: tuple[Live, GatedRunner]) -> None:
    live, runner = gate
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_status, live, body(prompt=["a"] * 6, max_tokens=2))
        wait_until(runner.begun.is_set)
        refused = httpx.post(f"{live.url}{ROUTE}", json=body(), timeout=20)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        runner.permit(MANY)
        assert first.result() == 200
    assert _status(live, body(max_tokens=2)) == 200


def test_a_long_wait_is_filled_with_comments(gate: tuple[Live, GatedRunner]) -> None:
    live, runner = gate
    runner.permit(1)
    with httpx.stream(
        "POST", f"{live.url}{ROUTE}", json=body(stream=True, max_tokens=2), timeout=20
    ) as response:
        lines = response.iter_lines()
        assert any(line.startswith(": ") for line in lines)
        runner.permit(MANY)
        assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize("streams", [False, True])
def test_a_crash_is_told_to_who_waits_and_to_who_comes(
    tokenizer: Tokenizer, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runner = GatedRunner(CrashingRunner())
    with live_server(tokenizer, runner) as live:
        with ThreadPoolExecutor() as pool:
            asked = body(stream=streams)
            waiting = pool.submit(httpx.post, f"{live.url}{ROUTE}", json=asked, timeout=20)
            wait_until(runner.begun.is_set)
            runner.permit(1)
            answer = waiting.result()
        assert "engine_stopped" in answer.text
        assert "[DONE]" not in answer.text
        assert answer.status_code == (200 if streams else 500)
        assert httpx.get(f"{live.url}/health").status_code == 503
        late = httpx.post(f"{live.url}{ROUTE}", json=body(), timeout=20)
        assert (late.status_code, late.json()["error"]["type"]) == (500, "server_error")
    assert "the model fell over" in caplog.text


def test_a_stopping_server_finishes_what_runs(tokenizer: Tokenizer) -> None:
    runner = GatedRunner(ScriptedRunner([*tokenizer.encode("the quick brown fox"), EOS]))
    answers: list[httpx.Response] = []
    with live_server(tokenizer, runner) as live:
        asked = body(stream=True, ignore_eos=False)
        call = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{live.url}{ROUTE}", json=asked, timeout=20))
        )
        call.start()
        wait_until(runner.begun.is_set)
        timer = threading.Timer(0.3, runner.permit, [MANY])
        timer.start()
    call.join(timeout=20)
    timer.join()
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert not live.worker.is_healthy


@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_has_waited_long_enough_says_so(tokenizer: Tokenizer, streams: bool) -> None:
    runner = GatedRunner(RandomRunner())
    with ThreadPoolExecutor() as pool:
        with live_server(tokenizer, runner, drain_seconds=0.1) as live:
            asked = body(stream=streams)
            waiting = pool.submit(httpx.post, f"{live.url}{ROUTE}", json=asked, timeout=20)
            runner.permit(2)
            wait_until(lambda: runner.num_steps == 3)
            threading.Timer(0.5, runner.permit, [1]).start()
        answer = waiting.result()
    assert "the server is shutting down" in answer.text
    assert answer.status_code == (200 if streams else 500)
