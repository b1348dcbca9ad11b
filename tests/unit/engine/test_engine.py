from __future__ import annotations

from typing import Any

import pytest

from helpers.fake_runner import VOCABULARY, drain, fake_engine, fake_logits, letters, limits
from terrazzo.engine.engine import Engine
from terrazzo.engine.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TopLogprobs,
)
from terrazzo.errors import RequestError

GREEDY = {"temperature": 0.0}


def request(name: str, prompt: tuple[int, ...], **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(**params))


def run(engine: Engine) -> list[Delta]:
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
        engine.check_integrity()
    return deltas


def test_greedy_tokens_are_the_argmax_of_the_model() -> None:
    engine, _ = fake_engine(limits())
    engine.add(request("a", (1, 2, 3, 4, 5), max_tokens=6, **GREEDY))
    context = [1, 2, 3, 4, 5]
    for _ in range(6):
        context.append(int(fake_logits(context).argmax()))
    assert drain(engine) == {("a", 0): tuple(context[5:])}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("a", ()), "the prompt has no tokens"),
        (request("a", (1,) * 32), "the prompt has 32 tokens.*shorten it to 31"),
        (request("a", (VOCABULARY,)), "the prompt holds the token id 24; legal ids are 0 to 23"),
        (request("a", (1,), stop_token_ids=(99,)), "stop_token_ids holds the token id 99"),
        (request("a", (1,), logit_bias=((99, 1.0),)), "logit_bias holds the token id 99"),
        (request("a", (1,), stop=("x",)), "has no tokenizer"),
        (request("taken", (1,)), "'taken' is already in flight"),
    ],
)
def test_a_request_that_can_never_run_is_refused(wrong: Request, message: str) -> None:
    engine, _ = fake_engine(limits())
    engine.add(request("taken", (1,)))
    with pytest.raises(RequestError, match=message):
        engine.add(wrong)
    assert engine.stats.num_waiting == 1


def test_the_longest_legal_prompt_yields_one_token() -> None:
    engine, _ = fake_engine(limits(num_pages=8))
    engine.add(request("a", (1,) * 31))
    (delta,) = run(engine)
    assert (len(delta.token_ids), delta.finish) == (1, FinishReason.LENGTH)


def test_eos_and_minimum_length() -> None:
    def lengths(**params: Any) -> list[int]:
        engine, _ = fake_engine(limits(), eos_token_ids=frozenset(range(12)))
        for seed in range(8):
            engine.add(request(str(seed), (1, seed), max_tokens=20, seed=seed, **params))
        return [len(tokens) for tokens in drain(engine).values()]

    assert min(lengths()) < 5
    assert all(length >= 6 for length in lengths(min_tokens=5))
    assert all(length == 20 for length in lengths(ignore_eos=True))


def test_stop_strings_end_a_choice_in_the_middle_of_a_token_stream() -> None:
    engine, _ = fake_engine(limits(), decode=letters)
    engine.add(request("a", (1, 2), max_tokens=12, **GREEDY))
    whole = "".join(delta.text for delta in run(engine))
    stop = whole[4:6]
    engine.add(request("a", (1, 2), max_tokens=12, stop=(stop,), **GREEDY))
    deltas = run(engine)
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish is FinishReason.STOP


def test_choices_differ_share_the_prompt_and_repeat_with_the_seed() -> None:
    engine, runner = fake_engine(limits())
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    engine.add(request("a", prompt, max_tokens=8, n=3, seed=5))
    deltas = run(engine)
    computed = sum(plan.num_tokens for plan in runner.plans)
    assert computed == len(prompt) + 2 * 1 + 3 * 7
    assert {delta.index: delta.cached_tokens for delta in deltas} == {0: 0, 1: 8, 2: 8}
    tokens = [tuple(d.token_ids[0] for d in deltas if d.index == i) for i in range(3)]
    assert len(set(tokens)) == 3
    engine.add(request("b", prompt, max_tokens=8, n=3, seed=5))
    assert list(drain(engine).values()) == tokens


def test_requests_without_a_seed_differ() -> None:
    engine, _ = fake_engine(limits())
    for name in "ab":
        engine.add(request(name, (1, 2), max_tokens=16))
    assert len(set(drain(engine).values())) == 2


def test_logprobs_come_with_each_token() -> None:
    engine, _ = fake_engine(limits())
    engine.add(request("a", (1, 2), max_tokens=3, logprobs=TopLogprobs(2), **GREEDY))
    context = [1, 2]
    for delta in run(engine):
        (logprob,) = delta.logprobs
        expected = fake_logits(context).log_softmax(0)
        assert logprob.logprob == pytest.approx(expected.max().item())
        assert logprob.top[0] == (delta.token_ids[0], logprob.logprob)
        context += delta.token_ids


@pytest.mark.parametrize("num_pages", [4, 16])
def test_prompt_logprobs_are_teacher_forced_in_chunks_and_after_preemption(num_pages: int) -> None:
    engine, _ = fake_engine(limits(num_pages=num_pages, max_model_len=16, max_num_batched_tokens=5))
    engine.add(request("old", (1,) * 8, max_tokens=8, ignore_eos=True))
    prompt = (1, 2, 3, 4, 5, 6, 7)
    engine.add(request("a", prompt, max_tokens=9, prompt_logprobs=TopLogprobs(0), n=2))
    first = [d for d in run(engine) if d.prompt_logprobs]
    assert [(delta.request_id, delta.index) for delta in first] == [("a", 0)]
    values = [each.logprob for each in first[0].prompt_logprobs]
    expected = [fake_logits(prompt[:end]).log_softmax(0)[prompt[end]].item() for end in range(1, 7)]
    assert values == pytest.approx(expected)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_ends_once_per_choice(steps: int) -> None:
    engine, _ = fake_engine(limits())
    engine.add(request("a", (1, 2, 3, 4, 5), n=2, max_tokens=20))
    engine.add(request("b", (1, 2, 3, 4, 6), max_tokens=3))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    engine.check_integrity()
    deltas = run(engine)
    ended = [(d.request_id, d.index, d.finish) for d in deltas if d.finish.value == "aborted"]
    assert ended == [("a", 0, FinishReason.ABORTED), ("a", 1, FinishReason.ABORTED)]
    assert engine.stats.pages_used == 0
    assert not engine.has_work


def test_statistics_count_the_prefix_cache() -> None:
    engine, _ = fake_engine(limits())
    for name in "ab":
        engine.add(request(name, tuple(range(9)), max_tokens=1))
        run(engine)
    assert (engine.stats.prefix_query_tokens, engine.stats.prefix_hit_tokens) == (18, 8)
    assert (engine.stats.pages_total, engine.stats.num_running) == (16, 0)
