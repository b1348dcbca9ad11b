"""AutoRound configs: rules in the order that decides, and words of its formats that are GPTQ's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.brute_packing import Stored, brute_module
from helpers.checkpoints import MODULE, Affine, Configs, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import ConfigError, RuleError, TerrazzoError, UnsupportedError
from terrazzo.packing import sequential_groups
from terrazzo.spec import DENSE, Dense, QuantSpec

BASE = QuantSpec(4, 32)
LAYER = "model.layers.1"
STORED = {
    "auto_round:auto_gptq": Stored.MINUS_ONE,
    "auto_round:gptq": Stored.CLAMPED,
    "auto": Stored.MINUS_ONE,
    "auto_round:gptqmodel": Stored.TRUE,
    "auto_round": Stored.TRUE,
}


def config(spec: QuantSpec = BASE, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "autoround_version": "0.16.1",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "sym": spec.sym,
        "data_type": "int",
        **more,
    }


def folder_of(
    folder: Path, specs: dict[str, QuantSpec | Dense], fields: dict[str, Any]
) -> tuple[Checkpoint, dict[str, Affine]]:
    """One module of 32 x 64 for each name, and the weights that it was made of."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Affine] = {}
    for seed, (name, spec) in enumerate(specs.items()):
        if isinstance(spec, Dense):
            tensors[f"{name}.weight"] = torch.randn(32, 64).half()
            continue
        weights[name] = random_affine(spec, 32, 64, seed)
        tensors |= brute_module(weights[name], spec.bits, module=name)
    checkpoint = Checkpoint(write_folder(folder, tensors, Configs(embedded=fields)))
    for name, weight in weights.items():
        assert torch.equal(checkpoint.dequantize(name), weight.dequantized), name
    return checkpoint, weights


def deciders(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: str(resolution.decided_by) for name, resolution in checkpoint.plan.items()}


def test_a_folder_of_every_kind_of_entry(tmp_path: Path) -> None:
    """Own name over pattern, first pattern over the next, blocks over patterns."""
    extra = {
        r".*mlp\..*": {"bits": 8, "group_size": -1},
        r".*up_proj.*": {"bits": 2},
        f"{LAYER}.mlp.down_proj": {"bits": 16, "act_bits": 16},
        f"{LAYER}.self_attn.q_proj": {"sym": False, "bits": None},
        "lm_head": {"bits": 4, "group_size": 64, "sym": True, "data_type": "int"},
        "gate": {},
    }
    specs: dict[str, QuantSpec | Dense] = {
        f"{LAYER}.mlp.down_proj": DENSE,
        f"{LAYER}.mlp.up_proj": QuantSpec(8, -1),
        f"{LAYER}.mlp.gate_proj": QuantSpec(8, -1),
        f"{LAYER}.self_attn.q_proj": QuantSpec(4, 32, sym=False),
        f"{LAYER}.self_attn.k_proj": BASE,
        "lm_head": QuantSpec(4, 64),
        "model.visual.mlp.up_proj": DENSE,
    }
    fields = config(extra_config=extra, block_name_to_quantize="model.layers")
    checkpoint, _ = folder_of(tmp_path, specs, fields)
    assert checkpoint.conflicts == checkpoint.remarks == ()
    assert {name: held.spec for name, held in checkpoint.plan.items()} == specs
    assert deciders(checkpoint) == {
        f"{LAYER}.mlp.down_proj": f"{LAYER}.mlp.down_proj",
        f"{LAYER}.mlp.up_proj": r".*mlp\..*",
        f"{LAYER}.mlp.gate_proj": r".*mlp\..*",
        f"{LAYER}.self_attn.q_proj": f"{LAYER}.self_attn.q_proj",
        f"{LAYER}.self_attn.k_proj": "base config",
        "lm_head": "lm_head",
        "model.visual.mlp.up_proj": "block_name_to_quantize",
    }


def test_a_pattern_that_no_block_has_is_tried_outside(tmp_path: Path) -> None:
    specs: dict[str, QuantSpec | Dense] = {
        f"{LAYER}.mlp.up_proj": BASE,
        "lm_head": QuantSpec(8, 32),
    }
    checkpoint, _ = folder_of(tmp_path, specs, config(extra_config={".*head.*": {"bits": 8}}))
    assert checkpoint.conflicts == ()
    assert deciders(checkpoint)["lm_head"] == ".*head.*"


