"""Experts by one name each, however a file stores them.

transformers may keep the experts of a layer as two tensors of three dimensions. Here each slice is
a tensor of its own, named as GPTQ tools name the linear it belongs to. Mixtral has an older and a
newer spelling; both are on disks, and a checkpoint that is to be written gets the newer one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from terrazzo.checkpoint.files import TensorFiles, TensorHeader

STACKED_GATE_UP = ".experts.gate_up_proj"
STACKED_DOWN = ".experts.down_proj"
MOST_EXPERTS = 1 << 14
"""Of one layer. More would cost more memory in names than in weights."""
MIXTRAL_SHARDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXTRAL = re.compile(r"\.block_sparse_moe\.(?:(gate)|(experts\.\d+)\.(w[123]))(?=\.)")
MIXTRAL_TODAY = re.compile(r"\.mlp\.(?:(gate)|(experts\.\d+)\.(\w+_proj))(?=\.|$)")


class Naming(enum.Enum):
    """Which names the experts of Mixtral go by."""

    STORED = "those in the file"
    TODAY = "mlp.experts.N.gate_proj and so on, as GPTQModel writes them"


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as it is stored."""

    def of(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """rows: of the matrix of one expert."""

    expert: int
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.expert, self.rows]


WHOLE = Whole()


@dataclass(frozen=True, slots=True)
class View:
    """stored: the name in the file. part: of that tensor. header: of the part."""

    stored: str
    part: Whole | ExpertSlice
    header: TensorHeader


class ExpertFiles(TensorFiles):
    """The tensors of a folder, those of experts by one name each."""

    def __init__(self, folder: Path, naming: Naming) -> None:
        """Raises what TensorFiles raises."""
        super().__init__(folder)
        self._views = view_tensors(self.headers, naming)
        self.headers = {name: view.header for name, view in self._views.items()}

    def tensor(self, name: str) -> Tensor:
        file = self.header(name).file
        view = self._views[name]
        return view.part.of(self._read(file, view.stored))


def view_tensors(headers: Mapping[str, TensorHeader], naming: Naming) -> dict[str, View]:
    """Every tensor by the name that Terrazzo uses for it, in the order of the files."""
    views: dict[str, View] = {}
    for stored, header in headers.items():
        if _is_stacked(stored, headers):
            views |= dict(_experts(stored, header))
        else:
            name = stored if naming is Naming.STORED else MIXTRAL.sub(_today, stored)
            views[name] = View(stored, WHOLE, header)
    return views


def in_older_spelling(name: str) -> str:
    """A tensor or module of Mixtral as its first files name it; others are unchanged."""
    return MIXTRAL_TODAY.sub(_before, name)


def _is_stacked(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Both tensors of a layer are there, and store [expert, out, in]; others are left alone."""
    layer = name.removesuffix(STACKED_GATE_UP).removesuffix(STACKED_DOWN)
    names = (f"{layer}{STACKED_GATE_UP}", f"{layer}{STACKED_DOWN}")
    if name not in names or not all(each in headers for each in names):
        return False
    gate_up, down = (headers[each].shape for each in names)
    if len(gate_up) != 3 or len(down) != 3:
        return False
    experts, hidden, features = down
    is_sound = experts <= MOST_EXPERTS and hidden > 0 and features > 0
    return is_sound and gate_up == (experts, 2 * features, hidden)


def _experts(stored: str, header: TensorHeader) -> Iterator[tuple[str, View]]:
    experts, outputs, inputs = header.shape
    stem, _, projection = stored.rpartition(".")
    shards = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    height = outputs // len(shards)
    part = replace(header, shape=(height, inputs))
    for expert in range(experts):
        for index, shard in enumerate(shards):
            rows = slice(index * height, (index + 1) * height)
            name = f"{stem}.{expert}.{shard}.weight"
            yield name, View(stored, ExpertSlice(expert, rows), part)


def _before(match: re.Match[str]) -> str:
    router, expert, shard = match.groups()
    older = {today: before for before, today in MIXTRAL_SHARDS.items()}
    return f".block_sparse_moe.{router}" if router else f".block_sparse_moe.{expert}.{older[shard]}"


def _today(match: re.Match[str]) -> str:
    router, expert, shard = match.groups()
    return f".mlp.{router}" if router else f".mlp.{expert}.{MIXTRAL_SHARDS[shard]}"
