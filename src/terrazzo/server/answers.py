"""What the server sends: OpenAI's response bodies."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

FinishName: TypeAlias = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one call, all prompts and all choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopToken(msgspec.Struct, frozen=True):
    """A likely token; `bytes` because it may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken, frozen=True):
    """A generated token and the likeliest tokens at its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per token."""

    content: list[ChatToken]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName


class ChatDelta(msgspec.Struct, frozen=True):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishName | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four columns of equal length; null where nothing comes before a token.

    text_offset: characters of the choice's text before each token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One whole continuation, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishName | None = None


Choice: TypeAlias = ChatChoice | ChatChunkChoice | CompletionChoice


class Answer(msgspec.Struct, frozen=True):
    """A whole answer or, with `object` saying so, one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """The served model; max_model_len: longest prompt plus output in tokens."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "terrazzo"


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True):
    """type: class of the error. param: the field at fault. code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every answer that is not a success."""

    error: ErrorDetail


class Tokens(msgspec.Struct, frozen=True):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    prompt: str
