"""The seam between scheduling and mathematics: a step plan in, logits out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terrazzo.engine.batch import BatchSpan, build_batch
from terrazzo.engine.scheduler import StepPlan
from terrazzo.models.decoder import Decoder
from terrazzo.models.program import NotNativeError, ProgrammedDecoder, compile_decoder
from terrazzo.nn.attention import KVPool, PagedContext, SequenceSpan


class Runner(Protocol):
    """Whatever computes a step. Tests put a plain function of the tokens here."""

    def run(self, plan: StepPlan) -> Tensor:
        """Logits float32 [plan.num_logits, vocabulary], chunks in order, tokens in order.

        Keys and values of every token of the plan are stored in its pages.
        """


class ModelRunner:
    """Runs a decoder, stage after stage; owns it and the KV pool."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        batch = build_batch(plan, self._pool.page_size)
        positions_T, slots_T, rows_R = map(
            torch.tensor, (batch.positions, batch.slot_mapping, batch.logit_rows)
        )
        context = PagedContext(self._pool, positions_T, slots_T, tuple(map(_span, batch.spans)))
        hidden_TH = self.decoder(torch.tensor(batch.token_ids), context)
        return self.decoder.logits(hidden_TH[rows_R.long()])


class ProgramRunner:
    """Runs a decoder as one native program; owns it and the KV pool."""

    def __init__(self, decoder: ProgrammedDecoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        batch = build_batch(plan, self._pool.page_size)
        spans = [(s.query_start, s.query_len, s.kv_len, s.pages) for s in batch.spans]
        return self._decoder(
            batch.token_ids, batch.positions, batch.slot_mapping, spans, batch.logit_rows
        )


def _span(span: BatchSpan) -> SequenceSpan:
    table = torch.tensor(span.pages)
    return SequenceSpan(span.query_start, span.query_len, span.kv_len, table)


def fastest_runner(decoder: Decoder, pool: KVPool) -> Runner:
    """As a program where every part of the decoder has a native operation."""
    try:
        return ProgramRunner(compile_decoder(decoder, pool), pool)
    except NotNativeError:
        return ModelRunner(decoder, pool)
