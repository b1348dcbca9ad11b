"""`terrazzo import-gguf`: a GGUF file becomes a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from terrazzo.importing.gguf import import_gguf


def import_gguf_command(file: Path, out: Path, /) -> None:
    """Turn a GGUF file into a Hugging Face folder.

    The weights are dequantized: the folder holds what the file holds, not the original model.

    Parameters
    ----------
    file
        The .gguf file.
    out
        The folder to write; it must not exist.
    """
    imported = import_gguf(file, out)
    print(f"{imported.folder}: {imported.architecture}, {imported.num_tensors} tensors")
    print(f"weights dequantized to {imported.precision}")
