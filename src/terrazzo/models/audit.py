"""Compares what a checkpoint holds with what its architecture needs, before any weight is read.

Every tensor ends in one of four places: it fills a parameter; it is a bias that a quantized module
brings along though the architecture has none; it is ignored by name with a reason; or it is a
problem. All problems are collected into one error.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.names import TOWERS
from terrazzo.errors import TensorError
from terrazzo.models.architectures import Modality
from terrazzo.models.config import ModelConfig
from terrazzo.models.layout import Layout
from terrazzo.models.parameters import Parameter, ParameterKind, head_parameter, parameters
from terrazzo.spec import Name, QuantSpec, words_for

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROBLEMS_SHOWN = 20
BESIDE_TEXT = TOWERS | {"multi_modal_projector"}
NO_TOWER = ""
_PACKABLE = (ParameterKind.LINEAR, ParameterKind.EMBEDDING)


class HeadWeights(enum.Enum):
    """Where the output head gets its weights from."""

    OWN = "lm_head"
    EMBEDDING = "the embedding"


@dataclass(frozen=True, slots=True)
class IgnoredTensor:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: ignored, {self.reason}"


@dataclass(frozen=True, slots=True)
class SurplusBias:
    """A quantized module brings a bias along where the architecture has none."""

    module: Name


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading does with the tensors that are not plainly parameters.

    remarks: sentences on where the tensors overrule config.json. biases: modules that have one
    though config.json gives them none.
    """

    head: HeadWeights
    ignored: tuple[IgnoredTensor, ...]
    remarks: tuple[str, ...]
    biases: tuple[Name, ...] = ()


def audit(checkpoint: Checkpoint, config: ModelConfig) -> LoadReport:
    """Checks names, shapes and dtypes from the headers; reads data only of surplus biases and of a
    head that may repeat the embedding.

    Raises TensorError listing every tensor that is missing, left over or malformed.
    """
    present = frozenset(checkpoint.tensor_names)
    wanted = _wanted(checkpoint, config)
    expected = {tensor: shape for p in wanted for tensor, shape in _tensors_of(checkpoint, p)}
    problems = list(_unfilled(checkpoint, expected))
    surplus = sorted(present - expected.keys())
    towers = Counter(_tower(config, name) for name in surplus)
    del towers[NO_TOWER]
    ignored = [
        IgnoredTensor(f"{tower}.*", f"{count} tensors of an encoder that text does not pass")
        for tower, count in towers.items()
    ]
    linears = {p.name: p.shape for p in wanted if p.kind is ParameterKind.LINEAR}
    rest = [name for name in surplus if _tower(config, name) == NO_TOWER]
    verdicts = [_judge_surplus(checkpoint, config, name, linears) for name in rest]
    ignored += [verdict for verdict in verdicts if isinstance(verdict, IgnoredTensor)]
    problems += [verdict for verdict in verdicts if isinstance(verdict, str)]
    if problems:
        raise TensorError(_message(checkpoint, config, problems))
    biases = tuple(verdict.module for verdict in verdicts if isinstance(verdict, SurplusBias))
    return _with_biases(_with_head(checkpoint, config, tuple(ignored)), config, biases)


def _with_biases(report: LoadReport, config: ModelConfig, biases: tuple[Name, ...]) -> LoadReport:
    if not biases:
        return report
    remark = (
        f"{len(biases)} quantized modules have biases that {config.architecture.name} with this "
        f"config.json does not have, the first is {biases[0]}.bias: adding them. Other engines "
        "leave them out without a word"
    )
    return replace(report, remarks=(*report.remarks, remark), biases=biases)


