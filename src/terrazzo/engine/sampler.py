"""Logits to tokens.

Row by row the order is: penalties, logit_bias, blocked tokens; then the likeliest token, or
temperature, top_k, top_p over what is left, min_p, and one draw. The filters are thresholds on
values, so equally likely tokens are kept or dropped together and no sort order matters.

Randomness is a pure function of (seed, choice, position): one number in [0, 1) per token, looked
up in the cumulative distribution in vocabulary order. Batch mates, chunking and preemption cannot
change a request's tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from terrazzo.engine.request import SamplingParams, TokenLogprob
from terrazzo.errors import CheckpointError

_MASK: Final = (1 << 64) - 1
_NARROW: Final = 256
"""Likeliest tokens looked at first; whole vocabularies are sorted only for flat distributions."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What decides one token besides its logits.

    params: with a number as seed. token_ids: prompt and output so far, of which num_prompt are the
    prompt's. blocked: token ids that must not come now.
    """

    params: SamplingParams
    choice: int
    token_ids: Sequence[int]
    num_prompt: int
    blocked: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the logits are used as they are."""
        params = self.params
        penalties = (params.presence_penalty, params.frequency_penalty, params.logit_bias)
        return not (self.blocked or any(penalties)) and params.repetition_penalty == 1.0


def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token id per row of float32 [R, vocabulary].

    Raises CheckpointError when a row holds NaN or no finite maximum.
    """
    likeliest = _likeliest(logits_RV)
    highest = [float(row_V[token]) for row_V, token in zip(logits_RV, likeliest, strict=True)]
    if not all(map(math.isfinite, highest)):
        raise CheckpointError(
            "the model computed logits that are not finite; its weights overflow or are damaged: "
            "run `terrazzo inspect` on the folder, or quantize it again"
        )
    changed = [index for index, row in enumerate(rows) if not row.is_plain]
    if changed:
        logits_RV = logits_RV.clone()
        for index in changed:
            _change(logits_RV[index], rows[index])
        likeliest = _likeliest(logits_RV)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        tokens = _draw(logits_RV[drawn], [rows[index] for index in drawn]).tolist()
        for index, token in zip(drawn, tokens, strict=True):
            likeliest[index] = token
    return likeliest


def _likeliest(logits_RV: Tensor) -> list[int]:
    """The first of the highest of each row, or the first NaN; numpy finds it faster."""
    token_ids: list[int] = logits_RV.numpy().argmax(axis=-1).tolist()
    return token_ids


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from a hash of three integers (the finalizer of SplitMix64, chained)."""
    state = 0
    for word in (seed, choice, position):
        state = _mix((state + 0x9E3779B97F4A7C15) ^ (word & _MASK))
    return math.ldexp(state >> 12, -52)


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _change(logits_V: Tensor, row: SampleRow) -> None:
    """Penalties, bias and blocked tokens, in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.token_ids)))
        values = logits_V[seen]
        factors = torch.where(values > 0, 1 / params.repetition_penalty, params.repetition_penalty)
        logits_V[seen] = values * factors
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.token_ids[row.num_prompt :])
        for token, count in counts.items():
            logits_V[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        logits_V[token] += bias
    logits_V[list(row.blocked)] = -math.inf


def _draw(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Token ids int64 [R]; probabilities in float64, so that their sums are exact enough."""
    scaled_RV = logits_RV / torch.tensor([[row.params.temperature] for row in rows])
    cumulative_RV = keep_likely(scaled_RV, rows).double().softmax(dim=-1).cumsum(dim=-1)
    numbers = [_number(row) for row in rows]
    targets_R1 = torch.tensor(numbers, dtype=torch.float64)[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, targets_R1, right=True)[:, 0]


def _number(row: SampleRow) -> float:
    seed = row.params.seed
    assert isinstance(seed, int), "the engine gives every request a seed"
    return uniform(seed, row.choice, len(row.token_ids) - row.num_prompt)


def keep_likely(scaled_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Minus infinity outside top_k, top_p of the rest and min_p; float32 [R, vocabulary]."""
    filters = [(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    if all(each == (0, 1.0, 0.0) for each in filters):
        return scaled_RV
    vocabulary = scaled_RV.shape[1]
    thresholds_R1, certain_R = _thresholds(scaled_RV, filters, min(_NARROW, vocabulary))
    flat = (~certain_R).nonzero()[:, 0].tolist()
    if flat:
        thresholds_R1[flat], _ = _thresholds(
            scaled_RV[flat], [filters[index] for index in flat], vocabulary
        )
    return scaled_RV.masked_fill(scaled_RV < thresholds_R1, -math.inf)


def _thresholds(
    scaled_RV: Tensor, filters: Sequence[tuple[int, float, float]], width: int
) -> tuple[Tensor, Tensor]:
    """The smallest logit each row keeps [R, 1], judged by its `width` likeliest tokens.

    The second, bool [R], is false for a row that keeps all of these, so it may keep more.
    """
    vocabulary = scaled_RV.shape[1]
    k_R1 = torch.tensor([[min(k or vocabulary, vocabulary)] for k, _, _ in filters])
    p_R1 = torch.tensor([[p if p < 1.0 else math.inf] for _, p, _ in filters])
    floor_R1 = torch.tensor([[math.log(m) if m else -math.inf] for _, _, m in filters])
    top_RW = scaled_RV.topk(width, dim=-1).values
    in_k_RW = torch.arange(width) < k_R1
    wide_RW = top_RW.double().masked_fill(~in_k_RW, -math.inf)
    total_R1 = torch.where(
        k_R1 <= width,
        wide_RW.logsumexp(dim=-1, keepdim=True),
        scaled_RV.double().logsumexp(dim=-1, keepdim=True),
    )
    mass_RW = (wide_RW - total_R1).exp()
    likelier_RW = mass_RW.cumsum(dim=-1) - mass_RW
    near_RW = wide_RW - wide_RW[:, :1] >= floor_R1
    kept_R1 = (in_k_RW & (likelier_RW < p_R1) & near_RW).sum(dim=-1, keepdim=True)
    certain_R1 = (kept_R1 < width) | (k_R1 <= width)
    return top_RW.gather(1, kept_R1 - 1), certain_R1[:, 0]


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Raw log-probabilities of one token per row, with the row's `count` likeliest tokens."""
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    chosen = logprobs_RV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    values, tokens = logprobs_RV.topk(min(count, logits_RV.shape[1]), dim=-1)
    tops = [
        tuple(zip(ids, logs, strict=True))
        for ids, logs in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    return tuple(map(TokenLogprob, token_ids, chosen, tops))
