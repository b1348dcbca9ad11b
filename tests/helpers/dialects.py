"""Checkpoints as GPTQModel would write them by given rules: as facts alone, or as a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.checkpoints import Configs, packed_module, random_affine, write_folder
from terrazzo.dialects.engines import ENGINES
from terrazzo.dialects.prediction import Outcome, Prediction
from terrazzo.dialects.subject import SEQUENTIAL, Linear, Subject
from terrazzo.rules import LM_HEAD, RuleSet
from terrazzo.spec import DENSE, Format, Name, QuantSpec

BASE = QuantSpec(4, 128)
HIDDEN, INNER, VOCABULARY = 256, 512, 320
ROUTER = "mlp.gate"
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
}
"""Child of a decoder layer -> (out, in)."""

MLP = {
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}


def shapes(layers: int = 2, experts: int = 0, root: str = "model") -> dict[Name, tuple[int, int]]:
    """Names and (out, in) of a small decoder; with experts, each layer has a router."""
    found: dict[Name, tuple[int, int]] = {}
    for layer in range(layers):
        prefix = f"{root}.layers.{layer}"
        found |= {f"{prefix}.{child}": shape for child, shape in LAYER.items()}
        mlps = [f"{prefix}.mlp.experts.{each}" for each in range(experts)] or [f"{prefix}.mlp"]
        found |= {f"{mlp}.{part}": shape for mlp in mlps for part, shape in MLP.items()}
        if experts:
            found[f"{prefix}.{ROUTER}"] = (experts, HIDDEN)
    return {**found, LM_HEAD: (VOCABULARY, HIDDEN)}


def written(
    dynamic: Mapping[str, Any],
    base: QuantSpec = BASE,
    named: Mapping[Name, tuple[int, int]] | None = None,
    lm_head: bool = False,
    **fields: Any,
) -> Subject:
    """What GPTQModel makes of rules: tensors as the rules say, and the config beside them.

    fields: further ones of the quantization config, laid over the usual ones.
    """
    rules = RuleSet.parse({k: v or {} for k, v in dynamic.items()}, base, lm_head=lm_head)
    linears = []
    for name, (out_features, in_features) in (named or shapes()).items():
        spec = DENSE if name.endswith(ROUTER) else rules.resolve_name(name).spec
        order = name if isinstance(spec, QuantSpec) and spec.desc_act else SEQUENTIAL
        linears.append(Linear(name, spec, out_features, in_features, order))
    return described(linears, rules, {**config(base, dynamic, lm_head), **fields})


def config(base: QuantSpec, dynamic: Mapping[str, Any], lm_head: bool = False) -> dict[str, Any]:
    return {
        **asdict(base),
        "dynamic": dict(dynamic),
        "lm_head": lm_head,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }


def described(
    linears: Sequence[Linear],
    rules: RuleSet,
    fields: Mapping[str, Any],
    architecture: str = "LlamaForCausalLM",
) -> Subject:
    label = Format(fields["checkpoint_format"])
    return Subject(tuple(linears), fields, fields, label, rules, architecture, ties_head=False)


def holding(subject: Subject, changes: Mapping[Name, QuantSpec | Any]) -> Subject:
    """The subject with other tensors under the same config. changes: name -> spec or DENSE."""
    unknown = set(changes) - {linear.name for linear in subject.linears}
    assert not unknown, unknown
    linears = [replace(x, spec=changes.get(x.name, x.spec)) for x in subject.linears]
    return replace(subject, linears=tuple(linears))


def with_config(subject: Subject, **fields: Any) -> Subject:
    """The same tensors under a config.json with other fields."""
    return replace(subject, embedded={**subject.embedded, **fields})


def predict(engine: str, subject: Subject) -> Prediction:
    return ENGINES[engine].predict(subject)


def outcome(engine: str, subject: Subject) -> Outcome:
    return predict(engine, subject).outcome


def reasons(engine: str, subject: Subject) -> dict[Name, str]:
    """Module -> what goes wrong there."""
    return {found.module: found.reason for found in predict(engine, subject).findings}


def fabricate(
    folder: Path,
    dynamic: Mapping[str, Any],
    base: QuantSpec = BASE,
    named: Mapping[Name, tuple[int, int]] | None = None,
    checkpoint_format: Format = Format.GPTQ,
    lm_head: bool = False,
) -> Path:
    """A folder that holds exactly what the rules say, as GPTQModel would write it; routers are
    dense.
    """
    rules = RuleSet.parse(dynamic, base, lm_head=lm_head)
    tensors: dict[str, Tensor] = {}
    for index, (name, (outputs, inputs)) in enumerate((named or shapes(1)).items()):
        spec = DENSE if name.endswith(ROUTER) else rules.resolve_name(name).spec
        if isinstance(spec, QuantSpec):
            weight = random_affine(spec, outputs, inputs, index)
            tensors |= packed_module(weight, spec.bits, checkpoint_format, name)
        else:
            tensors[f"{name}.weight"] = torch.randn(outputs, inputs).half()
    fields = {**config(base, dynamic, lm_head), "checkpoint_format": checkpoint_format.value}
    return write_folder(folder, tensors, Configs(fields, fields))
