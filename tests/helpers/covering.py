"""Pairwise covering arrays: few rows in which every two values of two factors meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Every two factors of a row with their values; also of a row that is not yet complete."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    return {
        frozenset({(one, value), (other, another)})
        for one, other in combinations(factors, 2)
        for value in factors[one]
        for another in factors[other]
    }


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy and without chance: each row starts with a pair that no row has yet, and every other
    factor takes the value that meets most of what is missing.

    The start is the smallest missing pair in the order of the factors, so that the rows are the
    same in every run.
    """
    missing = all_pairs(factors)
    places = {
        (name, value): (at, values.index(value))
        for at, (name, values) in enumerate(factors.items())
        for value in values
    }
    rows = []
    while missing:
        row = dict(min(missing, key=lambda pair: sorted(places[choice] for choice in pair)))
        for name, values in factors.items():
            if name not in row:
                turned = [*values[len(rows) % len(values) :], *values[: len(rows) % len(values)]]
                row[name] = max(turned, key=lambda v: len(pairs_of({**row, name: v}) & missing))
        missing -= pairs_of(row)
        rows.append({name: row[name] for name in factors})
    return rows
