"""How text is cut before byte-pair merging, by the `tokenizer.ggml.pre` label of a GGUF file.

transformers gives every GGUF tokenizer of a family the same cut, but the label decides it: numbers,
runs of spaces and line breaks come out as other tokens when it is ignored. The patterns are those
of the original tokenizers of each family.
"""

from __future__ import annotations

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pre_tokenizer_for(label: str) -> PreTokenizer | None:
    """The cut that `label` names, or None when the one of the tokenizer's family is right."""
    match label:
        case "smollm":
            cut = Digits(individual_digits=True)
            return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=True)])
        case "llama-bpe" | "llama3" | "llama-v3":
            return _split(rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}")
        case "qwen2" | "deepseek-r1-qwen":
            return _split(rf"{_LETTERS}|\p{{N}}|{_REST}")
        case _:
            return None


def _split(pattern: str) -> PreTokenizer:
    cut = Split(Regex(pattern), behavior="isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
