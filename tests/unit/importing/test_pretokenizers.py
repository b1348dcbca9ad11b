"""The label of a GGUF file decides where text is cut before merging."""

from __future__ import annotations

import pytest

from terrazzo.importing.pretokenizers import pre_tokenizer_for


def pieces(label: str, text: str) -> list[str]:
    cut = pre_tokenizer_for(label)
    assert cut is not None
    return [piece.replace("Ġ", " ") for piece, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("smollm", ["in", " ", "2", "0", "2", "6", " it", "'s"]),
        ("qwen2", ["in", " ", "2", "0", "2", "6", " it", "'s"]),
        ("llama-bpe", ["in", " ", "202", "6", " it", "'s"]),
    ],
)
def test_numbers(label: str, expected: list[str]) -> None:
    assert pieces(label, "in 2026 it's") == expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [("smollm", ["a", "  ", "7"]), ("qwen2", ["a", " ", " ", "7"])],
)
def test_spaces_before_a_number(label: str, expected: list[str]) -> None:
    assert pieces(label, "a  7") == expected


def test_an_unknown_label_changes_nothing() -> None:
    assert pre_tokenizer_for("gpt-2") is None
