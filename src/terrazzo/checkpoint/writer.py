"""Writes a checkpoint aside, tensor by tensor, and renames it when it is whole.

    with CheckpointWriter(out, Format.GPTQ) as writer:
        writer.add_quantized(name, weight)
        writer.add_tensor(name, tensor)
        writer.copy_file(tokenizer_file)
        writer.commit(Description(...))

Everything goes into a hidden folder beside `out`; leaving the block without `commit` removes it, so
under the final name there is a whole checkpoint or nothing. What a killed writer left is removed by
the next one of the same name. At most one shard is held in memory, as a copy: what the caller does
to a tensor afterwards does not matter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from terrazzo.checkpoint.aside import Aside
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.files import INDEX_SUFFIX, SINGLE_FILE
from terrazzo.checkpoint.json_files import write_json
from terrazzo.errors import ConfigError
from terrazzo.packing import QuantTensor, encode_qweight, encode_zeros, is_planar, unpack
from terrazzo.spec import Format, Name

DEFAULT_SHARD_BYTES = 1 << 30
"""Writing a shard takes twice its size in memory: the tensors and their bytes on the way out."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A finished file and the names and bytes of what is in it."""

    file: Path
    tensors: tuple[str, ...]
    num_bytes: int


class CheckpointWriter:
    """See the file's first lines.

    out: must not exist, or be an empty folder. shard_bytes: a file is closed before it outgrows it.
    Raises ConfigError when `out` is taken.
    """

    def __init__(
        self, out: Path, checkpoint_format: Format, shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"{out}: already there; give a folder that does not exist, or remove this one"
            )
        self._out = out
        self._format = checkpoint_format
        self._shard_bytes = shard_bytes
        self._shards: list[_Shard] = []
        self._names: set[str] = set()
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        self._folder = Aside.beside(self._out)
        self._aside = self._folder.folder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.close()

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Any dtype and shape; kept as it is."""
        assert name not in self._names, f"{name} was added before"
        self._names.add(name)
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._close_shard()
        self._pending[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def add_quantized(self, module: Name, weight: QuantTensor) -> None:
        """Writes qweight, qzeros, scales (float16) and g_idx in the words of the format."""
        bits = weight.spec.bits
        qweight = weight.qweight
        if is_planar(bits, self._format):
            qweight = encode_qweight(unpack(qweight, weight.in_features, bits), bits, self._format)
        self.add_tensor(f"{module}.qweight", qweight)
        self.add_tensor(f"{module}.qzeros", encode_zeros(weight.zeros, bits, self._format))
        self.add_tensor(f"{module}.scales", weight.scales.to(torch.float16))
        self.add_tensor(f"{module}.g_idx", weight.g_idx.to(torch.int32))

    def copy_file(self, file: Path) -> None:
        """A file that goes along as it is: tokenizer, chat template, generation config, licence."""
        shutil.copyfile(file, self._aside / file.name)

    def commit(self, description: Description) -> None:
        """Writes index, configs and manifest, then gives the folder its name."""
        if self._pending or not self._shards:
            self._close_shard()
        self._name_shards()
        for file, content in description.documents(self._format).items():
            write_json(self._aside / file, content)
        for path in (*self._aside.iterdir(), self._aside):
            _flush(path)
        self._folder.publish(self._out)
        _flush(self._out.parent)

    def _close_shard(self) -> None:
        file = self._aside / f"shard-{len(self._shards)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        # safetensors writes for the owner alone; who serves a folder is often somebody else.
        file.chmod(0o644)
        self._shards.append(_Shard(file, tuple(self._pending), self._pending_bytes))
        self._pending = {}
        self._pending_bytes = 0

    def _name_shards(self) -> None:
        if len(self._shards) == 1:
            self._shards[0].file.rename(self._aside / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, start=1):
            name = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            shard.file.rename(self._aside / name)
            weight_map |= dict.fromkeys(shard.tensors, name)
        total = sum(shard.num_bytes for shard in self._shards)
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(self._aside / f"model{INDEX_SUFFIX}", index)


def _flush(path: Path) -> None:
    """What is on disk survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
