"""What clients send: OpenAI's request bodies, closed to fields that nothing here would honour.

`null` means absent, as in OpenAI's API. A field is honoured, or refused with what is legal, or it
is one of a few that cannot change an answer; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from terrazzo.errors import RequestError

HARMLESS: Final = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""They say who asks, not what."""

UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
}
"""OpenAI's fields for what this server cannot do, with the values that do not ask for it."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON body; without `model` the served one is meant."""

    model: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk counts tokens."""

    include_usage: bool = False


class Generation(Body, kw_only=True):
    """What both generating routes share; meanings as in `SamplingParams`.

    Beyond OpenAI's fields: top_k (-1 and 0 are off), min_p, repetition_penalty, stop_token_ids,
    min_tokens, ignore_eos, include_stop_str_in_output.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; the fields that must be null come back when a client repeats an answer."""

    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None


class ChatBody(Generation, kw_only=True):
    """POST /v1/chat/completions.

    continue_final_message: the answer goes on where the last message ends.
    """

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Generation, kw_only=True):
    """POST /v1/completions. Token ids are taken as they are, texts are encoded."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeText(Body, kw_only=True):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True


class TokenizeChat(Body, kw_only=True):
    """POST /tokenize with a conversation, as `ChatBody` has it."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


GENERATION_FIELDS: Final = frozenset(
    field.name for kind in (ChatBody, CompletionBody) for field in msgspec.structs.fields(kind)
)
Conversation: TypeAlias = ChatBody | TokenizeChat
AnyBody = TypeVar("AnyBody", bound=Body)


class BodyError(RequestError):
    """A body is malformed. param: the field at fault, or "" for the whole body."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises BodyError."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BodyError(f"the body is a JSON {type(document).__name__}; it must be an object")
    return document


def read_body(document: Mapping[str, Any], kind: type[AnyBody]) -> AnyBody:
    """Raises BodyError naming the field, what was seen and what is legal."""
    legal = {field.name for field in msgspec.structs.fields(kind)}
    kept = {name: value for name, value in document.items() if _matters(name, value, legal)}
    try:
        return msgspec.convert(kept, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message = str(error)
        path = message.rpartition("`$.")[2].rstrip("`") if "`$." in message else ""
        raise BodyError(f"{path}: {message}" if path else message, path) from error


def _matters(name: str, value: object, legal: set[str]) -> bool:
    if name in legal:
        return value is not None
    if name in HARMLESS or value is None:
        return False
    if name not in UNSUPPORTED:
        known = ", ".join(sorted(legal | HARMLESS))
        raise BodyError(f"{name} is not a field of this route; legal are {known}", name)
    neutral = UNSUPPORTED[name]
    if value not in neutral:
        values = "".join(f" or send {msgspec.json.encode(each).decode()}" for each in neutral)
        raise BodyError(f"{name} is not supported by this server; leave it out{values}", name)
    return False
