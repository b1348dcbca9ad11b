"""Text to token ids and back, from the files of a model folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tokenizer:
    """`tokenizer.json` and its companions. Raises MissingFileError when it is not there."""

    folder: Path
    eos_token_ids: frozenset[int]
    vocab_size: int

    def __init__(self, folder: str | Path) -> None:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Special tokens (BOS) are added exactly as the file's post-processor says."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for, possibly not UTF-8 on their own."""
        raise NotImplementedError

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. RequestError when the template refuses it."""
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """As `render_chat`, encoded without further special tokens: the template writes them."""
        raise NotImplementedError
