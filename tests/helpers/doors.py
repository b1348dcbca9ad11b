"""Opens folders that may be hostile, each in a process of its own with little memory and time.

    python -m helpers.doors < folders        # lines of doors, a tab, a path; answers in JSON lines

Torch is imported once; a fork of that process opens each folder through every door. What the
fork can raise, print, take and wait for is bounded and told.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MORE_MEMORY = 1 << 30
"""Bytes of address space that a folder may take beside those of the interpreter."""
PATIENCE_S = 20
MESSAGES = ({"role": "user", "content": "hello"},)


@dataclass(frozen=True, slots=True)
class Visit:
    """outcome, of each door: "opened", "refused", or what else was raised. status, message: of
    `terrazzo inspect`. rss: bytes at the peak. ended: "well", or how the process was killed.
    """

    outcomes: dict[str, str]
    status: int
    message: str
    rss: int
    ended: str


def visit(folders: Sequence[Path], doors: Sequence[str]) -> list[Visit]:
    """Every folder through its doors ("weights inspect", "text" ...), from a process that inherits
    nothing of the caller's.
    """
    tests = Path(__file__).parent.parent
    source = Path(__file__).parent.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": f"{source}:{tests}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.doors"],
        input="\n".join(f"{door}\t{at}" for door, at in zip(doors, folders, strict=True)),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Visit(**json.loads(line)) for line in done.stdout.splitlines()]


def _through(door: Callable[[Path], None], folder: Path) -> str:
    from terrazzo.errors import TerrazzoError

    try:
        door(folder)
    except TerrazzoError:
        return "refused"
    except BaseException as error:  # noqa: BLE001 (a panic of Rust is one)
        return f"{type(error).__name__}: {error}"[:500]
    return "opened"


def _weights(folder: Path) -> None:
    from terrazzo.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    for module in checkpoint.plan:
        checkpoint.dequantize(module)
    for tensor in checkpoint.tensor_names:
        checkpoint.tensor(tensor)


def _text(folder: Path) -> None:
    from terrazzo.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat(MESSAGES)
    tokenizer.decode(ids)
    for token_id in ids[:8]:
        tokenizer.token_bytes(token_id)


def _inspect(folder: Path) -> tuple[int, str]:
    from terrazzo import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(["inspect", str(folder)])
    out.getvalue().encode("utf-8")
    return status, err.getvalue()


def _open(chosen: str, folder: Path, result: int) -> None:
    """In the fork: every chosen door, and what came of it to the pipe."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, used + MORE_MEMORY))
    doors = {"weights": _weights, "text": _text}
    outcomes = {name: _through(door, folder) for name, door in doors.items() if name in chosen}
    try:
        status, message = _inspect(folder) if "inspect" in chosen else (0, "")
    except BaseException as error:  # noqa: BLE001
        status, message = -1, f"Traceback: {type(error).__name__}: {error}"[:500]
    os.write(result, json.dumps((outcomes, status, message)).encode()[:60_000])


def _visit(chosen: str, folder: Path) -> Visit:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _open(chosen, folder, write)
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + PATIENCE_S
    done, status, usage = os.wait4(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.002)
        done, status, usage = os.wait4(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        _, status, usage = os.wait4(child, 0)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    outcomes, code, message = json.loads(text) if text else ({}, -1, "")
    ended = "well" if status == 0 and text else f"status {status} after at most {PATIENCE_S} s"
    return Visit(outcomes, code, message, usage.ru_maxrss * 1024, ended)


def main() -> None:

    import terrazzo.cli.inspect
    import terrazzo.engine.tokenizer
    import terrazzo.inspection.render

    with contextlib.redirect_stderr(io.StringIO()):
        terrazzo.cli.run(["inspect", "/nowhere"])
    gc.freeze()
    for line in sys.stdin.read().splitlines():
        chosen, _, path = line.partition("\t")
        print(json.dumps(asdict(_visit(chosen, Path(path)))), flush=True)


if __name__ == "__main__":
    main()
