"""Pages of the KV cache: reference counts and a prefix cache, all in plain Python.

A full page of computed tokens is *sealed*: it gets an entry under the key (id of the prefix before
it, its tokens). A dict compares whole keys, so equal hashes of different tokens are harmless, and
the chain of prefix ids makes one key stand for everything since the first token.

    free ──allocate──> used ──seal──> used + cached ──release──> idle (cached, no owner)
      ^                  │                 ^                         │
      └────release───────┘                 └────────acquire──────────┤
      └──────────────────────────evict (oldest first)────────────────┘

Every operation costs O(1) per page.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

PrefixId: TypeAlias = int
ROOT: Final[PrefixId] = 0
"""The prefix of no tokens."""

_Key: TypeAlias = tuple[PrefixId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A sealed page; `prefix` names all tokens up to its end and is never used twice."""

    page: int
    prefix: PrefixId


@dataclass(slots=True)
class PageTable:
    """Pages of one sequence in token order; the first `num_sealed` are in the prefix cache."""

    pages: list[int] = field(default_factory=list)
    num_sealed: int = 0
    prefix: PrefixId = ROOT


class PagePool:
    """Hands out `num_pages` pages of `page_size` tokens each.

    A page is in exactly one of three states: free, idle (cached, no owner) or owned.
    """

    def __init__(self, num_pages: int, page_size: int, *, caching: bool = True) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._caching = caching
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._cache: dict[_Key, CachedPage] = {}
        self._keys: dict[int, _Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_prefix = ROOT + 1

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def missing(self, table: PageTable, num_tokens: int) -> int:
        """Pages that `table` lacks to hold `num_tokens` tokens."""
        return max(0, self.pages_for(num_tokens) - len(table.pages))

    def match(self, token_ids: Sequence[int], limit: int) -> PageTable:
        """The longest cached run of full pages within the first `limit` tokens; owns nothing."""
        table = PageTable()
        for start in range(0, limit - self.page_size + 1, self.page_size):
            tokens = tuple(token_ids[start : start + self.page_size])
            found = self._cache.get((table.prefix, tokens))
            if found is None:
                break
            table.pages.append(found.page)
            table.prefix = found.prefix
            table.num_sealed += 1
        return table

    def num_idle(self, table: PageTable) -> int:
        """Pages of a match that nobody owns: acquiring it makes so many fewer available."""
        return sum(self._owners[page] == 0 for page in table.pages)

    def acquire(self, table: PageTable) -> None:
        """Become an owner of every page of a fresh match."""
        for page in table.pages:
            self._own(page)

    def grow(self, table: PageTable, num_tokens: int) -> None:
        """Add pages until `num_tokens` fit; the caller made sure they are available."""
        for _ in range(self.missing(table, num_tokens)):
            page = self._take()
            self._own(page)
            table.pages.append(page)

    def seal(self, table: PageTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish the full pages among the first `num_computed` tokens.

        Where another sequence published the same prefix first, its page replaces ours: memory is
        saved, and an owner of a page owns the cached pages of its whole prefix.
        """
        if not self._caching:
            return
        for index in range(table.num_sealed, num_computed // self.page_size):
            start = index * self.page_size
            key = (table.prefix, tuple(token_ids[start : start + self.page_size]))
            cached = self._publish(table.pages[index], key)
            table.pages[index] = cached.page
            table.prefix = cached.prefix
            table.num_sealed += 1

    def release(self, table: PageTable) -> None:
        """Give every page back and empty the table.

        Last page first, so that a prefix is always evicted after what follows it.
        """
        while table.pages:
            self._disown(table.pages.pop())
        table.num_sealed = 0
        table.prefix = ROOT

    def _publish(self, page: int, key: _Key) -> CachedPage:
        known = self._cache.get(key)
        if known is not None:
            self._own(known.page)
            self._disown(page)
            return known
        cached = CachedPage(page, self._next_prefix)
        self._next_prefix += 1
        self._cache[key] = cached
        self._keys[page] = key
        return cached

    def _own(self, page: int) -> None:
        self._owners[page] += 1
        self._idle.pop(page, None)

    def _disown(self, page: int) -> None:
        assert self._owners[page] > 0
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        del self._cache[self._keys.pop(page)]
        return page

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Assert that `tables` are all the owners there are and that no page is lost or doubled."""
        owners = Counter(page for table in tables for page in table.pages)
        assert all(owners[page] == count for page, count in enumerate(self._owners))
        states = [*self._free, *self._idle, *owners]
        assert sorted(states) == list(range(self.num_pages))
        assert {cached.page: key for key, cached in self._cache.items()} == self._keys
        assert set(self._idle) <= set(self._keys)
        assert not set(self._free) & set(self._keys)
        prefixes = {cached.prefix for cached in self._cache.values()}
        assert len(prefixes) == len(self._cache)
        assert all(parent in prefixes or parent == ROOT for parent, _ in self._cache)
