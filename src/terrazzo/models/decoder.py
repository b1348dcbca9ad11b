"""The one decoder: embedding, blocks, head. Every architecture is an instance of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from terrazzo.models.block import Block
from terrazzo.models.config import ModelConfig
from terrazzo.nn.attention import AttentionContext, Pass
from terrazzo.nn.embedding import Embedding
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.grouped import NO_CAP, softcap_
from terrazzo.nn.norm import RMSNorm
from terrazzo.nn.rope import RotaryEmbeddings


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the projection to the vocabulary, an ordinary linear.

    multiplier: of the logits. cap: they become `cap * tanh(logit / cap)` where it is finite.
    """

    norm: RMSNorm
    linear: FusedLinear
    multiplier: float = 1.0
    cap: float = NO_CAP

    def __call__(self, hidden_RH: Tensor) -> Tensor:
        """float32 [R, hidden] -> float32 [R, vocabulary]."""
        return self.scaled_(self.linear(self.norm(hidden_RH)))

    def scaled_(self, logits_RV: Tensor) -> Tensor:
        """What the projection gave, multiplied and capped in place."""
        if self.multiplier != 1.0:
            logits_RV.mul_(self.multiplier)
        return logits_RV if self.cap == NO_CAP else softcap_(logits_RV, self.cap)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model, born with its weights."""

    config: ModelConfig
    embedding: Embedding
    rotary: RotaryEmbeddings
    blocks: tuple[Block, ...]
    head: Head

    def __call__(self, token_ids_T: Tensor, context: AttentionContext) -> Tensor:
        """int64 [T] -> float32 [T, hidden], before the final norm.

        Positions must be below `config.context_length` and ids below `config.vocab_size`.
        """
        forward = Pass(context, self.rotary(context.positions))
        hidden_TH = self.embedding(token_ids_T)
        for block in self.blocks:
            hidden_TH = block(hidden_TH, forward)
        return hidden_TH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """float32 [R, hidden], rows of what a call returned -> float32 [R, vocabulary]."""
        return self.head(hidden_RH)
