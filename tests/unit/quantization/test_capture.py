"""The Hessian is the second moment of the inputs, whatever the batches."""

from __future__ import annotations

import pytest
import torch

from terrazzo.quantization.capture import CHUNK_TOKENS, PANEL, measure_hessian


@pytest.mark.parametrize("width", [24, PANEL, 2 * PANEL + 3])
def test_hessian_is_twice_the_second_moment(width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x_TK = torch.randn(CHUNK_TOKENS + 77, width, generator=generator)
    x_TK *= torch.linspace(0.01, 9, width)
    exact_KK = 2 * x_TK.double().T @ x_TK.double() / len(x_TK)
    for batches in ([x_TK], list(torch.split(x_TK, 1000))):
        hessian_KK = measure_hessian(batches)
        assert hessian_KK.dtype is torch.float64
        torch.testing.assert_close(hessian_KK, exact_KK, rtol=1e-4, atol=1e-4)
        assert torch.equal(hessian_KK, hessian_KK.T)
