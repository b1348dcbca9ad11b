"""`terrazzo inspect FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

EXIT_NO = 1
ITSELF = "terrazzo"


def inspect_command(
    folder: Path, /, *, engine: Annotated[str, Parameter(name="--as")] = ITSELF, json: bool = False
) -> int:
    """Say what every module of a folder is, which rule decided it, and what will run it.

    Exit status 1 when the folder cannot be served; the reason is printed.

    Parameters
    ----------
    folder
        A GPTQ checkpoint, or an ordinary Hugging Face model.
    engine
        Say instead what another engine will make of the folder: vllm, sglang, gptqmodel or
        transformers. Exit status 1 when it refuses the folder or loads other numbers.
    json
        Print JSON instead of text.
    """
    from json import dumps

    text, fields, is_good = _described(folder) if engine == ITSELF else _predicted(folder, engine)
    print(dumps(fields, indent=2) if json else text)
    return 0 if is_good else EXIT_NO


def _described(folder: Path) -> tuple[str, dict[str, Any], bool]:
    from terrazzo.inspection.inspection import inspect
    from terrazzo.inspection.render import to_json, to_text

    inspection = inspect(folder)
    return to_text(inspection), to_json(inspection), inspection.is_servable


def _predicted(folder: Path, engine: str) -> tuple[str, dict[str, Any], bool]:
    from terrazzo.checkpoint.checkpoint import Checkpoint
    from terrazzo.dialects.engines import engine_named
    from terrazzo.dialects.prediction import Outcome
    from terrazzo.dialects.subject import Subject

    prediction = engine_named(engine).predict(Subject.of(Checkpoint(folder)))
    return str(prediction), prediction.to_json(), prediction.outcome is Outcome.LOADS
