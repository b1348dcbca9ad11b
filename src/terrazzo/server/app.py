"""The routes: OpenAI's, and a few that programs around a server ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from terrazzo import __version__
from terrazzo.server.answers import ModelCard, ModelList, Text, Tokens
from terrazzo.server.failures import HANDLED, Failure, KeyRefusedError, UnknownModelError
from terrazzo.server.prompts import (
    Exchange,
    ServedModel,
    chat_exchange,
    completion_exchange,
    decode,
    encode_conversation,
)
from terrazzo.server.protocol import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
    read_body,
    read_object,
)
from terrazzo.server.stream import EventStream, Reply, unless_gone
from terrazzo.server.telling import ChatVoice, CompletionVoice, Voice
from terrazzo.server.worker import EngineStoppedError, Worker

KEEP_ALIVE_SECONDS = 10.0
OPEN_PATHS = frozenset({"/health"})


def create_app(
    model: ServedModel,
    worker: Worker,
    *,
    api_keys: Sequence[str] = (),
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> Starlette:
    """The server as an ASGI application, which closes the worker at its own end.

    api_keys: one of them is needed for everything but /health; none: everything is open.
    keep_alive_seconds: a stream without news for so long gets a comment.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    routes = Routes(model, worker, keep_alive_seconds)
    guard = [Middleware(KeyGuard, api_keys=tuple(api_keys))] if api_keys else []
    return Starlette(
        routes=routes.table(), middleware=guard, exception_handlers=HANDLED, lifespan=lifespan
    )


class Routes:
    """One method for each route."""

    def __init__(self, model: ServedModel, worker: Worker, keep_alive_seconds: float) -> None:
        self._model = model
        self._worker = worker
        self._keep_alive_seconds = keep_alive_seconds

    def table(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/version", self.version),
        ]

    async def chat_completions(self, http: Request) -> Response:
        body = await self._read(http, ChatBody)
        return await self._generate(http, chat_exchange(body, self._model), ChatVoice())

    async def completions(self, http: Request) -> Response:
        body = await self._read(http, CompletionBody)
        return await self._generate(http, completion_exchange(body, self._model), CompletionVoice())

    async def models(self, http: Request) -> Response:
        return as_json(ModelList([self._card()]))

    async def one_model(self, http: Request) -> Response:
        self._check_name(http.path_params["name"])
        return as_json(self._card())

    async def tokenize(self, http: Request) -> Response:
        tokenizer = self._model.tokenizer
        if "messages" in read_object(await http.body()):
            token_ids = encode_conversation(await self._read(http, TokenizeChat), self._model)
        else:
            body = await self._read(http, TokenizeText)
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return as_json(Tokens(len(token_ids), self._model.max_model_len, list(token_ids)))

    async def detokenize(self, http: Request) -> Response:
        body = await self._read(http, DetokenizeBody)
        return as_json(Text(decode(body.tokens, self._model.tokenizer, "tokens")))

    async def health(self, http: Request) -> Response:
        if self._worker.is_healthy:
            return as_json({"status": "ok"})
        stopped = Failure.of(EngineStoppedError("the engine has stopped"))
        return as_json(stopped.body, status=503)

    async def version(self, http: Request) -> Response:
        return as_json({"version": __version__})

    async def _read(self, http: Request, kind: type[AnyBody]) -> AnyBody:
        body = read_body(read_object(await http.body()), kind)
        self._check_name(self._model.name if body.model is None else body.model)
        return body

    async def _generate(self, http: Request, exchange: Exchange, voice: Voice) -> Response:
        """Refusals come before the first byte of a stream, with a status of their own."""
        worker = self._worker
        reply = Reply(exchange, voice, self._model.name, self._model.tokenizer)
        job = await unless_gone(http.receive, worker.submit(exchange.requests))
        if exchange.is_streamed:
            events = reply.events(job)
            return EventStream(events, lambda: worker.release(job), self._keep_alive_seconds)
        try:
            return as_json(await unless_gone(http.receive, reply.whole(job)))
        finally:
            worker.release(job)

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            raise UnknownModelError(
                f"model is {name!r}, which is not served here; the served one is "
                f"{self._model.name!r}"
            )

    def _card(self) -> ModelCard:
        model = self._model
        return ModelCard(model.name, model.created, model.max_model_len)


class KeyGuard:
    """Lets through who shows a key as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refused = KeyRefusedError("the API key is missing or wrong; send Authorization: Bearer KEY")
        await Failure.of(refused).response()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Every key is compared in full: the time taken says nothing about them."""
        shown = dict(scope["headers"]).get(b"authorization", b"")
        matches = [compare_digest(shown, expected) for expected in self._expected]
        return any(matches)


def as_json(content: msgspec.Struct | dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
