"""Predictions against the real tools, and conversions that they load.

GPTQModel is always here; where optimum is installed too, transformers is asked as well. What they
make of a folder is judged by logits, against those of the folder itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from helpers.witness import Witness, write_tokenizer
from terrazzo import Checkpoint
from terrazzo.dialects.convert import convert
from terrazzo.dialects.engines import ENGINES
from terrazzo.dialects.prediction import Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.errors import UnsupportedError

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))
TOLERANCE = 5e-3
"""CPU kernels of GPTQModel compute some 4-bit products in lower precision."""

Edit = Callable[[dict[str, Any]], None]
PLAIN, HEAD, ASYM = "llama-w4-g128-sym", "llama-lm_head-default", "llama-w3-g64-asym-v1"
EDITS: dict[str, tuple[str, Edit]] = {
    "other group": (PLAIN, lambda q: q.update(group_size=32)),
    "unknown group": (PLAIN, lambda q: q.update(group_size=48)),
    "rule of finer groups": (PLAIN, lambda q: q.update(dynamic={".*down": {"group_size": 64}})),
    "rule of coarser groups": (PLAIN, lambda q: q.update(dynamic={".*down": {"group_size": 256}})),
    "rule of other bits": (PLAIN, lambda q: q.update(dynamic={".*down_proj": {"bits": 8}})),
    "negative rule": (PLAIN, lambda q: q.update(dynamic={"-:.*down_proj": {}})),
    "null": (PLAIN, lambda q: q.update(dynamic={"-:nothing": None})),
    "dense head": (PLAIN, lambda q: q.update(lm_head=True)),
    "denied head": (HEAD, lambda q: q.update(lm_head=False)),
    "denied symmetry": (PLAIN, lambda q: q.update(sym=False)),
    "v1 as v2": (PLAIN, lambda q: q.update(format="gptq_v2", checkpoint_format="gptq_v2")),
    "foreign asymmetry": (ASYM, lambda q: q.update(meta={"quantizer": ["x:1.0"]})),
}

KERNEL_DEPENDENT = frozenset({"wild-g_idx-permuted-flag-false"})
"""Predicted wrong, because kernels that trust the flag are; those for a CPU read g_idx."""

NO_CPU_KERNEL = frozenset({"llama-w4-g16-asym-v1", "llama-w4-odd-in_features"})
"""The kernel for a CPU that transformers gets has no 4-bit groups of 16, and, where the CPU has
AVX-512, no last group that is cut short; other kernels have both."""

CHANGED_BY_GPTQMODEL = frozenset({"mixtral-w4-g32"})
"""Once GPTQModel has loaded experts, transformers builds them in another way in that process."""

TRANSFORMERS_SKIPS = NO_CPU_KERNEL | CHANGED_BY_GPTQMODEL


def with_tokenizer(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("golden.*"))
    write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    return folder


def gptqmodel(folder: Path) -> nn.Module:
    return Witness(folder).model


def transformers(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float16)
    return nn.Module.float(model).eval()


LOADERS: dict[str, Callable[[Path], nn.Module]] = {"gptqmodel": gptqmodel}
if find_spec("optimum"):
    LOADERS["transformers"] = transformers
LOADING = (ValueError, RuntimeError, AttributeError, NotImplementedError, KeyError, IndexError)


def difference(engine: str, folder: Path, golden: dict[str, Tensor]) -> float:
    """Of logits, over the largest; not a number where the weights are unset."""
    with torch.inference_mode():
        logits = LOADERS[engine](folder)(golden["input_ids"]).logits
    return float((logits - golden["logits"]).abs().max() / golden["logits"].abs().max())


def loads_right(engine: str, folder: Path, golden: dict[str, Tensor]) -> bool:
    try:
        return difference(engine, folder, golden) <= TOLERANCE
    except LOADING:
        return False


def is_predicted_to_load(engine: str, folder: Path) -> bool:
    return ENGINES[engine].predict(Subject.of(Checkpoint(folder))).outcome is Outcome.LOADS


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folders_load_as_predicted(name: str, engine: str, tmp_path: Path) -> None:
    if name in KERNEL_DEPENDENT or (engine == "transformers" and name in TRANSFORMERS_SKIPS):
        pytest.skip("depends on the kernel")
    folder = with_tokenizer(GOLDEN / name, tmp_path / "in")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    assert loads_right(engine, folder, golden) == is_predicted_to_load(engine, folder)


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("edit", EDITS)
def test_edited_folders_load_as_predicted(edit: str, engine: str, tmp_path: Path) -> None:
    name, change = EDITS[edit]
    folder = with_tokenizer(GOLDEN / name, tmp_path / "in")
    for file in (folder / "config.json", folder / "quantize_config.json"):
        content = json.loads(file.read_text())
        change(content.get("quantization_config", content))
        file.write_text(json.dumps(content))
    golden = load_file(GOLDEN / name / "golden.safetensors")
    assert loads_right(engine, folder, golden) == is_predicted_to_load(engine, folder)


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_converted_folders_load(name: str, engine: str, tmp_path: Path) -> None:
    if engine == "transformers" and name in NO_CPU_KERNEL:
        pytest.skip("depends on the kernel")
    folder = with_tokenizer(GOLDEN / name, tmp_path / "in")
    try:
        convert(folder, tmp_path / "out", ENGINES[engine])
    except UnsupportedError:
        pytest.skip("cannot be converted")
    golden = load_file(GOLDEN / name / "golden.safetensors")
    assert difference(engine, tmp_path / "out", golden) <= TOLERANCE


@pytest.mark.parametrize("engine", LOADERS)
def test_fused_linears_are_cut_and_joined_as_each_class_needs(engine: str, tmp_path: Path) -> None:
    """Phi-3 by way of GPTQModel, whose files have gate and up apart, and back."""
    name = "wild-fused-on-disk-phi3"
    folder = with_tokenizer(GOLDEN / name, tmp_path / "in")
    convert(folder, tmp_path / "apart", ENGINES["gptqmodel"])
    convert(tmp_path / "apart", tmp_path / "again", ENGINES["transformers"])
    golden = load_file(GOLDEN / name / "golden.safetensors")
    for each in ("in", "apart", "again"):
        loads = loads_right(engine, tmp_path / each, golden)
        assert loads == is_predicted_to_load(engine, tmp_path / each), each
        assert loads == ((engine == "gptqmodel") == (each == "apart"))
