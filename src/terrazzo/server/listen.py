"""Sockets and signals: from an application to a running server and back to the shell."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from terrazzo.errors import ConfigError
from terrazzo.server.worker import Worker


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """on_ready: called once connections are accepted. drain_seconds: how long running requests
    may take to finish after a signal. logs_requests: one line for each.
    """

    on_ready: Callable[[], None]
    drain_seconds: float
    logs_requests: bool


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything is loaded; connections are refused until the server runs.

    port: 0 lets the system choose. Raises ConfigError when the address cannot be had.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}; legal values are 0 (any free port) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            undo.pop_all()
            return bound
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another "
            "with --host and --port, or end the program that uses it"
        ) from error


def url(bound: socket.socket, host: str) -> str:
    """What a client on this machine types."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"


class Server(uvicorn.Server):
    """Tells when it accepts connections, and lets running requests finish when it is stopped.

    give_up: makes them end at once; called after `drain_seconds` or by a second signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_ready: Callable[[], None],
        give_up: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._give_up = give_up
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up)
        await super().shutdown(sockets)
        patience.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._give_up()
        else:
            super().handle_exit(sig, frame)


def listen(app: Starlette, bound: socket.socket, worker: Worker, options: ListenOptions) -> None:
    """Serve until a signal, then finish running requests; a second signal drops them."""
    config = uvicorn.Config(
        app,
        access_log=options.logs_requests,
        log_level="info" if options.logs_requests else "warning",
        server_header=False,
    )
    server = Server(
        config,
        on_ready=options.on_ready,
        give_up=worker.stop,
        drain_seconds=options.drain_seconds,
    )
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])
