"""The files of a model folder that are neither weights nor configs of quantization."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from terrazzo.errors import ConfigError

REWRITTEN_FILES = frozenset({"config.json", "quantize_config.json", "terrazzo.json", "README.md"})
"""Written anew, or, as the model card, no longer true."""

WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def companion_files(folder: Path) -> tuple[Path, ...]:
    """Tokenizer, chat template, generation config, licence: what goes along as it is.

    Raises ConfigError for a link that leads out of the folder: whoever made the folder could have
    named any file of its reader, and what is copied is often published. The cache of the Hugging
    Face hub, whose snapshots are links to `blobs` beside them, counts as one folder.
    """
    files = tuple(_companions(folder))
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(home) for home in _homes(folder.resolve())):
            raise ConfigError(
                f"{file} is a link to {target}, outside of the model folder; it would be copied "
                "into the new one. Put the file itself in its place if it belongs there"
            )
    return files


def _companions(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        kept = file.name not in REWRITTEN_FILES and not file.name.startswith(".")
        if file.is_file() and kept and not file.name.endswith(WEIGHT_SUFFIXES):
            yield file


def _homes(folder: Path) -> tuple[Path, ...]:
    """Where the files of a folder may lie."""
    is_snapshot = folder.parent.name == "snapshots"
    return (folder, folder.parent.parent / "blobs") if is_snapshot else (folder,)
