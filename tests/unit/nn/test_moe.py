from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.quant_tensors import random_dense_tensor, random_input, random_quant_tensor
from terrazzo.kernels.base import DenseTensor, Weight
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.moe import ExpertBank, Router, SharedExpert, TopKWeights
from terrazzo.nn.weights import LinearWeight
from terrazzo.packing import dequantize
from terrazzo.spec import QuantSpec

HIDDEN = 32
SPECS = (QuantSpec(8, 32), QuantSpec(4, 16, sym=False), QuantSpec(4, 32, desc_act=True))


def weight_of(index: int) -> Weight:
    """Every fourth is dense, the others differ in bits, group, zero points and order."""
    if index % 4 == 3:
        return random_dense_tensor(HIDDEN, HIDDEN, seed=index)
    return random_quant_tensor(SPECS[index % 4], HIDDEN, HIDDEN, seed=index)


def bank_of(weights: Sequence[Weight]) -> ExpertBank:
    return ExpertBank(
        [FusedLinear([LinearWeight(f"e{index}", each)]) for index, each in enumerate(weights)]
    )


def values(weight: Weight) -> Tensor:
    return weight.weight_NK if isinstance(weight, DenseTensor) else dequantize(weight)


def loop(
    x_TH: Tensor, logits_TE: Tensor, weights: Sequence[Weight], top_k: int, how: TopKWeights
) -> Tensor:
    """Token by token, expert by expert, in float64."""
    y_TH = torch.zeros_like(x_TH, dtype=torch.float64)
    for token, logits_E in enumerate(logits_TE.double()):
        probabilities_E = logits_E.softmax(0)
        chosen = probabilities_E.argsort(descending=True)[:top_k].tolist()
        total = float(probabilities_E[chosen].sum()) if how is TopKWeights.SUM_TO_ONE else 1.0
        for expert in chosen:
            output_H = values(weights[expert]).double() @ x_TH[token].double()
            y_TH[token] += probabilities_E[expert] / total * output_H
    return y_TH


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 9),
    data=st.data(),
    how=st.sampled_from(TopKWeights),
    seed=st.integers(0, 1000),
)
def test_a_bank_is_a_loop_over_tokens_and_experts(
    tokens: int, num_experts: int, data: st.DataObject, how: TopKWeights, seed: int
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    weights = [weight_of(index) for index in range(num_experts)]
    logits_TE = 3 * random_input(tokens, num_experts, seed)
    x_TH = random_input(tokens, HIDDEN, seed + 1)
    routing = Router(num_experts, top_k, how, SharedExpert.NONE)(logits_TE)
    x_RH = routing.gather(x_TH)
    assert x_RH.shape[0] == tokens * top_k == routing.slices[-1].stop
    outputs = bank_of(weights)([x_RH[rows] for rows in routing.slices])
    actual = routing.combine(torch.cat(outputs), tokens)
    expected = loop(x_TH, logits_TE, weights, top_k, how)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_shared_expert_sees_every_token_weighted_by_its_gate() -> None:
    logits_TE = random_input(6, 4)
    routing = Router(3, 1, TopKWeights.SUM_TO_ONE, SharedExpert.GATED)(logits_TE)
    shared = routing.slices[3]
    assert routing.tokens_R[shared].tolist() == list(range(6))
    torch.testing.assert_close(routing.weights_R[shared], logits_TE[:, 3].sigmoid())
    assert torch.equal(routing.weights_R[: shared.start], torch.ones(6))


def test_rows_of_an_expert_stay_in_the_order_of_their_tokens() -> None:
    routing = Router(2, 2, TopKWeights.PROBABILITIES, SharedExpert.NONE)(random_input(5, 2))
    assert routing.tokens_R.tolist() == [0, 1, 2, 3, 4] * 2
