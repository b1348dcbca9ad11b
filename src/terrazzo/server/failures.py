"""Every answer that is not a success, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from terrazzo.errors import TerrazzoError
from terrazzo.server.answers import ErrorBody, ErrorDetail
from terrazzo.server.protocol import GENERATION_FIELDS, BodyError
from terrazzo.server.worker import EngineStoppedError, QueueFullError

RETRY_SECONDS: Final = 1
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a request whose client has left; nobody receives it."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


class UnknownModelError(Exception):
    """The body or the path names a model that is not served."""


class KeyRefusedError(Exception):
    """The request carries no API key, or a wrong one."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as HTTP: status, body and further headers."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """A failure that is not ours says nothing of the inside; the log has the traceback."""
        if isinstance(error, HTTPException):
            detail = _detail(f"{error.detail}", "invalid_request_error")
            return cls(error.status_code, detail, error.headers or {})
        for kind, (status, name, code) in _KINDS.items():
            if isinstance(error, kind):
                param = error.param if isinstance(error, BodyError) else _field_at_fault(error)
                headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else {}
                return cls(status, _detail(f"{error}", name, param, code), headers)
        return cls(500, _detail("internal error; the server's log says more", "server_error"))

    def response(self) -> Response:
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, dict(self.headers), "application/json")


_KINDS: Final[Mapping[type[Exception], tuple[int, str, str]]] = {
    TerrazzoError: (400, "invalid_request_error", ""),
    KeyRefusedError: (401, "invalid_request_error", "invalid_api_key"),
    UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    QueueFullError: (429, "rate_limit_error", "rate_limit_exceeded"),
    ClientGoneError: (CLIENT_CLOSED_REQUEST, "client_error", ""),
    EngineStoppedError: (500, "server_error", "engine_stopped"),
}


async def answer_failure(http: Request, error: Exception) -> Response:
    """An exception handler of Starlette."""
    return Failure.of(error).response()


HANDLED: Final = dict.fromkeys((*_KINDS, HTTPException, Exception), answer_failure)


def _field_at_fault(error: Exception) -> str:
    """The engine's messages begin with the field, where one is at fault."""
    first = str(error).partition(" ")[0]
    return first if first in GENERATION_FIELDS else ""


def _detail(message: str, kind: str, param: str = "", code: str = "") -> ErrorBody:
    return ErrorBody(ErrorDetail(message, kind, param or None, code or None))
