"""A step plan as tensors: what the decoder and the attention context take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.scheduler import Chunk, StepPlan
from terrazzo.nn.attention import SequenceSpan


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of all chunks, one after the other.

    token_ids, positions, slot_mapping: int64 [T]. spans: one per chunk. logit_rows: int64 [R],
    the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    spans: tuple[SequenceSpan, ...]
    logit_rows: Tensor


def build_batch(plan: StepPlan, page_size: int) -> StepBatch:
    """Lay out the chunks of `plan` in order."""
    spans: list[SequenceSpan] = []
    rows: list[int] = []
    end = 0
    for chunk in plan.chunks:
        spans.append(_span(chunk, end))
        end += len(chunk.token_ids)
        rows.extend(range(end - chunk.num_logits, end))
    positions = [torch.arange(chunk.start, chunk.end) for chunk in plan.chunks]
    slots = [
        slots_of(span.block_table, position, page_size)
        for span, position in zip(spans, positions, strict=True)
    ]
    return StepBatch(
        token_ids=torch.tensor([token for chunk in plan.chunks for token in chunk.token_ids]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        spans=tuple(spans),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )


def slots_of(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the tokens at `positions` of one sequence live: page * page_size + offset, int64."""
    return block_table[positions // page_size] * page_size + positions % page_size


def _span(chunk: Chunk, query_start: int) -> SequenceSpan:
    return SequenceSpan(
        query_start=query_start,
        query_len=len(chunk.token_ids),
        kv_len=chunk.end,
        block_table=torch.tensor(chunk.pages),
    )
