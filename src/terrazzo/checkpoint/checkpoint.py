"""A folder on disk as facts: which modules it has, what each is, and what decided it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.config import Unquantized, read_quantization_config
from terrazzo.checkpoint.conflict import Conflict
from terrazzo.checkpoint.disagreement import (
    age_conflicts,
    kind_conflict,
    neighbour_conflicts,
    overflow_conflicts,
    spec_conflicts,
    word_conflicts,
)
from terrazzo.checkpoint.experts import ExpertFiles, Naming
from terrazzo.checkpoint.facts import Facts, PackedFiles, read_facts, read_quant_tensor
from terrazzo.checkpoint.json_files import read_json
from terrazzo.checkpoint.names import QWEIGHT, is_quantizable, linear_names
from terrazzo.checkpoint.spelled_rules import respelled, spelling_remarks
from terrazzo.errors import ConfigError, MissingFileError, TensorError
from terrazzo.packing import QuantTensor, dequantize
from terrazzo.rules import NO_CONFIG, OUT_OF_REACH, Plan, Resolution
from terrazzo.spec import DENSE, Name, QuantSpec, WordFormat


class Checkpoint:
    """A GPTQ checkpoint or an unquantized Hugging Face folder, opened without reading weights.

    The tensors are the truth: a module is quantized if and only if its `.qweight` exists, and its
    spec comes from the tensors. Where config or rules say otherwise there is a Conflict.

    naming: of experts. folder: the path. model_config: config.json. rules: of the quantization
    config. plan: every linear, quantized or dense, with the rule that decided it. conflicts:
    disagreements, in which the tensors win. remarks: sentences on config files that contradict
    each other.
    Raises MissingFileError, ConfigError, UnsupportedError, CheckpointError or TensorError.
    """

    def __init__(self, folder: str | Path, naming: Naming = Naming.STORED) -> None:
        self.folder = Path(folder)
        self.model_config: Mapping[str, Any] = _read_model_config(self.folder)
        self._files = ExpertFiles(self.folder, naming)
        self._linears = linear_names(self._files.headers)
        self._quantization = read_quantization_config(
            self.folder, self.model_config, self._linears.keys()
        )
        self.rules = respelled(self._quantization.rules, self.model_config, self._linears.keys())
        self.remarks = (*self._quantization.remarks, *spelling_remarks(self.rules))
        self._facts = dict(self._read_facts())
        self.plan = Plan(self._held(module) for module in self._linears)
        self.conflicts: tuple[Conflict, ...] = tuple(self._find_conflicts())

    @property
    def word_format(self) -> WordFormat:
        """How words are read, as the config labels them."""
        return self._quantization.word_format

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._files.headers)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._files.header(tensor).shape

    def dtype(self, tensor: str) -> torch.dtype:
        return self._files.header(tensor).dtype

    def num_bytes(self, tensor: str) -> int:
        return self._files.header(tensor).num_bytes

    def linear_shape(self, module: Name) -> tuple[int, int]:
        """(out_features, in_features) of a module of the plan, from headers."""
        if module in self._facts:
            facts = self._facts[module]
            return facts.out_features, facts.in_features
        out_features, in_features = self.shape(f"{module}.weight")
        return out_features, in_features

    def tensor(self, tensor: str) -> Tensor:
        """The tensor as stored, mapped from its file. TensorError when there is none."""
        return self._files.tensor(tensor)

    def quant_tensor(self, module: Name) -> QuantTensor:
        """A quantized module in canonical form. TensorError when it is not quantized."""
        if module not in self._facts:
            raise TensorError(f"{module} in {self.folder} is not quantized: it has no .qweight")
        return read_quant_tensor(PackedFiles(self._files, module), self._facts[module])

    def dequantize(self, module: Name) -> Tensor:
        """float32 [out, in]: the weight of a module, quantized or dense."""
        if module in self._facts:
            return dequantize(self.quant_tensor(module))
        return self.tensor(f"{module}.weight").to(torch.float32)

    def _read_facts(self) -> Iterator[tuple[Name, Facts]]:
        for module, suffix in self._linears.items():
            if suffix == QWEIGHT:
                said = self._said(module).spec
                hint = said if isinstance(said, QuantSpec) else self.rules.base
                packed = PackedFiles(self._files, module)
                facts = read_facts(packed, hint, self.word_format)
                self._check_guess(module, facts)
                yield module, facts

    def _check_guess(self, module: Name, facts: Facts) -> None:
        """Without a config only zero points in the middle are sure: they read the same anyhow."""
        if isinstance(self._quantization, Unquantized) and not facts.spec.sym:
            raise ConfigError(
                f"{self.folder}: {module} is quantized and asymmetric, but neither config.json nor "
                "quantize_config.json says how zero points are stored. Fetch or write "
                "quantize_config.json with bits, group_size, sym and checkpoint_format"
            )

    def _said(self, module: Name) -> Resolution:
        """What config and rules say of a module, whatever it is."""
        if isinstance(self._quantization, Unquantized):
            return Resolution(module, DENSE, NO_CONFIG)
        said = self.rules.resolve_name(module)
        if self._linears[module] == QWEIGHT or is_quantizable(module):
            return said
        return said if said.spec == DENSE else Resolution(module, DENSE, OUT_OF_REACH)

    def _held(self, module: Name) -> Resolution:
        """What a module is, with what should have decided it."""
        spec = self._facts[module].spec if module in self._facts else DENSE
        return replace(self._said(module), spec=spec)

    def _find_conflicts(self) -> Iterator[Conflict]:
        for module, resolution in self.plan.items():
            said, held = self._said(module), resolution.spec
            if isinstance(said.spec, QuantSpec) and isinstance(held, QuantSpec):
                yield from spec_conflicts(said, said.spec, self._facts[module])
                pack_dtype = self._quantization.pack_dtype
                yield from word_conflicts(said, pack_dtype, self._facts[module])
            elif said.spec != held:
                yield kind_conflict(said, held)
        quantizers = self._quantization.quantizers
        yield from age_conflicts(self._facts, quantizers)
        yield from neighbour_conflicts(self._facts)
        yield from overflow_conflicts(self.folder, self._facts, quantizers)


def _read_model_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such folder; give the folder that has config.json")
    return read_json(folder / "config.json")
