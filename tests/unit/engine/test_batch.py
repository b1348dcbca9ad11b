from __future__ import annotations

from terrazzo.engine.batch import build_batch
from terrazzo.engine.request import Request, SamplingParams
from terrazzo.engine.scheduler import Chunk, Sequence, StepPlan


def chunk(start: int, tokens: tuple[int, ...], pages: tuple[int, ...], num_logits: int) -> Chunk:
    sequence = Sequence.born(Request("a", (1,), SamplingParams()), 0)
    return Chunk(sequence, start, tokens, pages, num_logits, samples=num_logits > 0)


def test_chunks_lie_one_after_the_other() -> None:
    first = chunk(3, (10, 11, 12), (5, 2), 2)
    second = chunk(0, (20, 21), (7,), 0)
    third = chunk(8, (30,), (1, 3, 0), 1)
    batch = build_batch(StepPlan((first, second, third)), page_size=4)
    assert batch.token_ids == [10, 11, 12, 20, 21, 30]
    assert batch.positions == [3, 4, 5, 0, 1, 8]
    assert batch.slot_mapping == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 7 * 4, 7 * 4 + 1, 0]
    assert batch.logit_rows == [1, 2, 5]
    assert [(s.query_start, s.query_len, s.kv_len) for s in batch.spans] == [
        (0, 3, 6),
        (3, 2, 2),
        (5, 1, 9),
    ]
    assert [span.pages for span in batch.spans] == [(5, 2), (7,), (1, 3, 0)]
