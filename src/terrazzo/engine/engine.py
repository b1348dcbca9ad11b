"""The synchronous core: schedule, run, commit."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from terrazzo.engine.config import EngineLimits
from terrazzo.engine.output import Output, stop_tokens
from terrazzo.engine.request import (
    NO_LOGPROBS,
    UNSEEDED,
    Delta,
    FinishReason,
    Request,
    TokenLogprob,
    TopLogprobs,
)
from terrazzo.engine.runner import Runner
from terrazzo.engine.sampler import SampleRow, sample, token_logprobs
from terrazzo.engine.scheduler import Chunk, Scheduler, Sequence, StepPlan
from terrazzo.engine.text import Decode
from terrazzo.errors import RequestError
from terrazzo.kernels.machine import no_other_threads


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine knows about tokens.

    size: logits per row. eos_token_ids: any of them ends a choice. decode: `no_text` for a model
    without a tokenizer.
    """

    size: int
    eos_token_ids: frozenset[int]
    decode: Decode


def no_text(token_ids: object) -> str:
    """Decoding without a tokenizer: every token is the empty text."""
    return ""


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


@dataclass(slots=True)
class _InFlight:
    """A request and the indices of its choices that have not ended."""

    request: Request
    open: set[int]


@dataclass(slots=True)
class _Growing:
    """What a sequence has given out so far, beside its tokens."""

    output: Output
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One new token of one sequence."""

    sequence: Sequence
    token_id: int
    logprobs: tuple[TokenLogprob, ...]


class Engine:
    """One thread calls everything here; nothing blocks but `step`.

    draw_seed: gives seeds to requests without one.
    """

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        vocabulary: Vocabulary,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.limits = limits
        self.vocabulary = vocabulary
        self.scheduler = Scheduler(limits)
        self._runner = runner
        self._draw_seed = draw_seed
        self._in_flight: dict[str, _InFlight] = {}
        self._growing: dict[Sequence, _Growing] = {}
        self._aborted: list[Delta] = []

    def add(self, request: Request) -> None:
        """Queue a request. RequestError when it can never run; nothing is queued then."""
        self._check(request)
        params = request.params
        if params.seed is UNSEEDED:
            request = replace(request, params=replace(params, seed=self._draw_seed()))
        self._in_flight[request.request_id] = _InFlight(request, set(range(params.n)))
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; the next `step` returns an ABORTED Delta for each unfinished choice.

        Unknown and already finished ids are ignored.
        """
        if request_id not in self._in_flight:
            return
        ended = self._in_flight.pop(request_id)
        for sequence in self.scheduler.sequences():
            if sequence.request is ended.request:
                self.scheduler.finish(sequence)
                self._growing.pop(sequence, None)
        self._aborted += [_aborted(ended.request, index) for index in sorted(ended.open)]

    def step(self) -> list[Delta]:
        """Schedule, run the model once, commit. An empty list is legal (a chunk of a prompt)."""
        deltas, self._aborted = self._aborted, []
        plan = self.scheduler.plan()
        if plan.chunks:
            with no_other_threads():
                deltas += self._commit(plan, self._runner.run(plan))
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or bool(self._aborted)

    @property
    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_used=scheduler.pool.num_used,
            pages_total=scheduler.pool.num_pages,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Assert what holds between steps."""
        self.scheduler.check_integrity()
        alive = self.scheduler.sequences()
        assert set(self._growing) <= set(alive)
        assert {each.request.request_id for each in alive} == set(self._in_flight)

    def _check(self, request: Request) -> None:
        if request.request_id in self._in_flight:
            raise RequestError(f"request {request.request_id!r} is already in flight; rename one")
        length, longest = len(request.prompt_token_ids), self.limits.max_model_len
        if not length:
            raise RequestError("the prompt has no tokens; send at least one")
        if length >= longest:
            raise RequestError(
                f"the prompt has {length} tokens, but prompt and output together may have "
                f"{longest}; shorten it to {longest - 1} or raise max_model_len"
            )
        params = request.params
        self._check_ids("the prompt", request.prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(token for token, _ in params.logit_bias))
        if params.stop and self.vocabulary.decode is no_text:
            raise RequestError(
                f"stop is {params.stop!r}, but this model has no tokenizer and so no text; use "
                "stop_token_ids"
            )

    def _check_ids(self, field: str, token_ids: tuple[int, ...]) -> None:
        size = self.vocabulary.size
        illegal = [token for token in token_ids if not 0 <= token < size]
        if illegal:
            raise RequestError(
                f"{field} holds the token id {illegal[0]}; legal ids are 0 to {size - 1}"
            )

    def _commit(self, plan: StepPlan, logits_RV: Tensor) -> list[Delta]:
        first = 0
        last_rows: list[int] = []
        sampling: list[Sequence] = []
        for chunk in plan.chunks:
            rows = slice(first, first + chunk.num_logits)
            first += chunk.num_logits
            if chunk.sequence.reports_prompt:
                self._report_prompt(chunk, logits_RV[rows])
            if chunk.samples:
                last_rows.append(first - 1)
                sampling.append(chunk.sequence)
            self.scheduler.commit(chunk)
        if not sampling:
            return []
        if len(last_rows) < logits_RV.shape[0]:
            logits_RV = logits_RV[last_rows]
        return [self._advance(each) for each in self._sample(logits_RV, sampling)]

    def _sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> list[_Sampled]:
        token_ids = sample(logits_SV, [self._row(sequence) for sequence in sequences])
        sampled: list[_Sampled] = []
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            wanted = sequence.request.params.logprobs
            reported = (
                token_logprobs(logits_SV[row : row + 1], [token_id], wanted.count)
                if isinstance(wanted, TopLogprobs)
                else ()
            )
            sampled.append(_Sampled(sequence, token_id, reported))
        return sampled

    def _row(self, sequence: Sequence) -> SampleRow:
        params = sequence.request.params
        early = sequence.num_generated < params.min_tokens
        eos = self.vocabulary.eos_token_ids
        return SampleRow(
            params=params,
            choice=sequence.index,
            token_ids=sequence.token_ids,
            num_prompt=sequence.num_prompt,
            blocked=tuple(sorted(stop_tokens(params, eos))) if early else (),
        )

    def _report_prompt(self, chunk: Chunk, logits_RV: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this chunk's logits predict."""
        wanted = chunk.sequence.request.params.prompt_logprobs
        assert wanted is not NO_LOGPROBS
        first = chunk.end - chunk.num_logits + 1
        predicted = chunk.sequence.request.prompt_token_ids[first : chunk.end + 1]
        reported = token_logprobs(logits_RV[: len(predicted)], predicted, wanted.count)
        self._grow(chunk.sequence).prompt_logprobs.extend(reported)

    def _grow(self, sequence: Sequence) -> _Growing:
        if sequence not in self._growing:
            room = self.limits.max_model_len - sequence.num_prompt
            vocabulary = self.vocabulary
            params = sequence.request.params
            output = Output(params, vocabulary.eos_token_ids, room, vocabulary.decode)
            self._growing[sequence] = _Growing(output)
        return self._growing[sequence]

    def _advance(self, sampled: _Sampled) -> Delta:
        """Append the token to its sequence, and end that where it ends."""
        sequence = sampled.sequence
        growing = self._grow(sequence)
        self.scheduler.append(sequence, sampled.token_id)
        grown = growing.output.accept(sampled.token_id)
        delta = Delta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            text=grown.text,
            token_ids=(sampled.token_id,),
            logprobs=sampled.logprobs,
            finish=grown.finish,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens,
            prompt_logprobs=tuple(growing.prompt_logprobs),
        )
        growing.prompt_logprobs.clear()
        if grown.finish is not FinishReason.NOT_YET:
            self._end(sequence)
        return delta

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._growing[sequence]
        in_flight = self._in_flight[sequence.request.request_id]
        in_flight.open.remove(sequence.index)
        if not in_flight.open:
            del self._in_flight[sequence.request.request_id]


def _aborted(request: Request, index: int) -> Delta:
    return Delta(
        request_id=request.request_id,
        index=index,
        text="",
        token_ids=(),
        logprobs=(),
        finish=FinishReason.ABORTED,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=0,
    )
