"""What Terrazzo writes is read by GPTQModel with the same bits: weights and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.witness import (
    CALIBRATION,
    TOKENS,
    Witness,
    exact_logits,
    write_tiny_model,
    write_tiny_model_apart,
)
from terrazzo import Checkpoint, QuantSpec, RuleSet, quantize
from terrazzo.quantization.options import CalibrationOptions
from terrazzo.spec import Format

LOGIT_TOLERANCE = 1e-4
"""Largest difference over the largest logit: both sides compute in float32."""

BITS = (2, 3, 4, 8)
GROUPS = (16, 32, 64, -1)
MIXTURE: Mapping[str, Mapping[str, Any]] = {
    "+:.*q_proj": {"bits": 8, "sym": False, "group_size": 16},
    "-:.*k_proj": {},
    "+:.*layers\\.1\\.mlp\\.down_proj": {"bits": 2, "group_size": 64, "desc_act": True},
    "+:.*up_proj": {},
    ".*mlp": {"bits": 3, "group_size": 32},
}
PLANES: Mapping[str, Mapping[str, Any]] = {
    "+:.*q_proj": {"bits": 5},
    "+:.*v_proj": {"bits": 7, "sym": False},
    "+:.*mlp": {"bits": 6, "desc_act": True},
}
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "-:.*layers\\.0\\.mlp\\.experts\\.2\\.": {},
    "+:.*experts\\.1\\.": {"bits": 8},
    "+:.*experts\\.0\\.gate_proj": {"group_size": 16, "sym": False},
    "+:.*experts\\.3\\.down_proj": {"desc_act": True},
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}
"""What tiny models with experts have beside the sizes of all."""


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint to write: base spec, rules, head, layout and kind of model."""

    base: QuantSpec
    dynamic: Mapping[str, Mapping[str, Any]]
    lm_head: bool = False
    checkpoint_format: Format = Format.GPTQ
    architecture: str = "llama"
    tied: bool = False

    def __str__(self) -> str:
        parts = [str(self.base), self.checkpoint_format.value, f"{len(self.dynamic)} rules"]
        parts += ["head"] * self.lm_head + ["tied"] * self.tied + [self.architecture]
        return "-".join(parts).replace(" ", "-")


def grid() -> list[Case]:
    """Every width with every group size; the other choices alternate, so that all pairs occur."""
    cases = []
    for row, bits in enumerate(BITS):
        for column, group_size in enumerate(GROUPS):
            turn = row + column
            base = QuantSpec(bits, group_size, sym=turn % 2 == 0, desc_act=column % 2 == row // 2)
            layout = list(Format)[(2 * row + column) % 3]
            cases.append(
                Case(
                    base,
                    dynamic=MIXTURE if (row + 2 * column) % 3 == 0 else {},
                    lm_head=turn % 3 == 0,
                    checkpoint_format=layout,
                )
            )
    return cases


CASES = [
    *grid(),
    Case(QuantSpec(4, 32), PLANES),
    Case(QuantSpec(4, 32), MIXTURE, lm_head=True, tied=True),
    Case(QuantSpec(4, 128), {}, tied=True),
    Case(
        QuantSpec(4, 32, sym=False),
        MIXTURE,
        architecture="qwen2",
    ),
    Case(
        QuantSpec(3, 32, sym=False),
        MIXTURE,
        architecture="qwen3",
        tied=True,
    ),
    Case(QuantSpec(4, 32), EXPERTS, architecture="mixtral"),
    Case(QuantSpec(4, 32), EXPERTS, architecture="qwen3_moe"),
    Case(QuantSpec(4, 32), EXPERTS, architecture="deepseek_v2"),
    Case(QuantSpec(4, 64), {"+:^lm_head$": {"bits": 4, "sym": False}}, lm_head=True),
]


def quantized(case: Case, work: Path) -> Path:
    sizes = {"tie_word_embeddings": case.tied, **SIZES.get(case.architecture, {})}
    write = write_tiny_model_apart if case.dynamic is EXPERTS else write_tiny_model
    dense = write(work / "dense", case.architecture, **sizes)
    text = work / "calibration.txt"
    text.write_text("\n".join(" ".join(map(str, ids)) for ids in CALIBRATION), encoding="utf-8")
    quantize(
        dense,
        work / "quantized",
        rules=RuleSet.parse(case.dynamic, case.base, lm_head=case.lm_head),
        calibration=CalibrationOptions(text, num_tokens=24 * 32, sequence_length=32),
        checkpoint_format=case.checkpoint_format,
    )
    return work / "quantized"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gptqmodel_reads_the_same_weights_and_logits(case: Case, tmp_path: Path) -> None:
    folder = quantized(case, tmp_path)
    witness = Witness(folder)
    checkpoint = Checkpoint(folder)
    weights = witness.dequantized()
    assert set(weights) == set(checkpoint.plan.quantized)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.dequantize(name), weight), name
    expected = witness.logits(TOKENS)
    difference = (exact_logits(folder, TOKENS) - expected).abs().max()
    assert difference <= LOGIT_TOLERANCE * expected.abs().max()
