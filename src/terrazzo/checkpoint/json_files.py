"""JSON objects on disk, with errors that name the file."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.small_files import read_text
from terrazzo.errors import ConfigError

MOST_VALUES = 4_000_000
"""Commas, brackets and braces of a text: they bound what it becomes in memory. A quarter of a
million tensors in one header have half as many.
"""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises MissingFileError or ConfigError naming the file.

    Keys that occur twice are refused, because each reader would take another one, and so is text
    that cannot be written as UTF-8.
    """
    text = read_text(file)
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not readable as JSON ({error}). Correct the file or fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: holds a JSON {type(content).__name__}; legal is an object. Fetch it again"
        )
    return content


def parse_json(text: str) -> Any:
    """Raises ValueError or RecursionError."""
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    content = json.loads(text, object_pairs_hook=_unique)
    if _SURROGATE.search(text):
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise ValueError(f"key {keys.most_common(1)[0][0]!r} occurs twice")
    return content


def write_json(file: Path, content: object) -> None:
    """Keeps the order of keys: the order of `dynamic` decides what its rules mean."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
