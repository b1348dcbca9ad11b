"""The stored type is the one that rounds least, and float32 where both half types lose too much."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.importing.precision import LARGEST_LOSS, choose, measure


def test_exact_bfloat16_values_stay_bfloat16() -> None:
    tensor = torch.randn(64, 8).to(torch.bfloat16).to(torch.float32) * 2.0**-20
    chosen = choose((tensor,))
    assert (chosen.dtype, chosen.loss) == (torch.bfloat16, 0.0)


def test_ordinary_weights_become_float16() -> None:
    chosen = choose((torch.randn(64, 8), torch.ones(8)))
    assert chosen.dtype is torch.float16
    assert 0.0 < chosen.loss < 2.0**-11


def test_a_value_beyond_float16_rules_it_out() -> None:
    tensor = torch.tensor([1e6, 1.0])
    assert measure([tensor], torch.float16).loss == float("inf")
    assert choose((tensor,)).dtype is torch.bfloat16


def test_the_worst_tensor_decides() -> None:
    small = torch.full((4,), 1.3e-8)
    assert choose((torch.ones(4), small)).dtype is torch.bfloat16


def test_float32_when_both_half_types_lose_too_much() -> None:
    # Beyond float16, and subnormal even in bfloat16.
    assert choose((torch.tensor([1e6]), torch.tensor([1.3e-40]))).dtype is torch.float32


@given(exponent=st.integers(-100, 100), seed=st.integers(0, 2**16))
def test_what_is_chosen_never_loses_more_than_the_limit(exponent: int, seed: int) -> None:
    tensor = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    chosen = choose((tensor,))
    exact = tensor.to(torch.float64)
    error = tensor.to(chosen.dtype).to(torch.float64) - exact
    assert torch.linalg.vector_norm(error) <= LARGEST_LOSS * torch.linalg.vector_norm(exact)


def test_a_precision_says_what_it_costs() -> None:
    tensors = [torch.full((2,), 1.0 + 2.0**-12)]
    assert str(measure(tensors, torch.float16)).startswith("float16 (largest relative")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_tensor_of_zeros_loses_nothing(dtype: torch.dtype) -> None:
    assert measure([torch.zeros(3)], dtype).loss == 0.0
