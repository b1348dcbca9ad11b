"""Checkpoints in the words of other tools, from the folder to logits: beside each one the same
weights in a dense folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.brute_packing import Stored, brute_module, rounded_weight
from helpers.checkpoints import Configs, write_folder
from helpers.tiny_llama import write_tiny_llama
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import TensorError
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import plan_linears, weight_bytes
from terrazzo.models.loader import load, open_source
from terrazzo.nn.attention import CausalContext
from terrazzo.spec import QuantSpec

IDS = torch.arange(12)
DOWN = "model.layers.1.mlp.down_proj"
Specs = Callable[[str], QuantSpec]


def logits(checkpoint: Checkpoint) -> Tensor:
    decoder = load(checkpoint)
    return decoder.logits(decoder(IDS, CausalContext(1, len(IDS))))


def pair(
    folder: Path,
    specs: Specs,
    fields: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.int32,
    stored: Stored = Stored.MINUS_ONE,
) -> tuple[Checkpoint, Checkpoint]:
    """(quantized, dense) folders of a tiny llama whose linears in layers have the same weights."""
    model = Checkpoint(write_tiny_llama(folder / "model", torch.float32))
    dense = {name: model.tensor(name) for name in model.tensor_names}
    packed = dict(dense)
    for seed, module in enumerate(name for name in model.plan if name.startswith("model.layers")):
        spec = specs(module)
        weight = rounded_weight(spec, *model.linear_shape(module), seed)
        del packed[f"{module}.weight"]
        packed |= brute_module(weight, spec.bits, dtype, stored, module)
        dense[f"{module}.weight"] = weight.dequantized
    configs = Configs(embedded=fields, model=model.model_config)
    quantized = write_folder(folder / "packed", {**packed, **(extra or {})}, configs)
    plain = write_folder(folder / "dense", dense, Configs(model=model.model_config))
    return Checkpoint(quantized), Checkpoint(plain)


def everywhere(spec: QuantSpec) -> Specs:
    return lambda module: spec


def gptq(spec: QuantSpec, **more: Any) -> dict[str, Any]:
    fields = {"bits": spec.bits, "group_size": spec.group_size, "sym": spec.sym}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", **fields, **more}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_words_of_every_type_compute_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = QuantSpec(4, 32, sym=False)
    fields = gptq(spec, meta={"pack_dtype": str(dtype).removeprefix("torch.")})
    quantized, dense = pair(tmp_path, everywhere(spec), fields, dtype=dtype)
    assert quantized.conflicts == ()
    torch.testing.assert_close(logits(quantized), logits(dense), rtol=1e-4, atol=1e-4)


def mixed(module: str) -> QuantSpec:
    if ".mlp." in module:
        return QuantSpec(6, 32, sym=False)
    return QuantSpec(8, -1, sym=False) if "v_proj" in module else QuantSpec(4, 32, sym=False)


def test_an_autoround_folder_computes_the_same(tmp_path: Path) -> None:
    """Widths 4, 6 and 8 by names and patterns; 6 bits are one stream, zero points are true ones."""
    fields = {
        "quant_method": "auto-round",
        "packing_format": "auto_round",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "block_name_to_quantize": "model.layers",
        "extra_config": {
            r".*mlp\..*": {"bits": 6},
            **{
                f"model.layers.{layer}.self_attn.v_proj": {"bits": 8, "group_size": -1}
                for layer in (0, 1)
            },
        },
    }
    quantized, dense = pair(tmp_path, mixed, fields, stored=Stored.TRUE)
    assert quantized.conflicts == quantized.remarks == ()
    torch.testing.assert_close(logits(quantized), logits(dense), rtol=1e-4, atol=1e-4)


SPEC = QuantSpec(4, 32)


def test_a_bias_that_the_architecture_has_not_is_added(tmp_path: Path) -> None:
    """Also where only one of the linears of a shared input has one; zeros are left out aloud."""
    bias = torch.linspace(-1, 1, 64)
    extra = {
        f"{DOWN}.bias": bias.half(),
        "model.layers.0.self_attn.k_proj.bias": torch.full((32,), 0.5),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
    }
    quantized, dense = pair(tmp_path, everywhere(SPEC), gptq(SPEC), extra)
    report = open_source(quantized).report
    assert report.biases == ("model.layers.0.self_attn.k_proj", DOWN)
    assert [ignored.name for ignored in report.ignored] == ["model.layers.0.self_attn.q_proj.bias"]
    (remark,) = report.remarks
    assert "2 quantized modules have biases that LlamaForCausalLM" in remark
    assert "k_proj.bias: adding them" in remark
    biased = {name: dense.tensor(name) for name in dense.tensor_names}
    for module in quantized.plan.quantized:
        name = f"{module}.bias"
        biased[name] = extra[name] if name in extra else torch.zeros(dense.linear_shape(module)[0])
    config = {**dense.model_config, "attention_bias": True, "mlp_bias": True}
    twin = Checkpoint(write_folder(tmp_path / "biased", biased, Configs(model=config)))
    torch.testing.assert_close(logits(quantized), logits(twin), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(quantized), logits(dense), atol=1e-2)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (
            torch.ones(65),
            r"down_proj\.bias: torch\.float32 \[65\]; legal is a float type and \[64\]",
        ),
        (torch.ones(64, dtype=torch.int32), r"down_proj\.bias: torch\.int32 \[64\]; legal"),
        (torch.full((64,), float("nan")), r"down_proj\.bias: some values are inf or nan"),
    ],
)
def test_a_bias_that_cannot_be_added_is_named(tmp_path: Path, bias: Tensor, message: str) -> None:
    quantized, _ = pair(tmp_path, everywhere(SPEC), gptq(SPEC), {f"{DOWN}.bias": bias})
    with pytest.raises(TensorError, match=message):
        open_source(quantized)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_embedding_is_looked_up(tmp_path: Path, tied: bool) -> None:
    """Tokens stand where a linear has its inputs; 320 tokens in groups of 48 end in a short one."""
    spec = QuantSpec(4, 48, sym=False)
    model = Checkpoint(
        write_tiny_llama(tmp_path / "model", torch.float32, tie_word_embeddings=tied)
    )
    packed = {name: model.tensor(name) for name in model.tensor_names}
    name = "model.embed_tokens"
    weight = rounded_weight(spec, 64, 320)
    dense = {**packed, f"{name}.weight": weight.dequantized.T.contiguous()}
    del packed[f"{name}.weight"]
    packed |= brute_module(weight, 4, module=name)
    fields = {**gptq(spec), "modules_in_block_to_quantize": ["embed_tokens"]}
    configs = Configs(embedded=fields, model=model.model_config)
    quantized = Checkpoint(write_folder(tmp_path / "packed", packed, configs))
    twin = Checkpoint(write_folder(tmp_path / "dense", dense, Configs(model=model.model_config)))
    assert quantized.conflicts == ()
    assert quantized.plan.quantized == {name: spec}
    torch.testing.assert_close(logits(quantized), logits(twin), rtol=0, atol=0)
    config = ModelConfig.of(quantized)
    plans = plan_linears(quantized, config)
    assert weight_bytes(quantized, config, plans) == weight_bytes(twin, config, plans)


def test_a_quantized_embedding_of_another_size_is_named(tmp_path: Path) -> None:
    model = Checkpoint(write_tiny_llama(tmp_path / "model", torch.float32))
    tensors = {name: model.tensor(name) for name in model.tensor_names}
    del tensors["model.embed_tokens.weight"]
    weight = rounded_weight(SPEC, 64, 288)
    tensors |= brute_module(weight, 4, module="model.embed_tokens")
    configs = Configs(embedded=gptq(SPEC), model=model.model_config)
    quantized = Checkpoint(write_folder(tmp_path / "packed", tensors, configs))
    with pytest.raises(
        TensorError, match=r"qweight: shape \[36, 64\]; config\.json asks for \[40, 64\]"
    ):
        open_source(quantized)
