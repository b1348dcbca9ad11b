"""Text files of a model folder, which may come from anybody: regular files of bounded size only.

Links are followed, because download caches are made of them; what they lead to is judged alike.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from terrazzo.errors import ConfigError, MissingFileError

LARGEST_TEXT = 64 << 20
"""Bytes. The index of a model of a trillion parameters in many small experts has half of it."""
LARGEST_TOKENIZER = 256 << 20
"""Bytes. The largest tokenizers in use have a tenth of it."""


def is_present(file: Path) -> bool:
    """Whether something has this name, be it a folder or a link to nothing."""
    return os.path.lexists(file)


def read_text(file: Path, largest: int = LARGEST_TEXT) -> str:
    """UTF-8 text. Raises MissingFileError or ConfigError naming the file; never waits for it."""
    check_regular(file, largest)
    try:
        # A file that became a pipe in the meantime must not be waited for either.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as opened:
            text = opened.read(largest + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: not readable as UTF-8 text ({error}). Correct the file or fetch it again"
        ) from error
    if len(text) > largest:
        raise _too_large(file, "more", largest)
    return text


def check_regular(file: Path, largest: int) -> None:
    """Raises MissingFileError or ConfigError naming the file. Opens nothing: to open a pipe waits,
    and to open a device acts.
    """
    try:
        state = file.stat()
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{file}: not there. Check that the path is a model folder and that it is complete"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: not readable ({error}). Correct the file or fetch it again"
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise ConfigError(
            f"{file}: is a {_kind(state.st_mode)}; legal is a regular file, or a link to one. "
            "Do not trust this folder; fetch it again"
        )
    if state.st_size > largest:
        raise _too_large(file, str(state.st_size), largest)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _too_large(file: Path, seen: str, largest: int) -> ConfigError:
    return ConfigError(
        f"{file}: has {seen} bytes; at most {largest} are read. No model needs as many: fetch the "
        "file again"
    )
