"""Linears of one shared input as one callable, whatever the quantization of each.

Fusing is a view at run time; names, specs and biases stay with the shards. Consecutive shards whose
specs and input orders agree are one segment, hence one GEMM; other shards each get their own launch
and write their columns of the same output. A uniform q/k/v is one launch, a mixed one two or three.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from terrazzo.kernels.base import GemmProblem
from terrazzo.kernels.choose import KernelPolicy
from terrazzo.nn.linear import Linear
from terrazzo.nn.weights import LinearWeight, can_merge
from terrazzo.spec import Name


class FusedLinear:
    """y = [x W0' + b0 | x W1' + b1 | ...] over shards that share x.

    in_features: K. out_features: N, the sum over the shards. columns: of each shard in y.
    launches: the GEMMs that run, in column order, each with its columns.
    """

    __slots__ = ("columns", "in_features", "launches", "names", "out_features")

    def __init__(
        self, shards: Sequence[LinearWeight], policy: KernelPolicy = KernelPolicy.SPEED
    ) -> None:
        """Raises NoKernelError naming the modules and the reason of every kernel."""
        assert len({shard.in_features for shard in shards}) == 1, "shards must share their input"
        segments = [Linear.of(run, policy) for run in _mergeable_runs(shards)]
        self.names: tuple[Name, ...] = tuple(shard.name for shard in shards)
        self.columns = _columns([shard.out_features for shard in shards])
        self.in_features = shards[0].in_features
        self.out_features = self.columns[-1].stop
        places = _columns([segment.out_features for segment in segments])
        self.launches = tuple(zip(places, segments, strict=True))

    @property
    def segments(self) -> tuple[Linear, ...]:
        return tuple(segment for _, segment in self.launches)

    @property
    def problems(self) -> tuple[GemmProblem, ...]:
        """Of the segments: what is equal for linears that one kernel can run side by side."""
        return tuple(segment.weight.problem for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        """Memory of the prepared weights, without biases."""
        return sum(segment.weight.num_bytes for segment in self.segments)

    def split(self, y_MN: Tensor) -> tuple[Tensor, ...]:
        """The columns of each shard, as views."""
        return tuple(y_MN[:, columns] for columns in self.columns)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """float32 [M, K] -> float32 [M, N]."""
        y_MN = x_MK.new_empty((x_MK.shape[0], self.out_features))
        self.run(x_MK, y_MN)
        return y_MN

    def run(self, x_MK: Tensor, out_MN: Tensor) -> None:
        """float32 [M, K]; overwrites float32 [M, N], whose rows may be strided."""
        for columns, segment in self.launches:
            segment.run(x_MK, out_MN[:, columns])


def _mergeable_runs(shards: Sequence[LinearWeight]) -> list[list[LinearWeight]]:
    runs = [[shards[0]]]
    for left, right in pairwise(shards):
        if can_merge(left.weight, right.weight):
            runs[-1].append(right)
        else:
            runs.append([right])
    return runs


def _columns(widths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in pairwise(accumulate(widths, initial=0)))
