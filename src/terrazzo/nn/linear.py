"""One GEMM with its bias: a module, or several that stand side by side as one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from terrazzo.errors import NoKernelError
from terrazzo.kernels.base import GemmProblem, Kernel, Prepared
from terrazzo.kernels.choose import KernelPolicy, choose
from terrazzo.nn.weights import AnyBias, LinearWeight, merge_biases, merge_weights
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class Linear:
    """names: the un-fused modules whose outputs are the columns of y, in order."""

    names: tuple[Name, ...]
    kernel: Kernel
    weight: Prepared
    bias: AnyBias

    @classmethod
    def of(
        cls, shards: Sequence[LinearWeight], policy: KernelPolicy = KernelPolicy.SPEED
    ) -> Linear:
        """Merges `shards`, whose weights must be mergeable, and prepares them.

        Raises NoKernelError naming the modules and the reason of every kernel.
        """
        names = tuple(shard.name for shard in shards)
        weight = merge_weights([shard.weight for shard in shards])
        try:
            kernel = choose(GemmProblem.of(weight), policy).kernel
        except NoKernelError as error:
            raise NoKernelError(f"{', '.join(names)}: {error}") from error
        return cls(names, kernel, kernel.prepare(weight), merge_biases(shards))

    @property
    def in_features(self) -> int:
        return self.weight.problem.in_features

    @property
    def out_features(self) -> int:
        return self.weight.problem.out_features

    def run(self, x_MK: Tensor, out_MN: Tensor) -> None:
        """float32 [M, K]; overwrites float32 [M, N], whose rows may be strided."""
        self.kernel.run(x_MK, self.weight, out_MN)
        self.bias.add_to_(out_MN)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """float32 [M, K] -> float32 [M, N]."""
        y_MN = x_MK.new_empty((x_MK.shape[0], self.out_features))
        self.run(x_MK, y_MN)
        return y_MN
