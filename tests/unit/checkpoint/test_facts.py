"""Facts that only tensors tell, on fabricated modules; the weights are asserted as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.checkpoints import (
    MODULE,
    Affine,
    Configs,
    config_of,
    packed_module,
    random_affine,
    split_into_shards,
    truncate,
    write_folder,
    write_index,
)
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import (
    CheckpointError,
    ConfigError,
    MissingFileError,
    TensorError,
    UnsupportedError,
)
from terrazzo.packing import V1_WORD_INCREMENT, sequential_groups
from terrazzo.rules import NO_CONFIG, OUT_OF_REACH
from terrazzo.spec import DENSE, Format, QuantSpec

SYM3 = QuantSpec(3, 32)


def fields_in_conflict(checkpoint: Checkpoint) -> set[str]:
    return {conflict.field for conflict in checkpoint.conflicts}


@settings(max_examples=60)
@given(
    spec=st.builds(
        QuantSpec,
        bits=st.sampled_from([2, 3, 4, 8]),
        group_size=st.sampled_from([-1, 16, 32, 50]),
        sym=st.booleans(),
    ),
    out_features=st.integers(1, 70),
    in_features=st.integers(2, 130),
    label=st.sampled_from([Format.GPTQ, Format.GPTQ_V2]),
)
def test_any_size_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    spec: QuantSpec,
    out_features: int,
    in_features: int,
    label: Format,
) -> None:
    weight = random_affine(spec, out_features, in_features)
    folder = tmp_path_factory.mktemp("any")
    write_folder(folder, packed_module(weight, spec.bits, label), config_of(spec, label))
    checkpoint = Checkpoint(folder)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    held = checkpoint.plan.quantized[MODULE]
    assert (held.bits, held.num_groups(in_features)) == (spec.bits, spec.num_groups(in_features))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_stay_mapped_from_the_file(tmp_path: Path, bits: int) -> None:
    spec = QuantSpec(bits, 32)
    write_folder(tmp_path, packed_module(random_affine(spec, 32, 64), bits), config_of(spec))
    checkpoint = Checkpoint(tmp_path)
    words = checkpoint.quant_tensor(MODULE).qweight
    again = checkpoint.tensor(f"{MODULE}.qweight")
    assert words.data_ptr() == again.data_ptr()


@pytest.mark.parametrize("written", list(Format))
@pytest.mark.parametrize("label", list(Format))
def test_zero_words_reveal_the_layout_of_symmetric_3_bit_codes(
    tmp_path: Path, written: Format, label: Format
) -> None:
    weight = random_affine(SYM3, 64, 96)
    write_folder(tmp_path, packed_module(weight, 3, written), config_of(SYM3, label))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.plan[MODULE].spec == SYM3
    assert fields_in_conflict(checkpoint) == (set() if written is label else {"checkpoint_format"})


def test_asymmetric_zeros_follow_the_label_and_deny_a_symmetric_config(tmp_path: Path) -> None:
    asym = QuantSpec(4, 32, sym=False)
    weight = random_affine(asym, 40, 64)
    write_folder(tmp_path, packed_module(weight, 4), config_of(QuantSpec(4, 32)))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.plan[MODULE].spec == asym
    assert fields_in_conflict(checkpoint) == {"sym"}


def test_padding_behind_the_last_column_is_no_zero_point(tmp_path: Path) -> None:
    """13 columns fill 52 of 64 bits; what a packer leaves in the other 12 means nothing."""
    spec = QuantSpec(4, 32)
    weight = random_affine(spec, 13, 64)
    tensors = packed_module(weight, 4, Format.GPTQ_V2)
    tensors[f"{MODULE}.qzeros"][:, -1] |= 0x5A5 << 20
    write_folder(tmp_path, tensors, config_of(spec, Format.GPTQ_V2))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.conflicts == ()


@pytest.mark.parametrize(("in_features", "group_size"), [(64, 32), (100, 25), (96, -1)])
@pytest.mark.parametrize("said_bits", [4, 8])
def test_without_g_idx_sizes_come_from_words_and_groups(
    tmp_path: Path, in_features: int, group_size: int, said_bits: int
) -> None:
    spec = QuantSpec(4, group_size)
    weight = random_affine(spec, 48, in_features)
    tensors = packed_module(weight, 4)
    del tensors[f"{MODULE}.g_idx"]
    write_folder(tmp_path, tensors, config_of(QuantSpec(said_bits, group_size)))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.plan[MODULE].spec == spec


def test_equal_groups_in_any_order_are_act_order(tmp_path: Path) -> None:
    spec = QuantSpec(4, 16, desc_act=True)
    weight = random_affine(spec, 32, 64)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    weight = Affine(weight.codes, weight.scales, weight.zeros, weight.g_idx[shuffled])
    write_folder(tmp_path, packed_module(weight, 4), config_of(QuantSpec(4, 32)))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plan[MODULE].spec == spec
    assert fields_in_conflict(checkpoint) == {"group_size", "desc_act"}
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)


def test_a_flag_without_act_order_is_no_conflict(tmp_path: Path) -> None:
    """Static groups, or too few samples: the tool had the flag and wrote groups in order."""
    weight = random_affine(QuantSpec(4, 32), 32, 64)
    write_folder(tmp_path, packed_module(weight, 4), config_of(QuantSpec(4, 32, desc_act=True)))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.conflicts == ()
    assert not checkpoint.plan.quantized[MODULE].desc_act


def test_groups_that_cannot_be_equal_are_refused(tmp_path: Path) -> None:
    weight = random_affine(QuantSpec(4, 16), 32, 48)
    g_idx = torch.tensor([0] * 46 + [2, 1], dtype=torch.int32)
    scales = torch.ones(31, 32, dtype=torch.float16)
    zeros = torch.full((31, 32), 8, dtype=torch.uint8)
    g_idx[-31:] = torch.arange(31, dtype=torch.int32).flip(0)
    odd = Affine(weight.codes, scales, zeros, g_idx)
    write_folder(tmp_path, packed_module(odd, 4), config_of(QuantSpec(4, 16)))
    with pytest.raises(TensorError, match="48 inputs cannot be cut into 31 groups"):
        Checkpoint(tmp_path)


def test_planes_of_odd_size_are_refused(tmp_path: Path) -> None:
    words = torch.zeros(9, 40, dtype=torch.int32)
    tensors = {
        f"{MODULE}.qweight": words,
        f"{MODULE}.qzeros": torch.zeros(1, 7, dtype=torch.int32),
        f"{MODULE}.scales": torch.ones(1, 40, dtype=torch.float16),
        f"{MODULE}.g_idx": torch.zeros(56, dtype=torch.int32),
    }
    write_folder(tmp_path, tensors, config_of(QuantSpec(5, -1), Format.GPTQ_P))
    with pytest.raises(TensorError, match="multiples of 32, not 56 and 40"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_dtypes_must_fit_float16(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = random_affine(QuantSpec(4, 32), 32, 64)
    tensors = packed_module(weight, 4)
    fitting = weight.scales.to(torch.bfloat16).to(dtype)
    write_folder(tmp_path, {**tensors, f"{MODULE}.scales": fitting}, config_of(QuantSpec(4, 32)))
    scales = Checkpoint(tmp_path).quant_tensor(MODULE).scales
    assert scales.dtype == torch.float16
    assert torch.equal(scales.to(dtype), fitting)
    tensors[f"{MODULE}.scales"] = fitting * 1e6
    write_folder(tmp_path, tensors, config_of(QuantSpec(4, 32)))
    with pytest.raises(UnsupportedError, match=r"down_proj\.scales.*float16 cannot hold"):
        Checkpoint(tmp_path).quant_tensor(MODULE)


def test_a_rule_with_a_planar_width_makes_the_whole_file_planar(tmp_path: Path) -> None:
    """As GPTQModel does, even when the rule is idle: zero points are then the true ones."""
    spec = QuantSpec(3, 32, sym=False)
    weight = random_affine(spec, 32, 64)
    config = config_of(spec, Format.GPTQ, dynamic={".*nothing": {"bits": 6}})
    write_folder(tmp_path, packed_module(weight, 3, Format.GPTQ_P), config)
    assert torch.equal(Checkpoint(tmp_path).dequantize(MODULE), weight.dequantized)


def test_a_symmetric_weight_needs_no_config(tmp_path: Path) -> None:
    weight = random_affine(QuantSpec(4, 32), 32, 64)
    write_folder(tmp_path, packed_module(weight, 4, Format.GPTQ_V2), Configs())
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert fields_in_conflict(checkpoint) == {"quantized"}


def test_an_asymmetric_weight_without_config_is_not_guessed(tmp_path: Path) -> None:
    weight = random_affine(QuantSpec(4, 32, sym=False), 32, 64)
    write_folder(tmp_path, packed_module(weight, 4), Configs())
    with pytest.raises(ConfigError, match="how zero points are stored"):
        Checkpoint(tmp_path)


def test_rotated_weights_are_refused(tmp_path: Path) -> None:
    tensors = packed_module(random_affine(QuantSpec(4, 32), 32, 64), 4)
    write_folder(tmp_path, tensors, config_of(QuantSpec(4, 32), rotation="hadamard"))
    with pytest.raises(UnsupportedError, match="rotation is 'hadamard'"):
        Checkpoint(tmp_path)


def dense_folder(folder: Path, *names: str) -> Path:
    tensors = {f"{name}.weight": torch.zeros(8, 8) for name in names}
    return write_folder(folder, tensors, config_of(QuantSpec(4, 32)))


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate", "model.visual.layers.0.fc1", "connector.proj"]
)
def test_linears_that_tools_leave_dense_are_no_conflict(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(dense_folder(tmp_path, name))
    assert checkpoint.conflicts == ()
    assert checkpoint.plan[name].spec == DENSE
    assert checkpoint.plan[name].decided_by == OUT_OF_REACH


def test_embeddings_and_norms_are_no_linears(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        {"model.embed_tokens.weight": torch.zeros(8, 8), "model.norm.weight": torch.ones(8)},
        Configs(),
    )
    assert len(Checkpoint(tmp_path).plan) == 0


def test_an_ordinary_model_is_dense_by_no_config(tmp_path: Path) -> None:
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    write_folder(tmp_path, {f"{MODULE}.weight": weight}, Configs())
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plan[MODULE].decided_by == NO_CONFIG
    assert checkpoint.conflicts == ()
    assert torch.equal(checkpoint.dequantize(MODULE), weight.float())


def test_rules_speak_of_quantized_modules_under_any_name(tmp_path: Path) -> None:
    name = "transformer.h.0.mlp.c_fc"
    spec = QuantSpec(8, 32)
    tensors = packed_module(random_affine(spec, 32, 64), 8, module=name)
    config = config_of(QuantSpec(4, 32), dynamic={".*c_fc": {"bits": 8}})
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config))
    assert checkpoint.conflicts == ()
    assert str(checkpoint.plan[name].decided_by) == ".*c_fc"


def test_a_quantized_head_that_the_switch_denies_is_a_conflict(tmp_path: Path) -> None:
    tensors = packed_module(random_affine(QuantSpec(4, 32), 32, 64), 4, module="lm_head")
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config_of(QuantSpec(4, 32))))
    (conflict,) = checkpoint.conflicts
    assert "dense by lm_head: false" in str(conflict)
    assert checkpoint.plan["lm_head"].spec == QuantSpec(4, 32)


def sharded(tmp_path: Path) -> tuple[Path, dict[str, Tensor], Affine]:
    weight = random_affine(QuantSpec(4, 32), 32, 64)
    tensors = packed_module(weight, 4)
    folder = write_folder(tmp_path, tensors, config_of(QuantSpec(4, 32)))
    return folder, tensors, weight


def test_a_module_may_be_spread_over_shards(tmp_path: Path) -> None:
    folder, tensors, weight = sharded(tmp_path)
    split_into_shards(
        folder, {f"model-{i}.safetensors": dict([item]) for i, item in enumerate(tensors.items())}
    )
    assert torch.equal(Checkpoint(folder).dequantize(MODULE), weight.dequantized)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder, tensors, _ = sharded(tmp_path)
    own = torch.ones(1)
    split_into_shards(folder, {"a.safetensors": {**tensors, "own": own}, "b.safetensors": tensors})
    with pytest.raises(CheckpointError, match=r"is in .\.safetensors and in .\.safetensors"):
        Checkpoint(folder)


def test_a_truncated_shard_is_named_with_its_size(tmp_path: Path) -> None:
    folder, tensors, _ = sharded(tmp_path)
    split_into_shards(folder, {"a.safetensors": tensors})
    truncate(folder / "a.safetensors", 600)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: 600 bytes"):
        Checkpoint(folder)


def test_an_index_beside_a_single_file_is_ambiguous(tmp_path: Path) -> None:
    folder, _, _ = sharded(tmp_path)
    write_index(folder, {f"{MODULE}.qweight": "other.safetensors"})
    with pytest.raises(CheckpointError, match="both claim to be the model"):
        Checkpoint(folder)


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    folder, tensors, _ = sharded(tmp_path)
    split_into_shards(folder, {"a.safetensors": tensors, "b.safetensors": {"x": torch.ones(1)}})
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(MissingFileError, match=r"no model\.safetensors\.index\.json"):
        Checkpoint(folder)


@pytest.mark.parametrize("bits", sorted(V1_WORD_INCREMENT))
def test_a_borrow_between_zero_points_is_undone(tmp_path: Path, bits: int) -> None:
    """True zero points of 0 make v1 words borrow from their neighbours."""
    spec = QuantSpec(bits, -1, sym=False)
    zeros = (torch.arange(64) % 3).to(torch.uint8).reshape(1, 64)
    codes = random_affine(spec, 64, 32).codes
    weight = Affine(codes, torch.ones(1, 64).half(), zeros, sequential_groups(32, 32))
    write_folder(tmp_path, packed_module(weight, bits), config_of(spec))
    assert torch.equal(Checkpoint(tmp_path).quant_tensor(MODULE).zeros, zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers_are_counted_and_refused(tmp_path: Path, value: float) -> None:
    tensors = packed_module(random_affine(QuantSpec(4, 32), 32, 64), 4)
    tensors[f"{MODULE}.scales"][1, 2:4] = value
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config_of(QuantSpec(4, 32))))
    with pytest.raises(TensorError, match="2 of 64 values are inf or nan"):
        checkpoint.quant_tensor(MODULE)
