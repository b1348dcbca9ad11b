"""How the queries of a forward pass read keys and values out of pages.

Planned once per pass and used by every layer, so that a layer costs few calls: pages that stand
side by side are read in place, and decoding sequences of similar length are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from terrazzo.nn.grouped import Look, causal_look, grouped_attention


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


class Read(Protocol):
    """How some of the T queries read their keys and values; planned once, used by every layer."""

    @property
    def rows(self) -> slice | Tensor: ...

    def __call__(self, q_LHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _ReadOne:
    """One sequence. pages: a slice where they stand side by side, so that nothing is copied."""

    rows: slice
    pages: slice | Tensor
    kv_len: int
    look: Look

    @classmethod
    def of(cls, span: SequenceSpan, page_size: int) -> _ReadOne:
        pages = span.block_table[: -(-span.kv_len // page_size)]
        rows = slice(span.query_start, span.query_start + span.query_len)
        look = causal_look(span.query_len, span.kv_len)
        return cls(rows, _side_by_side(pages), span.kv_len, look)

    def __call__(self, q_LHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        k_SKD, v_SKD = self._read(keys, q_LHD.dtype), self._read(values, q_LHD.dtype)
        return grouped_attention(self.look, q_LHD, k_SKD, v_SKD, scale)

    def _read(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        pages = self.pages
        mine = pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)
        return mine.flatten(0, 1)[: self.kv_len].to(dtype)


@dataclass(frozen=True, slots=True)
class _ReadMany:
    """B sequences of similar length with one query each, as one call.

    slots_BS: of every token; rows shorter than S repeat their first slot, and the mask hides that.
    mask_B11S: float32, 0 or minus infinity.
    """

    rows: slice | Tensor
    slots_BS: Tensor
    mask_B11S: Tensor

    @classmethod
    def of(cls, spans: Sequence[SequenceSpan], page_size: int) -> _ReadMany:
        rows = torch.tensor([span.query_start for span in spans])
        lengths_B1 = torch.tensor([[span.kv_len] for span in spans])
        tokens_S = torch.arange(int(lengths_B1.max()))
        hidden_BS = tokens_S >= lengths_B1
        tokens_BS = tokens_S.where(~hidden_BS, 0)
        pages_BP = pad_sequence([span.block_table for span in spans], batch_first=True)
        slots_BS = pages_BP.gather(1, tokens_BS // page_size) * page_size + tokens_BS % page_size
        mask_BS = torch.zeros(hidden_BS.shape).masked_fill_(hidden_BS, -torch.inf)
        return cls(_side_by_side(rows), slots_BS, mask_BS[:, None, None])

    def __call__(self, q_LHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        k_BKSD, v_BKSD = self._read(keys, q_LHD.dtype), self._read(values, q_LHD.dtype)
        q_BKGD = q_LHD.view(q_LHD.shape[0], keys.shape[2], -1, q_LHD.shape[2])
        out_BKGD = scaled_dot_product_attention(
            q_BKGD, k_BKSD, v_BKSD, attn_mask=self.mask_B11S, scale=scale
        )
        return out_BKGD.reshape(q_LHD.shape)

    def _read(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        mine = pool.flatten(0, 1).index_select(0, self.slots_BS.flatten())
        return mine.view(*self.slots_BS.shape, *pool.shape[2:]).transpose(1, 2).to(dtype)


def plan_reads(sequences: Sequence[SequenceSpan], page_size: int) -> tuple[Read, ...]:
    """Decoding sequences go together where their lengths have the same number of binary digits, so
    that less than half of what is read is padding; all others go alone.
    """
    alone: list[Read] = [_ReadOne.of(span, page_size) for span in sequences if span.query_len > 1]
    together: dict[int, list[SequenceSpan]] = {}
    for span in sequences:
        if span.query_len == 1:
            together.setdefault(span.kv_len.bit_length(), []).append(span)
    for spans in together.values():
        one = len(spans) == 1
        alone.append(_ReadOne.of(spans[0], page_size) if one else _ReadMany.of(spans, page_size))
    return tuple(alone)


def _side_by_side(indices: Tensor) -> slice | Tensor:
    """int64 [n] as a slice where the indices count up by one."""
    first, count = int(indices[0]), indices.shape[0]
    consecutive = indices.tolist() == list(range(first, first + count))
    return slice(first, first + count) if consecutive else indices
