"""How the queries of a forward pass read keys and values out of pages.

Planned once per pass and used by every layer, so that a layer costs few calls: pages that stand
side by side are read in place, short decoding sequences of similar length are one call, and what
must be gathered goes into memory that all layers share, because fresh memory costs more than the
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from terrazzo.nn.grouped import NO_WINDOW, Mask, Scoring, causal_mask, grouped_attention, weigh
from terrazzo.nn.kv_pool import KVPool

SHORT = 256
"""Tokens up to which decoding sequences are read together: there a call costs more than gathering
their keys and values. Longer ones are read alone, in place where their pages allow it.
"""


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The tokens of one sequence in a forward pass.

    query_start, query_len: its rows among the T tokens. kv_len: tokens it has once these are
    stored. block_table: int64 [pages], the pages of the sequence in order, at least enough for
    kv_len tokens.
    """

    query_start: int
    query_len: int
    kv_len: int
    block_table: Tensor

    def first_seen(self, window: int) -> int:
        """The earliest token that any of the queries sees."""
        return max(0, self.kv_len - self.query_len - window + 1)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Where gathered keys and values go, [tokens, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def for_reads(cls, reads: Sequence[_ReadOne | _ReadMany], pool: KVPool) -> _Scratch:
        tokens = max(read.num_gathered for read in reads)
        shape = (tokens, *pool.keys[0].shape[2:])
        return cls(*(torch.empty(shape, dtype=pool.keys[0].dtype) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class _ReadOne:
    """One sequence. rows: its queries. slots: of the tokens they see, a slice where these count up
    by one.
    """

    rows: slice
    slots: slice | Tensor
    mask: Mask

    @classmethod
    def of(cls, span: SequenceSpan, page_size: int, window: int) -> _ReadOne:
        rows = slice(span.query_start, span.query_start + span.query_len)
        first_page, skipped = divmod(span.first_seen(window), page_size)
        pages = _side_by_side(span.block_table[first_page : -(-span.kv_len // page_size)])
        count = span.kv_len - span.first_seen(window)
        mask = causal_mask(span.query_len, count, window)
        if isinstance(pages, slice):
            start = pages.start * page_size + skipped
            return cls(rows, slice(start, start + count), mask)
        slots_PO = pages.unsqueeze(1) * page_size + torch.arange(page_size)
        return cls(rows, slots_PO.flatten()[skipped : skipped + count], mask)

    @property
    def num_gathered(self) -> int:
        return 0 if isinstance(self.slots, slice) else self.slots.shape[0]

    def attend(self, q_LHD: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        return grouped_attention(self.mask, q_LHD, keys, values, scoring)


@dataclass(frozen=True, slots=True)
class _ReadMany:
    """B short sequences of similar length with one query each.

    rows: their queries. slots: of S tokens each, int64 [B * S]; sequences shorter than S repeat
    their first slot, and the mask hides that. mask_B11S: float32, 0 or minus infinity.
    """

    rows: slice | Tensor
    slots: Tensor
    mask_B11S: Tensor

    @classmethod
    def of(cls, spans: Sequence[SequenceSpan], page_size: int, window: int) -> _ReadMany:
        rows = torch.tensor([span.query_start for span in spans])
        first_B1 = torch.tensor([[span.first_seen(window)] for span in spans])
        lengths_B1 = torch.tensor([[span.kv_len] for span in spans]) - first_B1
        tokens_S = torch.arange(int(lengths_B1.max()))
        hidden_BS = tokens_S >= lengths_B1
        tokens_BS = tokens_S.where(~hidden_BS, 0) + first_B1
        pages_BP = pad_sequence([span.block_table for span in spans], batch_first=True)
        slots_BS = pages_BP.gather(1, tokens_BS // page_size) * page_size + tokens_BS % page_size
        mask_BS = torch.zeros(hidden_BS.shape).masked_fill_(hidden_BS, -torch.inf)
        return cls(_side_by_side(rows), slots_BS.flatten(), mask_BS[:, None, None])

    @property
    def num_gathered(self) -> int:
        return self.slots.shape[0]

    def attend(self, q_BHD: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        batch, _, width = q_BHD.shape
        _, kv_heads, _ = keys.shape
        out_BKGD = weigh(
            q_BHD.view(batch, kv_heads, -1, width),
            keys.view(batch, -1, kv_heads, width).transpose(1, 2),
            values.view(batch, -1, kv_heads, width).transpose(1, 2),
            self.mask_B11S,
            scoring,
        )
        return out_BKGD.reshape(q_BHD.shape)


class ReadPlan:
    """Reads that together answer all queries of a forward pass, planned once for each window."""

    __slots__ = ("_longest", "_page_size", "_planned", "_scratch", "_sequences")

    def __init__(self, sequences: Sequence[SequenceSpan], pool: KVPool) -> None:
        self._sequences = sequences
        self._page_size = pool.page_size
        self._longest = max(span.kv_len for span in sequences)
        everything = _reads_of(sequences, pool.page_size, NO_WINDOW)
        self._planned = {self._longest: everything}
        # A window reads no more than that, so its reads fit as well.
        self._scratch = _Scratch.for_reads(everything, pool)

    def attend(self, q_THD: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """keys, values: the pages of one layer. -> [T, H, D]"""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        scratch = self._scratch
        for read in self._reads(scoring.window):
            k_SKD = _fetch(keys, read.slots, scratch.keys).to(q_THD.dtype)
            v_SKD = _fetch(values, read.slots, scratch.values).to(q_THD.dtype)
            out_THD[read.rows] = read.attend(q_THD[read.rows], k_SKD, v_SKD, scoring)
        return out_THD

    def _reads(self, window: int) -> tuple[_ReadOne | _ReadMany, ...]:
        """Windows that hide nothing are one."""
        window = min(window, self._longest)
        if window not in self._planned:
            self._planned[window] = _reads_of(self._sequences, self._page_size, window)
        return self._planned[window]


def _fetch(pages: Tensor, slots: slice | Tensor, scratch: Tensor) -> Tensor:
    """[pages, page_size, K, D] -> [S, K, D], in place where `slots` is a slice."""
    tokens = pages.flatten(0, 1)
    if isinstance(slots, slice):
        return tokens[slots]
    return torch.index_select(tokens, 0, slots, out=scratch[: slots.shape[0]])


def _reads_of(
    sequences: Sequence[SequenceSpan], page_size: int, window: int
) -> tuple[_ReadOne | _ReadMany, ...]:
    """Decoding sequences go together where their lengths have the same number of binary digits, so
    that less than half of what is read is padding.
    """
    alone = []
    together: dict[int, list[SequenceSpan]] = {}
    for span in sequences:
        if span.query_len == 1 and span.kv_len <= SHORT:
            together.setdefault(span.kv_len.bit_length(), []).append(span)
        else:
            alone.append(span)
    alone += [spans[0] for spans in together.values() if len(spans) == 1]
    groups = [spans for spans in together.values() if len(spans) > 1]
    return (
        *(_ReadOne.of(span, page_size, window) for span in alone),
        *(_ReadMany.of(spans, page_size, window) for spans in groups),
    )


def _side_by_side(indices: Tensor) -> slice | Tensor:
    """int64 [n] as a slice where the indices count up by one."""
    first, count = int(indices[0]), indices.shape[0]
    consecutive = indices.tolist() == list(range(first, first + count))
    return slice(first, first + count) if consecutive else indices
