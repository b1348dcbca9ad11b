"""Tokens to text as they come: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text; bytes that are not UTF-8 become U+FFFD."""

_INCOMPLETE: Final = "\ufffd"


class TextStream:
    """Incremental decoding of one sequence of tokens.

    A token's text can depend on the token before it (spaces) and on those after it (bytes of one
    character). So a window is decoded twice, without and with the new tokens, and the difference
    is given out once it ends in a whole character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_read = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What was held back; the stream stands at a clean start afterwards."""
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        new = text[len(self._decode(self._window[: self._num_read])) :]
        if new:
            # Tokens without text (special ones) stay, with what is needed before them.
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
        return new


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is safe to give out, and whether a stop string ended it."""

    text: str
    is_stopped: bool


class StopStrings:
    """Cuts a text before (or behind) the stop string that is complete first.

    Of several that end at the same character the longest counts. Text is held back exactly as long
    as it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, text: str) -> Piece:
        if not self._stops:
            return Piece(text, is_stopped=False)
        seen = len(self._held)
        whole = self._held + text
        for end in range(seen + 1, len(whole) + 1):
            for stop in self._stops:
                if whole.endswith(stop, 0, end):
                    self._held = ""
                    cut = end if self._keep_stop else end - len(stop)
                    return Piece(whole[:cut], is_stopped=True)
        self._held = self._beginning_of_stop(whole)
        return Piece(whole[: len(whole) - len(self._held)], is_stopped=False)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, text: str) -> str:
        """The longest end of `text` that begins a stop string."""
        longest = len(self._stops[0]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return text[start:]
        return ""
