"""What users have: the real OpenAI client, and the types of its answers and errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from helpers.live_server import NAME, Live, RandomRunner, live_server
from terrazzo.engine.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def connect(live: Live, api_key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key=api_key, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with connect(live) as connected:
        yield connected


@pytest.fixture(scope="module")
def dice(tokenizer: Tokenizer) -> Iterator[OpenAI]:
    """A model whose tokens are random."""
    with live_server(tokenizer, RandomRunner()) as live, connect(live) as connected:
        yield connected


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "terrazzo")
    assert client.models.retrieve(NAME).id == NAME


def test_chat(client: OpenAI, answer: str, tokenizer: Tokenizer) -> None:
    reply = client.chat.completions.create(model=NAME, messages=HELLO)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", answer)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (reply.object, reply.model) == ("chat.completion", NAME)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokenizer.encode_chat(HELLO))
    assert reply.usage.completion_tokens == len(tokenizer.encode(answer)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_an_answer_can_be_sent_back_as_the_client_holds_it(client: OpenAI, answer: str) -> None:
    message = client.chat.completions.create(model=NAME, messages=HELLO).choices[0].message
    for repeated in (message, message.model_dump()):
        longer = [*HELLO, repeated, {"role": "user", "content": "and then?"}]
        reply = client.chat.completions.create(model=NAME, messages=longer, user="someone")
        assert reply.choices[0].message.content == answer


def test_chat_stream(client: OpenAI, answer: str) -> None:
    stream = client.chat.completions.create(
        model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    first, *middle, finish = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in middle) == answer
    assert all(choice.finish_reason is None for choice in middle)
    assert (finish.delta.content, finish.finish_reason) == (None, "stop")
    assert all(chunk.usage is None for chunk in chunks)
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_a_stream_reports_usage_only_when_asked(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True))
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_choices_of_several_prompts(dice: OpenAI) -> None:
    reply = dice.completions.create(model=NAME, prompt=["a", "b"], n=2, max_tokens=6, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) == 4
    alone = dice.completions.create(model=NAME, prompt="b", n=2, max_tokens=6, seed=1)
    assert [each.text for each in alone.choices] == [each.text for each in reply.choices[2:]]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 24


def test_streamed_choices_are_the_whole_ones(dice: OpenAI) -> None:
    asked = {"model": NAME, "messages": HELLO, "n": 3, "max_tokens": 7, "seed": 5}
    whole = dice.chat.completions.create(**asked)
    texts = ["", "", ""]
    finished: list[int] = []
    for chunk in dice.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(finished) == [0, 1, 2]


def test_equal_seeds_give_equal_texts(dice: OpenAI) -> None:
    def text(seed: int) -> str:
        return dice.completions.create(model=NAME, prompt="a", seed=seed).choices[0].text

    assert text(3) == text(3)
    assert text(3) != text(4)


def test_lengths(client: OpenAI, dice: OpenAI, tokenizer: Tokenizer) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        reply = client.chat.completions.create(model=NAME, messages=HELLO, **limit)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 2
    completion = dice.completions.create(
        model=NAME, prompt="a", logit_bias={"1": -100}, temperature=0
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    longest = dice.chat.completions.create(
        model=NAME, messages=HELLO, extra_body={"ignore_eos": True}
    )
    assert longest.usage is not None
    assert longest.usage.total_tokens == 64


def test_stop_strings(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=NAME, messages=HELLO, stop=[" fox", "zzz"])
    assert reply.choices[0].message.content == "the quick brown"
    assert reply.choices[0].finish_reason == "stop"
    kept = client.completions.create(
        model=NAME, prompt="a", stop=" fox", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "the quick brown fox"
    stream = client.completions.create(model=NAME, prompt="a", stop="own fox", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "the quick br"


def test_stop_token_ids(client: OpenAI, tokenizer: Tokenizer) -> None:
    third = tokenizer.encode("the quick brown fox")[2]
    reply = client.completions.create(
        model=NAME, prompt="a", extra_body={"stop_token_ids": [third]}
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_chat_logprobs(client: OpenAI, answer: str) -> None:
    reply = client.chat.completions.create(
        model=NAME, messages=HELLO, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    *tokens, end = logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == answer
    assert end.token == "</s>"
    assert any(token.token.startswith("bytes:\\x") for token in tokens)
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob == pytest.approx(0, abs=1e-6)
        assert token.top_logprobs[1].logprob == pytest.approx(-40, abs=1e-4)


def test_streamed_logprobs_are_the_whole_ones(client: OpenAI) -> None:
    asked = {"model": NAME, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    stream = client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [t for piece in pieces if piece for t in piece.content or []] == whole.content


def test_completion_logprobs_with_echo(client: OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "a lazy dog "
    reply = client.completions.create(model=NAME, prompt=prompt, echo=True, logprobs=1)
    (choice,) = reply.choices
    assert choice.text.startswith(f"{prompt}the quick")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    num_prompt = len(tokenizer.encode(prompt))
    assert "".join(logprobs.tokens[:num_prompt]) == prompt
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1] == pytest.approx(0, abs=1e-6)
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {logprobs.tokens[1]: logprobs.token_logprobs[1]}
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        spelled = token not in ("</s>",) and not token.startswith("bytes:")
        assert not spelled or choice.text[offset:].startswith(token)


def test_echo_of_every_choice_streamed(client: OpenAI, answer: str) -> None:
    stream = client.completions.create(
        model=NAME, prompt=["a ", "b "], n=2, echo=True, logprobs=0, stream=True, max_tokens=40
    )
    texts, tokens = [""] * 4, [0] * 4
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += len(choice.logprobs.tokens or []) if choice.logprobs else 0
    assert texts == [f"a {answer}"] * 2 + [f"b {answer}"] * 2
    assert len(set(tokens)) == 1


def test_only_the_prompt_can_be_scored(client: OpenAI) -> None:
    reply = client.completions.create(
        model=NAME, prompt="a lazy dog", echo=True, logprobs=0, max_tokens=0
    )
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == ("a lazy dog", "length")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == "a lazy dog"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


def test_prompts_of_token_ids(client: OpenAI, tokenizer: Tokenizer, answer: str) -> None:
    token_ids = list(tokenizer.encode("a lazy dog"))
    alone = client.completions.create(model=NAME, prompt=token_ids, echo=True, max_tokens=40)
    assert [choice.text for choice in alone.choices] == [f"a lazy dog{answer}"]
    both = client.completions.create(model=NAME, prompt=[token_ids, [7, 8]])
    assert len(both.choices) == 2
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(token_ids) + 2


def test_cached_tokens_are_counted(dice: OpenAI) -> None:
    prompt = list(range(100, 120))
    counts = []
    for _ in range(2):
        usage = dice.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 16]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_bad_requests_name_the_field(
    client: OpenAI, changes: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO, **changes)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in str(caught.value)


def test_a_bad_request_for_a_stream_has_a_status_too(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="shorten it to 63"):
        client.completions.create(model=NAME, prompt=[5] * 64, stream=True)


def test_an_over_long_prompt_is_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt has") as caught:
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "stone " * 90}]
        )
    assert "64" in str(caught.value)


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_keys(tokenizer: Tokenizer) -> None:
    with live_server(tokenizer, RandomRunner(), api_keys=("sesame", "second")) as live:
        for key in ("sesame", "second"):
            with connect(live, key) as client:
                assert client.models.list().data
        for key in ("sesam", "sesame2"):
            with connect(live, key) as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
