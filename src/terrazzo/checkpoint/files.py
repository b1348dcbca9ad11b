"""The safetensors files of one folder: which exist, what each holds, and one tensor at a time.

Only headers are read when a folder is opened; a tensor is a view of the mapped file until somebody
computes with it. Pickled weights are refused: unpickling runs code.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from terrazzo.checkpoint.json_files import parse_json, read_json
from terrazzo.checkpoint.small_files import check_regular, is_present
from terrazzo.errors import CheckpointError, MissingFileError, TensorError, UnsupportedError

INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ANY_SIZE = sys.maxsize
LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header."""
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth"})

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The type names of safetensors headers."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor before its data is touched."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """Every tensor of a folder by name.

    Raises MissingFileError, CheckpointError or UnsupportedError naming the file when the folder has
    no safetensors, a shard is missing or damaged, or the index and the shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        listed = _listed_tensors(folder)
        self._handles = {file: _open(folder / file) for file in listed}
        self.headers: Mapping[str, TensorHeader] = _headers(folder, self._handles)
        _check_index(folder, listed, self.headers)

    def header(self, name: str) -> TensorHeader:
        if name not in self.headers:
            raise TensorError(
                f"tensor {name!r} is in none of the files {', '.join(self._handles)}; "
                "legal names are those of `tensor_names`"
            )
        return self.headers[name]

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file, in the dtype of the file."""
        return self._read(self.header(name).file, name)

    def _read(self, file: str, stored: str) -> Tensor:
        try:
            tensor: Tensor = self._handles[file].get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError, OverflowError, TypeError) as error:
            raise TensorError(
                f"{file}: tensor {stored!r} cannot be read ({error}). Fetch the file again"
            ) from error
        return tensor


def _listed_tensors(folder: Path) -> dict[str, frozenset[str]]:
    """Each weight file of the folder with the tensors that an index promises in it."""
    names = _names(folder)
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) > 1:
        raise CheckpointError(
            f"{folder}: {len(indices)} index files ({', '.join(indices)}); legal is one. "
            "Remove those that do not belong to this model"
        )
    if indices:
        shards = _read_index(folder / indices[0])
        if SINGLE_FILE in files and SINGLE_FILE not in shards:
            raise CheckpointError(
                f"{folder}: holds {SINGLE_FILE} and {indices[0]}, which does not list it; both "
                "claim to be the model. Remove the one that is stale"
            )
        return shards
    if SINGLE_FILE in files:
        return {SINGLE_FILE: frozenset()}
    if len(files) == 1:
        return {files[0]: frozenset()}
    raise _no_weights(folder, names, files)


def _names(folder: Path) -> list[str]:
    """In order. Names that begin with a dot are no part of a model: systems leave such files."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error}). Make it readable") from error


def _no_weights(
    folder: Path, names: list[str], files: list[str]
) -> CheckpointError | UnsupportedError:
    if files:
        return MissingFileError(
            f"{folder}: {len(files)} safetensors files but no model{INDEX_SUFFIX} that says how "
            "they belong together. Fetch the index too"
        )
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        return UnsupportedError(
            f"{folder}: holds only pickled weights ({pickles[0]}); reading those can run any code. "
            "Save the model again with transformers (save_pretrained writes safetensors), or fetch "
            "a safetensors version of it"
        )
    if any(name.endswith(".gguf") for name in names):
        return UnsupportedError(
            f"{folder}: holds a GGUF file, which is no safetensors checkpoint. "
            "Convert it with `terrazzo import-gguf`"
        )
    return MissingFileError(
        f"{folder}: no {SINGLE_FILE} and no model{INDEX_SUFFIX}. Check that the path is the model "
        "folder and that its download is complete"
    )


def _read_index(file: Path) -> dict[str, frozenset[str]]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file}: weight_map is {type(weight_map).__name__}; legal is an object that gives the "
            "shard of each tensor. Fetch the file again"
        )
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(_checked_shard(file, tensor, shard), set()).add(tensor)
    return {shard: frozenset(tensors) for shard, tensors in shards.items()}


def _checked_shard(index: Path, tensor: str, shard: object) -> str:
    if isinstance(shard, str) and shard.endswith(".safetensors") and shard.isprintable():
        name = Path(shard).name
        if name == shard and "\\" not in shard:
            return shard
    raise CheckpointError(
        f"{index}: tensor {tensor!r} is said to be in {shard!r}; legal is the plain name of a "
        ".safetensors file in the same folder. Do not trust this folder; fetch it again"
    )


def _open(file: Path) -> Any:
    if not is_present(file):
        raise MissingFileError(
            f"{file}: not there, but the index lists it. Fetch the missing shard"
        )
    check_regular(file, ANY_SIZE)
    try:
        handle = safe_open(file, framework="pt")
        _check_header(file)
    except (SafetensorError, OSError, MemoryError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: {file.stat().st_size} bytes that are not a whole safetensors file ({error}). "
            "The download may have stopped early: fetch the file again"
        ) from error
    return handle


def _check_header(file: Path) -> None:
    """What safetensors lets pass: it has read the header before, so that its length is sound.

    Raises ValueError for names that occur twice, of which each reader takes another one, and for
    names with control characters, which would reach the terminal; RecursionError.
    """
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(LENGTH_BYTES))
        header = parse_json(opened.read(length).decode("utf-8"))
    strange = next((name for name in header if not name.isprintable()), None)
    if strange is not None:
        raise ValueError(f"tensor name {strange!r} has characters that cannot be printed")


def _headers(folder: Path, handles: Mapping[str, Any]) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
            if name in headers:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in {headers[name].file} and in {file}; legal "
                    "is one. Remove the stale file or fetch the folder again"
                )
            headers[name] = _header(folder, file, handle, name)
    return headers


def _header(folder: Path, file: str, handle: Any, name: str) -> TensorHeader:
    view = handle.get_slice(name)
    code = view.get_dtype()
    if code not in DTYPES:
        raise UnsupportedError(
            f"{folder / file}: tensor {name!r} has dtype {code}; legal are {', '.join(DTYPES)}. "
            "Convert the tensor or fetch another version of the model"
        )
    return TensorHeader(tuple(view.get_shape()), DTYPES[code], file)


def _check_index(
    folder: Path, listed: Mapping[str, frozenset[str]], headers: Mapping[str, TensorHeader]
) -> None:
    for shard, tensors in listed.items():
        lacking = sorted(t for t in tensors if t not in headers or headers[t].file != shard)
        if lacking:
            raise CheckpointError(
                f"{folder / shard}: lacks {len(lacking)} tensors that the index promises in it, "
                f"the first is {lacking[0]!r}. Index and shards are of different versions: fetch "
                "the folder again"
            )
