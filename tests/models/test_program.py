"""The native program of a decoder computes what its stages compute in torch."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.tiny_models import SIZES, save_tiny_model
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.kernels.machine import why_not_native
from terrazzo.models.decoder import Decoder
from terrazzo.models.loader import load
from terrazzo.models.program import NotNativeError, compile_decoder
from terrazzo.nn.attention import CausalContext, KVPool

pytestmark = pytest.mark.skipif(bool(why_not_native()), reason="no native kernels here")

PAGE_SIZE = 32
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 40}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": {},
    "qwen3": {"head_dim": 20},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.4, "logits_scaling": 2.5, "embedding_multiplier": 3.0},
    "glm4": {"head_dim": 16},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 56},
}


LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@cache
def decoder_of(family: str) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), family, **CHANGES.get(family, LATENT))
        return load(Checkpoint(folder))


@cache
def tokens_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (120,), generator=generator)


@cache
def expected(family: str, seed: int) -> Tensor:
    """Logits of all of `tokens_of(seed)`, stage by stage in torch."""
    decoder = decoder_of(family)
    return decoder.logits(decoder(tokens_of(seed), CausalContext(1, 120)))


class Programmed:
    """A program with a few sequences in its pool. Sequence i owns pages i, i + 3, i + 6, ..."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32) -> None:
        decoder = decoder_of(family)
        config = decoder.config
        sizes = (config.num_layers, 12, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        pool = KVPool.allocate(*sizes, dtype)
        for pages in (*pool.keys, *pool.values):
            pages.fill_(torch.nan)
        self._run = compile_decoder(decoder, pool)
        self._past = [0, 0, 0]

    def step(self, lengths: tuple[int, ...]) -> list[Tensor]:
        """The next so many tokens of each sequence; their logits."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for sequence, length in enumerate(lengths):
            past, pages = self._past[sequence], [sequence + 3 * page for page in range(4)]
            end = past + length
            if length:
                spans.append((len(ids), length, end, pages))
            ids += tokens_of(sequence)[past:end].tolist()
            positions += range(past, end)
            slots += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(past, end)]
            self._past[sequence] = end
        logits_TV = self._run(ids, positions, slots, spans, range(len(ids)))
        return list(logits_TV.split(lengths))


def in_steps(family: str, steps: list[tuple[int, ...]]) -> list[Tensor]:
    """Logits of each sequence, all its steps put together."""
    programmed = Programmed(family)
    parts = [programmed.step(lengths) for lengths in steps]
    return [torch.cat(sequence) for sequence in zip(*parts, strict=True)]


@pytest.mark.parametrize("family", CHANGES)
def test_equals_the_stages(family: str) -> None:
    steps = [(70, 5, 0), (1, 1, 64), (30, 1, 1), *[(1, 1, 1)] * 4]
    for sequence, logits_TV in enumerate(in_steps(family, steps)):
        reference_TV = expected(family, sequence)[: logits_TV.shape[0]]
        torch.testing.assert_close(logits_TV, reference_TV, rtol=1e-5, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["llama", "gemma2", "qwen3", "olmo2", "qwen2_moe"]),
    steps=st.lists(st.tuples(*[st.integers(0, 24)] * 3), min_size=1, max_size=5).filter(
        lambda steps: any(map(any, steps))
    ),
)
def test_no_bit_depends_on_chunks_or_neighbours(family: str, steps: list[tuple[int, ...]]) -> None:
    steps = [step for step in steps if any(step)]
    for sequence, logits_TV in enumerate(in_steps(family, steps)):
        if logits_TV.shape[0]:
            alone = tuple(logits_TV.shape[0] if i == sequence else 0 for i in range(3))
            assert torch.equal(logits_TV, in_steps(family, [alone])[sequence])


def test_keys_and_values_may_be_bfloat16() -> None:
    logits_TV = Programmed("llama", torch.bfloat16).step((90, 0, 0))[0]
    reference_TV = expected("llama", 0)[:90]
    error = (logits_TV - reference_TV).norm() / reference_TV.norm()
    assert 1e-5 < error < 1e-2


def test_rows_that_are_not_asked_for_have_no_logits() -> None:
    decoder, config = decoder_of("llama"), decoder_of("llama").config
    sizes = (config.num_layers, 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    run = compile_decoder(decoder, KVPool.allocate(*sizes))
    ids = tokens_of(0)[:6].tolist()
    nothing = run(ids, range(6), range(6), [(0, 6, 6, [0])], [])
    some = run(ids, range(6), range(6), [(0, 6, 6, [0])], [5, 2])
    assert nothing.shape == (0, SIZES["vocab_size"])
    torch.testing.assert_close(some, expected("llama", 0)[[5, 2]], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "page_size", "what"),
    [
        ("llama", 16, "page_size is 16; native attention takes multiples of 32"),
        ("deepseek_v2", 32, "latent attention has no native operation yet"),
    ],
)
def test_what_is_not_native_is_named(family: str, page_size: int, what: str) -> None:
    decoder = decoder_of(family)
    config = decoder.config
    pool = KVPool.allocate(config.num_layers, 1, page_size, config.num_kv_heads, config.head_dim)
    with pytest.raises(NotNativeError, match=what):
        compile_decoder(decoder, pool)
