from __future__ import annotations

from helpers.fake_runner import limits
from terrazzo.engine.config import EngineLimits
from terrazzo.engine.request import Request, SamplingParams, Stage, TopLogprobs
from terrazzo.engine.scheduler import Scheduler, StepPlan


def request(name: str, length: int, **params: object) -> Request:
    """A prompt that shares no page with another name's."""
    tokens = tuple(ord(name) + position for position in range(length))
    return Request(name, tokens, SamplingParams(**params))  # type: ignore[arg-type]


def advance(scheduler: Scheduler, token: int = 0) -> StepPlan:
    """One step whose samples are all `token`."""
    plan = scheduler.plan()
    for chunk in plan.chunks:
        scheduler.commit(chunk)
        if chunk.samples:
            scheduler.append(chunk.sequence, token)
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of every chunk."""
    return [
        (chunk.sequence.request.request_id, chunk.start, len(chunk.token_ids))
        for chunk in plan.chunks
    ]


def scheduler_with(given: EngineLimits, *requests: Request) -> Scheduler:
    scheduler = Scheduler(given)
    for each in requests:
        scheduler.add(each)
    return scheduler


def test_prompts_are_cut_to_the_budget_and_decoding_goes_on_beside_them() -> None:
    scheduler = scheduler_with(limits(max_num_batched_tokens=8), request("a", 5), request("b", 12))
    assert shape(advance(scheduler)) == [("a", 0, 5), ("b", 0, 3)]
    assert shape(advance(scheduler)) == [("a", 5, 1), ("b", 3, 7)]
    assert shape(advance(scheduler)) == [("a", 6, 1), ("b", 10, 2)]
    assert shape(advance(scheduler)) == [("a", 7, 1), ("b", 12, 1)]


def test_decoding_comes_before_an_older_prompt() -> None:
    scheduler = scheduler_with(limits(max_num_batched_tokens=4), request("a", 11), request("b", 1))
    assert shape(advance(scheduler)) == [("a", 0, 4)]
    assert shape(advance(scheduler)) == [("a", 4, 4)]
    assert shape(advance(scheduler)) == [("a", 8, 3), ("b", 0, 1)]
    assert shape(advance(scheduler)) == [("a", 11, 1), ("b", 1, 1)]


def test_only_rows_that_are_wanted_have_logits() -> None:
    scheduler = scheduler_with(limits(max_num_batched_tokens=8), request("a", 12))
    assert [advance(scheduler).num_logits for _ in range(3)] == [0, 1, 1]


def test_prompt_logprobs_want_every_row_once_and_use_no_cache() -> None:
    wanting = request("a", 12, prompt_logprobs=TopLogprobs(0))
    scheduler = scheduler_with(limits(max_num_batched_tokens=8), wanting, wanting)
    plans = [advance(scheduler) for _ in range(3)]
    assert [shape(plan) for plan in plans] == [
        [("a", 0, 8)],
        [("a", 8, 4), ("a", 0, 4)],
        [("a", 12, 1), ("a", 4, 7)],
    ]
    assert [plan.num_logits for plan in plans] == [8, 8, 8]


def test_slots_are_given_in_order_of_arrival() -> None:
    requests = [request(name, 2) for name in "abc"]
    scheduler = scheduler_with(limits(max_num_seqs=2), *requests)
    advance(scheduler)
    assert [each.request.request_id for each in scheduler.running] == ["a", "b"]
    scheduler.finish(scheduler.running[0])
    advance(scheduler)
    assert [each.request.request_id for each in scheduler.running] == ["b", "c"]


def test_the_youngest_gives_way_when_pages_run_out() -> None:
    scheduler = scheduler_with(
        limits(num_pages=4, max_model_len=16), request("a", 8), request("b", 8)
    )
    advance(scheduler)
    plan = advance(scheduler)
    assert shape(plan) == [("a", 8, 1)]
    assert scheduler.num_preemptions == 1
    (young,) = scheduler.waiting
    assert (young.stage, young.num_computed, young.num_generated) == (Stage.WAITING, 0, 1)
    scheduler.finish(scheduler.running[0])
    assert shape(advance(scheduler)) == [("b", 4, 5)], "one of its pages is still cached"


def test_who_gave_way_comes_before_who_never_ran() -> None:
    scheduler = scheduler_with(
        limits(num_pages=4, max_model_len=16), request("a", 8), request("b", 8)
    )
    advance(scheduler)
    scheduler.add(request("c", 1))
    advance(scheduler)
    assert [each.request.request_id for each in scheduler.waiting] == ["b", "c"]


def test_a_prompt_waits_until_all_of_it_has_room() -> None:
    scheduler = scheduler_with(
        limits(num_pages=5, max_model_len=20), request("a", 12), request("b", 12)
    )
    assert shape(advance(scheduler)) == [("a", 0, 12)]
    assert shape(advance(scheduler)) == [("a", 12, 1)], "one page would be free for b"
    scheduler.finish(scheduler.running[0])
    assert shape(advance(scheduler)) == [("b", 0, 12)]
    assert scheduler.num_preemptions == 0


def test_choices_start_on_the_cached_prompt() -> None:
    scheduler = scheduler_with(limits(), request("a", 9, n=3), request("b", 2))
    assert shape(advance(scheduler)) == [("a", 0, 9), ("b", 0, 2)]
    plan = advance(scheduler)
    assert shape(plan) == [("a", 9, 1), ("b", 2, 1), ("a", 8, 1), ("a", 8, 1)]
    assert [chunk.sequence.index for chunk in plan.chunks] == [0, 0, 1, 2]
    assert [chunk.pages[:2] for chunk in plan.chunks if chunk.sequence.index] == [
        plan.chunks[0].pages[:2]
    ] * 2
