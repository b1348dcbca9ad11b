"""The engine as a state machine: whatever arrives, pages never leak and tokens never change."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from helpers.fake_runner import FakeRunner, drain, fake_engine, fake_logits, limits
from terrazzo.engine.config import EngineLimits
from terrazzo.engine.engine import Engine
from terrazzo.engine.request import Delta, FinishReason, Request, SamplingParams
from terrazzo.engine.sampler import SampleRow, sample

EOS = frozenset({0, 1})

prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=19).map(tuple),
    st.integers(1, 19).map(lambda length: tuple(range(2, 2 + length))),
)
"""Few different tokens, or one shared beginning: prefixes often meet in the cache."""

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
    n=st.integers(1, 3),
)

engine_limits = st.builds(
    limits,
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 16),
    max_model_len=st.just(20),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(20, 30),
    prefix_caching=st.booleans(),
) | st.builds(
    limits,
    max_model_len=st.just(20),
    max_num_batched_tokens=st.integers(4, 16),
    num_pages=st.integers(5, 8),
)


def alone(request: Request, choice: int) -> tuple[int, ...]:
    """The definition: one sequence, one token at a time, no cache, no batch."""
    params, prompt = request.params, request.prompt_token_ids
    tokens = list(prompt)
    most = min(params.max_tokens, 20 - len(prompt))
    while True:
        generated = len(tokens) - len(prompt)
        blocked = tuple(EOS) if generated < params.min_tokens else ()
        row = SampleRow(params, choice, tokens, len(prompt), blocked)
        token = sample(fake_logits(tokens)[None], [row])[0]
        tokens.append(token)
        if token in EOS or generated + 1 == most:
            return tuple(tokens[len(prompt) :])


class Serving(RuleBasedStateMachine):
    """Requests arrive, are aborted and run; everything they yield is kept."""

    engine: Engine
    runner: FakeRunner

    @initialize(given=engine_limits)
    def start(self, given: EngineLimits) -> None:
        self.engine, self.runner = fake_engine(given, eos_token_ids=EOS)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], tuple[int, ...]] = {}
        self.finish: dict[tuple[str, int], FinishReason] = {}

    @rule(prompt=prompts, params=params)
    def arrive(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        request = Request(f"r{len(self.requests)}", prompt, params)
        self.requests[request.request_id] = request
        self.engine.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.note(self.engine.step())
            self.engine.check_integrity()

    def note(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.finish, "nothing follows the last delta"
            self.tokens[key] = self.tokens.get(key, ()) + delta.token_ids
            if delta.finish is not FinishReason.NOT_YET:
                self.finish[key] = delta.finish

    @invariant()
    def pages_and_budgets_hold(self) -> None:
        self.engine.check_integrity()
        for plan in self.runner.plans:
            assert 0 < plan.num_tokens <= self.engine.limits.max_num_batched_tokens
            assert len(plan.chunks) <= self.engine.limits.max_num_seqs
        self.runner.plans.clear()

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.note(self.engine.step())
            self.engine.check_integrity()
        assert not self.engine.has_work, "every request ends"
        assert self.engine.stats.pages_used == 0
        wanted = {(r.request_id, i): r for r in self.requests.values() for i in range(r.params.n)}
        assert set(self.finish) == set(wanted)
        for (name, index), request in wanted.items():
            tokens, expected = self.tokens[name, index], alone(request, index)
            if self.finish[name, index] is FinishReason.ABORTED:
                assert expected[: len(tokens)] == tokens
            else:
                assert tokens == expected


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestServing = Serving.TestCase


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(prompts, params), min_size=1, max_size=6), engine_limits)
def test_equal_calls_give_equal_plans(
    arrivals: list[tuple[tuple[int, ...], SamplingParams]], given: EngineLimits
) -> None:
    def shapes() -> list[list[tuple[str, int, int, tuple[int, ...]]]]:
        engine, runner = fake_engine(given, eos_token_ids=EOS)
        for number, (prompt, params) in enumerate(arrivals):
            engine.add(Request(str(number), prompt, params))
        drain(engine)
        return [
            [
                (chunk.sequence.request.request_id, chunk.start, chunk.end, chunk.pages)
                for chunk in plan.chunks
            ]
            for plan in runner.plans
        ]

    assert shapes() == shapes()


def test_preemption_happens_in_these_tests_and_changes_nothing() -> None:
    tight, _ = fake_engine(limits(num_pages=5, max_model_len=20))
    roomy, _ = fake_engine(limits(num_pages=40, max_model_len=20))
    for engine in (tight, roomy):
        for seed in range(4):
            prompt = tuple(range(seed, seed + 6))
            engine.add(Request(str(seed), prompt, SamplingParams(seed=seed, max_tokens=14)))
    assert drain(tight) == drain(roomy)
    assert tight.stats.num_preemptions > 2
    assert roomy.stats.num_preemptions == 0
