"""A step plan laid out token after token: what a runner takes.

Plain integers: a decode step has so few that making tensors of them would cost more than they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.engine.scheduler import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """The tokens [query_start, query_start + query_len) of a step: the last of a sequence of kv_len
    tokens, which lives in `pages`.
    """

    query_start: int
    query_len: int
    kv_len: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of all chunks, one after the other.

    token_ids, positions, slot_mapping: of each. spans: one per chunk. logit_rows: the tokens whose
    logits are wanted.
    """

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    spans: list[BatchSpan]
    logit_rows: list[int]


def build_batch(plan: StepPlan, page_size: int) -> StepBatch:
    """Lay out the chunks of `plan` in order."""
    batch = StepBatch([], [], [], [], [])
    for chunk in plan.chunks:
        batch.spans.append(_span(chunk, len(batch.token_ids)))
        batch.token_ids.extend(chunk.token_ids)
        batch.positions.extend(range(chunk.start, chunk.end))
        batch.slot_mapping.extend(_slots(chunk, page_size))
        end = len(batch.token_ids)
        batch.logit_rows.extend(range(end - chunk.num_logits, end))
    return batch


def _slots(chunk: Chunk, page_size: int) -> list[int]:
    """Where the tokens of a chunk live: page * page_size + offset."""
    return [
        chunk.pages[position // page_size] * page_size + position % page_size
        for position in range(chunk.start, chunk.end)
    ]


def _span(chunk: Chunk, query_start: int) -> BatchSpan:
    return BatchSpan(query_start, len(chunk.token_ids), chunk.end, chunk.pages)
