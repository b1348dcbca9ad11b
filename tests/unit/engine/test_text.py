from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_tokenizer import write_tokenizer
from terrazzo.engine.output import Output
from terrazzo.engine.request import FinishReason, SamplingParams
from terrazzo.engine.text import StopStrings, TextStream
from terrazzo.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def streamed(decode: Callable[..., str], token_ids: list[int]) -> list[str]:
    stream = TextStream(decode)
    return [*(stream.push(token) for token in token_ids), stream.flush()]


@given(text=st.text())
def test_pieces_join_to_the_text_and_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    pieces = streamed(tokenizer.decode, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 319)))
def test_any_tokens_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer.decode, ids)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("🪨", add_special_tokens=False))
    assert len(ids) == 4
    assert streamed(tokenizer.decode, ids) == ["", "", "", "🪨", ""]
    assert streamed(tokenizer.decode, ids[:3]) == ["", "", "", "\ufffd"]


def spaced(token_ids: list[int]) -> str:
    """Decodes as sentencepiece models do: a space before each word, but not the first.

    Word 0 stands for a special token, which has no text.
    """
    return "".join(f" w{token}" for token in token_ids if token).removeprefix(" ")


@given(st.lists(st.integers(0, 3)))
def test_spaces_that_depend_on_the_token_before_survive(ids: list[int]) -> None:
    assert "".join(streamed(spaced, ids)) == spaced(ids)


def cut(text: str, stops: list[str], *, keep: bool) -> str:
    """The definition: read character by character, stop at the first stop string completed."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if keep else text[: end - max(map(len, found))]
    return text


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_cut_and_never_leak(pieces: list[str], stops: list[str], keep: bool) -> None:
    expected = cut("".join(pieces), stops, keep=keep)
    matcher = StopStrings(stops, keep_stop=keep)
    shown, read, stopped = "", "", False
    for text in pieces:
        piece = matcher.push(text)
        shown, read, stopped = shown + piece.text, read + text, piece.is_stopped
        assert expected.startswith(shown)
        if stopped:
            break
        held = read[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops), "held without need"
    assert shown + matcher.flush() == expected


EOS = frozenset({25})


def letter(token_ids: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids)


def finished(tokens: str, room: int = 100, **params: object) -> tuple[str, int, FinishReason]:
    """Text, tokens used and reason; in `tokens`, "z" is the end of sequence."""
    output = Output(SamplingParams(**params), EOS, room, letter)  # type: ignore[arg-type]
    text = ""
    for count, character in enumerate(tokens, start=1):
        grown = output.accept(ord(character) - ord("a"))
        text += grown.text
        if grown.finish is not FinishReason.NOT_YET:
            return text, count, grown.finish
    return text, len(tokens), FinishReason.NOT_YET


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_what_ends_a_choice() -> None:
    assert finished("abzc") == ("ab", 3, STOP)
    assert finished("abc", stop_token_ids=(1,)) == ("a", 2, STOP)
    assert finished("abc", stop_token_ids=(1,), include_stop_str_in_output=True) == ("ab", 2, STOP)
    assert finished("abc", max_tokens=2) == ("ab", 2, LENGTH)
    assert finished("abc", room=2) == ("ab", 2, LENGTH)
    assert finished("abcd", stop=("bc",)) == ("a", 3, STOP)
    assert finished("abcd", stop=("bc",), include_stop_str_in_output=True) == ("abc", 3, STOP)


def test_ignoring_eos_and_minimum_lengths() -> None:
    assert finished("azbc", ignore_eos=True, max_tokens=3) == ("azb", 3, LENGTH)
    assert finished("azbz", min_tokens=2)[1:] == (4, STOP)
    assert finished("bcabc", min_tokens=2, stop=("bc",)) == ("bca", 5, STOP)
    assert finished("abc", min_tokens=3, max_tokens=3, stop=("b",)) == ("abc", 3, LENGTH)


def test_a_held_back_beginning_is_given_out_at_the_end() -> None:
    assert finished("abz", stop=("bc",)) == ("ab", 3, STOP)
    assert finished("abc", stop=("bcd",), max_tokens=3) == ("abc", 3, LENGTH)
    assert finished("abc", stop=("bc",), max_tokens=3) == ("a", 3, STOP)


def test_an_incomplete_character_is_given_out_at_the_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    output = Output(SamplingParams(max_tokens=2), frozenset(), 100, tokenizer.decode)
    first, second, *_ = tokenizer.encode("🪨", add_special_tokens=False)
    assert output.accept(first).text == ""
    assert output.accept(second).text == "\ufffd"
