"""`terrazzo generate`: continue one prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from terrazzo.cli.loading import DEFAULT_SAMPLING, Sampling, open_model
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.request import FinishReason

if TYPE_CHECKING:
    from terrazzo.engine.llm import LLM
    from terrazzo.engine.request import SamplingParams


def generate_command(
    folder: Path,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    sampling: Annotated[Sampling, Parameter(name="*")] = DEFAULT_SAMPLING,
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    chat: bool = False,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Continue one prompt.

    The text goes to stdout as it comes, everything else to stderr.

    Parameters
    ----------
    folder
        The model: a GPTQ checkpoint or an unquantized Hugging Face folder.
    prompt
        The text to continue; "-" reads it from stdin.
    stop
        End before this text; may be given several times.
    chat
        Wrap the prompt in the model's chat template, as one message of the user.
    json_output
        Print one JSON object at the end instead: text, finish_reason, token_ids, prompt_tokens.
    """
    llm = open_model(folder, EngineConfig(max_num_seqs=1), _say)
    params = llm.default_params(**sampling.changes(), stop=stop)
    text = sys.stdin.read() if prompt == "-" else prompt
    token_ids = (
        llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        if chat
        else llm.tokenizer.encode(text)
    )
    if json_output:
        _print_json(llm, token_ids, params)
    else:
        _print_stream(llm, token_ids, params)


def _print_stream(llm: LLM, token_ids: tuple[int, ...], params: SamplingParams) -> None:
    for delta in llm.stream(token_ids, params):
        print(delta.text, end="", flush=True)
    print()


def _print_json(llm: LLM, token_ids: tuple[int, ...], params: SamplingParams) -> None:
    (completion,) = llm.generate(token_ids, params)
    stopped = completion.finish is FinishReason.STOP
    answer = {
        "text": completion.text,
        "finish_reason": "stop" if stopped else "length",
        "token_ids": completion.token_ids,
        "prompt_tokens": len(completion.prompt_token_ids),
    }
    print(json.dumps(answer, ensure_ascii=False))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
