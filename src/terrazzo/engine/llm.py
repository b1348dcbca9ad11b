"""The offline door: a model folder in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.config import DEFAULT_CONFIG, EngineConfig
from terrazzo.engine.engine import Engine, Vocabulary, no_text
from terrazzo.engine.folder import GenerationDefaults
from terrazzo.engine.memory import MemoryPlan, available_memory
from terrazzo.engine.needs import plan_memory
from terrazzo.engine.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
)
from terrazzo.engine.runner import fastest_runner
from terrazzo.engine.text import Decode
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.errors import RequestError
from terrazzo.models.config import ModelConfig
from terrazzo.models.decoder import Decoder
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext, KVPool

Prompt: TypeAlias = str | Sequence[int]
"""Text, encoded as the tokenizer's files say (with BOS where they add one), or token ids."""


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
    """All choices of one prompt; `text`, `token_ids`, ... are those of the first choice.

    prompt_logprobs: of prompt tokens 1..P-1 when asked for. cached_tokens: prompt tokens that were
    in the prefix cache.
    """

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
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish(self) -> FinishReason:
        return self.choices[0].finish


def keep_quiet(plan: MemoryPlan) -> None:
    """Nobody wants to hear of the plan."""


class LLM:
    """A model folder ready to generate: `LLM(folder).generate("Once upon a time")[0].text`.

    memory_plan: what is allocated and why; `announce` gets it before anything is. engine: the
    synchronous core, which a server drives itself. Raises the errors of `Checkpoint`, `load` and
    `resolve`; nothing is loaded before the memory plan stands.
    """

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig = DEFAULT_CONFIG,
        announce: Callable[[MemoryPlan], None] = keep_quiet,
    ) -> None:
        self.folder = Path(folder)
        checkpoint = Checkpoint(self.folder)
        self.model_config = ModelConfig.of(checkpoint)
        self.memory_plan: MemoryPlan = plan_memory(
            checkpoint, self.model_config, config, available_memory()
        )
        announce(self.memory_plan)
        self._defaults = GenerationDefaults.read(self.folder)
        vocabulary = self._vocabulary()
        self.decoder: Decoder = load(checkpoint, self.memory_plan.needs.kernel_policy)
        limits = self.memory_plan.limits
        pool = KVPool.allocate(
            self.model_config.num_layers,
            limits.num_pages,
            limits.page_size,
            self.model_config.num_kv_heads,
            self.model_config.head_dim,
            self.memory_plan.needs.kv_dtype,
        )
        self.engine = Engine(fastest_runner(self.decoder, pool), limits, vocabulary)
        self._request_numbers = count()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self.memory_plan.limits.max_model_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """MissingFileError when the folder has none; everything on token ids works without."""
        return Tokenizer(self.folder)

    def default_params(self, **changes: Any) -> SamplingParams:
        """SamplingParams with the recommendations of generation_config.json, then `changes`."""
        return SamplingParams(**{**self._defaults.sampling, **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """One Completion per prompt, in order; params: `default_params()` where not given.

        Raises RequestError for a prompt that can never run; then none of them has run.
        """
        chosen = self.default_params() if params is None else params
        requests = [self._request(prompt, chosen) for prompt in _as_list(prompts)]
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work:
                for delta in self.engine.step():
                    deltas.get(delta.request_id, []).append(delta)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        return [_completion(request, deltas[request.request_id]) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The Deltas of one prompt as they come; closing the iterator ends the request."""
        chosen = self.default_params() if params is None else params
        request = self._request(prompt, chosen)
        num_open = request.params.n
        self.engine.add(request)
        try:
            while num_open:
                for delta in self.engine.step():
                    if delta.request_id == request.request_id:
                        num_open -= delta.finish is not FinishReason.NOT_YET
                        yield delta
        finally:
            self.engine.abort(request.request_id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Completion:
        """The answer to a conversation, prompted by the model's chat template."""
        return self.generate(self.tokenizer.encode_chat(messages), params)[0]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Teacher-forced logits, float32 [T, vocab_size]: row i is about token i + 1."""
        size, longest = self.model_config.vocab_size, self.model_config.context_length
        if not 1 <= len(token_ids) <= longest:
            raise RequestError(f"{len(token_ids)} tokens given; legal are 1 to {longest}")
        if not all(0 <= token < size for token in token_ids):
            raise RequestError(f"a token id is outside the legal 0 to {size - 1}")
        context = CausalContext(1, len(token_ids))
        return self.decoder.logits(self.decoder(torch.tensor(list(token_ids)), context))

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        return Request(f"llm-{next(self._request_numbers)}", token_ids, params)

    def _vocabulary(self) -> Vocabulary:
        """EOS ids that the model has no logits for can never come and are left out."""
        size = self.model_config.vocab_size
        eos: frozenset[int] = self._defaults.eos_token_ids
        decode: Decode = no_text
        if (self.folder / "tokenizer.json").is_file():
            eos, decode = self.tokenizer.eos_token_ids, self.tokenizer.decode
        return Vocabulary(size, frozenset(each for each in eos if each < size), decode)


def _as_list(prompts: Prompt | Sequence[str] | Sequence[Sequence[int]]) -> list[Prompt]:
    """One prompt or several: a text and a sequence of numbers are one."""
    if isinstance(prompts, str):
        return [prompts]
    several: list[Prompt] = []
    numbers: list[int] = []
    for each in prompts:
        if isinstance(each, int):
            numbers.append(each)
        else:
            several.append(each)
    if numbers and several:
        raise RequestError("prompts mixes token ids with whole prompts; give one kind")
    return [numbers] if numbers else several


def _completion(request: Request, deltas: Sequence[Delta]) -> Completion:
    first = [delta for delta in deltas if delta.index == 0]
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=tuple(each for delta in first for each in delta.prompt_logprobs),
        cached_tokens=first[0].cached_tokens,
        choices=tuple(_choice(index, deltas) for index in range(request.params.n)),
    )


def _choice(index: int, deltas: Sequence[Delta]) -> Choice:
    own = [delta for delta in deltas if delta.index == index]
    return Choice(
        index=index,
        text="".join(delta.text for delta in own),
        token_ids=tuple(token for delta in own for token in delta.token_ids),
        logprobs=tuple(each for delta in own for each in delta.logprobs),
        finish=own[-1].finish,
    )
