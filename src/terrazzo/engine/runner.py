"""The seam between scheduling and mathematics: a step plan in, logits out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terrazzo.engine.batch import build_batch
from terrazzo.engine.scheduler import StepPlan
from terrazzo.models.decoder import Decoder
from terrazzo.nn.attention import KVPool, PagedContext


class Runner(Protocol):
    """Whatever computes a step. Tests put a plain function of the tokens here."""

    def run(self, plan: StepPlan) -> Tensor:
        """Logits float32 [plan.num_logits, vocabulary], chunks in order, tokens in order.

        Keys and values of every token of the plan are stored in its pages.
        """


class ModelRunner:
    """Runs a decoder; owns it and the KV pool."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        batch = build_batch(plan, self._pool.page_size)
        context = PagedContext(self._pool, batch.positions, batch.slot_mapping, batch.spans)
        hidden_TH = self.decoder(batch.token_ids, context)
        return self.decoder.logits(hidden_TH[batch.logit_rows])
