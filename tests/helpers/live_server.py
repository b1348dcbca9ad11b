"""A real HTTP server on a free port of this machine, over an engine whose model is a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from torch import Tensor

from helpers.fake_runner import fake_logits
from helpers.tiny_tokenizer import write_tokenizer
from terrazzo.engine.config import EngineLimits
from terrazzo.engine.engine import Engine, Vocabulary
from terrazzo.engine.request import SamplingParams
from terrazzo.engine.runner import Runner
from terrazzo.engine.scheduler import StepPlan
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.app import create_app
from terrazzo.server.listen import Server, bind, url
from terrazzo.server.prompts import ServedModel
from terrazzo.server.worker import Worker

NAME = "tiny"
EOS = 1
VOCABULARY = 320
MAX_MODEL_LEN = 64


class ScriptedRunner:
    """Answers every prompt with the same tokens, whatever the temperature.

    After a prompt token comes, most likely, the next one: so prompts have log-probabilities.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = tuple(script)

    def run(self, plan: StepPlan) -> Tensor:
        rows = [
            self._row(chunk.sequence.token_ids, chunk.sequence.num_prompt, end)
            for chunk in plan.chunks
            for end in range(chunk.end - chunk.num_logits + 1, chunk.end + 1)
        ]
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)

    def _row(self, token_ids: Sequence[int], num_prompt: int, end: int) -> Tensor:
        row = torch.zeros(VOCABULARY)
        generated = end - num_prompt
        row[token_ids[end] if generated < 0 else self._script[generated]] = 40.0
        return row


class RandomRunner:
    """Tokens that depend on everything before them and on the seed."""

    def run(self, plan: StepPlan) -> Tensor:
        rows = [
            fake_logits(chunk.sequence.token_ids[: chunk.end], VOCABULARY)
            for chunk in plan.chunks
            for _ in range(chunk.num_logits)
        ]
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)


class GatedRunner:
    """Each step waits for a permit. num_steps: steps that have begun."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._permits = threading.Semaphore(0)
        self.begun = threading.Event()
        self.num_steps = 0

    def run(self, plan: StepPlan) -> Tensor:
        self.num_steps += 1
        self.begun.set()
        assert self._permits.acquire(timeout=20)
        return self._inner.run(plan)

    def permit(self, num_steps: int) -> None:
        self._permits.release(num_steps)


class CrashingRunner:
    """A model that fails at its first step."""

    def run(self, plan: StepPlan) -> Tensor:
        raise ZeroDivisionError("the model fell over")


@dataclass(frozen=True, slots=True)
class Live:
    """A running server."""

    url: str
    engine: Engine
    worker: Worker
    tokenizer: Tokenizer


def write_speaking_folder(folder: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(folder, vocab_size=VOCABULARY))


@contextmanager
def live_server(
    tokenizer: Tokenizer,
    runner: Runner,
    *,
    max_requests: int = 16,
    api_keys: Sequence[str] = (),
    keep_alive_seconds: float = 10.0,
    drain_seconds: float = 5.0,
) -> Iterator[Live]:
    limits = EngineLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        page_size=4,
        num_pages=128,
    )
    vocabulary = Vocabulary(VOCABULARY, tokenizer.eos_token_ids, tokenizer.decode)
    engine = Engine(runner, limits, vocabulary)
    worker = Worker(engine, max_requests)
    model = ServedModel(NAME, 1_700_000_000, MAX_MODEL_LEN, tokenizer, SamplingParams)
    app = create_app(model, worker, api_keys=api_keys, keep_alive_seconds=keep_alive_seconds)
    ready = threading.Event()
    config = uvicorn.Config(app, log_level="critical")
    with closing(bind("127.0.0.1", 0)) as bound:
        server = Server(
            config, on_ready=ready.set, give_up=worker.stop, drain_seconds=drain_seconds
        )
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        thread.start()
        try:
            assert ready.wait(timeout=20)
            yield Live(url(bound, "127.0.0.1"), engine, worker, tokenizer)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            worker.close()
    assert not thread.is_alive()