def test_a_pattern_that_a_block_has_says_nothing_outside(tmp_path: Path) -> None:
    specs: dict[str, QuantSpec | Dense] = {
        f"{LAYER}.mlp.up_proj": QuantSpec(8, 32),
        "lm_head": DENSE,
    }
    checkpoint, _ = folder_of(tmp_path, specs, config(extra_config={"p|m": {"bits": 8}}))
    assert checkpoint.conflicts == ()
    assert deciders(checkpoint)["lm_head"] == "outside the blocks"


@pytest.mark.parametrize(
    "blocks",
    [
        {"block_name_to_quantize": "model.layers"},
        {"block_name_to_quantize": " model.layers , model.visual.blocks"},
        {"block_name_to_quantize": ["model.layers"]},
        {"to_quant_block_names": [["model.layers.0", "model.layers.1"]]},
        {"quant_block_list": [["model.layers.1"]], "block_name_to_quantize": "elsewhere"},
        {"block_name_to_quantize": None},
    ],
)
def test_every_way_to_name_blocks(tmp_path: Path, blocks: dict[str, Any]) -> None:
    specs: dict[str, QuantSpec | Dense] = {f"{LAYER}.mlp.up_proj": BASE, "lm_head": DENSE}
    checkpoint, _ = folder_of(tmp_path, specs, config(**blocks))
    assert checkpoint.conflicts == checkpoint.remarks == ()


def test_blocks_that_are_not_there_are_remarked(tmp_path: Path) -> None:
    specs: dict[str, QuantSpec | Dense] = {f"{LAYER}.mlp.up_proj": BASE, "lm_head": DENSE}
    fields = config(block_name_to_quantize="model.language_model.layers")
    checkpoint, _ = folder_of(tmp_path, specs, fields)
    (remark,) = checkpoint.remarks
    assert "block_name_to_quantize is model.language_model.layers, and no linear is there" in remark
    assert checkpoint.conflicts == ()


@settings(max_examples=80)
@given(
    packing=st.sampled_from(sorted(STORED)),
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    sym=st.booleans(),
    blocks=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_every_packing_format_and_width(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    bits: int,
    sym: bool,
    blocks: int,
    seed: int,
) -> None:
    """5 to 7 bits are one stream here, not planes; a true zero that was clamped away reads as 1."""
    spec = QuantSpec(bits, 32, sym)
    weight = random_affine(spec, 32 * blocks, 64, seed)
    if STORED[packing] is Stored.CLAMPED:
        weight.zeros.clamp_(min=1)
    tensors = brute_module(weight, bits, stored=STORED[packing])
    del tensors[f"{MODULE}.g_idx"]
    fields = config(spec, packing_format=packing)
    folder = write_folder(tmp_path_factory.mktemp("any"), tensors, Configs(embedded=fields))
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan.quantized == {MODULE: spec}
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    is_doubtful = bits == 3 and not sym and STORED[packing] is Stored.MINUS_ONE
    assert bool(checkpoint.conflicts) == (is_doubtful and bool((weight.zeros == 0).any()))


def test_three_bits_beside_a_zero_are_doubted_aloud(tmp_path: Path) -> None:
    """Packers that add fields up let a zero minus one run on into its neighbours."""
    spec = QuantSpec(3, 32, sym=False)
    weight = random_affine(spec, 32, 64)
    weight.zeros[0, 3] = 0
    tensors = brute_module(weight, 3)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, Configs(embedded=config(spec))))
    (conflict,) = checkpoint.conflicts
    assert "some are zero, and AutoRound before 0.16 changed others" in str(conflict)


