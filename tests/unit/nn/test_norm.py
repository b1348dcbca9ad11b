from __future__ import annotations

import pytest
import torch

from terrazzo.nn.norm import HeadNorm, PlainHeads, RMSNorm


def by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.to(torch.float64)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.to(torch.float64)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_its_definition(eps: float) -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    actual = RMSNorm(weight, eps)(x)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), by_definition(x, weight, eps), rtol=1e-5, atol=1e-6)


def test_head_norm_has_one_weight_for_queries_and_one_for_keys() -> None:
    query, key = torch.randn(8), torch.randn(8)
    heads = torch.randn(3, 6, 8)
    before = heads.clone()
    actual = HeadNorm.of(query, key, 4, 2, 1e-6)(heads)
    expected = torch.cat(
        [by_definition(heads[:, :4], query, 1e-6), by_definition(heads[:, 4:], key, 1e-6)], dim=1
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(heads, before)


def test_plain_heads_change_nothing() -> None:
    heads = torch.randn(3, 6, 8)
    assert PlainHeads()(heads) is heads
