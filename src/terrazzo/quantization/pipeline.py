"""A model becomes a checkpoint, layer by layer.

The hidden states of all calibration tokens walk through the model. At each stage of a block they
give one Hessian for all linears that share an input; those are quantized, written and put in
place of the originals before the states walk on, so that every linear is fitted to the inputs it
will really see. Weights are read from the file when their block is built and let go after it: the
memory that stays is the hidden states, `4 * tokens * hidden` bytes, and one input of a stage.

Nothing that is written depends on the clock: the same files, options and threads give the same
bytes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from terrazzo.checkpoint.companions import companion_files
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.errors import ConfigError
from terrazzo.kernels.base import DenseTensor
from terrazzo.models.build import build_block, build_embedding, build_rotary
from terrazzo.nn.attention import CausalContext, Pass
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.norm import RMSNorm
from terrazzo.nn.weights import LinearWeight
from terrazzo.packing import dequantize
from terrazzo.quantization.bench import Bench
from terrazzo.quantization.calibration import Calibration, load_calibration
from terrazzo.quantization.job import Job, open_job
from terrazzo.quantization.options import (
    DEFAULT_CALIBRATION,
    DEFAULT_GPTQ,
    CalibrationOptions,
    GptqOptions,
)
from terrazzo.quantization.output import copy_dense_tensors, describe
from terrazzo.quantization.progress import SILENT, Progress
from terrazzo.quantization.report import QuantizationReport
from terrazzo.quantization.work import forward_work, total_work
from terrazzo.rules import RuleSet
from terrazzo.spec import Format

BATCH_TOKENS = 4096
"""Calibration tokens that walk together; more only costs memory."""


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    rules: RuleSet,
    calibration: CalibrationOptions = DEFAULT_CALIBRATION,
    options: GptqOptions = DEFAULT_GPTQ,
    checkpoint_format: Format = Format.GPTQ,
    progress: Progress = SILENT,
) -> QuantizationReport:
    """Quantize a Hugging Face folder by rules into a GPTQ checkpoint.

    model: a dense model with its tokenizer.json. out: a folder that does not exist; it appears
    when everything is written. rules: base spec and `dynamic` rules; see `RuleSet.parse`. A head
    that shares the embedding gets weights of its own when the rules quantize it.

    Raises what `open_job` and `load_calibration` raise, and QuantizationError when a Hessian or a
    weight is not finite.
    """
    job = open_job(model, rules, checkpoint_format)
    return run_job(job, out, calibration=calibration, options=options, progress=progress)


def run_job(
    job: Job,
    out: str | Path,
    *,
    calibration: CalibrationOptions = DEFAULT_CALIBRATION,
    options: GptqOptions = DEFAULT_GPTQ,
    progress: Progress = SILENT,
) -> QuantizationReport:
    """`quantize` for a job whose plan and remarks the caller has seen."""
    start = time.monotonic()
    tokens = _load_tokens(job, calibration)
    companions = companion_files(job.checkpoint.folder)
    with CheckpointWriter(Path(out), job.checkpoint_format) as writer:
        bench = Bench(job, options, writer, progress, tokens.num_tokens, [])
        progress.begin(total_work(job, tokens.num_tokens))
        hidden = _walk_blocks(bench, tokens)
        if job.head in job.plan.quantized:
            final_norm = job.source.norm(job.config.layout.final_norm)
            norm = RMSNorm(final_norm, job.config.rms_norm_eps)
            bench.quantize_linears((job.head,), [norm(hidden_TH) for hidden_TH in hidden])
        copy_dense_tensors(job, writer)
        for file in companions:
            writer.copy_file(file)
        writer.commit(describe(job, calibration, tokens, options, bench.modules))
    return QuantizationReport(
        Path(out), tuple(bench.modules), tokens.num_tokens, tokens.sha256, time.monotonic() - start
    )


def _load_tokens(job: Job, options: CalibrationOptions) -> Calibration:
    config = job.config
    if options.sequence_length > config.context_length:
        raise ConfigError(
            f"calibration sequence_length is {options.sequence_length}; this model sees at most "
            f"{config.context_length} positions"
        )
    tokens = load_calibration(job.checkpoint.folder / "tokenizer.json", options)
    largest = int(tokens.token_ids_BL.max())
    if largest >= config.vocab_size:
        raise ConfigError(
            f"{job.checkpoint.folder / 'tokenizer.json'}: gives token {largest}, the model knows "
            f"{config.vocab_size}; the tokenizer belongs to another model"
        )
    return tokens


def _walk_blocks(bench: Bench, tokens: Calibration) -> list[Tensor]:
    """Quantize every block in turn -> the hidden states behind the last one, batch by batch."""
    source, config = bench.job.source, bench.job.config
    rotary, embedding = build_rotary(config), build_embedding(config, source)
    length = tokens.token_ids_BL.shape[1]
    batches = torch.split(tokens.token_ids_BL, max(1, BATCH_TOKENS // length))
    contexts = [CausalContext(len(batch_BL), length) for batch_BL in batches]
    passes = [Pass(context, rotary(context.positions)) for context in contexts]
    hidden = [embedding(batch_BL.flatten()) for batch_BL in batches]
    for layer in range(config.num_layers):
        block = build_block(config, layer, source)
        flows = [block.enter(hidden_TH) for hidden_TH in hidden]
        for stage in block.stages:
            settled = stage.with_linears(
                [
                    FusedLinear([_as_float32(linear) for linear in linears])
                    for linears in bench.quantize_stage(stage, flows)
                ]
            )
            # Batch by batch, so that the inputs of one stage go as those of the next come.
            for index, forward in enumerate(passes):
                flows[index] = settled(flows[index], forward)
            names = [name for group in stage.groups for name in group]
            bench.progress.advance(forward_work(bench.job, names, tokens.num_tokens))
        hidden = [flow.residual_TH for flow in flows]
    return hidden


def _as_float32(linear: LinearWeight) -> LinearWeight:
    """What the weight means; calibration does not depend on which kernels exist."""
    if isinstance(linear.weight, DenseTensor):
        return linear
    return replace(linear, weight=DenseTensor(dequantize(linear.weight)))