@pytest.mark.parametrize(
    ("backend", "stored"),
    [
        ("auto_round:gptq:exllamav2", Stored.MINUS_ONE),
        ("auto_round:exllamav2", Stored.TRUE),
        ("auto", Stored.MINUS_ONE),
    ],
)
@pytest.mark.parametrize("method", ["intel/auto-round", "auto-round", "auto_round"])
def test_old_configs_name_a_backend(
    tmp_path: Path, method: str, backend: str, stored: Stored
) -> None:
    spec = QuantSpec(4, 32, sym=False)
    weight = random_affine(spec, 32, 64)
    fields = config(spec, quant_method=method, backend=backend, packing_format=None)
    tensors = brute_module(weight, 4, stored=stored)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, Configs(embedded=fields)))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)


def test_a_separate_file_is_read_too(tmp_path: Path) -> None:
    weight = random_affine(BASE, 32, 64)
    configs = Configs(config())
    checkpoint = Checkpoint(write_folder(tmp_path, brute_module(weight, 4), configs))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)


def test_symmetric_five_bits_under_a_label_of_planes_are_known_by_their_words(
    tmp_path: Path,
) -> None:
    """The middle zero point tells one stream from bit planes."""
    spec = QuantSpec(5, 32)
    weight = random_affine(spec, 32, 64)
    fields = {"quant_method": "gptq", "bits": 5, "group_size": 32, "sym": True}
    tensors = brute_module(weight, 5)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, Configs(embedded=fields)))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert [conflict.field for conflict in checkpoint.conflicts] == ["checkpoint_format"]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"packing_format": "auto_round:auto_awq"},
            UnsupportedError,
            "packing_format is 'auto_round:auto_awq', whose words are not those of GPTQ",
        ),
        ({"packing_format": "auto_round:llm_compressor"}, UnsupportedError, "Export the model"),
        ({"packing_format": "auto_round:fp8_static"}, UnsupportedError, "auto_round:fp8_static"),
        ({"packing_format": "mlx"}, UnsupportedError, "packing_format is 'mlx'"),
        ({"data_type": "mx_fp"}, UnsupportedError, "data_type of the config is 'mx_fp'"),
        ({"act_bits": 8}, UnsupportedError, "act_bits of the config is 8: inputs are quantized"),
        ({"act_bits": "8"}, ConfigError, "act_bits of the config is '8'"),
        ({"rotation_config": {"kind": 1}}, UnsupportedError, "rotation_config of the config"),
        (
            {"extra_config": {"lm_head": {"act_bits": 4}}},
            UnsupportedError,
            "act_bits of extra_config['lm_head'] is 4",
        ),
        ({"extra_config": []}, ConfigError, "extra_config is []"),
        ({"extra_config": {"a": 4}}, ConfigError, "extra_config['a'] is 4"),
        ({"extra_config": {"(": {"bits": 4}}}, RuleError, "'(': "),
        ({"extra_config": {"a": {"bits": "many"}}}, RuleError, "'a': bits is 'many'"),
        ({"extra_config": {"a": {"bits": 1}}}, RuleError, "bits is 1"),
        ({"bits": 12}, ConfigError, "bits is 12"),
        ({"block_name_to_quantize": 3}, ConfigError, "block_name_to_quantize is 3"),
        ({"quant_method": "awq"}, UnsupportedError, "reads 'gptq' and 'auto-round'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], kind: type[TerrazzoError], message: str
) -> None:
    tensors = brute_module(random_affine(BASE, 32, 64), 4)
    folder = write_folder(tmp_path, tensors, Configs(embedded=config(**fields)))
    with pytest.raises(kind) as caught:
        Checkpoint(folder)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


def test_ten_thousand_entries_are_read_in_little_time(tmp_path: Path) -> None:
    """Mixtures of experts have an entry for each expert; only the first one is on disk here."""
    extra = {f"{LAYER}.mlp.experts.{index}.up_proj": {"bits": 8} for index in range(10_000)}
    name = f"{LAYER}.mlp.experts.0.up_proj"
    affine = Affine(
        torch.zeros(64, 32, dtype=torch.uint8),
        torch.ones(2, 32).half(),
        torch.full((2, 32), 128, dtype=torch.uint8),
        sequential_groups(64, 32),
    )
    tensors = brute_module(affine, 8, module=name)
    fields = config(extra_config=extra)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, Configs(embedded=fields)))
    assert checkpoint.plan.quantized == {name: QuantSpec(8, 32)}
