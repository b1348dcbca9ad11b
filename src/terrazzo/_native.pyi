"""The native kernels, see native/ in the source tree. Arrays are tensors on the CPU."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

from torch import Tensor

class Arithmetic(Enum):
    """Of activations: float32, or int8 with one scale for every 16 or 32 neighbours."""

    FLOAT = 0
    INT8 = 1

class Activation(Enum):
    SILU = 0
    GELU_TANH = 1

class HeadNorm(Enum):
    """NONE, over each head, or over all heads as one vector."""

    NONE = 0
    HEAD = 1
    PROJECTION = 2

class Machine:
    """A team of threads and the instruction set of its kernels; ValueError for one not there."""

    def __init__(self, num_threads: int, instruction_set: str) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class SharedExpert(Enum):
    """How an expert that every token sees counts."""

    NONE = 0
    GATED = 1
    PLAIN = 2

class Weight:
    """A packed weight in memory of its own, of use to machines of one instruction set."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

Segment: TypeAlias = tuple[Weight, int, Sequence[float]]
"""A weight of a linear, the first column of its outputs, their bias or nothing."""

def instruction_sets() -> list[str]:
    """Those this machine runs, fastest first."""

def quantized(
    machine: Machine,
    words: Tensor,
    bits: int,
    in_features: int,
    block: int,
    quantum: int,
    lookup: Sequence[int],
    groups: Sequence[int],
    scales: Tensor,
    zeros: Tensor | None,
    zero: float,
) -> Weight:
    """words: int32 [ceil(in_features * bits / 32), N], continuous. block: places of a block.
    quantum: places that share an activation scale. lookup: the input of each place, -1 for none, or
    empty where place k is input k. groups: of each block. scales: [G, N]. zeros: uint8 [G, N], or
    None where `zero` holds for all. ValueError for sizes that do not fit.
    """

def dense(machine: Machine, values: Tensor) -> Weight:
    """values: float32, float16 or bfloat16 [N, K]."""

def rounded(machine: Machine, values: Tensor) -> Weight:
    """The same in 8 bits: one bfloat16 scale for every 32 neighbours of an output."""

def quantized_bytes(
    machine: Machine,
    bits: int,
    out_features: int,
    places: int,
    blocks: int,
    scale_bytes: int,
    zeros: bool,
) -> int: ...
def dense_bytes(machine: Machine, out_features: int, places: int, element_bytes: int) -> int: ...
def multiply(
    machine: Machine, weight: Weight, arithmetic: Arithmetic, x: Tensor, out: Tensor
) -> None:
    """Overwrites `out`, float32 [M, N], with the product of x, float32 [M, K], and the weight."""

class Program:
    """Operations over buffers of rows, run in order. A norm of no weights passes what it gets."""

    def __init__(self, machine: Machine) -> None: ...
    def bind(self, width: int) -> int:
        """A buffer whose memory each run is given; before all others."""

    def buffer(self, width: int) -> int:
        """A buffer of the program's own."""

    def select(self, src: int) -> int:
        """A buffer of the rows of `src` that a run selects; what follows runs on these alone."""

    def rope(self, frequencies: Tensor, magnitude: float, neighbours: bool) -> int:
        """A rotation, frequencies in radians per position; its number."""

    def norm(self, src: int, dst: int, weight: Tensor, eps: float) -> None: ...
    def settle(
        self,
        y: int,
        residual: int,
        x: int,
        after: Tensor,
        multiplier: float,
        before: Tensor,
        eps: float,
    ) -> None:
        """residual += multiplier * norm(y); x = norm(residual)."""

    def linear(
        self,
        src: int,
        dst: int,
        segments: Sequence[Segment],
        arithmetic: Arithmetic,
    ) -> None: ...
    def experts(
        self,
        src: int,
        logits: int,
        shared: int,
        dst: int,
        width: int,
        router: tuple[int, bool, float, SharedExpert],
        activation: Activation,
        experts: Sequence[tuple[Sequence[Segment], Arithmetic, Sequence[Segment], Arithmetic]],
    ) -> None:
        """dst = the weighted sum of the experts that the logits choose, and of `shared`. width: of
        a gate. router: experts of a token, whether their weights are divided by their sum, what
        they are multiplied with, how `shared` counts; GATED by the logit after those of the
        experts. experts: gate and up side by side, then down, of each.
        """

    def gate(self, src: int, dst: int, activation: Activation) -> None:
        """dst = activation(first half of src) * second half."""

    def attend(
        self,
        src: int,
        dst: int,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        scale: float,
        softcap: float,
        window: int,
        norm: HeadNorm,
        query_norm: Tensor,
        key_norm: Tensor,
        eps: float,
        rope: int,
        rotary_dim: int,
        neighbours: bool,
    ) -> None:
        """src: queries, keys and values side by side. keys, values: pages of a layer, float32 or
        bfloat16 [pages, kv_heads, page_size, head_dim], page_size a multiple of 32. rope: -1 where
        positions do not turn.
        """

    def run(
        self,
        bound: Sequence[Tensor],
        positions: Sequence[int],
        slots: Sequence[int],
        spans: Sequence[tuple[int, int, int, Sequence[int]]],
        selected: Sequence[int],
    ) -> None:
        """bound: float32 [rows, width] for each bound buffer, [T, width] for the first. positions,
        slots: of T tokens. spans: query_start, query_len, kv_len and pages of each sequence.
        selected: rows. ValueError for what is not there.
        """
