"""Continuous batching: which tokens of which sequences the next step computes. Plain Python.

One token budget per step. Every decoding sequence gets its one token, what is left goes to
prompts, in chunks, oldest first. When pages run out, the youngest sequence gives its pages back
and is computed again later, so the oldest always advances and every request ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from terrazzo.engine.config import EngineLimits
from terrazzo.engine.pages import PagePool, PageTable
from terrazzo.engine.request import NO_LOGPROBS, Request, Stage

PROMPT_LOGITS_PER_STEP: Final = 256
"""Cuts the chunks of prompts whose logits are all wanted: logits are large, vocabulary by token."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request while it is generated.

    token_ids: prompt and generated tokens. num_computed: of those, how many have keys and values
    in `table`. num_reported: prompt tokens whose successors' log-probabilities are done.
    """

    request: Request
    index: int
    token_ids: list[int]
    num_reported: int
    stage: Stage = Stage.WAITING
    num_computed: int = 0
    cached_tokens: int = 0
    table: PageTable = field(default_factory=PageTable)

    @classmethod
    def born(cls, request: Request, index: int) -> Sequence:
        prompt = request.prompt_token_ids
        silent = index > 0 or request.params.prompt_logprobs is NO_LOGPROBS
        return cls(request, index, list(prompt), len(prompt) - 1 if silent else 0)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def reports_prompt(self) -> bool:
        return self.num_reported < self.num_prompt - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute `token_ids` at positions start, start + 1, ... of one sequence.

    pages: block table up to the last of these tokens. num_logits: logits are wanted of the last
    so many tokens. samples: the last logits choose the sequence's next token.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    num_logits: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_logits(self) -> int:
        return sum(chunk.num_logits for chunk in self.chunks)


class Scheduler:
    """First come, first served; equal calls give equal plans."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_size, caching=limits.prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue the first choice; the others follow when its prompt is in the prefix cache."""
        assert 1 <= len(request.prompt_token_ids) < self.limits.max_model_len
        self.waiting.append(Sequence.born(request, 0))

    def plan(self) -> StepPlan:
        """Choose the next step's work and give it pages."""
        chunks: list[Chunk] = []
        decoding = sum(sequence.num_pending == 1 for sequence in self.running)
        budget = self.limits.max_num_batched_tokens - decoding
        for sequence in tuple(self.running):
            decodes = sequence.num_pending == 1
            count = 1 if decodes else self._prompt_tokens(sequence, budget)
            if sequence.stage is Stage.RUNNING and count and self._make_room(sequence, count):
                chunks.append(self._chunk(sequence, count))
                budget -= 0 if decodes else count
        chunks += self._admit(budget)
        return StepPlan(tuple(chunks))

    def commit(self, chunk: Chunk) -> None:
        """The keys and values of a chunk are computed; publish its full pages."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        sequence.num_reported = max(sequence.num_reported, min(chunk.end, sequence.num_prompt - 1))
        self.pool.seal(sequence.table, sequence.token_ids, chunk.end)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """A token was sampled. With the first one, the other choices start on the same prompt."""
        if sequence.num_generated == 0 and sequence.index == 0:
            choices = range(sequence.request.params.n - 1, 0, -1)
            self.waiting.extendleft(Sequence.born(sequence.request, index) for index in choices)
        sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence go, wherever it is in its life."""
        if sequence.stage is Stage.RUNNING:
            self.running.remove(sequence)
        elif sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        self.pool.release(sequence.table)
        sequence.stage = Stage.FINISHED

    def sequences(self) -> list[Sequence]:
        """Everything not finished, running ones first."""
        return [*self.running, *self.waiting]

    def check_integrity(self) -> None:
        """Assert what holds between steps."""
        self.pool.check_integrity(sequence.table for sequence in self.sequences())
        assert len(self.running) <= self.limits.max_num_seqs
        assert all(sequence.stage is Stage.RUNNING for sequence in self.running)
        for sequence in self.waiting:
            assert sequence.stage is Stage.WAITING
            assert not sequence.table.pages
        for sequence in self.running:
            assert self.pool.missing(sequence.table, sequence.num_computed) == 0

    def _prompt_tokens(self, sequence: Sequence, budget: int) -> int:
        limit = PROMPT_LOGITS_PER_STEP if sequence.reports_prompt else budget
        return min(sequence.num_pending, budget, limit)

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + count
        samples = end == len(sequence.token_ids)
        reported = end - max(start, sequence.num_reported) if sequence.reports_prompt else 0
        return Chunk(
            sequence=sequence,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            pages=tuple(sequence.table.pages[: self.pool.pages_for(end)]),
            num_logits=max(reported, int(samples)),
            samples=samples,
        )

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Give `sequence` pages for `count` more tokens, at the cost of younger ones.

        False: it was the youngest itself and now waits.
        """
        needed = sequence.num_computed + count
        while self.pool.missing(sequence.table, needed) > self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self.pool.grow(sequence.table, needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self.running) > 1, "a request longer than the pool was admitted"
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.num_computed = 0
        sequence.stage = Stage.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting sequences, in order, while budget, slots and pages allow."""
        chunks: list[Chunk] = []
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            match = self._match(sequence)
            if not self._fits(sequence, match):
                break
            self._start(self.waiting.popleft(), match)
            count = self._prompt_tokens(sequence, budget)
            self.pool.grow(sequence.table, sequence.num_computed + count)
            chunks.append(self._chunk(sequence, count))
            budget -= count
        return chunks

    def _match(self, sequence: Sequence) -> PageTable:
        """Cached pages to start from; the last token is always computed, its logits are wanted."""
        limit = len(sequence.token_ids) - 1
        if sequence.reports_prompt:
            limit = min(limit, sequence.num_reported)
        return self.pool.match(sequence.token_ids, limit)

    def _fits(self, sequence: Sequence, match: PageTable) -> bool:
        """Whether the whole prompt has room; what was preempted a moment ago does not.

        With nothing running it always fits: no request is longer than the pool.
        """
        needed = self.pool.missing(match, len(sequence.token_ids)) + self.pool.num_idle(match)
        return needed <= self.pool.num_available

    def _start(self, sequence: Sequence, match: PageTable) -> None:
        self.pool.acquire(match)
        sequence.table = match
        sequence.num_computed = len(match.pages) * self.pool.page_size
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)
        if sequence.num_generated == 0:
            sequence.cached_tokens = sequence.num_computed
            self.prefix_query_tokens += sequence.num_prompt
            self.prefix_hit_tokens += sequence.num_computed
