from __future__ import annotations

import pytest

from terrazzo.engine.pages import PagePool, PageTable

PROMPT = tuple(range(10))


def computed(pool: PagePool, tokens: tuple[int, ...]) -> PageTable:
    """A sequence that starts from the cache and has all its tokens computed."""
    table = pool.match(tokens, len(tokens))
    pool.acquire(table)
    pool.grow(table, len(tokens))
    pool.seal(table, tokens, len(tokens))
    return table


def test_only_full_pages_are_shared() -> None:
    pool = PagePool(8, 4)
    first = computed(pool, PROMPT)
    second = computed(pool, PROMPT)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert pool.num_used == 4
    pool.check_integrity([first, second])


def test_a_limit_keeps_tokens_to_compute() -> None:
    pool = PagePool(8, 4)
    computed(pool, PROMPT[:8])
    assert len(pool.match(PROMPT, 8).pages) == 2
    assert len(pool.match(PROMPT, 7).pages) == 1


def test_equal_pages_after_different_prefixes_are_different() -> None:
    pool = PagePool(8, 2)
    first = computed(pool, (1, 1, 7, 7))
    second = computed(pool, (2, 2, 7, 7))
    assert not set(first.pages) & set(second.pages)
    assert pool.match((7, 7), 2).pages == []


def test_tokens_with_equal_hashes_do_not_meet() -> None:
    assert hash((-1,)) == hash((-2,))
    pool = PagePool(8, 1)
    computed(pool, (-1,))
    assert pool.match((-2,), 1).pages == []


def test_pages_computed_twice_at_once_become_one() -> None:
    pool = PagePool(8, 4)
    tables = [PageTable(), PageTable()]
    for table in tables:
        pool.grow(table, 8)
    assert pool.num_used == 4
    for table in tables:
        pool.seal(table, PROMPT, 8)
    assert tables[0].pages == tables[1].pages
    assert pool.num_used == 2
    pool.check_integrity(tables)


def test_released_pages_are_found_again_until_they_are_needed() -> None:
    pool = PagePool(3, 4)
    first = computed(pool, PROMPT[:8])
    pool.release(first)
    assert first == PageTable()
    assert pool.num_available == 3
    assert len(pool.match(PROMPT, 8).pages) == 2
    other = PageTable()
    pool.grow(other, 8)
    assert len(pool.match(PROMPT, 8).pages) == 1, "the end of a prefix goes first"
    pool.check_integrity([other])


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = PagePool(2, 4)
    pool.release(computed(pool, (1, 1, 1, 1)))
    pool.release(computed(pool, (2, 2, 2, 2)))
    pool.release(computed(pool, (1, 1, 1, 1)))
    pool.release(computed(pool, (3, 3, 3, 3)))
    assert len(pool.match((1, 1, 1, 1), 4).pages) == 1
    assert pool.match((2, 2, 2, 2), 4).pages == []


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(8, 4, caching=False)
    pool.release(computed(pool, PROMPT))
    assert pool.match(PROMPT, 8).pages == []
    assert pool.num_used == 0


def test_integrity_notices_a_leak_and_a_second_owner() -> None:
    pool = PagePool(8, 4)
    table = computed(pool, PROMPT)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table])
