"""The worker alone, over an engine that is a list of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from terrazzo.engine.request import Delta, FinishReason, Request, SamplingParams
from terrazzo.errors import RequestError
from terrazzo.server.worker import EngineStoppedError, Job, QueueFullError, Worker


class Echoing:
    """Gives each choice one token, with which it ends or not; `gate` holds back every step."""

    def __init__(self, finish: FinishReason = FinishReason.LENGTH) -> None:
        self.finish = finish
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def add(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt has no tokens")
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.requests = [each for each in self.requests if each.request_id != request_id]

    def step(self) -> list[Delta]:
        assert self.gate.wait(timeout=20)
        done, self.requests = self.requests, []
        return [
            Delta(
                request_id=request.request_id,
                index=index,
                text="x",
                token_ids=(7,),
                logprobs=(),
                finish=self.finish,
                prompt_tokens=1,
                cached_tokens=0,
            )
            for request in done
            for index in range(request.params.n)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self.requests)


def request(name: str, n: int = 1, prompt: tuple[int, ...] = (3,)) -> Request:
    return Request(name, prompt, SamplingParams(n=n))


@contextmanager
def working(engine: Echoing, max_requests: int = 4) -> Iterator[Worker]:
    worker = Worker(engine, max_requests)
    try:
        yield worker
    finally:
        engine.gate.set()
        worker.close()


def test_every_choice_of_every_request_is_delivered() -> None:
    async def collect(worker: Worker) -> list[tuple[str, int]]:
        job = await worker.submit((request("a", n=2), request("b")))
        assert worker.num_requests == 2
        deltas = [(delta.request_id, delta.index) async for delta in job.deltas()]
        worker.release(job)
        return deltas

    with working(Echoing()) as worker:
        assert asyncio.run(collect(worker)) == [("a", 0), ("a", 1), ("b", 0)]
        assert worker.num_requests == 0


def test_a_refused_request_takes_the_whole_job_back() -> None:
    engine = Echoing()

    async def refused(worker: Worker) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await worker.submit((request("a"), request("b", prompt=())))
        assert worker.num_requests == 0
        # Commands are carried out in order: once the next job is accepted, the first is forgotten.
        worker.release(await worker.submit((request("c"),)))

    with working(engine) as worker:
        asyncio.run(refused(worker))
        assert engine.aborted[:2] == ["a", "b"]


def test_room_is_counted_in_requests() -> None:
    engine = Echoing()
    engine.gate.clear()

    async def fill(worker: Worker) -> None:
        job = await worker.submit((request("a"), request("b"), request("c")))
        with pytest.raises(QueueFullError, match="3 requests are in flight"):
            await worker.submit((request("d"), request("e")))
        with pytest.raises(RequestError, match="5 prompts"):
            await worker.submit(tuple(request(name) for name in "vwxyz"))
        worker.release(job)

    with working(engine) as worker:
        asyncio.run(fill(worker))


def test_a_cancelled_submission_leaves_nothing_behind() -> None:
    engine = Echoing()
    engine.gate.clear()

    async def give_up(worker: Worker) -> None:
        job = await worker.submit((request("a"),))
        waiting = asyncio.create_task(worker.submit((request("b"),)))
        await asyncio.sleep(0.05)
        assert worker.num_requests == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert worker.num_requests == 1
        engine.gate.set()
        assert len([delta async for delta in job.deltas()]) == 1
        worker.release(job)

    with working(engine) as worker:
        asyncio.run(give_up(worker))


def test_closing_tells_who_waits_and_who_comes_late() -> None:
    engine = Echoing(FinishReason.NOT_YET)
    engine.gate.clear()

    async def read(job: Job) -> None:
        async for delta in job.deltas():
            assert delta.text == "x"

    async def outlive(worker: Worker) -> None:
        job = await worker.submit((request("a"),))
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.sleep(0.05)
        assert not worker.is_healthy
        with pytest.raises(EngineStoppedError):
            await worker.submit((request("c"),))
        engine.gate.set()
        await closing
        with pytest.raises(EngineStoppedError):
            await read(job)
        worker.release(job)

    with working(engine) as worker:
        asyncio.run(outlive(worker))
