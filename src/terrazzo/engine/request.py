"""What a generation request is and what comes back: values only, complete at birth."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from terrazzo.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives per token that may be asked for, as in the OpenAI API."""

MAX_CHOICES = 128


class Stage(enum.Enum):
    """Life of one sequence (one choice of one request).

    WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING when its pages are taken away; then
    its keys and values are computed again.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a choice ended. STOP: EOS, stop token or stop string. LENGTH: a token limit."""

    NOT_YET = "not_yet"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class Unseeded(enum.Enum):
    """The engine draws a fresh seed for the request."""

    UNSEEDED = "unseeded"


class NoLogprobs(enum.Enum):
    """No log-probabilities are computed."""

    NO_LOGPROBS = "no_logprobs"


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Report each token's log-probability and those of the `count` most likely tokens (0..20)."""

    count: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.count <= MAX_LOGPROBS, "logprobs", self.count, f"0 to {MAX_LOGPROBS}")


UNSEEDED: Final = Unseeded.UNSEEDED
NO_LOGPROBS: Final = NoLogprobs.NO_LOGPROBS
Logprobs: TypeAlias = TopLogprobs | NoLogprobs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError naming the illegal field.

    max_tokens: most tokens to generate; the model's length limit ends a choice earlier.
    min_tokens: EOS, stop tokens and stop strings have no effect before this many tokens.
    temperature: 0 is greedy. Filters apply in the order top_k (0 is off), top_p, min_p.
    presence_penalty, frequency_penalty: subtracted from logits of generated tokens.
    repetition_penalty: divides positive and multiplies negative logits of prompt and generated
        tokens; 1 is off.
    seed: token i of choice c depends on the batch in no way, only on logits and (seed, c, i).
    stop: generated text ends before the first of these strings.
    logit_bias: (token id, bias) pairs, added to the logits.
    logprobs, prompt_logprobs: of the model's raw distribution, before any change above.
    n: independent choices, which share the work of the prompt.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | Unseeded = UNSEEDED
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: Logprobs = NO_LOGPROBS
    prompt_logprobs: Logprobs = NO_LOGPROBS
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        self._check_stops()

    def _check_lengths(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 and above")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"0 to max_tokens ({self.max_tokens})",
        )
        _require(1 <= self.n <= MAX_CHOICES, "n", self.n, f"1 to {MAX_CHOICES}")

    def _check_filters(self) -> None:
        warm = 0.0 <= self.temperature <= 100.0
        _require(warm, "temperature", self.temperature, "0 (greedy) to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) and above")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 (off) to 1")

    def _check_penalties(self) -> None:
        for name, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _require(-2.0 <= value <= 2.0, name, value, "-2 to 2")
        positive = 0.0 < self.repetition_penalty < math.inf
        _require(positive, "repetition_penalty", self.repetition_penalty, "above 0; 1 is off")
        for token, bias in self.logit_bias:
            legal = token >= 0 and -100.0 <= bias <= 100.0
            _require(legal, "logit_bias", (token, bias), "token ids from 0 with biases -100 to 100")

    def _check_stops(self) -> None:
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        natural = all(token >= 0 for token in self.stop_token_ids)
        _require(natural, "stop_token_ids", self.stop_token_ids, "token ids from 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what to do with it. `request_id` is unique among the requests in flight."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token and the most likely (token id, log-probability) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to choice `index` of a request.

    text: may lag behind token_ids (incomplete characters and possible stop strings are held
        back); the last Delta of a choice brings the rest.
    logprobs: one per token id when asked for, else empty.
    prompt_logprobs: of prompt tokens 1..P-1, in the first Delta of choice 0 when asked for.
    finish: NOT_YET until the last Delta of the choice. Every choice gets exactly one last Delta.
    cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def _require(legal: bool, field: str, value: object, domain: str) -> None:
    if not legal:
        raise RequestError(f"{field} is {value!r}; legal values are {domain}")
