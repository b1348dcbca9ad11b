"""The offline door: a model folder in, completions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from terrazzo.engine.config import EngineConfig
from terrazzo.engine.engine import Engine
from terrazzo.engine.request import FinishReason, SamplingParams, TokenLogprob
from terrazzo.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated continuation; `text` is empty when the folder has no tokenizer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of one prompt; `text`, `token_ids`, ... are those of the first choice."""

    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish(self) -> FinishReason:
        return self.choices[0].finish


class LLM:
    """A model folder ready to generate: `LLM(folder).generate("Once upon a time")[0].text`.

    engine: the synchronous core (the server drives it). tokenizer: MissingFileError at first
    use when the folder has none. max_model_len: longest prompt plus output.
    """

    folder: Path
    engine: Engine
    max_model_len: int

    def __init__(self, folder: str | Path, config: EngineConfig | None = None) -> None:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def default_params(self, **changes: Any) -> SamplingParams:
        """SamplingParams with the defaults of the folder's generation_config.json."""
        raise NotImplementedError

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        raise NotImplementedError

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Completion:
        raise NotImplementedError

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Teacher-forced logits, float32 [T, vocab_size]."""
        raise NotImplementedError
