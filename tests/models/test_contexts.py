"""However tokens reach the model - whole, in chunks, one by one - the result is the same."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.tiny_models import SIZES, save_tiny_model
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.models.decoder import Decoder
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext, KVPool, PagedContext, SequenceSpan


@dataclass(frozen=True)
class Prompt:
    """ids of one sequence, the pages it may use, and the sizes of its chunks."""

    ids: Tensor
    pages: Tensor
    chunks: tuple[int, ...]


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "deepseek_v2": {
        "q_lora_rank": 18,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
FAMILIES = ["llama", "qwen3", *CHANGES]


@cache
def decoder_of(family: str) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), family, **CHANGES.get(family, {}))
        return load(Checkpoint(folder))


@st.composite
def chunks_of(draw: st.DrawFn) -> tuple[int, ...]:
    """Zero means that the sequence sits out a step; ones are decoding steps."""
    prefill = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    return (*prefill, *[1] * draw(st.integers(0, 4)))


@st.composite
def prompts(draw: st.DrawFn, page_size: int) -> tuple[Prompt, ...]:
    plans = draw(st.lists(chunks_of(), min_size=1, max_size=4))
    needed = [-(-sum(chunks) // page_size) for chunks in plans]
    order = torch.tensor(draw(st.permutations(range(sum(needed) + 2))), dtype=torch.int64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    pages = order[: sum(needed)].split(needed)
    ids = [torch.randint(SIZES["vocab_size"], (sum(c),), generator=generator) for c in plans]
    return tuple(map(Prompt, ids, pages, plans))


def run_paged(decoder: Decoder, batch: tuple[Prompt, ...], page_size: int) -> list[Tensor]:
    """The hidden states of each prompt, computed chunk by chunk, all sequences side by side."""
    config = decoder.config
    pool = KVPool.allocate(
        config.num_layers,
        sum(prompt.pages.shape[0] for prompt in batch) + 2,
        page_size,
        config.num_kv_heads,
        config.head_dim,
    )
    outputs = [torch.empty(len(prompt.ids), config.hidden_size) for prompt in batch]
    done = [0] * len(batch)
    for step in range(max(len(prompt.chunks) for prompt in batch)):
        rows, spans, positions, slots = [], [], [], []
        for index, prompt in enumerate(batch):
            length = prompt.chunks[step] if step < len(prompt.chunks) else 0
            if length == 0:
                continue
            start, done[index] = done[index], done[index] + length
            span_positions = torch.arange(start, done[index])
            spans.append(SequenceSpan(sum(map(len, positions)), length, done[index], prompt.pages))
            positions.append(span_positions)
            slots.append(prompt.pages[span_positions // page_size] * page_size)
            slots[-1] += span_positions % page_size
            rows.append((index, slice(start, done[index])))
        if not spans:
            continue
        context = PagedContext(pool, torch.cat(positions), torch.cat(slots), tuple(spans))
        ids = torch.cat([batch[index].ids[part] for index, part in rows])
        parts = decoder(ids, context).split([span.query_len for span in spans])
        for (index, part), hidden in zip(rows, parts, strict=True):
            outputs[index][part] = hidden
    return outputs


@settings(max_examples=60)
@given(data=st.data(), family=st.sampled_from(FAMILIES), page_size=st.integers(1, 5))
def test_paged_chunks_equal_one_causal_pass(
    data: st.DataObject, family: str, page_size: int
) -> None:
    batch = data.draw(prompts(page_size))
    decoder = decoder_of(family)
    for prompt, actual in zip(batch, run_paged(decoder, batch, page_size), strict=True):
        if len(prompt.ids):
            expected = decoder(prompt.ids, CausalContext(1, len(prompt.ids)))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_of_equal_lengths_equals_its_sequences() -> None:
    decoder = decoder_of("qwen2")
    ids = torch.randint(SIZES["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(0))
    together = decoder(ids.flatten(), CausalContext(3, 11)).view(3, 11, -1)
    for row, expected in zip(ids, together, strict=True):
        torch.testing.assert_close(
            decoder(row, CausalContext(1, 11)), expected, rtol=1e-4, atol=1e-5
        )
