"""Measurements as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terrazzo.bench.hardware import Hardware
from terrazzo.bench.offline import BatchSpeed, OfflineSpeed, Workload
from terrazzo.bench.startup import StartupSpeed
from terrazzo.bench.traffic import WeightTraffic
from terrazzo.kernels.policy import KernelPolicy

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Everything that `terrazzo bench offline` says."""

    folder: Path
    architecture: str
    policy: KernelPolicy
    hardware: Hardware
    workload: Workload
    traffic: WeightTraffic
    speed: OfflineSpeed

    def __str__(self) -> str:
        kernels = ", ".join(f"{name} {count}" for name, count in self.traffic.kernels.items())
        read = self.speed.memory_read
        return "\n".join(
            [
                str(self.hardware),
                f"{self.folder}: {self.architecture}, kernels for {self.policy.value}: {kernels}",
                f"prompts of {self.workload.input_len} tokens, {self.workload.output_len} new "
                f"ones; median (least to most) of {self.workload.repeats}",
                *(line for each in self.speed.batches for line in self._lines(each)),
                f"memory read: {read} GB/s",
            ]
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "architecture": self.architecture,
            "kernel_policy": self.policy.value,
            "kernels": dict(self.traffic.kernels),
            "machine": asdict(self.hardware),
            "input_len": self.workload.input_len,
            "output_len": self.workload.output_len,
            "memory_read_gb_per_s": self.speed.memory_read.to_json(),
            "batches": [self._batch(each) for each in self.speed.batches],
        }

    def _weights_gb_per_s(self, speed: BatchSpeed) -> float:
        """How fast the median decode step reads weights, in 1e9 bytes per second."""
        steps_per_s = speed.decode.median / speed.batch
        return steps_per_s * self.traffic.step_bytes(speed.batch) / 1e9

    def _lines(self, speed: BatchSpeed) -> list[str]:
        rate = self._weights_gb_per_s(speed)
        share = rate / self.speed.memory_read.median
        size = self.traffic.step_bytes(speed.batch) / _MIB
        return [
            f"batch {speed.batch}: prefill {speed.prefill} tokens/s",
            f"batch {speed.batch}: decode {speed.decode} tokens/s, {size:.1f} MiB of weights a "
            f"step, {rate:.2f} GB/s, {share:.0%} of memory read",
        ]

    def _batch(self, speed: BatchSpeed) -> dict[str, Any]:
        rate = self._weights_gb_per_s(speed)
        return {
            "batch": speed.batch,
            "prefill_tokens_per_s": speed.prefill.to_json(),
            "decode_tokens_per_s": speed.decode.to_json(),
            "weight_bytes_per_step": self.traffic.step_bytes(speed.batch),
            "weights_gb_per_s": rate,
            "share_of_memory_read": rate / self.speed.memory_read.median,
        }


def startup_text(hardware: Hardware, speeds: Sequence[StartupSpeed]) -> str:
    lines = [str(hardware), f"seconds; median (least to most) of {len(speeds[0].starts)}"]
    for speed in speeds:
        lines.append(f"{speed.folder}:")
        lines += [f"  {name:12} {samples}" for name, samples in speed.phases.items()]
    return "\n".join(lines)


def startup_json(hardware: Hardware, speeds: Sequence[StartupSpeed]) -> dict[str, Any]:
    return {
        "machine": asdict(hardware),
        "models": [
            {
                "folder": str(speed.folder),
                "seconds": {name: samples.to_json() for name, samples in speed.phases.items()},
            }
            for speed in speeds
        ],
    }
