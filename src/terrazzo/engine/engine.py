"""The synchronous core: schedule, run, commit."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.engine.request import Delta, Request


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since birth (num_preemptions, prefix_*) and gauges of this moment.

    prefix_query_tokens: prompt tokens looked up; prefix_hit_tokens: of those found.
    """

    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class Engine:
    """One thread calls everything here; nothing blocks but `step`."""

    def add(self, request: Request) -> None:
        """Queue a request. RequestError when it can never run; nothing is queued then."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request; the next `step` returns an ABORTED Delta for each unfinished choice.

        Unknown and already finished ids are ignored.
        """
        raise NotImplementedError

    def step(self) -> list[Delta]:
        """Schedule, run the model once, commit. An empty list is legal (a chunk of a prompt)."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        raise NotImplementedError
