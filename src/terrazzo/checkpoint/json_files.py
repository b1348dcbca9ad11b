"""JSON objects on disk, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terrazzo.errors import ConfigError, MissingFileError


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises MissingFileError or ConfigError naming the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{file}: not there. Check that the path is a model folder and that it is complete"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not readable as JSON ({error}). Correct the file or fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: holds a JSON {type(content).__name__}; legal is an object. Fetch it again"
        )
    return content


def write_json(file: Path, content: object) -> None:
    """Keeps the order of keys: the order of `dynamic` decides what its rules mean."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
