"""The progress bar of `terrazzo quantize`."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from terrazzo.spec import Name


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
