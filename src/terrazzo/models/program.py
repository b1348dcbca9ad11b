"""A decoder as one native program: a forward pass is one call, whatever the number of layers.

The stages of a block are translated one by one; what a stage has that the native kernels do not
know is named, and then the decoder runs stage by stage in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrazzo.kernels.machine import machine, native, why_not_native
from terrazzo.kernels.native import NativeDenseKernel, NativeKernel, NativePrepared, arithmetic
from terrazzo.models.block import AddNormStep, AnyStage, AttendStep, Block, GateStep, Stage
from terrazzo.models.config import ModelConfig
from terrazzo.models.decoder import Decoder
from terrazzo.models.experts import CombineExperts, ExpertStage, GateExperts, RouteStep
from terrazzo.models.latent_config import Latent
from terrazzo.nn.activation import Activation
from terrazzo.nn.attention import Attention, KVPool
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.moe import Router, TopKWeights
from terrazzo.nn.norm import HeadNorm, Norm, PlainHeads, ProjectionNorm, RMSNorm
from terrazzo.nn.rope import NoRope, Pairing, RotaryEmbedding
from terrazzo.nn.weights import Bias

if TYPE_CHECKING:
    from terrazzo import _native

NO_ROPE = -1
LARGEST_HEAD = 512
LARGEST_GROUP = 32
"""Features of a head, and query heads of a key head, that the native attention has room for."""

PAGE_UNIT = 32
"""Tokens that native attention takes from a page at once."""


class NotNativeError(Exception):
    """The decoder has a part that no native operation runs; the message names it."""


@dataclass(frozen=True, slots=True)
class ProgrammedDecoder:
    """What a decoder computes, over one KV pool, whose memory the program lays out its own way.

    program: hidden states in, logits of the selected rows out.
    """

    decoder: Decoder
    program: _native.Program

    def __call__(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        spans: Sequence[tuple[int, int, int, Sequence[int]]],
        logit_rows: Sequence[int],
    ) -> Tensor:
        """T tokens, where they stand and are stored; query_start, query_len, kv_len and pages of
        each sequence; R rows of the tokens -> float32 [R, vocabulary]. Stores keys and values.
        """
        head = self.decoder.head
        hidden_TH = self.decoder.embedding(torch.tensor(token_ids))
        logits_RV = hidden_TH.new_empty((len(logit_rows), head.linear.out_features))
        self.program.run([hidden_TH, logits_RV], positions, slots, spans, logit_rows)
        return head.scaled_(logits_RV)


def compile_decoder(decoder: Decoder, pool: KVPool) -> ProgrammedDecoder:
    """Raises NotNativeError naming the first part that the native kernels do not run."""
    reason = why_not_programmed(decoder.config, pool.page_size)
    if reason:
        raise NotNativeError(reason)
    translation = _Translation(decoder, pool)
    for block in decoder.blocks:
        translation.emit(block)
    return ProgrammedDecoder(decoder, translation.end())


def why_not_programmed(model: ModelConfig, page_size: int) -> str:
    """Why a decoder runs stage by stage, as far as its config tells; empty where it need not."""
    if why_not_native():
        return why_not_native()
    if page_size % PAGE_UNIT:
        return f"page_size is {page_size}; native attention takes multiples of {PAGE_UNIT}"
    if isinstance(model.heads, Latent):
        return "latent attention has no native operation yet"
    group = model.num_attention_heads // model.num_kv_heads
    if model.head_dim > LARGEST_HEAD or group > LARGEST_GROUP:
        return (
            f"attention has {model.head_dim} features a head and {group} query heads for each key "
            f"head; native are up to {LARGEST_HEAD} and {LARGEST_GROUP}"
        )
    return ""


class _Translation:
    """Emits the blocks of a decoder. Buffers are shared by all layers: a width has one."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._program: _native.Program = native().Program(machine())
        self._hidden = self._program.bind(decoder.config.hidden_size)
        self._logits = self._program.bind(decoder.head.linear.out_features)
        self._normed = self._program.buffer(decoder.config.hidden_size)
        self._buffers: dict[tuple[str, int], int] = {}
        self._ropes = [self._rope(kind) for kind in decoder.rotary.kinds]

    def end(self) -> _native.Program:
        """The program, complete with the head."""
        norm = self._decoder.head.norm
        selected = self._program.select(self._hidden)
        self._program.norm(selected, self._normed, norm.weight, norm.eps)
        _emit_linear(self._program, self._normed, self._logits, self._decoder.head.linear)
        return self._program

    def emit(self, block: Block) -> None:
        x = self._hidden
        if isinstance(block.input_norm, RMSNorm):
            norm = block.input_norm
            self._program.norm(self._hidden, self._normed, norm.weight, norm.eps)
            x = self._normed
        *dense, route, opening, closing = block.stages
        if not isinstance(closing, ExpertStage):
            dense = list(block.stages)
        for stage in dense:
            x = self._emit_stage(stage, x)
        if isinstance(closing, ExpertStage):
            self._emit_experts(route, opening, closing, x)

    def _emit_stage(self, stage: AnyStage, x: int) -> int:
        """x: the buffer it reads. -> the buffer that the next stage reads."""
        if not isinstance(stage, Stage):
            raise NotNativeError(f"{type(stage).__name__} has no native operation yet")
        y = self._buffer("y", stage.linear.out_features)
        _emit_linear(self._program, x, y, stage.linear)
        if isinstance(stage.step, AttendStep):
            return self._attend(stage.step.attention, y)
        if isinstance(stage.step, GateStep):
            return self._gate(stage, y)
        if isinstance(stage.step, AddNormStep):
            return self._settle(stage.step, y)
        raise NotNativeError(f"{type(stage.step).__name__} has no native operation yet")

    def _emit_experts(self, route: AnyStage, opening: AnyStage, closing: AnyStage, x: int) -> None:
        """The three stages of an MLP with experts: one operation, a shared expert before it."""
        assert isinstance(route, Stage)
        assert isinstance(route.step, RouteStep)
        assert isinstance(opening, ExpertStage)
        assert isinstance(opening.step, GateExperts)
        assert isinstance(closing, ExpertStage)
        assert isinstance(closing.step, CombineExperts)
        assert isinstance(closing.step.step, AddNormStep)
        router, activation = route.step.router, _activation(opening.step.activation)
        logits = self._buffer("logits", route.linear.out_features)
        shared, out = (
            self._buffer(side, self._decoder.config.hidden_size) for side in ("shared", "y")
        )
        _emit_linear(self._program, x, logits, route.linear)
        for gate_up, down in zip(opening.shared, closing.shared, strict=True):
            y = self._buffer("y", gate_up.out_features)
            product = self._buffer("x", gate_up.out_features // 2)
            _emit_linear(self._program, x, y, gate_up)
            self._program.gate(y, product, activation)
            _emit_linear(self._program, product, shared, down)
        pairs = zip(opening.bank.experts, closing.bank.experts, strict=True)
        self._program.experts(
            x,
            logits,
            shared,
            out,
            opening.bank.experts[0].out_features // 2,
            (router.top_k, router.weights is TopKWeights.SUM_TO_ONE, router.scale, _shared(router)),
            activation,
            [(*_segments(gate_up), *_segments(down)) for gate_up, down in pairs],
        )
        self._settle(closing.step.step, out)

    def _gate(self, stage: Stage, y: int) -> int:
        assert isinstance(stage.step, GateStep)
        out = self._buffer("x", stage.linear.out_features // 2)
        self._program.gate(y, out, _activation(stage.step.activation))
        return out

    def _settle(self, step: AddNormStep, y: int) -> int:
        before = isinstance(step.before, RMSNorm)
        x: int = self._normed if before else self._hidden
        eps = next((n.eps for n in (step.after, step.before) if isinstance(n, RMSNorm)), 0.0)
        self._program.settle(
            y, self._hidden, x, _weight(step.after), step.multiplier, _weight(step.before), eps
        )
        return x

    def _attend(self, attention: Attention, y: int) -> int:
        out = self._buffer("x", attention.num_heads * attention.head_dim)
        mode, query_D, key_D, eps = _head_norm(attention)
        rotary = self._decoder.rotary.kinds[attention.rotation]
        self._program.attend(
            y,
            out,
            _pages(self._pool.keys[attention.layer]),
            _pages(self._pool.values[attention.layer]),
            attention.num_heads,
            attention.scoring.scale,
            attention.scoring.softcap,
            attention.scoring.window,
            mode,
            query_D,
            key_D,
            eps,
            self._ropes[attention.rotation],
            0 if isinstance(rotary, NoRope) else 2 * rotary.frequencies_F.shape[0],
            isinstance(rotary, RotaryEmbedding) and rotary.pairing is Pairing.NEIGHBOURS,
        )
        return out

    def _rope(self, kind: RotaryEmbedding | NoRope) -> int:
        if isinstance(kind, NoRope):
            return NO_ROPE
        neighbours = kind.pairing is Pairing.NEIGHBOURS
        return self._program.rope(kind.frequencies_F.contiguous(), kind.magnitude, neighbours)

    def _buffer(self, side: str, width: int) -> int:
        """side: `x` for inputs of linears, `y` for outputs; no operation reads and writes one."""
        if (side, width) not in self._buffers:
            self._buffers[side, width] = self._program.buffer(width)
        return self._buffers[side, width]


def _emit_linear(program: _native.Program, src: int, dst: int, linear: FusedLinear) -> None:
    program.linear(src, dst, *_segments(linear))


def _segments(linear: FusedLinear) -> tuple[list[_native.Segment], _native.Arithmetic]:
    """Raises NotNativeError for a segment whose kernel is not native."""
    segments: list[_native.Segment] = []
    activations = torch.float32
    for columns, segment in linear.launches:
        kernel, weight = segment.kernel, segment.weight
        if not isinstance(kernel, NativeKernel | NativeDenseKernel):
            raise NotNativeError(f"{segment.names[0]} runs on {kernel.name}")
        assert isinstance(weight, NativePrepared)
        activations = kernel.activations
        bias = segment.bias.values_N.tolist() if isinstance(segment.bias, Bias) else []
        segments.append((weight.packed, columns.start, bias))
    return segments, arithmetic(activations)


def _activation(activation: Activation) -> _native.Activation:
    modes: type[_native.Activation] = native().Activation
    return modes.SILU if activation is Activation.SILU else modes.GELU_TANH


def _shared(router: Router) -> _native.SharedExpert:
    mode: _native.SharedExpert = native().SharedExpert[router.shared.name]
    return mode


def _pages(tensor: Tensor) -> Tensor:
    """The memory of a layer as [pages, kv_heads, page_size, head_dim]."""
    pages, page_size, kv_heads, head_dim = tensor.shape
    return tensor.view(pages, kv_heads, page_size, head_dim)


def _weight(norm: Norm) -> Tensor:
    """Nothing where hidden states pass as they are."""
    return norm.weight if isinstance(norm, RMSNorm) else torch.empty(0)


def _head_norm(attention: Attention) -> tuple[_native.HeadNorm, Tensor, Tensor, float]:
    modes, how, heads = native().HeadNorm, attention.normalize, attention.num_heads
    if isinstance(how, HeadNorm):
        return modes.HEAD, how.weight_ND[0], how.weight_ND[heads], how.eps
    if isinstance(how, ProjectionNorm):
        return modes.PROJECTION, how.query_HD.flatten(), how.key_KD.flatten(), how.eps
    if isinstance(how, PlainHeads):
        return modes.NONE, torch.empty(0), torch.empty(0), 0.0
    raise NotNativeError(f"{how} has no native operation yet")
