"""The routes as plain HTTP: refusals, and the smaller routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import terrazzo
from helpers.live_server import MAX_MODEL_LEN, NAME, RandomRunner, live_server
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.protocol import HARMLESS, UNSUPPORTED

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
ASKING: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "parallel_tool_calls": 3,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "low",
    "verbosity": "low",
    "store": True,
    "service_tier": "flex",
    "best_of": 2,
    "suffix": "the end",
}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, field: str) -> None:
    body = {"messages": HELLO, field: ASKING[field]}
    error = error_of(http.post(CHAT, json=body), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is not supported by this server; leave it out")


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, field: str) -> None:
    for value in (None, *UNSUPPORTED[field]):
        answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, field: value})
        assert answer.status_code == 200


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_fields_about_the_caller_change_nothing(http: httpx.Client, field: str) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, field: "anything"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        (CHAT, {}, None, "missing required field `messages`"),
        (CHAT, {"messages": []}, "messages", "messages is empty"),
        (CHAT, {"messages": HELLO, "temprature": 1}, "temprature", "legal are add_generation"),
        (CHAT, {"messages": HELLO, "echo": True}, "echo", "not a field of this route"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature", "got `str`"),
        (CHAT, {"messages": HELLO, "logit_bias": {"the": 1}}, "logit_bias", "got `str`"),
        (CHAT, {"messages": HELLO, "logit_bias": {"320": 1}}, "logit_bias", "0 to 319"),
        (CHAT, {"messages": HELLO, "stop": ["a", 1]}, "stop[1]", "got `int`"),
        (CHAT, {"messages": HELLO, "stop": ""}, "stop", "not empty"),
        (CHAT, {"messages": HELLO, "top_k": -2}, "top_k", "0 (off)"),
        (CHAT, {"messages": [{"role": "tool", "content": "3"}]}, "messages[0].role", "'tool'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "missing required field"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "user", "content": [IMAGE]}]},
            "messages[1].content[0]",
            "'image_url'; tiny is served text-only",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]",
            "tiny is served text-only",
        ),
        (CHAT, {"messages": [{"role": "system", "content": "x"}]}, None, "no system role"),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "they mean the same",
        ),
        (
            CHAT,
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "set one",
        ),
        ("/v1/completions", {"prompt": []}, "prompt", "empty or mixes"),
        ("/v1/completions", {"prompt": ["a", 3]}, "prompt", "empty or mixes"),
        ("/v1/completions", {"prompt": ""}, None, "at least one"),
        ("/v1/completions", {"prompt": [[5], [320]]}, None, "0 to 319"),
        ("/v1/completions", {"prompt": [-1], "echo": True}, "prompt", "token id -1"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
        ("/v1/completions", {"prompt": ["a"] * 17}, "prompt", "takes 16 at once"),
        ("/detokenize", {"tokens": [5, 1 << 40]}, "tokens", "0 to 319"),
    ],
)
def test_bad_bodies(
    http: httpx.Client, route: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    error = error_of(http.post(route, json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}']
)
def test_bodies_that_are_not_json_objects(http: httpx.Client, raw: bytes) -> None:
    assert "the body is" in error_of(http.post(CHAT, content=raw), 400)["message"]


def test_a_refused_batch_leaves_nothing_behind(http: httpx.Client) -> None:
    for _ in range(20):
        error_of(http.post("/v1/completions", json={"prompt": [[5]] * 8 + [[320]]}), 400)
    assert http.post("/v1/completions", json={"prompt": [[5]] * 16}).status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get(CHAT), 405)


def test_an_unexpected_error_hides_the_inside_from_the_client(tokenizer: Tokenizer) -> None:
    class Faulty(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            raise ZeroDivisionError("secret")

    with live_server(Faulty(tokenizer.folder), RandomRunner()) as live:
        error = error_of(httpx.post(f"{live.url}/tokenize", json={"prompt": "a"}), 500)
        assert "secret" not in error["message"]
        assert error["type"] == "server_error"


def test_parts_and_developers(http: httpx.Client, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
    tokens = http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]}).json()
    same = tokenizer.encode_chat([{"role": "user", "content": "two\nlines"}])
    assert tokens == {"count": len(same), "max_model_len": MAX_MODEL_LEN, "tokens": list(same)}
    developer = {"messages": [{"role": "developer", "content": "x"}]}
    assert "no system role" in error_of(http.post(CHAT, json=developer), 400)["message"]


def test_continuing_the_final_message(http: httpx.Client, tokenizer: Tokenizer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": begun, "continue_final_message": True}
    text = http.post("/detokenize", json={"tokens": _tokens(http, body)}).json()["prompt"]
    assert text.endswith("Once upon")
    assert http.post(CHAT, json=body).status_code == 200
    opened = _tokens(http, {"messages": HELLO})
    assert opened == list(tokenizer.encode_chat(HELLO))
    closed = _tokens(http, {"messages": HELLO, "add_generation_prompt": False})
    assert opened[: len(closed)] == closed
    assert len(opened) == len(closed) + 1


def _tokens(http: httpx.Client, body: dict[str, Any]) -> list[int]:
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert isinstance(tokens, list)
    return tokens


def test_tokens_and_back(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "größe, 你好 🙂"
    tokens = _tokens(http, {"prompt": text, "model": NAME})
    assert tokens == list(tokenizer.encode(text))
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": terrazzo.__version__}
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN


def test_only_health_is_open_when_there_is_a_key(tokenizer: Tokenizer) -> None:
    with live_server(tokenizer, RandomRunner(), api_keys=("größe",)) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200
        for route in ("/v1/models", "/version", "/nothing"):
            error = error_of(httpx.get(f"{live.url}{route}"), 401)
            assert error["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer größe".encode()}
        assert httpx.get(f"{live.url}/version", headers=key).status_code == 200
