from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.quant_tensors import random_dense_tensor, random_input, random_quant_tensor
from terrazzo.kernels.base import DenseTensor, Weight
from terrazzo.kernels.choose import KernelPolicy
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.moe import ExpertBank, Router, SharedExpert, TopKWeights
from terrazzo.nn.weights import LinearWeight
from terrazzo.packing import dequantize
from terrazzo.spec import QuantSpec

HIDDEN, WIDE = 32, 64
DENSE_EXPERT = -1
SPECS = (
    QuantSpec(8, 32),
    QuantSpec(4, 16, sym=False),
    QuantSpec(4, 32, desc_act=True),
    QuantSpec(3, -1),
)


@cache
def weight_of(
    kind: int, seed: int, out_features: int = HIDDEN, in_features: int = HIDDEN
) -> Weight:
    """kind: an index of SPECS, or DENSE_EXPERT."""
    if kind == DENSE_EXPERT:
        return random_dense_tensor(out_features, in_features, seed=seed)
    return random_quant_tensor(SPECS[kind], out_features, in_features, seed=seed)


def linear_of(*weights: Weight, policy: KernelPolicy = KernelPolicy.SPEED) -> FusedLinear:
    shards = [LinearWeight(f"e{index}", each) for index, each in enumerate(weights)]
    return FusedLinear(shards, policy)


def values(weight: Weight) -> Tensor:
    return weight.weight_NK if isinstance(weight, DenseTensor) else dequantize(weight)


def loop(
    x_TH: Tensor, logits_TE: Tensor, weights: Sequence[Weight], top_k: int, how: TopKWeights
) -> Tensor:
    """Token by token, expert by expert, in float64."""
    y_TN = torch.zeros((len(x_TH), weights[0].out_features), dtype=torch.float64)
    for token, logits_E in enumerate(logits_TE.double()):
        probabilities_E = logits_E.softmax(0)
        chosen = probabilities_E.argsort(descending=True)[:top_k].tolist()
        total = float(probabilities_E[chosen].sum()) if how is TopKWeights.SUM_TO_ONE else 1.0
        for expert in chosen:
            output_N = values(weights[expert]).double() @ x_TH[token].double()
            y_TN[token] += probabilities_E[expert] / total * output_N
    return y_TN


kinds = st.lists(st.integers(DENSE_EXPERT, len(SPECS) - 1), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(0, 12), kinds=kinds, data=st.data(), seed=st.integers(0, 1000))
def test_a_bank_is_a_loop_over_tokens_and_experts(
    tokens: int, kinds: list[int], data: st.DataObject, seed: int
) -> None:
    top_k, how = data.draw(st.integers(1, len(kinds))), data.draw(st.sampled_from(TopKWeights))
    policy = data.draw(st.sampled_from([KernelPolicy.SPEED, KernelPolicy.MEMORY]))
    weights = [weight_of(kind, index, WIDE) for index, kind in enumerate(kinds)]
    logits_TE = 3 * random_input(tokens, len(kinds), seed)
    x_TH = random_input(tokens, HIDDEN, seed + 1)
    routing = Router(len(kinds), top_k, how, SharedExpert.NONE)(logits_TE)
    bank = ExpertBank([linear_of(weight, policy=policy) for weight in weights])
    y_RN = bank(routing.gather(x_TH), routing.offsets)
    assert y_RN.shape == (tokens * top_k, WIDE)
    actual = routing.combine(y_RN, (), tokens)
    expected = loop(x_TH, logits_TE, weights, top_k, how)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    shards=st.lists(st.tuples(*[st.integers(DENSE_EXPERT, len(SPECS) - 1)] * 2), min_size=1),
    data=st.data(),
)
def test_every_expert_works_on_its_own_rows_alone(
    shards: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever the shares of the experts are, most tokens to one or none to many of them."""
    counts = data.draw(
        st.lists(st.integers(0, 7), min_size=len(shards), max_size=len(shards)), label="rows"
    )
    linears = [
        linear_of(weight_of(gate, index), weight_of(up, 50 + index, WIDE))
        for index, (gate, up) in enumerate(shards)
    ]
    offsets = tuple(accumulate(counts, initial=0))
    x_RK = random_input(offsets[-1], HIDDEN)
    alone = [
        linear(x_RK[slice(*ends)]) for linear, ends in zip(linears, pairwise(offsets), strict=True)
    ]
    assert torch.equal(ExpertBank(linears)(x_RK, offsets), torch.cat(alone))


def test_experts_that_are_alike_are_one_group() -> None:
    kinds = [0, DENSE_EXPERT, 0, 2, DENSE_EXPERT, 0]
    bank = ExpertBank([linear_of(weight_of(kind, index)) for index, kind in enumerate(kinds)])
    assert [group.members for group in bank.groups] == [(0, 2, 5), (1, 4), (3,)]
    assert [group.experts[0] for group in bank.groups] == [bank.experts[i] for i in (0, 1, 3)]


def test_an_expert_without_tokens_is_not_run() -> None:
    ran: list[int] = []

    class Watched(FusedLinear):
        def run(self, x_MK: Tensor, out_MN: Tensor) -> None:
            ran.append(len(x_MK))
            super().run(x_MK, out_MN)

    experts = [Watched([LinearWeight(f"e{index}", weight_of(0, index))]) for index in range(3)]
    ExpertBank(experts)(random_input(5, HIDDEN), (0, 2, 2, 5))
    assert ran == [2, 3]


def test_a_shared_expert_sees_every_token_weighted_by_its_gate() -> None:
    logits_TE = random_input(6, 4)
    routing = Router(3, 1, TopKWeights.SUM_TO_ONE, SharedExpert.GATED)(logits_TE)
    assert torch.equal(routing.weights_R, torch.ones(6))
    shared_TN = random_input(6, 2, 9)
    expected = logits_TE[:, 3:].sigmoid() * shared_TN
    actual = routing.combine(torch.zeros(6, 2), (shared_TN.clone(),), 6)
    torch.testing.assert_close(actual, expected)


def test_rows_of_an_expert_stay_in_the_order_of_their_tokens() -> None:
    routing = Router(2, 2, TopKWeights.PROBABILITIES, SharedExpert.NONE)(random_input(5, 2))
    assert routing.tokens_R.tolist() == [0, 1, 2, 3, 4] * 2
    assert [rows.tolist() for rows in routing.rows(routing.tokens_R)] == [[0, 1, 2, 3, 4]] * 2
