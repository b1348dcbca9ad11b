"""What a checkpoint needs beside its quantized modules: dense tensors, files, and the facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.quantization.calibration import Calibration
from terrazzo.quantization.job import Job
from terrazzo.quantization.options import CalibrationOptions, GptqOptions
from terrazzo.quantization.report import ModuleReport


def copy_dense_tensors(job: Job, writer: CheckpointWriter) -> None:
    """Every tensor that no quantized weight replaces, in the dtype of the file."""
    replaced = {f"{name}.weight" for name in job.plan.quantized}
    for tensor in job.checkpoint.tensor_names:
        if tensor not in replaced:
            writer.add_tensor(tensor, job.checkpoint.tensor(tensor))


def describe(
    job: Job,
    calibration: CalibrationOptions,
    tokens: Calibration,
    options: GptqOptions,
    modules: Sequence[ModuleReport],
) -> Description:
    """Facts that make the run repeatable, and its losses; nothing of the clock or the machine."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "calibration": {
            **asdict(calibration),
            "source": calibration.source_name,
            "sha256": tokens.sha256,
        },
        "gptq": {**asdict(options), "search": options.search.value},
        "losses": {module.name: module.loss for module in modules},
        "tokens": {module.name: module.tokens for module in modules},
        "log": {module.name: module.log for module in modules if module.log},
    }
    config = dict(job.checkpoint.model_config)
    if job.unties_head:
        config["tie_word_embeddings"] = False
    meta = {"damp_percent": options.damp, "static_groups": True, "true_sequential": True}
    return Description(config, job.rules, job.plan, facts, meta)
