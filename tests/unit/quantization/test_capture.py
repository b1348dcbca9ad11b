"""The Hessian is the second moment of the inputs, whatever the batches."""

from __future__ import annotations

import torch

from terrazzo.quantization.capture import CHUNK_TOKENS, measure_hessian


def test_hessian_is_twice_the_second_moment() -> None:
    generator = torch.Generator().manual_seed(2)
    x_TK = torch.randn(CHUNK_TOKENS + 77, 24, generator=generator) * torch.linspace(0.01, 9, 24)
    exact_KK = 2 * x_TK.double().T @ x_TK.double() / len(x_TK)
    for batches in ([x_TK], list(torch.split(x_TK, 1000))):
        hessian_KK = measure_hessian(batches)
        assert hessian_KK.dtype is torch.float64
        torch.testing.assert_close(hessian_KK, exact_KK, rtol=1e-4, atol=1e-5)
