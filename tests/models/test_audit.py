"""A checkpoint is used whole, or refused with the name of everything that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.checkpoints import packed_module, random_affine
from helpers.tiny_models import CLASSES, tiny_model
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import TensorError
from terrazzo.models.audit import HeadWeights, audit
from terrazzo.models.config import ModelConfig
from terrazzo.models.loader import load, open_source
from terrazzo.models.parameters import linear_names, parameters, shared_inputs
from terrazzo.nn.attention import CausalContext
from terrazzo.spec import QuantSpec

DOWN = "model.layers.1.mlp.down_proj"
SPEC = QuantSpec(bits=4, group_size=16, sym=True)
IDS = torch.arange(10)


def tensors_of(family: str = "llama", **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a tiny model as a file has them, and its config.json."""
    model = tiny_model(family, **changes)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors, {**model.config.to_dict(), "architectures": [type(model).__name__]}


def quantized(tensors: dict[str, Tensor], module: str = DOWN, spec: QuantSpec = SPEC) -> None:
    """Puts random codes in the place of a dense module."""
    out_features, in_features = tensors.pop(f"{module}.weight").shape
    weight = random_affine(spec, out_features, in_features)
    tensors |= packed_module(weight, spec.bits, module=module)


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], spec: QuantSpec = SPEC
) -> Checkpoint:
    if any(name.endswith(".qweight") for name in tensors):
        fields = {key: getattr(spec, key) for key in ("bits", "group_size", "sym", "desc_act")}
        quantization = {"quant_method": "gptq", "checkpoint_format": "gptq", **fields}
        config = {**config, "quantization_config": quantization}
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return Checkpoint(folder)


class Unreadable(Checkpoint):
    """Headers can be read, data cannot."""

    def tensor(self, tensor: str) -> Tensor:
        raise AssertionError(f"{tensor} was read")


def logits(checkpoint: Checkpoint) -> Tensor:
    decoder = load(checkpoint)
    return decoder.logits(decoder(IDS, CausalContext(1, len(IDS))))


@pytest.mark.parametrize("family", CLASSES)
def test_parameters_are_what_transformers_has(family: str) -> None:
    tensors, config = tensors_of(family, head_dim=8, attention_bias=True, mlp_bias=True)
    read = ModelConfig.from_hf(config, Path("config.json"))
    assert {p.tensor: p.shape for p in parameters(read)} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def test_linears_are_grouped_by_the_input_they_share() -> None:
    _, config = tensors_of()
    read = ModelConfig.from_hf(config, Path("config.json"))
    groups = shared_inputs(read, 1)
    leaves = [[name.rpartition(".")[2] for name in group] for group in groups]
    assert leaves == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    assert linear_names(read)[7:] == tuple(name for group in groups for name in group)


def test_an_audit_of_a_plain_folder_reads_no_data(tmp_path: Path) -> None:
    tensors, config = tensors_of()
    write(tmp_path, tensors, config)
    source = open_source(Unreadable(tmp_path))
    assert source.report.head is HeadWeights.OWN
    assert source.report.ignored == source.report.remarks == ()


