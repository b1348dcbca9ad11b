"""`terrazzo bench`: how fast a model runs, and how fast it starts, on the machine at hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from terrazzo.cli.loading import open_model
from terrazzo.engine.config import AUTO, Auto
from terrazzo.errors import ConfigError
from terrazzo.kernels.policy import KernelPolicy

bench_command = App(name="bench", help="Time how fast a model runs and starts on this machine.")


@bench_command.command(name="offline")
def offline_command(
    folder: Path,
    /,
    *,
    batch: str = "1,8",
    input_len: int = 512,
    output_len: int = 128,
    repeats: int = 5,
    kernel_policy: KernelPolicy | Auto = AUTO,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Time prompts and generation of a model, without a server.

    TERRAZZO_THREADS says how many threads compute. Weights read per second stand next to how fast
    this machine reads memory in the same minutes with the same threads.

    Parameters
    ----------
    folder
        The model: a GPTQ checkpoint or an unquantized Hugging Face folder.
    batch
        Sequences at once, several numbers with commas between them.
    input_len
        Tokens of each prompt, which are random.
    output_len
        Tokens that each sequence is given while they are timed.
    repeats
        Measurements; their median, least and most are printed.
    kernel_policy
        Which kernels to prefer, as for `terrazzo serve`.
    json_output
        Print JSON instead of text.
    """
    from terrazzo.bench.hardware import MemoryReader, this_machine
    from terrazzo.bench.offline import Workload, measure
    from terrazzo.bench.report import OfflineReport
    from terrazzo.bench.traffic import WeightTraffic
    from terrazzo.checkpoint.checkpoint import Checkpoint

    workload = Workload(_counts("batch", batch), input_len, output_len, repeats)
    checkpoint = Checkpoint(folder)
    llm = open_model(folder, workload.engine_config(checkpoint, kernel_policy), _say)
    hardware = this_machine()
    policy = llm.memory_plan.needs.kernel_policy
    report = OfflineReport(
        folder,
        llm.model_config.architecture.name,
        policy,
        hardware,
        workload,
        WeightTraffic.of(checkpoint, llm.model_config, policy),
        measure(llm, workload, MemoryReader(hardware.cache_bytes)),
    )
    print(json.dumps(report.to_json(), indent=2) if json_output else report)


@bench_command.command(name="startup")
def startup_command(
    folders: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    repeats: int = 5,
    kernel_policy: KernelPolicy | Auto = AUTO,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Time the way from the start of a process to the first token.

    Several models take turns. The first start of each does not count: it fills the page cache.

    Parameters
    ----------
    folders
        The models: GPTQ checkpoints or unquantized Hugging Face folders, with tokenizers.
    repeats
        Starts of each; their median, least and most are printed.
    kernel_policy
        Which kernels to prefer, as for `terrazzo serve`.
    json_output
        Print JSON instead of text.
    """
    from terrazzo.bench.hardware import this_machine
    from terrazzo.bench.report import startup_json, startup_text
    from terrazzo.bench.startup import measure_startup
    from terrazzo.cli.threads import use_threads

    use_threads()
    speeds = measure_startup(folders, repeats, kernel_policy)
    hardware = this_machine()
    if json_output:
        print(json.dumps(startup_json(hardware, speeds), indent=2))
    else:
        print(startup_text(hardware, speeds))


def _counts(option: str, text: str) -> tuple[int, ...]:
    """`1,8` -> (1, 8). Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{option} is {text!r}; legal are whole numbers with commas between them")
    return tuple(int(part) for part in parts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