def _wanted(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of the architecture; a head the file brings along counts though it is tied."""
    if config.tie_word_embeddings and config.layout.head in checkpoint.plan:
        return (*parameters(config), head_parameter(config))
    return parameters(config)


def _tensors_of(
    checkpoint: Checkpoint, parameter: Parameter
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that hold `parameter`; `in_features` is config.json's, the
    number of groups is the file's, because only it knows how act-order divided the inputs.
    """
    resolution = checkpoint.plan.get(parameter.name)
    spec = resolution.spec if resolution is not None else None
    if parameter.kind not in _PACKABLE or not isinstance(spec, QuantSpec):
        yield parameter.tensor, parameter.shape
        return
    # A packed embedding has its rows, the tokens, where a linear has its inputs.
    is_table = parameter.kind is ParameterKind.EMBEDDING
    out_features, in_features = parameter.shape[::-1] if is_table else parameter.shape
    groups, _ = checkpoint.shape(f"{parameter.name}.scales")
    word_bits = 8 * checkpoint.dtype(f"{parameter.name}.qweight").itemsize
    yield f"{parameter.name}.qweight", (words_for(in_features, spec.bits, word_bits), out_features)
    yield f"{parameter.name}.qzeros", (groups, words_for(out_features, spec.bits, word_bits))
    yield f"{parameter.name}.scales", (groups, out_features)
    # Without g_idx the words alone tell the number of inputs, so they must all be full.
    has_order = f"{parameter.name}.g_idx" in checkpoint.tensor_names
    if has_order or in_features * spec.bits % word_bits != 0:
        yield f"{parameter.name}.g_idx", (in_features,)


def _unfilled(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    present = frozenset(checkpoint.tensor_names)
    for name, shape in expected.items():
        if name not in present:
            yield f"{name}: missing; expected {list(shape)}"
        elif checkpoint.shape(name) != shape:
            seen = list(checkpoint.shape(name))
            yield f"{name}: shape {seen}; config.json asks for {list(shape)}"
        elif _is_plain(name) and checkpoint.dtype(name) not in FLOAT_DTYPES:
            yield f"{name}: dtype {checkpoint.dtype(name)}; legal are float32, bfloat16, float16"


def _is_plain(name: str) -> bool:
    return name.endswith((".weight", ".bias"))


def _tower(config: ModelConfig, name: str) -> str:
    """Name of the encoder for pictures or sound that a tensor belongs to, or NO_TOWER."""
    parts = name.split(".")
    found = [index for index, part in enumerate(parts) if part in BESIDE_TEXT]
    if config.architecture.modality is Modality.TEXT or not found:
        return NO_TOWER
    return ".".join(parts[: found[0] + 1])


def _judge_surplus(
    checkpoint: Checkpoint, config: ModelConfig, name: str, linears: Mapping[Name, tuple[int, ...]]
) -> IgnoredTensor | SurplusBias | str:
    """What to do with a tensor that no parameter needs, or the problem it is.

    linears: those of the architecture with the shapes of their weights.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return IgnoredTensor(name, "rotary frequencies are computed from config.json")
    module, _, suffix = name.rpartition(".")
    if suffix == "bias" and module in checkpoint.plan:
        return _judge_bias(checkpoint, config, module, linears)
    return f"{name}: left over; {config.architecture.name} has no such tensor"


def _judge_bias(
    checkpoint: Checkpoint,
    config: ModelConfig,
    module: Name,
    linears: Mapping[Name, tuple[int, ...]],
) -> IgnoredTensor | SurplusBias | str:
    name = f"{module}.bias"
    values = checkpoint.tensor(name)
    if values.numel() == 0 or not bool(values.any()):
        return IgnoredTensor(name, "all zero, and the architecture has no bias there")
    if module not in linears or not isinstance(checkpoint.plan[module].spec, QuantSpec):
        return (
            f"{name}: left over; {config.architecture.name} with this config.json has no bias "
            f"there, but its values go up to {float(values.abs().max()):.3g}. Check attention_bias "
            "and mlp_bias"
        )
    legal = list(linears[module][:1])
    if list(values.shape) != legal or values.dtype not in FLOAT_DTYPES:
        return f"{name}: {values.dtype} {list(values.shape)}; legal is a float type and {legal}"
    if not bool(values.isfinite().all()):
        return f"{name}: some values are inf or nan; every bias must be a finite number"
    return SurplusBias(module)


def _message(checkpoint: Checkpoint, config: ModelConfig, problems: list[str]) -> str:
    shown = problems[:PROBLEMS_SHOWN]
    hidden = len(problems) - len(shown)
    more = [f"... and {hidden} more"] if hidden else []
    return "\n  ".join(
        [
            f"{checkpoint.folder}: {len(problems)} tensors do not fit {config.architecture.name} "
            "as config.json describes it. Correct config.json, or make or fetch the folder again",
            *shown,
            *more,
        ]
    )


def _with_head(
    checkpoint: Checkpoint, config: ModelConfig, ignored: tuple[IgnoredTensor, ...]
) -> LoadReport:
    layout = config.layout
    if not config.tie_word_embeddings:
        return LoadReport(HeadWeights.OWN, ignored, ())
    if layout.head not in checkpoint.plan:
        return LoadReport(HeadWeights.EMBEDDING, ignored, ())
    if _repeats_embedding(checkpoint, layout):
        twin = IgnoredTensor(
            f"{layout.head}.weight", f"equal to {layout.embedding}.weight, which it is tied to"
        )
        return LoadReport(HeadWeights.EMBEDDING, (*ignored, twin), ())
    remark = (
        f"config.json ties {layout.head} to the embedding (tie_word_embeddings), but the file has "
        f"weights of its own for it ({checkpoint.plan[layout.head].spec}): using the tensors. Set "
        "tie_word_embeddings to false to say so in config.json too"
    )
    return LoadReport(HeadWeights.OWN, ignored, (remark,))


def _repeats_embedding(checkpoint: Checkpoint, layout: Layout) -> bool:
    head, embedding = f"{layout.head}.weight", f"{layout.embedding}.weight"
    return (
        {head, embedding} <= set(checkpoint.tensor_names)
        and checkpoint.dtype(head) == checkpoint.dtype(embedding)
        and torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding))
    )
