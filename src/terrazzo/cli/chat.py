"""`terrazzo chat`: talk to a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from terrazzo.cli.loading import DEFAULT_SAMPLING, Sampling, open_model
from terrazzo.engine.config import EngineConfig
from terrazzo.errors import RequestError

if TYPE_CHECKING:
    from terrazzo.engine.llm import LLM

PROMPT = "> "
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat_command(
    folder: Path,
    /,
    *,
    system: str = "",
    sampling: Annotated[Sampling, Parameter(name="*")] = DEFAULT_SAMPLING,
) -> None:
    """Talk to a model in the terminal.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    Parameters
    ----------
    folder
        The model: a GPTQ checkpoint or an unquantized Hugging Face folder.
    system
        A message that stands before every conversation.
    """
    with suppress(ModuleNotFoundError):
        # Imported for its effect: line editing and history for `input`, where Python has it.
        import_module("readline")
    llm = open_model(folder, EngineConfig(max_num_seqs=1), _say)
    _say(HELP)
    talk(Conversation(llm, sampling, system), input)


@dataclass(slots=True)
class Conversation:
    """The model and what has been said; `system` stands first when it is not empty."""

    llm: LLM
    sampling: Sampling
    system: str
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer; what was given out of it is remembered, even when it is cut short.

        Raises RequestError when the conversation has become too long.
        """
        asked = [*self.turns, {"role": "user", "content": question}]
        opening = [{"role": "system", "content": self.system}] if self.system else []
        token_ids = self.llm.tokenizer.encode_chat([*opening, *asked])
        pieces: list[str] = []
        params = self.llm.default_params(**self.sampling.changes())
        try:
            for delta in self.llm.stream(token_ids, params):
                pieces.append(delta.text)
                yield delta.text
        finally:
            if pieces:
                self.turns = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def talk(conversation: Conversation, read: Callable[[str], str]) -> None:
    """Until /exit or the end of the input. read: shows a prompt and returns a line."""
    while True:
        try:
            line = read(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            conversation.turns = []
        elif line.startswith("/"):
            print(f"{line.split()[0]} is not a command; {HELP}")
        elif line:
            _print_answer(conversation, line)


def _print_answer(conversation: Conversation, question: str) -> None:
    with interruptions() as interrupted, closing(conversation.answer(question)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                if interrupted():
                    break
            print()
        except RequestError as error:
            print(f"{error}; /reset starts again")


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; it lets the step under way end, a second one breaks it off."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
