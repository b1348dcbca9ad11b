"""`terrazzo inspect FOLDER`."""

from __future__ import annotations

from pathlib import Path

EXIT_UNSERVABLE = 1


def inspect_command(folder: Path, /, *, json: bool = False) -> int:
    """Say what every module of a folder is, which rule decided it, and what will run it.

    Exit status 1 when the folder cannot be served; the reason is printed.

    Parameters
    ----------
    folder
        A GPTQ checkpoint, or an ordinary Hugging Face model.
    json
        Print JSON instead of a table.
    """
    from json import dumps

    from terrazzo.inspection.inspection import inspect
    from terrazzo.inspection.render import to_json, to_text

    inspection = inspect(folder)
    print(dumps(to_json(inspection), indent=2) if json else to_text(inspection))
    return 0 if inspection.is_servable else EXIT_UNSERVABLE
