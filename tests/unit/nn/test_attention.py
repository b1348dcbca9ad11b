from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from terrazzo.nn.attention import CausalContext, KVPool, PagedContext, Scoring, SequenceSpan

PLAIN = Scoring(0.3)


def by_definition(q_LHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scoring: Scoring) -> Tensor:
    """The last L of S tokens, one head and one query at a time, in float64."""
    queries, heads, _ = q_LHD.shape
    length, kv_heads, _ = k_SKD.shape
    out = torch.empty_like(q_LHD, dtype=torch.float64)
    for head in range(heads):
        keys, values = (x[:, head * kv_heads // heads].double() for x in (k_SKD, v_SKD))
        for query in range(queries):
            seen = length - queries + query + 1
            part = slice(max(0, seen - scoring.window), seen)
            scores = keys[part] @ q_LHD[query, head].double() * scoring.scale
            if math.isfinite(scoring.softcap):
                scores = scoring.softcap * (scores / scoring.softcap).tanh()
            out[query, head] = scores.softmax(0) @ values[part]
    return out


SCORINGS = [PLAIN, Scoring(0.3, window=1), Scoring(0.3, window=4), Scoring(0.5, softcap=0.7)]
SCORINGS.append(Scoring(0.5, window=5, softcap=0.7))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_sequences_of_a_causal_context_do_not_see_each_other(
    heads: int, kv_heads: int, length: int, scoring: Scoring
) -> None:
    q, k, v = (torch.randn(3 * length, n, 8) for n in (heads, kv_heads, kv_heads))
    context = CausalContext(3, length)
    assert context.positions.tolist() == [*range(length)] * 3
    actual = context.attend(0, q, k, v, scoring)
    for start in range(0, 3 * length, length):
        rows = slice(start, start + length)
        close(actual[rows], by_definition(q[rows], k[rows], v[rows], scoring))


@pytest.mark.parametrize("table", [[2, 3, 4], [4, 0, 3]], ids=["side by side", "scattered"])
@pytest.mark.parametrize("chunks", [(10,), (4, 6), (9, 1), (1, 1, 5, 3)])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_chunks_see_what_was_stored_before_them(
    table: list[int], chunks: tuple[int], scoring: Scoring
) -> None:
    q, k, v = (torch.randn(10, n, 8) for n in (6, 2, 2))
    pool = KVPool.allocate(2, num_pages=5, page_size=4, num_kv_heads=2, head_dim=8)
    outputs, start = [], 0
    for chunk in chunks:
        end = start + chunk
        positions = torch.arange(start, end)
        slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
        span = SequenceSpan(0, chunk, end, torch.tensor(table))
        context = PagedContext(pool, positions, slots, (span,))
        outputs.append(context.attend(1, q[start:end], k[start:end], v[start:end], scoring))
        start = end
    close(torch.cat(outputs), by_definition(q, k, v, scoring))


def test_layers_and_sequences_of_a_pool_stay_apart() -> None:
    pool = KVPool.allocate(2, num_pages=4, page_size=2, num_kv_heads=2, head_dim=8)
    spans = (
        SequenceSpan(0, 3, 3, torch.tensor([3, 1])),
        SequenceSpan(3, 1, 1, torch.tensor([0])),
    )
    slots = torch.tensor([6, 7, 2, 0])
    context = PagedContext(pool, torch.tensor([0, 1, 2, 0]), slots, spans)
    layers = [tuple(torch.randn(4, n, 8) for n in (4, 2, 2)) for _ in range(2)]
    for layer, (q, k, v) in enumerate(layers):
        actual = context.attend(layer, q, k, v, PLAIN)
        close(actual[:3], by_definition(q[:3], k[:3], v[:3], PLAIN))
        close(actual[3:], by_definition(q[3:], k[3:], v[3:], PLAIN))
    for layer, (_, k, v) in enumerate(layers):
        assert torch.equal(pool.keys[layer].flatten(0, 1)[slots], k)
        assert torch.equal(pool.values[layer].flatten(0, 1)[slots], v)


@pytest.mark.parametrize(
    "lengths", [(9,), (4, 5, 7, 6), (1, 9, 16, 2, 3), (8, 8), (5, 300, 256, 257, 200, 6)]
)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_decoding_together_equals_decoding_alone(
    lengths: tuple[int, ...], scoring: Scoring
) -> None:
    page_size = 4
    pages_each = max(lengths) // page_size + 1
    pool = KVPool.allocate(1, len(lengths) * pages_each, page_size, 2, 8)
    for pages in (*pool.keys, *pool.values):
        pages.fill_(torch.nan)
    tables = torch.randperm(pool.num_pages).view(len(lengths), pages_each)
    histories, slots = [], []
    for length, table in zip(lengths, tables, strict=True):
        tokens = torch.arange(length)
        slot = table[tokens // page_size] * page_size + tokens % page_size
        k, v = (torch.randn(length, 2, 8) for _ in range(2))
        pool.store(0, slot[:-1], k[:-1], v[:-1])
        histories.append((k, v))
        slots.append(slot[-1])
    spans = [
        SequenceSpan(row, 1, length, table[: -(-length // page_size)])
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True))
    ]
    q = torch.randn(len(lengths), 6, 8)
    new_k, new_v = (torch.stack([pair[side][-1] for pair in histories]) for side in (0, 1))
    positions = torch.tensor(lengths) - 1
    context = PagedContext(pool, positions, torch.stack(slots), spans)
    actual = context.attend(0, q, new_k, new_v, scoring)
    for row, (k, v) in enumerate(histories):
        close(actual[row : row + 1], by_definition(q[row : row + 1], k, v, scoring))


def test_a_pool_of_half_precision_rounds_what_it_stores() -> None:
    pool = KVPool.allocate(1, 1, 4, 1, 8, dtype=torch.float16)
    q, k, v = (torch.randn(3, 1, 8) for _ in range(3))
    span = SequenceSpan(0, 3, 3, torch.tensor([0]))
    context = PagedContext(pool, torch.arange(3), torch.arange(3), (span,))
    close(
        context.attend(0, q, k, v, Scoring(1 / math.sqrt(8))),
        by_definition(q, k.half(), v.half(), Scoring(1 / math.sqrt(8))),
    )
