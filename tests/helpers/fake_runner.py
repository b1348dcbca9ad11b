"""A model without mathematics: its logits are a hash of everything the KV pages say came before."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from terrazzo.engine.batch import build_batch
from terrazzo.engine.config import EngineLimits
from terrazzo.engine.engine import Engine, Vocabulary, no_text
from terrazzo.engine.scheduler import StepPlan
from terrazzo.engine.text import Decode

VOCABULARY = 24
UNWRITTEN = -1


def fake_logits(context: Sequence[int], vocabulary: int = VOCABULARY) -> Tensor:
    """float32 [vocabulary], a pure function of the tokens so far."""
    seed = crc32(np.asarray(context, dtype=np.int64).tobytes())
    noise = np.random.default_rng(seed).normal(0.0, 2.0, vocabulary)
    return torch.tensor(noise, dtype=torch.float32)


class FakeRunner:
    """Stores token ids where a model stores keys and values, and reads them back as it would.

    A wrong slot, a page given to two owners or a stale page changes the tokens that come out.
    """

    def __init__(self, limits: EngineLimits, vocabulary: int = VOCABULARY) -> None:
        self.plans: list[StepPlan] = []
        self._slots = torch.full((limits.capacity,), UNWRITTEN)
        self._page_size = limits.page_size
        self._vocabulary = vocabulary

    def run(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        batch = build_batch(plan, self._page_size)
        self._slots[batch.slot_mapping] = torch.tensor(batch.token_ids)
        pages = self._slots.view(-1, self._page_size)
        rows: list[Tensor] = []
        for chunk, span in zip(plan.chunks, batch.spans, strict=True):
            stored = pages[list(span.pages)].flatten()[: span.kv_len].tolist()
            assert UNWRITTEN not in stored
            assert chunk.num_logits <= len(chunk.token_ids), (
                "logits of tokens that are not computed"
            )
            ends = range(chunk.end - chunk.num_logits + 1, chunk.end + 1)
            rows.extend(fake_logits(stored[:end], self._vocabulary) for end in ends)
        return torch.stack(rows) if rows else torch.empty(0, self._vocabulary)


def limits(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 32,
    page_size: int = 4,
    num_pages: int = 16,
    prefix_caching: bool = True,
) -> EngineLimits:
    return EngineLimits(
        max_num_seqs, max_num_batched_tokens, max_model_len, page_size, num_pages, prefix_caching
    )


def fake_engine(
    given: EngineLimits,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    decode: Decode = no_text,
    vocabulary: int = VOCABULARY,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(given, vocabulary)
    return Engine(runner, given, Vocabulary(vocabulary, eos_token_ids, decode)), runner


def letters(token_ids: Sequence[int]) -> str:
    """Token 0 is "a", token 1 is "b", and so on."""
    return "".join(chr(ord("a") + token) for token in token_ids)


def drain(engine: Engine, most_steps: int = 10_000) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens of every choice, run to the end with integrity checked after each step."""
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return tokens
        for delta in engine.step():
            key = (delta.request_id, delta.index)
            tokens[key] = tokens.get(key, ()) + delta.token_ids
        engine.check_integrity()
    raise AssertionError(f"not done after {most_steps} steps")
