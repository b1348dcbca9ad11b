"""Which kernels run a model, and how many bytes of weights one step reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import plan_linears
from terrazzo.models.mlp_config import ExpertsMlp
from terrazzo.models.parameters import expert_groups
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """kernels: how many linears each runs. shared_bytes: of weights that every step reads, as they
    lie in memory. routed_bytes: of all experts, by the share of them that one token goes to.
    """

    kernels: Mapping[str, int]
    shared_bytes: int
    routed_bytes: Mapping[float, int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: ModelConfig, policy: KernelPolicy) -> WeightTraffic:
        linears = plan_linears(checkpoint, config, policy)
        shares = dict(_routed(config))
        routed: Counter[float] = Counter()
        for linear in linears:
            if linear.name in shares:
                routed[shares[linear.name]] += linear.prepared_bytes
        return cls(
            kernels=dict(Counter(linear.choice.kernel.name for linear in linears)),
            shared_bytes=sum(each.prepared_bytes for each in linears if each.name not in shares),
            routed_bytes=dict(routed),
        )

    def step_bytes(self, batch: int) -> int:
        """Of a step with one token of each of `batch` sequences.

        Experts: as many as routers reach that send every token anywhere with equal chance.
        """
        reached = (size * (1 - (1 - part) ** batch) for part, size in self.routed_bytes.items())
        return self.shared_bytes + round(sum(reached))


def _routed(config: ModelConfig) -> Iterator[tuple[Name, float]]:
    """The linears of routed experts, with the share of the experts that one token goes to."""
    for layer, mlp in enumerate(config.mlps):
        if isinstance(mlp, ExpertsMlp):
            groups = expert_groups(config.layout.layer(layer), mlp)
            for linears in (groups.gate_up[: mlp.num_experts], groups.down[: mlp.num_experts]):
                for group in linears:
                    yield from ((name, mlp.top_k / mlp.num_experts) for name in group)
