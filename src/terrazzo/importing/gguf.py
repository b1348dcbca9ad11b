"""GGUF files to Hugging Face folders, dequantized.

transformers reads the file and llama.cpp's tensor order; what it refuses to save is written here.
Most GGUF files hold 4 to 8 bits per weight: the folder is a dequantized copy, not the original
model, and a figure measured on it should say so.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from terrazzo.checkpoint.aside import Aside
from terrazzo.errors import ConfigError, MissingFileError, UnsupportedError
from terrazzo.importing.precision import Precision, choose
from terrazzo.importing.pretokenizers import pre_tokenizer_for

READABLE = 0o644
"""Mode of the files written."""

SHARD_BYTES = 4 * 2**30
"""Largest safetensors file written, unless one tensor alone is larger."""

NOISE = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "_from_model_config",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "is_local",
    "local_files_only",
)
"""Keys of the written configs that describe the GGUF file or tasks other than text generation."""

END_TOKEN_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields `tokenizer.ggml.*` whose token ends an answer: of text, of a turn, of a message."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_gguf` wrote: the folder, its architecture, its tensors and their precision."""

    folder: Path
    architecture: str
    num_tensors: int
    precision: Precision


def import_gguf(file: str | Path, out: str | Path) -> Imported:
    """Write the model and tokenizer of `file` to the new folder `out`.

    The folder appears complete or not at all. Raises ConfigError when `out` exists or the extra
    `gguf` is not installed, MissingFileError without `file`, UnsupportedError for an architecture
    that transformers cannot read from GGUF.
    """
    source, target = Path(file), Path(out)
    _check(source, target)
    aside = Aside.beside(target)
    try:
        metadata = _metadata(source)
        _save_tokenizer(source, metadata, aside.folder)
        architecture, tensors, precision = _save_model(source, metadata, aside.folder)
        for each in aside.folder.iterdir():
            each.chmod(READABLE)  # safetensors makes its files private
        aside.publish(target)
    except ValueError as error:  # both readers raise it for what they cannot read
        raise UnsupportedError(f"{source} cannot be read as a GGUF model: {error}") from error
    finally:
        aside.close()
    return Imported(target, architecture, tensors, precision)


def _check(source: Path, target: Path) -> None:
    for package in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"reading GGUF files needs the package {package!r}, which is not installed; "
                "install Terrazzo with its extra: pip install 'terrazzo[gguf]'"
            )
    if not source.is_file():
        raise MissingFileError(f"{source} is not a file; give the path of one .gguf file")
    if target.exists():
        raise ConfigError(f"{target} exists; choose a folder that does not, or remove it first")


def _metadata(source: Path) -> Mapping[str, Any]:
    """Every scalar field of the file's header; arrays (vocabulary, merges) are left out."""
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(source).fields.values()
    scalars = (each for each in fields if each.types and each.types[0] is not GGUFValueType.ARRAY)
    return {each.name: each.contents() for each in scalars}


def _save_tokenizer(source: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    cut = pre_tokenizer_for(str(metadata.get("tokenizer.ggml.pre", "")))
    if cut is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = cut
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    file = folder / "tokenizer_config.json"
    # The class that every release of transformers knows, whatever this one calls it.
    portable = {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(file, json.loads(file.read_text(encoding="utf-8")) | portable)


def _save_model(
    source: Path, metadata: Mapping[str, Any], folder: Path
) -> tuple[str, int, Precision]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    tensors = _without_tied_head(dict(model.state_dict()))
    precision = choose(tuple(tensors.values()))
    architecture = type(model).__name__
    config = _portable_config(model.config.to_dict(), architecture, precision.dtype)
    _write_json(folder / "config.json", config)
    generation = model.generation_config.to_diff_dict() | {"eos_token_id": _end_tokens(metadata)}
    _write_json(folder / "generation_config.json", generation)
    _save_shards({name: each.to(precision.dtype) for name, each in tensors.items()}, folder)
    return architecture, len(tensors), precision


def _without_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tied head shares its memory with the embedding; on disk there is one of them."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and head.data_ptr() == embedding.data_ptr():
        del tensors["lm_head.weight"]
    return tensors


def _portable_config(
    config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> dict[str, Any]:
    """`config` with the spelling of older tools beside the current one."""
    rope = config.get("rope_parameters") or {}
    legacy = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    name = str(dtype).removeprefix("torch.")
    facts = {"architectures": [architecture], "dtype": name, "torch_dtype": name}
    return dict(config) | legacy | facts


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    fields = (f"tokenizer.ggml.{field}" for field in END_TOKEN_FIELDS)
    return sorted({int(metadata[field]) for field in fields if field in metadata})


def _save_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """One `model.safetensors`, or numbered shards with their index."""
    shards = _split(tensors)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    return shards


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    kept = {key: value for key, value in content.items() if key not in NOISE}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
