"""A damaged tokenizer.json is an error of ours, with the name of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.checkpoint.tokenizer_file import open_tokenizer
from terrazzo.errors import ConfigError, MissingFileError


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"model": {"type": "BPE"}}', '{"model": {"type": "None"}}']
)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        open_tokenizer(file, "fetch it")


def test_a_missing_file_ends_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="is not there; fetch it"):
        open_tokenizer(tmp_path / "tokenizer.json", "fetch it")
