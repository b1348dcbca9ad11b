"""From request bodies to engine requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from terrazzo.engine.request import NO_LOGPROBS, Logprobs, Request, SamplingParams, TopLogprobs
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.server.protocol import (
    BodyError,
    ChatBody,
    CompletionBody,
    Conversation,
    Generation,
    Message,
)

COMPLETION_TOKENS: Final = 16
"""OpenAI's default of max_tokens for completions; a chat answer may fill the model's context."""

ROLES: Final = ("system", "developer", "user", "assistant")
_PLAIN_FIELDS: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "include_stop_str_in_output",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the routes know of the model.

    name: as clients say it. created: seconds since the epoch. default_params: SamplingParams as
    the model's makers recommend, with the given fields changed.
    """

    name: str
    created: int
    max_model_len: int
    tokenizer: Tokenizer
    default_params: Callable[..., SamplingParams]


@dataclass(frozen=True, slots=True)
class Echo:
    """What of a prompt is repeated before the answer; empty for most calls."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP call: what to run, and what to tell of it.

    echoes: one per request. with_tokens: log-probabilities are told. generates: False when only
    the prompt is of interest; the engine's one token is not told then.
    """

    reply_id: str
    created: int
    requests: tuple[Request, ...]
    echoes: tuple[Echo, ...]
    is_streamed: bool
    with_usage: bool
    generates: bool = True


def chat_exchange(body: ChatBody, model: ServedModel) -> Exchange:
    """Raises BodyError or RequestError, MissingFileError when the model has no chat template."""
    token_ids = encode_conversation(body, model)
    room = max(1, model.max_model_len - len(token_ids))
    params = model.default_params(
        **_changes(body), max_tokens=_chat_limit(body, room), logprobs=_chat_logprobs(body)
    )
    return _exchange("chatcmpl", body, [token_ids], params, [Echo()])


def completion_exchange(body: CompletionBody, model: ServedModel) -> Exchange:
    """Raises BodyError or RequestError."""
    wanted = NO_LOGPROBS if body.logprobs is None else TopLogprobs(body.logprobs)
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generates = not (limit == 0 and body.echo)
    params = model.default_params(
        **_changes(body),
        max_tokens=limit if generates else 1,
        logprobs=wanted,
        prompt_logprobs=wanted if body.echo else NO_LOGPROBS,
    )
    prompts = _prompts(body.prompt)
    encoded = [_encode(prompt, model.tokenizer) for prompt in prompts]
    echoes = [_echo(body, *each, model.tokenizer) for each in zip(prompts, encoded, strict=True)]
    return _exchange("cmpl", body, encoded, params, echoes, generates=generates)


def encode_conversation(body: Conversation, model: ServedModel) -> tuple[int, ...]:
    """Token ids of the rendered conversation."""
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise BodyError(
            "add_generation_prompt and continue_final_message are both true; an answer either "
            "starts or continues, so set one",
            "continue_final_message",
        )
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    messages = [_message(message, index, model.name) for index, message in enumerate(body.messages)]
    text = model.tokenizer.render_chat(
        messages, add_generation_prompt=opens, variables=body.chat_template_kwargs or {}
    )
    if continues:
        text = _cut_behind(text, messages[-1]["content"])
    return model.tokenizer.encode(text, add_special_tokens=False)


def _message(message: Message, index: int, model: str) -> dict[str, str]:
    """As chat templates expect it: "developer" is OpenAI's newer word for "system"."""
    if message.role not in ROLES:
        raise BodyError(
            f"messages[{index}].role is {message.role!r}; legal are {', '.join(ROLES)}",
            f"messages[{index}].role",
        )
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": _content(message.content, index, model), **named}


def _content(content: str | list[dict[str, Any]], index: int, model: str) -> str:
    """Several parts become lines of one text; picture models are served without their towers."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or len(part) != 2:
            raise BodyError(
                f"messages[{index}].content[{number}] is of type {part.get('type')!r}; "
                f"{model} is served text-only: "
                '{"type": "text", "text": "..."}',
                f"messages[{index}].content[{number}]",
            )
    return "\n".join(part["text"] for part in content)


def _cut_behind(text: str, content: str) -> str:
    """The rendered conversation up to the end of its last message; templates may trim that."""
    for shown in (content, content.strip()):
        start = text.rfind(shown) if shown else -1
        if start >= 0:
            return text[: start + len(shown)]
    raise BodyError(
        "continue_final_message is true, but the chat template does not show the last message as "
        "it is; send the conversation as text to /v1/completions",
        "continue_final_message",
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One prompt or several: a text and a list of token ids are one."""
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [each for each in prompt if isinstance(each, int)]
    several = [each for each in prompt if not isinstance(each, int)]
    if bool(token_ids) == bool(several):
        raise BodyError(
            "prompt is empty or mixes token ids with whole prompts; legal are a text, a list of "
            "texts, a list of token ids or a list of such lists",
            "prompt",
        )
    return [token_ids] if token_ids else several


def _encode(prompt: str | list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)


def _echo(
    body: CompletionBody,
    prompt: str | list[int],
    token_ids: tuple[int, ...],
    tokenizer: Tokenizer,
) -> Echo:
    if not body.echo:
        return Echo()
    text = prompt if isinstance(prompt, str) else decode(token_ids, tokenizer, "prompt")
    return Echo(text, () if body.logprobs is None else token_ids)


def decode(token_ids: Sequence[int], tokenizer: Tokenizer, field: str) -> str:
    """The text of token ids that a client sent in `field`. Raises BodyError."""
    for token in token_ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise BodyError(
                f"{field} holds the token id {token}; legal are 0 to {tokenizer.vocab_size - 1}",
                field,
            )
    return tokenizer.decode(token_ids)


def _chat_limit(body: ChatBody, room: int) -> int:
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise BodyError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is "
            f"{body.max_completion_tokens}; they mean the same, so send one",
            "max_tokens",
        )
    return next((limit for limit in given if limit is not None), room)


def _chat_logprobs(body: ChatBody) -> Logprobs:
    if body.logprobs:
        return TopLogprobs(body.top_logprobs or 0)
    if body.top_logprobs:
        raise BodyError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
    return NO_LOGPROBS


def _changes(body: Generation) -> Mapping[str, Any]:
    """Fields of SamplingParams that the client has set."""
    plain = {name: getattr(body, name) for name in _PLAIN_FIELDS}
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop
    lists = {"stop": stop, "stop_token_ids": body.stop_token_ids}
    changes = {name: value for name, value in plain.items() if value is not None}
    changes |= {name: tuple(value) for name, value in lists.items() if value is not None}
    if body.top_k is not None:
        changes["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    if body.logit_bias is not None:
        changes["logit_bias"] = tuple(sorted(body.logit_bias.items()))
    return changes


def _exchange(
    prefix: str,
    body: Generation,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    echoes: Sequence[Echo],
    *,
    generates: bool = True,
) -> Exchange:
    if body.stream_options is not None and not body.stream:
        raise BodyError("stream_options needs stream; set stream to true", "stream_options")
    reply_id = f"{prefix}-{secrets.token_hex(12)}"
    return Exchange(
        reply_id=reply_id,
        created=int(time.time()),
        requests=tuple(
            Request(f"{reply_id}-{number}", token_ids, params)
            for number, token_ids in enumerate(prompts)
        ),
        echoes=tuple(echoes),
        is_streamed=bool(body.stream),
        with_usage=body.stream_options is not None and body.stream_options.include_usage,
        generates=generates,
    )
