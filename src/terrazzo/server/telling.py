"""From the engine's deltas to what a call tells of them: parts, and their form on each route."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from terrazzo.engine.request import Delta, FinishReason, TokenLogprob
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatToken,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    FinishName,
    PromptTokensDetails,
    TopToken,
    Usage,
)
from terrazzo.server.prompts import Exchange

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON lacks, as in OpenAI's API."""

_FINISH_NAMES: Final[dict[FinishReason, FinishName]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token with its place in the choice's text, and the likeliest tokens there.

    is_scored: False for a prompt's first token, before which there is nothing.
    """

    token: TopToken
    top: tuple[TopToken, ...]
    offset: int
    is_scored: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """What choice `index` of the call gained; `tokens` is empty when they are not asked for."""

    index: int
    text: str
    tokens: tuple[ToldToken, ...]
    finish: FinishReason

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.tokens)


class Teller:
    """Turns the deltas of one exchange into parts, in order, and counts tokens.

    The call's choices are numbered through: choice c of request r is r * n + c.
    """

    def __init__(self, exchange: Exchange, tokenizer: Tokenizer) -> None:
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._numbers = {each.request_id: i for i, each in enumerate(exchange.requests)}
        self._prompts: dict[int, Delta] = {}
        self._spellers: dict[int, _Speller] = {}
        self._num_generated = 0

    def tell(self, delta: Delta) -> Part:
        if not self._exchange.generates:
            delta = replace(delta, text="", token_ids=(), logprobs=(), finish=FinishReason.LENGTH)
        self._num_generated += len(delta.token_ids)
        number = self._numbers[delta.request_id]
        index = number * self._exchange.requests[number].params.n + delta.index
        text = ""
        tokens: tuple[ToldToken, ...] = ()
        if index not in self._spellers:
            self._spellers[index] = _Speller(self._tokenizer)
            # Choice 0 is the first to speak, and alone knows about the prompt.
            self._prompts.setdefault(number, delta)
            text, tokens = self._echo(number, self._spellers[index])
        spelled = tuple(self._spellers[index].scored(each) for each in delta.logprobs)
        return Part(index, text + delta.text, tokens + spelled, delta.finish)

    def usage(self) -> Usage:
        """Of everything told so far."""
        prompts = sum(len(each.prompt_token_ids) for each in self._exchange.requests)
        cached = sum(delta.cached_tokens for delta in self._prompts.values())
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=self._num_generated,
            total_tokens=prompts + self._num_generated,
            prompt_tokens_details=PromptTokensDetails(cached),
        )

    def _echo(self, number: int, speller: _Speller) -> tuple[str, tuple[ToldToken, ...]]:
        echo = self._exchange.echoes[number]
        first = tuple(speller.unscored(token) for token in echo.token_ids[:1])
        rest = self._prompts[number].prompt_logprobs
        return echo.text, first + tuple(speller.scored(each) for each in rest)


class _Speller:
    """Spells the tokens of one choice and counts the characters they complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def scored(self, token: TokenLogprob) -> ToldToken:
        top = tuple(self._spell(token_id, logprob) for token_id, logprob in token.top)
        return self._place(self._spell(token.token_id, token.logprob), top)

    def unscored(self, token_id: int) -> ToldToken:
        return replace(self._place(self._spell(token_id, 0.0), ()), is_scored=False)

    def _place(self, token: TopToken, top: tuple[TopToken, ...]) -> ToldToken:
        told = ToldToken(token, top, self._offset)
        self._offset += len(self._decoder.decode(bytes(token.bytes)))
        return told

    def _spell(self, token_id: int, logprob: float) -> TopToken:
        """Part of a character is written as "bytes:\\xe4\\xbd", so that it can be told apart."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        return TopToken(text, max(logprob, LEAST_LOGPROB), list(spelled))


class Voice(Protocol):
    """The form of parts on one route.

    opening: before the first part of a choice. piece: a part of a stream. ending: after the last.
    whole: all parts of a choice in one. whole_object and chunk_object: names of the bodies.
    """

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> list[Choice]: ...

    def piece(self, part: Part) -> Choice: ...

    def ending(self, index: int, finish: FinishName) -> Choice: ...

    def whole(self, part: Part) -> Choice: ...


class ChatVoice:
    """Answers of an assistant."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[Choice]:
        return [ChatChunkChoice(index, ChatDelta(role="assistant", content=""))]

    def piece(self, part: Part) -> Choice:
        return ChatChunkChoice(part.index, ChatDelta(content=part.text), _chat_logprobs(part))

    def ending(self, index: int, finish: FinishName) -> Choice:
        return ChatChunkChoice(index, ChatDelta(), finish_reason=finish)

    def whole(self, part: Part) -> Choice:
        message = AssistantMessage(part.text)
        return ChatChoice(part.index, message, _chat_logprobs(part), finish_name(part.finish))


class CompletionVoice:
    """Continuations of a text."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> list[Choice]:
        return []

    def piece(self, part: Part) -> Choice:
        return CompletionChoice(part.index, part.text, _completion_logprobs(part))

    def ending(self, index: int, finish: FinishName) -> Choice:
        return CompletionChoice(index, "", finish_reason=finish)

    def whole(self, part: Part) -> Choice:
        logprobs = _completion_logprobs(part)
        return CompletionChoice(part.index, part.text, logprobs, finish_name(part.finish))


def finish_name(finish: FinishReason) -> FinishName:
    """Only choices that ended by themselves are told."""
    return _FINISH_NAMES[finish]


def join(parts: Sequence[Part]) -> Part:
    """All parts of one choice as one."""
    return Part(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        finish=parts[-1].finish,
    )


def _chat_logprobs(part: Part) -> ChatLogprobs | None:
    if not part.tokens:
        return None
    return ChatLogprobs(
        [
            ChatToken(told.token.token, told.token.logprob, told.token.bytes, list(told.top))
            for told in part.tokens
        ]
    )


def _completion_logprobs(part: Part) -> CompletionLogprobs | None:
    if not part.tokens:
        return None
    return CompletionLogprobs(
        tokens=[told.token.token for told in part.tokens],
        token_logprobs=[told.token.logprob if told.is_scored else None for told in part.tokens],
        top_logprobs=[_likely(told) if told.is_scored else None for told in part.tokens],
        text_offset=[told.offset for told in part.tokens],
    )


def _likely(told: ToldToken) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI has it, the token itself; the likelier of equal texts."""
    likely: dict[str, float] = {}
    for token in (*told.top, told.token):
        likely.setdefault(token.token, token.logprob)
    return likely
