"""A hidden folder beside the one that it becomes, and what killed writers left of theirs.

A writer holds a lock in its folder for as long as it lives; the system lets it go however the
writer ends. The next writer of the same name removes a folder only if it proves all of this: a
Terrazzo of this user and host made it under this very name for this target, and nobody holds its
lock. What proves less stays: folders of others, copies, and those that somebody has renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from platform import node

LOCK_FILE = ".terrazzo-writing"
_LARGEST_LOCK = 4096
_UNLOCKABLE = -1
"""In place of a file descriptor, where the file system has no locks: nothing is ever proved."""


@dataclass(frozen=True, slots=True)
class Aside:
    """folder: exists, is empty but for its lock. lock: open file descriptor, or _UNLOCKABLE."""

    folder: Path
    lock: int

    @classmethod
    def beside(cls, out: Path) -> Aside:
        """A new folder for `out`, after those of dead writers of the same name are removed."""
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(out)
        folder = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
        folder.chmod(0o755)
        return cls(folder, _take_lock(folder, out))

    def publish(self, out: Path) -> None:
        """The folder gets its name while it is locked: killed on the way, it is whole or stale."""
        self.folder.rename(out)
        (out / LOCK_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what is left; nothing, if it was published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock != _UNLOCKABLE:
            os.close(self.lock)


def remove_abandoned(out: Path) -> None:
    """Remove the folders that killed writers of `out` left; see the file's first lines."""
    for folder in sorted(out.parent.iterdir()):
        if folder.name.startswith(_prefix(out)) and not folder.is_symlink() and folder.is_dir():
            with _abandoned(folder, out) as is_proved:
                if is_proved:
                    shutil.rmtree(folder, ignore_errors=True)


def _prefix(out: Path) -> str:
    return f".{out.name}."


def _claim(folder: Path, out: Path) -> bytes:
    """What the lock file says; a folder that was copied or renamed no longer fits it."""
    claim = {"terrazzo": "writing", "folder": folder.name, "out": out.name, "host": node()}
    return json.dumps(claim).encode()


def _take_lock(folder: Path, out: Path) -> int:
    """The lock gets its name only when it is held: no other writer ever sees it free."""
    file = folder / f"{LOCK_FILE}.new"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        file.unlink()
        return _UNLOCKABLE
    os.write(descriptor, _claim(folder, out))
    file.rename(folder / LOCK_FILE)
    return descriptor


@contextmanager
def _abandoned(folder: Path, out: Path) -> Iterator[bool]:
    """Whether the folder is ours and its writer dead. Its lock is held inside the block."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder / LOCK_FILE, flags)
    except OSError:
        yield False
        return
    try:
        yield _is_ours(descriptor, folder, out) and _is_free(descriptor, folder)
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, folder: Path, out: Path) -> bool:
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        return False
    return os.read(descriptor, _LARGEST_LOCK) == _claim(folder, out)


def _is_free(descriptor: int, folder: Path) -> bool:
    """Another writer may have removed the folder while this one waited to look."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), (folder / LOCK_FILE).lstat())
    except OSError:
        return False
