"""`terrazzo convert FOLDER OUT --for ENGINE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def convert_command(
    folder: Path, out: Path, /, *, engine: Annotated[str, Parameter(name="--for")]
) -> None:
    """Rewrite a checkpoint, with the same numbers, so that another engine loads it.

    Nothing is quantized anew. Rules and labels are corrected; where the engine lacks a width, a
    group size or zero points, codes get wider and groups finer; fused linears are cut or joined.
    What cannot be written so is listed, and then nothing is written.

    Parameters
    ----------
    folder
        A GPTQ checkpoint.
    out
        The folder to write; it must not exist.
    engine
        vllm, sglang, gptqmodel or transformers.
    """
    from terrazzo.dialects.convert import convert
    from terrazzo.dialects.engines import engine_named

    conversion = convert(folder, out, engine_named(engine))
    for change in conversion.changes:
        print(change)
    print(f"{out}: {conversion.num_bytes:,} bytes of tensors, from {conversion.source_bytes:,}")
    print(f"before: {conversion.before}")
    print(f"after: {conversion.after}")
