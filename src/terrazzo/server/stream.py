"""A call's answer over time: whole, or as server-sent events, and never to a client that left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from terrazzo.engine.request import FinishReason
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.answers import Answer, Choice, ErrorBody, Usage
from terrazzo.server.failures import ClientGoneError, Failure
from terrazzo.server.prompts import Exchange
from terrazzo.server.telling import Part, Teller, Voice, finish_name, join
from terrazzo.server.worker import EngineStoppedError, Job

Result = TypeVar("Result")
Events: TypeAlias = AsyncGenerator[bytes, None]

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": still working\n\n"
"""A comment, which clients skip; proxies cut connections on which nothing moves."""

_END: Final = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """How one exchange is answered, in the voice of its route."""

    exchange: Exchange
    voice: Voice
    model_name: str
    tokenizer: Tokenizer

    async def whole(self, job: Job) -> Answer:
        """Raises EngineStoppedError."""
        teller = Teller(self.exchange, self.tokenizer)
        parts: dict[int, list[Part]] = {}
        async for delta in job.deltas():
            part = teller.tell(delta)
            parts.setdefault(part.index, []).append(part)
        choices = [self.voice.whole(join(parts[index])) for index in sorted(parts)]
        return self._answer(self.voice.whole_object, choices, teller.usage())

    async def events(self, job: Job) -> Events:
        """Chunks as OpenAI sends them: opening, pieces and ending of each choice, usage, [DONE].

        A stream that has begun cannot change its status, so a crash becomes an error event.
        """
        teller = Teller(self.exchange, self.tokenizer)
        opened: set[int] = set()
        try:
            async for delta in job.deltas():
                part = teller.tell(delta)
                choices = [] if part.index in opened else self.voice.opening(part.index)
                opened.add(part.index)
                for choice in choices + self._choices(part):
                    yield self._chunk([choice], None if self.exchange.with_usage else UNSET)
        except EngineStoppedError as error:
            yield event(Failure.of(error).body)
            return
        if self.exchange.with_usage:
            yield self._chunk([], teller.usage())
        yield DONE

    def _choices(self, part: Part) -> list[Choice]:
        choices = [] if part.is_empty else [self.voice.piece(part)]
        if part.finish is not FinishReason.NOT_YET:
            choices.append(self.voice.ending(part.index, finish_name(part.finish)))
        return choices

    def _chunk(self, choices: list[Choice], usage: Usage | UnsetType | None) -> bytes:
        return event(self._answer(self.voice.chunk_object, choices, usage))

    def _answer(self, name: str, choices: list[Choice], usage: Usage | UnsetType | None) -> Answer:
        exchange = self.exchange
        return Answer(exchange.reply_id, name, exchange.created, self.model_name, choices, usage)


class EventStream(StreamingResponse):
    """Sends events as they come, and a comment whenever none came for `keep_alive_seconds`.

    on_end: called once, however the stream ends.
    """

    def __init__(
        self, events: Events, on_end: Callable[[], None], keep_alive_seconds: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        lively = with_keep_alive(events, keep_alive_seconds)
        super().__init__(lively, headers=headers, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError, OSError):
            try:
                await unless_gone(receive, self.stream_response(send))
            finally:
                self._on_end()


async def with_keep_alive(events: Events, seconds: float) -> Events:
    """The same events, with comments in the pauses."""
    async with aclosing(events):
        while True:
            pending = asyncio.ensure_future(anext(events, _END))
            try:
                while not (await asyncio.wait({pending}, timeout=seconds))[0]:
                    yield KEEP_ALIVE
            finally:
                pending.cancel()
                await asyncio.wait({pending})
            if pending.result() == _END:
                return
            yield pending.result()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves: ClientGoneError then."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(body: Answer | ErrorBody) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
