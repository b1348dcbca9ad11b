"""Multi-head latent attention, expanded: keys and values of all heads come from one small vector.

Each head has its own keys and values, made from the latent of a token; a part of the key turns with
the position and is the same for all heads. They are cached as any other heads are, values padded
to the width of keys: plain, and larger in memory than the latents would be.

Shape suffixes: T tokens, H heads, D width of queries and keys, R the part of it that turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from terrazzo.nn.attention import Pass, Scoring


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Heads of one layer. plain_dim, turning_dim: D in its two parts, in this order. value_dim: of
    a head, at most D. layer, rotation: as in `Attention`.
    """

    layer: int
    num_heads: int
    plain_dim: int
    turning_dim: int
    value_dim: int
    rotation: int
    scoring: Scoring

    def __call__(self, q_TN: Tensor, kv_TN: Tensor, key_TR: Tensor, forward: Pass) -> Tensor:
        """q_TN: [T, H * D]. kv_TN: [T, H * (plain + value)]. key_TR: the part that all heads share.
        All float32 -> [T, H * value].
        """
        tokens, heads, plain = q_TN.shape[0], self.num_heads, self.plain_dim
        q_THD = q_TN.view(tokens, heads, plain + self.turning_dim)
        kv_THN = kv_TN.view(tokens, heads, plain + self.value_dim)
        turning_TNR = torch.cat((q_THD[..., plain:], key_TR.unsqueeze(1)), dim=1)
        turned_TNR = forward.rotations[self.rotation].turn_(turning_TNR)
        shared_THR = turned_TNR[:, heads:].expand(-1, heads, -1)
        attended_THD = forward.context.attend(
            self.layer,
            torch.cat((q_THD[..., :plain], turned_TNR[:, :heads]), dim=-1),
            torch.cat((kv_THN[..., :plain], shared_THR), dim=-1),
            pad(kv_THN[..., plain:], (0, plain + self.turning_dim - self.value_dim)),
            self.scoring,
        )
        return attended_THD[..., : self.value_dim].reshape(tokens, heads * self.value_dim)
