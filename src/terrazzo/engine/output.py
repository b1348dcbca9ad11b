"""One choice while it grows: its text and the moment it ends."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.engine.request import FinishReason, SamplingParams
from terrazzo.engine.text import Decode, StopStrings, TextStream


@dataclass(frozen=True, slots=True)
class Grown:
    """What one token added."""

    text: str
    finish: FinishReason


class Output:
    """Turns the tokens of one choice into text and decides when they are enough.

    eos_token_ids: any of them ends the choice. room: most tokens before the model's limit.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: frozenset[int], room: int, decode: Decode
    ) -> None:
        self._params = params
        self._stop_tokens = stop_tokens(params, eos_token_ids)
        self._most = min(params.max_tokens, room)
        self._stream = TextStream(decode)
        self._stops = StopStrings(params.stop, keep_stop=params.include_stop_str_in_output)
        self._count = 0

    def accept(self, token_id: int) -> Grown:
        """Add a token. After the first result that is not NOT_YET nothing more is accepted."""
        self._count += 1
        may_stop = self._count > self._params.min_tokens
        if may_stop and token_id in self._stop_tokens:
            shown = self._params.include_stop_str_in_output
            return self._end(self._stream.push(token_id) if shown else "", FinishReason.STOP)
        text = self._stream.push(token_id)
        if self._count >= self._most:
            return self._end(text, FinishReason.LENGTH)
        if not may_stop:
            return Grown(text, FinishReason.NOT_YET)
        piece = self._stops.push(text)
        return Grown(piece.text, FinishReason.STOP if piece.is_stopped else FinishReason.NOT_YET)

    def _end(self, text: str, finish: FinishReason) -> Grown:
        """Let go of what is held back; even its last character may complete a stop string."""
        rest = text + self._stream.flush()
        if self._count <= self._params.min_tokens:
            return Grown(rest, finish)
        piece = self._stops.push(rest)
        if piece.is_stopped:
            return Grown(piece.text, FinishReason.STOP)
        return Grown(piece.text + self._stops.flush(), finish)


def stop_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end a choice."""
    eos = frozenset() if params.ignore_eos else eos_token_ids
    return eos | frozenset(params.stop_token_ids)
