"""Text to token ids and back, from the files of a model folder alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.tokenizer_file import blaming, open_tokenizer
from terrazzo.engine.chat_template import ChatTemplate, Message, read_template, special_tokens
from terrazzo.engine.folder import GenerationDefaults, read_json
from terrazzo.errors import RequestError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_VARIABLES: Final[Mapping[str, Any]] = {}


class Tokenizer:
    """`tokenizer.json` and its companions.

    eos_token_ids: of generation_config.json, config.json and tokenizer_config.json together.
    vocab_size: token ids are below it. Raises MissingFileError when tokenizer.json is not there,
    ConfigError when it is no tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file = self.folder / "tokenizer.json"
        self._backend = open_tokenizer(
            self._file,
            "copy it from the model this one was made of, or work with token ids",
        )
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config = read_json(self.folder / "tokenizer_config.json")
        eos = self._backend.token_to_id(special_tokens(self._config).get("eos_token", ""))
        own_eos = frozenset() if eos is None else frozenset({eos})
        self.eos_token_ids = GenerationDefaults.read(self.folder).eos_token_ids | own_eos
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Special tokens (BOS) are added exactly as the file's post-processor says."""
        with blaming(self._file, "cannot encode this text"):
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing."""
        with blaming(self._file, "cannot decode these tokens"):
            return str(self._backend.decode(list(token_ids), skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for, possibly not UTF-8 on their own; b"" for no token."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level:
            return bytes(_byte_alphabet()[letter] for letter in piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """The prompt text of a conversation.

        variables: further names for the template, such as `enable_thinking`. Raises RequestError
        when the template refuses, MissingFileError when the folder has none.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation has at least one message")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> tuple[int, ...]:
        """As `render_chat`, encoded without further special tokens: the template writes them."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _template(self) -> ChatTemplate:
        return read_template(self.folder, self._config)

    @cached_property
    def _added(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        """A sequence of decoders shows its members only in its printed form."""
        return "ByteLevel" in str(self._backend.decoder)


@cache
def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, and back.

    Printable Latin-1 bytes stand for themselves, the others take the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
