"""The engine on a thread of its own: asyncio sends it jobs and receives their deltas.

Who touches what: the engine and `_owners` belong to the engine thread; `_open`, `_inbox` and
`_life` are shared, under `_wake`; a Job's queue belongs to the event loop that submitted it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeAlias

from terrazzo.engine.request import Delta, FinishReason, Request
from terrazzo.errors import RequestError

_logger = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What a worker needs of an engine; see `terrazzo.engine.engine.Engine`."""

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[Delta]: ...

    @property
    def has_work(self) -> bool: ...


class EngineStoppedError(Exception):
    """The engine thread has ended: it crashed, or the server is shutting down."""


class QueueFullError(Exception):
    """As many requests are in flight as the server takes; the client may try again."""


class Life(enum.Enum):
    """RUNNING -> CLOSING by request, or -> CRASHED by an exception of the engine."""

    RUNNING = "running"
    CLOSING = "closing"
    CRASHED = "crashed"


class Acceptance(enum.Enum):
    """The engine has queued every request of a job."""

    ACCEPTED = "accepted"


_Event: TypeAlias = Acceptance | Delta | RequestError | EngineStoppedError
_CRASHED: Final = "the engine has crashed; the server's log says why, and restarting it helps"
_CLOSING: Final = "the server is shutting down; send the request again when it is back"


class Job:
    """The requests of one HTTP call while they run; born in a running event loop."""

    def __init__(self, requests: tuple[Request, ...]) -> None:
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()

    def post(self, event: _Event) -> None:
        """Called by the engine thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def accepted(self) -> None:
        """Raises RequestError when the engine refuses a request, EngineStoppedError."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        assert event is Acceptance.ACCEPTED

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything up to the last Delta of every choice. Raises EngineStoppedError."""
        num_open = sum(request.params.n for request in self.requests)
        while num_open:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            assert isinstance(event, Delta)
            num_open -= event.finish is not FinishReason.NOT_YET
            yield event


class Worker:
    """Runs the engine whenever it has work, until `close` or a crash.

    max_requests: most requests in flight, running or waiting; beyond, QueueFullError.
    """

    def __init__(self, engine: StepEngine, max_requests: int) -> None:
        self.max_requests = max_requests
        self._engine = engine
        self._owners: dict[str, Job] = {}
        self._wake = threading.Condition()
        self._open: set[Job] = set()
        self._inbox: list[Callable[[], None]] = []
        self._life = Life.RUNNING
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._executor.submit(self._run).add_done_callback(self._ended)

    @property
    def is_healthy(self) -> bool:
        return self._life is Life.RUNNING

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        with self._wake:
            return self._count()

    async def submit(self, requests: tuple[Request, ...]) -> Job:
        """Start a job once the engine has accepted all of it; the caller must `release` it.

        Raises RequestError, QueueFullError or EngineStoppedError; nothing runs then.
        """
        job = Job(requests)
        self._register(job)
        try:
            await job.accepted()
        except (RequestError, EngineStoppedError, asyncio.CancelledError):
            self.release(job)
            raise
        return job

    def release(self, job: Job) -> None:
        """Forget a job and abort what of it still runs."""
        with self._wake:
            self._open.discard(job)
            if self._life is Life.RUNNING:
                self._inbox.append(lambda: self._forget(job))
                self._wake.notify()

    def stop(self) -> None:
        """Fail every open job with EngineStoppedError and end the thread after its step."""
        with self._wake:
            if self._life is Life.RUNNING:
                self._life = Life.CLOSING
                self._fail_open_jobs(_CLOSING)
                self._wake.notify()

    def close(self) -> None:
        """`stop`, and wait for the end of the thread."""
        self.stop()
        self._executor.shutdown(wait=True)

    def _register(self, job: Job) -> None:
        with self._wake:
            if self._life is not Life.RUNNING:
                raise EngineStoppedError(_CRASHED if self._life is Life.CRASHED else _CLOSING)
            self._check_room(len(job.requests))
            self._open.add(job)
            self._inbox.append(lambda: self._add(job))
            self._wake.notify()

    def _check_room(self, num_new: int) -> None:
        if num_new > self.max_requests:
            raise RequestError(
                f"prompt holds {num_new} prompts, but the server takes {self.max_requests} at "
                "once; send fewer"
            )
        in_flight = self._count()
        if in_flight + num_new > self.max_requests:
            raise QueueFullError(
                f"{in_flight} requests are in flight and the server takes {self.max_requests}; "
                "try again later"
            )

    def _count(self) -> int:
        return sum(len(job.requests) for job in self._open)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_reason_to_wake)
                if self._life is Life.CLOSING:
                    return
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            for delta in self._engine.step():
                if delta.request_id in self._owners:
                    self._owners[delta.request_id].post(delta)

    def _has_reason_to_wake(self) -> bool:
        return bool(self._inbox) or self._life is Life.CLOSING or self._engine.has_work

    def _add(self, job: Job) -> None:
        try:
            for request in job.requests:
                self._engine.add(request)
                self._owners[request.request_id] = job
        except RequestError as error:
            job.post(error)
        else:
            job.post(Acceptance.ACCEPTED)

    def _forget(self, job: Job) -> None:
        for request in job.requests:
            if self._owners.pop(request.request_id, job) is job:
                self._engine.abort(request.request_id)

    def _ended(self, thread: Future[None]) -> None:
        """Last act of the engine thread, whatever ended it."""
        error = thread.exception()
        if error is None:
            return
        _logger.critical("the engine crashed", exc_info=error)
        with self._wake:
            self._life = Life.CRASHED
            self._fail_open_jobs(_CRASHED)

    def _fail_open_jobs(self, reason: str) -> None:
        for job in self._open:
            job.post(EngineStoppedError(reason))
