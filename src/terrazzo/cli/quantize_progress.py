"""What `terrazzo quantize` shows while it works: a bar in a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from terrazzo.quantization.progress import Progress as Listener
from terrazzo.rules import layer_relative
from terrazzo.spec import Name


def shown() -> AbstractContextManager[Listener]:
    """The progress that suits stderr."""
    return Bar() if sys.stderr.isatty() else nullcontext(Lines())


class Bar:
    """Shows the module at work, the part done, and the time that is left; on stderr."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.percentage:>5.1f}%"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("reading", total=1.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, work: float) -> None:
        self._progress.update(self._task, total=work)

    def doing(self, name: Name) -> None:
        self._progress.update(self._task, description=name)

    def advance(self, work: float) -> None:
        self._progress.advance(self._task, work)


class Lines:
    """One line on stderr when another layer begins."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._total = 1.0
        self._done = 0.0
        self._layer = ""

    def begin(self, work: float) -> None:
        self._total = work

    def doing(self, name: Name) -> None:
        layer = layer_of(name)
        if layer != self._layer:
            self._layer = layer
            seconds = time.monotonic() - self._start
            print(f"{self._done / self._total:6.1%} {seconds:5.0f} s  {layer}", file=sys.stderr)

    def advance(self, work: float) -> None:
        self._done += work


def layer_of(name: Name) -> str:
    """`model.layers.3.mlp.up_proj` -> `model.layers.3`; other names are unchanged."""
    return name.removesuffix(f".{layer_relative(name)}")
