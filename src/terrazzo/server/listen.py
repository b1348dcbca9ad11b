"""Sockets and signals: from an application to a running server and back to the shell."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import uvicorn
from starlette.applications import Starlette

from terrazzo.errors import ConfigError


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
    """Calls `on_ready` once connections are accepted."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def listen(
    app: Starlette,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None],
    drain_seconds: int,
    logs_requests: bool,
) -> None:
    """Serve until interrupted, then finish running requests; a second interrupt drops them."""
    config = uvicorn.Config(
        app,
        access_log=logs_requests,
        log_level="info" if logs_requests else "warning",
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    try:
        Server(config, on_ready).run(sockets=[bound])
    except KeyboardInterrupt:
        return