def lose(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


CORRUPTIONS = {
    "norm lost": (
        lose("model.norm.weight"),
        r"model\.norm\.weight: missing; expected \[48\]",
    ),
    "linear lost": (
        lose(f"{DOWN}.weight"),
        r"layers\.1\.mlp\.down_proj\.weight: missing; expected \[48, 80\]",
    ),
    "head lost": (lose("lm_head.weight"), r"lm_head\.weight: missing"),
    "embedding narrow": (
        put("model.embed_tokens.weight", torch.zeros(66, 48)),
        r"embed_tokens\.weight: shape \[66, 48\]; config\.json asks for \[67, 48\]",
    ),
    "linear transposed": (
        put(f"{DOWN}.weight", torch.zeros(80, 48)),
        r"down_proj\.weight: shape \[80, 48\]; config\.json asks for \[48, 80\]",
    ),
    "whole numbers": (
        put(f"{DOWN}.weight", torch.zeros(48, 80, dtype=torch.int8)),
        r"down_proj\.weight: dtype torch\.int8; legal are float32",
    ),
    "one layer more": (
        put("model.layers.2.mlp.down_proj.weight", torch.zeros(48, 80)),
        r"model\.layers\.2\.mlp\.down_proj\.weight: left over; LlamaForCausalLM has no such",
    ),
    "norm of another architecture": (
        put("model.layers.0.self_attn.q_norm.weight", torch.zeros(12)),
        r"q_norm\.weight: left over",
    ),
    "bias that matters": (
        put(f"{DOWN}.bias", torch.full((48,), -0.25)),
        r"down_proj\.bias: left over; .* go up to 0\.25\. Check attention_bias and mlp_bias",
    ),
    "bias of a norm": (put("model.norm.bias", torch.zeros(48)), r"model\.norm\.bias: left over"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(corruption: str, tmp_path: Path) -> None:
    tensors, config = tensors_of()
    change, message = CORRUPTIONS[corruption]
    change(tensors)
    with pytest.raises(TensorError, match=message):
        load(write(tmp_path, tensors, config))


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    tensors, config = tensors_of()
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        del tensors[name]
    tensors["model.extra.weight"] = torch.zeros(3)
    with pytest.raises(TensorError, match="3 tensors do not fit LlamaForCausalLM") as caught:
        load(write(tmp_path, tensors, config))
    assert all(
        name in str(caught.value) for name in ("model.norm", "up_proj", "model.extra", "Correct")
    )


def test_an_error_of_many_lines_is_cut(tmp_path: Path) -> None:
    tensors, config = tensors_of(num_hidden_layers=4)
    kept = {name: tensor for name, tensor in tensors.items() if "layers" not in name}
    with pytest.raises(TensorError, match=r"36 tensors do not fit(?s:.*)\.\.\. and 16 more"):
        load(write(tmp_path, kept, config))


QUANTIZED_CORRUPTIONS = {
    "dense twin": (put(f"{DOWN}.weight", torch.zeros(48, 80)), r"down_proj\.weight: left over"),
    "other inputs": (
        lambda tensors: tensors.update(packed_module(random_affine(SPEC, 48, 96), 4, module=DOWN)),
        r"down_proj\.qweight: shape \[12, 48\]; config\.json asks for \[10, 48\]",
    ),
    "other outputs": (
        lambda tensors: tensors.update(packed_module(random_affine(SPEC, 56, 80), 4, module=DOWN)),
        r"down_proj\.scales: shape \[5, 56\]; config\.json asks for \[5, 48\]",
    ),
}


@pytest.mark.parametrize("corruption", QUANTIZED_CORRUPTIONS)
def test_a_quantized_module_that_does_not_fit_is_refused_by_name(
    corruption: str, tmp_path: Path
) -> None:
    tensors, config = tensors_of()
    quantized(tensors)
    change, message = QUANTIZED_CORRUPTIONS[corruption]
    change(tensors)
    with pytest.raises(TensorError, match=message):
        load(write(tmp_path, tensors, config))


def test_inputs_that_do_not_fill_their_words_need_g_idx(tmp_path: Path) -> None:
    tensors, config = tensors_of(intermediate_size=76)
    quantized(tensors)
    write(tmp_path, tensors, config)
    assert logits(Checkpoint(tmp_path)).isfinite().all()
    del tensors[f"{DOWN}.g_idx"]
    with pytest.raises(TensorError, match=r"down_proj\.g_idx: missing; expected \[76\]"):
        load(write(tmp_path, tensors, config))


def test_groups_of_uneven_size_are_accepted(tmp_path: Path) -> None:
    tensors, config = tensors_of()
    quantized(tensors)
    tensors[f"{DOWN}.g_idx"][16:20] = 0
    assert logits(write(tmp_path, tensors, config)).isfinite().all()


def test_harmless_surplus_is_ignored_by_name_and_changes_nothing(tmp_path: Path) -> None:
    tensors, config = tensors_of()
    expected = logits(write(tmp_path, tensors, config))
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors |= {f"{DOWN}.bias": torch.zeros(48), frequencies: torch.ones(6)}
    checkpoint = write(tmp_path, tensors, config)
    report = open_source(checkpoint).report
    assert [str(each) for each in report.ignored] == [
        f"{frequencies}: ignored, rotary frequencies are computed from config.json",
        f"{DOWN}.bias: ignored, all zero, and the architecture has no bias there",
    ]
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-4, atol=1e-5)


def test_a_tied_head_comes_from_the_embedding(tmp_path: Path) -> None:
    tensors, config = tensors_of(tie_word_embeddings=True)
    checkpoint = write(tmp_path, tensors, config)
    assert open_source(checkpoint).report.head is HeadWeights.EMBEDDING
    untied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    expected = logits(checkpoint)
    again = write(tmp_path, untied, {**config, "tie_word_embeddings": False})
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)


def test_a_tied_head_that_repeats_the_embedding_is_ignored(tmp_path: Path) -> None:
    tensors, config = tensors_of(tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    report = open_source(write(tmp_path, tensors, config)).report
    assert report.head is HeadWeights.EMBEDDING
    assert [each.name for each in report.ignored] == ["lm_head.weight"]
    assert report.remarks == ()


@pytest.mark.parametrize("kind", ["dense", "quantized"])
def test_a_head_of_its_own_wins_over_a_config_that_ties_it(kind: str, tmp_path: Path) -> None:
    tensors, config = tensors_of(tie_word_embeddings=True)
    tensors["lm_head.weight"] = torch.randn(67, 48, generator=torch.Generator().manual_seed(3))
    if kind == "quantized":
        quantized(tensors, "lm_head")
    checkpoint = write(tmp_path, tensors, config)
    config_read = ModelConfig.from_hf(checkpoint.model_config, tmp_path / "config.json")
    report = audit(checkpoint, config_read)
    assert report.head is HeadWeights.OWN
    assert "tie_word_embeddings" in report.remarks[0]
    decoder = load(checkpoint)
    hidden = decoder(IDS, CausalContext(1, len(IDS)))
    expected = decoder.head.norm(hidden) @ checkpoint.dequantize("lm_head").T
    torch.testing.assert_close(decoder.logits(hidden), expected, rtol=1e-2, atol=1e-2)
