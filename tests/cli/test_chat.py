"""`terrazzo chat`: a conversation with a scripted person."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from terrazzo import LLM, cli
from terrazzo.cli.chat import HELP, Conversation, interruptions, talk
from terrazzo.cli.loading import Sampling

SHORT = Sampling(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=256))


def person(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Says each line when asked, or presses a key."""
    said: Iterator[str | type[BaseException]] = iter((*lines, EOFError))

    def read(prompt: str) -> str:
        line = next(said)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_answers_follow_from_everything_said(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SHORT, system="")
    talk(conversation, person("hello", "and then?"))
    params = llm.default_params(temperature=0.0, max_tokens=5)
    messages = [{"role": "user", "content": "hello"}]
    first = llm.chat(messages, params).text
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then?"},
    ]
    second = llm.chat(messages, params).text
    assert capsys.readouterr().out == f"{first}\n{second}\n\n"
    assert conversation.turns == [*messages, {"role": "assistant", "content": second}]


def test_commands(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SHORT, system="")
    talk(conversation, person("hello", "/reset", "", "/rest", KeyboardInterrupt, "/exit", "never"))
    assert conversation.turns == []
    out = capsys.readouterr().out
    assert "/rest is not a command" in out
    assert out.endswith(f"\n{HELP}\n")


def test_a_refused_question_leaves_the_conversation_as_it_was(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, SHORT, system="the template of this model refuses me")
    talk(conversation, person("hello"))
    assert "no system role" in capsys.readouterr().out
    assert conversation.turns == []
    longer = Conversation(llm, SHORT, system="")
    talk(longer, person("stone " * 300))
    assert "/reset starts again" in capsys.readouterr().out
    assert longer.turns == []


def test_an_interrupt_ends_the_answer_and_keeps_what_was_said(llm: LLM) -> None:
    conversation = Conversation(llm, Sampling(max_tokens=60, seed=3), system="")
    with interruptions() as interrupted:
        answer = conversation.answer("hello")
        first = next(answer)
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        answer.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": first}
    assert llm.engine.stats.num_running == 0


def test_a_second_interrupt_breaks_off() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptions() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_talks_until_the_end_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", person("hello"))
    folder = write_tiny_llama(tmp_path)
    assert cli.run(["chat", f"{folder}", "--max-tokens", "3", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert HELP in err
