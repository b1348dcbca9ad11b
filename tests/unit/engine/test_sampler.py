from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.engine import sampler
from terrazzo.engine.request import SamplingParams
from terrazzo.engine.sampler import SampleRow, keep_likely, sample, token_logprobs, uniform
from terrazzo.errors import CheckpointError

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0, 0.0])


def row(tokens: tuple[int, ...] = (), prompt: int = 0, choice: int = 0, **params: Any) -> SampleRow:
    blocked = params.pop("blocked", ())
    return SampleRow(SamplingParams(**{"seed": 0, **params}), choice, tokens, prompt, blocked)


def one(logits: Tensor, given: SampleRow) -> int:
    return sample(logits[None], [given])[0]


def distribution(draws: int = 4000, **params: Any) -> Counter[int]:
    """How often each token comes when only the position changes."""
    rows = [row(tokens=(0,) * position, **params) for position in range(draws)]
    return Counter(sample(LOGITS.expand(draws, -1), rows))


def assert_drawn_from(counts: Counter[int], probabilities: Tensor) -> None:
    """Pearson's statistic stays below its 99.99 % point for 5 degrees of freedom."""
    total = sum(counts.values())
    expected = {token: p * total for token, p in enumerate(probabilities.tolist()) if p > 0}
    assert set(counts) <= set(expected)
    statistic = sum((counts[token] - want) ** 2 / want for token, want in expected.items())
    assert statistic < 25.7


def test_greedy_takes_the_highest_and_the_first_of_equals() -> None:
    assert one(LOGITS, row(temperature=0.0)) == 0
    assert one(torch.tensor([1.0, 3.0, 3.0]), row(temperature=0.0)) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    counts = distribution(temperature=temperature)
    assert_drawn_from(counts, (LOGITS / temperature).softmax(0))


def test_filtered_tokens_come_as_often_as_the_renormalized_softmax_says() -> None:
    kept = LOGITS.topk(3)
    expected = torch.zeros(6).scatter(0, kept.indices, kept.values.softmax(0))
    assert_drawn_from(distribution(top_k=3), expected)


@pytest.mark.parametrize("choice", [0, 1])
def test_the_numbers_are_uniform_and_differ_between_choices(choice: int) -> None:
    numbers = [uniform(7, choice, position) for position in range(4000)]
    counts = Counter(int(number * 6) for number in numbers)
    assert_drawn_from(counts, torch.full((6,), 1 / 6))
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert numbers[:50] != [uniform(7, 1 - choice, position) for position in range(50)]


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-52, 2)])
def test_the_ends_of_the_interval_hit_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *_: number)
    assert one(torch.tensor([0.0, 0.0, 0.7, 0.0]), row(blocked=(0, 3))) == token


def brute_force(scaled: list[float], k: int, p: float, min_p: float) -> set[int]:
    """The definition: k likeliest, then the fewest that reach p, then those near the top."""
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])[: k or len(scaled)]
    total = sum(math.exp(scaled[token]) for token in order)
    mass, kept = 0.0, set[int]()
    for token in order:
        if mass < p or p == 1.0:
            kept.add(token)
        mass += math.exp(scaled[token]) / total
    return {t for t in kept if math.exp(scaled[t]) >= min_p * math.exp(scaled[order[0]])}


distinct_logits = st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True).map(
    lambda values: [value / 7 for value in values]
)
filters = st.tuples(
    st.integers(0, 14),
    st.floats(0.01, 1.0, exclude_max=True) | st.just(1.0),
    st.floats(0.01, 0.99) | st.just(0.0),
)


@given(distinct_logits, st.lists(filters, min_size=1, max_size=3), st.integers(1, 12))
def test_the_filters_keep_what_their_definition_keeps(
    logits: list[float], wanted: list[tuple[int, float, float]], narrow: int
) -> None:
    rows = [row(top_k=k, top_p=p, min_p=m) for k, p, m in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_NARROW", narrow)
        kept = keep_likely(torch.tensor([logits] * len(rows)), rows)
    for row_kept, each in zip(kept, wanted, strict=True):
        assert set(row_kept.isfinite().nonzero().flatten().tolist()) == brute_force(logits, *each)


def test_equal_tokens_are_kept_together() -> None:
    kept = keep_likely(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [row(top_k=1)])
    assert kept.isfinite().tolist() == [[False, True, True, False]]


def test_penalties_change_logits_as_they_say() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0, -1.9])
    greedy = {"temperature": 0.0}
    assert one(logits, row((0,), prompt=1, repetition_penalty=1.1, **greedy)) == 1
    assert one(logits, row((0,), prompt=0, presence_penalty=0.2, **greedy)) == 1
    assert one(logits, row((0,), prompt=1, presence_penalty=0.2, **greedy)) == 0, "prompt: no"
    assert one(logits, row((0, 0), frequency_penalty=0.04, **greedy)) == 0
    assert one(logits, row((0, 0, 0), frequency_penalty=0.04, **greedy)) == 1
    assert one(-logits, row((3,), repetition_penalty=2.0, **greedy)) == 2
    assert one(torch.tensor([-1.0, -1.1]), row((0,), repetition_penalty=1.2, **greedy)) == 1


def test_bias_and_blocked_tokens() -> None:
    assert one(LOGITS, row(temperature=0.0, logit_bias=((4, 100.0),))) == 4
    assert one(LOGITS, row(temperature=0.0, blocked=(0, 3))) == 2
    assert set(distribution(draws=200, blocked=(0, 3))) <= {1, 2, 4, 5}


def test_the_given_logits_are_left_alone() -> None:
    logits = LOGITS.clone()[None]
    sample(logits, [row(temperature=0.0, logit_bias=((4, 100.0),))])
    assert torch.equal(logits[0], LOGITS)


@given(st.permutations(range(6)), st.integers(1, 6))
def test_batch_mates_do_not_change_a_token(order: list[int], count: int) -> None:
    noise = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=noise)
    rows = [
        row((1,), temperature=0.0),
        row((2, 2), choice=1),
        row((3,), top_k=5, seed=9),
        row((4,), top_p=0.7, temperature=1.3),
        row((5, 1), min_p=0.2, frequency_penalty=1.0),
        row((6,), top_k=20, top_p=0.9, seed=4),
    ]
    alone = [one(logits[index], rows[index]) for index in range(6)]
    chosen = order[:count]
    assert sample(logits[chosen], [rows[index] for index in chosen]) == [
        alone[index] for index in chosen
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        one(torch.tensor([0.0, bad]), row())


def test_logprobs_are_of_the_raw_distribution() -> None:
    (first, second) = token_logprobs(LOGITS.expand(2, -1), [1, 0], 2)
    expected = LOGITS.log_softmax(0)
    assert first.token_id == 1
    assert first.logprob == pytest.approx(expected[1].item())
    assert [token for token, _ in first.top] == [0, 3]
    assert second.logprob == first.top[0][1] == pytest.approx(expected[0].item())
    assert token_logprobs(LOGITS[None], [1], 0)[0].top == ()
