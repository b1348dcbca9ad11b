"""Random rule sets, written by GPTQModel for a one-block model, are read here to the bit."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.witness import (
    TOKENS,
    Witness,
    exact_logits,
    quantize_with_gptqmodel,
    write_tiny_model,
)
from terrazzo import Checkpoint

PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPECS = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([2, 3, 4, 8]),
        "group_size": st.sampled_from([16, 32, 64, 128]),
        "sym": st.booleans(),
        "desc_act": st.booleans(),
    }
)
RULES = st.dictionaries(
    st.sampled_from(PARTS).map(lambda part: f"+:.*\\.{part}$")
    | st.sampled_from(PARTS[1:]).map(lambda part: f"-:.*\\.{part}$"),
    SPECS,
    max_size=6,
)
FORMATS = st.sampled_from(["gptq", "gptq_v2", "gptq_p"])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense"), num_hidden_layers=1)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(base=SPECS, dynamic=RULES, checkpoint_format=FORMATS, lm_head=st.booleans())
def test_any_mixture_reads_back(
    dense: Path,
    base: dict[str, Any],
    dynamic: dict[str, dict[str, Any]],
    checkpoint_format: str,
    lm_head: bool,
) -> None:
    config = {**base, "dynamic": dynamic, "format": checkpoint_format, "lm_head": lm_head}
    with TemporaryDirectory() as work:
        folder = quantize_with_gptqmodel(dense, Path(work) / "q", act_group_aware=False, **config)
        witness = Witness(folder)
        checkpoint = Checkpoint(folder)
        expected = witness.dequantized()
        assert checkpoint.conflicts == ()
        assert set(checkpoint.plan.quantized) == set(expected)
        for name, weight in expected.items():
            assert torch.equal(checkpoint.dequantize(name), weight), name
        logits = witness.logits(TOKENS)
        difference = (exact_logits(folder, TOKENS) - logits).abs().max()
        assert difference <= 1e-4 * logits.abs().max()
