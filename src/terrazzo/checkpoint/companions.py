"""The files of a model folder that are neither weights nor configs of quantization."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

REWRITTEN_FILES = frozenset({"config.json", "quantize_config.json", "terrazzo.json", "README.md"})
"""Written anew, or, as the model card, no longer true."""

WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def companion_files(folder: Path) -> Iterator[Path]:
    """Tokenizer, chat template, generation config, licence: what goes along as it is."""
    for file in sorted(folder.iterdir()):
        kept = file.name not in REWRITTEN_FILES and not file.name.startswith(".")
        if file.is_file() and kept and not file.name.endswith(WEIGHT_SUFFIXES):
            yield file
