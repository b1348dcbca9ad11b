"""The command line: one shell, each subcommand imported when it is called.

Exit status: 0 done, 1 the answer is no (`inspect` of a folder that cannot be served, or that the
engine of `--as` does not load right), 2 bad input or usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from terrazzo import __version__
from terrazzo.env import let_idle_threads_sleep
from terrazzo.errors import TerrazzoError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = App(
    name="terrazzo",
    help="GPTQ checkpoints whose modules each have their own quantization.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
COMMANDS = {
    "quantize": "Quantize a Hugging Face model by rules, layer by layer.",
    "inspect": "Say what is in a folder, which rule decided each module, and what will run it.",
    "generate": "Continue one prompt.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model behind an OpenAI-compatible API.",
    "convert": "Rewrite a checkpoint, with the same numbers, so that another engine loads it.",
    "bench": "Time how fast a model runs and starts on this machine.",
    "import-gguf": "Turn a GGUF file into a Hugging Face folder.",
}

for command, summary in COMMANDS.items():
    module = command.replace("-", "_")
    app.command(f"terrazzo.cli.{module}:{module}_command", name=command, help=summary)


def run(arguments: Sequence[str]) -> int:
    """Run one command line -> its exit status; user errors go to stderr as one message."""
    try:
        status = app(arguments, exit_on_error=False)
    except CycloptsError:
        return EXIT_BAD_INPUT
    except TerrazzoError as error:
        print(f"terrazzo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("terrazzo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def main() -> None:
    let_idle_threads_sleep()
    sys.exit(run(sys.argv[1:]))
