"""What a checkpoint says about itself, in every spelling that its readers look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from terrazzo import __version__
from terrazzo.checkpoint.config import EMBEDDED_KEY, TEXT_KEY
from terrazzo.rules import Plan, RuleSet
from terrazzo.spec import Format, QuantSpec

QUANTIZER = f"terrazzo:{__version__}"
MANIFEST_FILE = "terrazzo.json"


@dataclass(frozen=True, slots=True)
class Description:
    """model_config: of the model, with what quantization changes in it. rules, plan: as they were
    applied. facts: of the quantization run, for the manifest. meta: goes into the quantization
    config beside the producer. fields: of the quantization config, for readers that want more.
    """

    model_config: Mapping[str, Any]
    rules: RuleSet
    plan: Plan
    facts: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def documents(self, checkpoint_format: Format) -> dict[str, dict[str, Any]]:
        """File name -> JSON content. Both configs keep the rules in the order they are tried."""
        quantization = self._quantization(checkpoint_format)
        return {
            "config.json": {**_without_inner(self.model_config), EMBEDDED_KEY: quantization},
            "quantize_config.json": quantization,
            MANIFEST_FILE: {
                "quantizer": QUANTIZER,
                **self.facts,
                "modules": {name: _module(self.plan, name) for name in self.plan},
            },
        }

    def _quantization(self, checkpoint_format: Format) -> dict[str, Any]:
        base = self.rules.base
        dynamic = self.rules.to_dynamic()
        return {
            "bits": base.bits,
            **({"dynamic": dynamic} if dynamic else {}),
            "group_size": base.group_size,
            "desc_act": base.desc_act,
            "sym": base.sym,
            "lm_head": self.rules.lm_head,
            "method": "gptq",
            "quant_method": "gptq",
            "format": checkpoint_format.value,
            "checkpoint_format": checkpoint_format.value,
            "pack_dtype": "int32",
            **self.fields,
            "meta": {"quantizer": [QUANTIZER], **self.meta},
        }


def _without_inner(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A quantization config in that of a text tower would be of the source."""
    inner = model_config.get(TEXT_KEY)
    if not isinstance(inner, Mapping) or EMBEDDED_KEY not in inner:
        return model_config
    kept = {key: value for key, value in inner.items() if key != EMBEDDED_KEY}
    return {**model_config, TEXT_KEY: kept}


def _module(plan: Plan, name: str) -> dict[str, Any]:
    resolution = plan[name]
    spec = asdict(resolution.spec) if isinstance(resolution.spec, QuantSpec) else "dense"
    return {"spec": spec, "decided_by": str(resolution.decided_by)}
