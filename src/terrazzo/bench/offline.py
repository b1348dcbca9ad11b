"""Prefill and decode speed of one model, without a server.

All sequences of a batch start at once. Prefill lasts until each has its first token; then exactly
`output_len` steps are timed, in each of which every sequence gets one token. Prompts are random
tokens, sampling is greedy, and nothing comes from the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from terrazzo.bench.hardware import MemoryReader
from terrazzo.bench.samples import Clock, Samples
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.config import AUTO, Auto, EngineConfig
from terrazzo.engine.engine import Engine
from terrazzo.engine.llm import LLM
from terrazzo.engine.request import Request, SamplingParams
from terrazzo.errors import ConfigError
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig

STEP_TOKENS = 1024
"""Prompt tokens that one step computes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """batches: sequences at once. input_len, output_len: tokens of each. repeats: measurements.

    Raises ConfigError naming what is illegal.
    """

    batches: tuple[int, ...] = (1, 8)
    input_len: int = 512
    output_len: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        counts = [("input_len", self.input_len), ("output_len", self.output_len)]
        counts += [("repeats", self.repeats), *(("batch", batch) for batch in self.batches)]
        for name, count in counts:
            if count < 1:
                raise ConfigError(f"{name} is {count}; legal values are 1 and above")
        if not self.batches:
            raise ConfigError("no batch is given; give one or more, such as 1,8")

    @property
    def length(self) -> int:
        """Positions of the longest sequence: the first prompt of a batch starts to decode while the
        others are computed, one token for each step.
        """
        prefill_steps = -(-max(self.batches) * self.input_len // STEP_TOKENS)
        return self.input_len + prefill_steps + self.output_len + 1

    def engine_config(self, folder: Checkpoint, policy: KernelPolicy | Auto = AUTO) -> EngineConfig:
        """Raises ConfigError where the sequences are longer than the model knows."""
        longest = ModelConfig.of(folder).context_length
        if self.length > longest:
            raise ConfigError(
                f"{folder.folder}: input_len {self.input_len} and output_len {self.output_len} "
                f"need {self.length} positions, and the model knows {longest}; lower one of them"
            )
        batch = max(self.batches)
        return EngineConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=max(STEP_TOKENS, batch),
            max_model_len=self.length,
            prefix_caching=False,
            kernel_policy=policy,
        )


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Of one batch size, in tokens per second of all sequences together."""

    batch: int
    prefill: Samples
    decode: Samples


@dataclass(frozen=True, slots=True)
class OfflineSpeed:
    """memory_read: in 1e9 bytes per second, measured in turn with the model."""

    batches: tuple[BatchSpeed, ...]
    memory_read: Samples


def measure(
    llm: LLM, workload: Workload, memory: MemoryReader, clock: Clock = time.perf_counter
) -> OfflineSpeed:
    """Batch sizes take turns, after one round that does not count.

    llm: opened with `workload.engine_config`. Raises ConfigError where its cache cannot hold the
    largest batch.
    """
    _check_capacity(llm, workload)
    random = torch.Generator().manual_seed(0)
    size = (max(workload.batches), workload.input_len)
    prompts = torch.randint(llm.model_config.vocab_size, size, generator=random).tolist()
    passes: dict[int, list[Pass]] = {batch: [] for batch in workload.batches}
    reads = []
    for _ in range(workload.repeats + 1):
        reads.append(memory.gb_per_s())
        for batch, taken in passes.items():
            taken.append(run_once(llm.engine, prompts[:batch], workload.output_len, clock))
    return OfflineSpeed(
        tuple(_speed(batch, taken[1:], workload) for batch, taken in passes.items()),
        Samples(tuple(reads[1:])),
    )


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds that one batch took, until each sequence had its first token and from then on."""

    prefill: float
    decode: float


def run_once(
    engine: Engine, prompts: Sequence[Sequence[int]], output_len: int, clock: Clock
) -> Pass:
    """prompts: token ids. The engine has no other work, and room for these as for a `Workload`."""
    room = engine.limits.max_model_len - len(prompts[0])
    params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"bench-{number}", tuple(prompt), params) for number, prompt in enumerate(prompts)
    ]
    start = clock()
    for request in requests:
        engine.add(request)
    silent = {request.request_id for request in requests}
    while silent:
        silent.difference_update(delta.request_id for delta in engine.step())
    prefilled = clock()
    for _ in range(output_len):
        deltas = engine.step()
        assert len(deltas) == len(requests), "a sequence ended or waited"
    decoded = clock()
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    return Pass(prefilled - start, decoded - prefilled)


def _speed(batch: int, passes: Sequence[Pass], workload: Workload) -> BatchSpeed:
    return BatchSpeed(
        batch,
        Samples(tuple(batch * workload.input_len / each.prefill for each in passes)),
        Samples(tuple(batch * workload.output_len / each.decode for each in passes)),
    )


def _check_capacity(llm: LLM, workload: Workload) -> None:
    limits = llm.memory_plan.limits
    pages = -(-workload.length // limits.page_size) * max(workload.batches)
    if pages > limits.num_pages:
        raise ConfigError(
            f"batch {max(workload.batches)} needs {pages * limits.page_size} tokens of KV cache, "
            f"and memory holds {limits.capacity}; lower the batch, input_len or output_len"
        )
