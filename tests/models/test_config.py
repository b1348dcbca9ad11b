from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.models.architecture_table import ARCHITECTURES
from terrazzo.models.config import ModelConfig
from terrazzo.models.latent_config import DIRECT, Latent
from terrazzo.models.layout import GATE_UP, QKV, Layout
from terrazzo.models.mlp_config import DenseMlp
from terrazzo.nn.grouped import NO_WINDOW
from terrazzo.nn.rope import DefaultRope, LinearRope, Llama3Rope, NoRope, YarnRope

FILE = Path("somewhere/config.json")


def minimal(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Only the keys that have no default; a change to None means null."""
    return {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        **changes,
    }


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(minimal(architecture, **changes), FILE)


def test_defaults_are_those_of_transformers() -> None:
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.ropes == (DefaultRope(10000.0),)
    assert not config.tie_word_embeddings
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_scaling", "hidden_act"])
def test_null_is_the_same_as_absent(key: str) -> None:
    assert read(**{key: None}) == read()


@pytest.mark.parametrize("key", [key for key in minimal() if key != "architectures"])
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    config = minimal()
    del config[key]
    with pytest.raises(ConfigError, match=rf"somewhere/config\.json: {key} is missing"):
        ModelConfig.from_hf(config, FILE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", "64"),
        ("hidden_size", 66),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 0),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_act", 3),
        ("rope_theta", -1.0),
        ("rope_parameters", [1]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("architectures", ["LlamaForCausalLM", "Qwen2ForCausalLM"]),
    ],
)
def test_an_illegal_value_is_named_with_its_file(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"somewhere/config\.json: {key} is .*; "):
        read(**{key: value})


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'JambaForCausalLM' is not supported") as caught:
        read("JambaForCausalLM")
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_another_activation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="hidden_act is 'gelu'"):
        read(hidden_act="gelu")


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("LlamaForCausalLM", (True, True, True)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, False)),
    ],
)
def test_only_the_keys_an_architecture_knows_add_biases(
    architecture: str, biases: tuple[bool, bool, bool]
) -> None:
    config = read(architecture, attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


def test_heads_of_qwen3_do_not_follow_from_the_hidden_size() -> None:
    assert read("Qwen3ForCausalLM").head_dim == 128


SLIDING = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "changes", "windowed"),
    [
        ("LlamaForCausalLM", {"sliding_window": 512}, "..."),
        ("MistralForCausalLM", {"sliding_window": None}, "..."),
        ("MistralForCausalLM", {"sliding_window": 512}, "www"),
        ("MinistralForCausalLM", {"sliding_window": 512, "layer_types": SLIDING}, "w.."),
        ("Phi3ForCausalLM", {"sliding_window": 512}, "www"),
        ("Phi3ForCausalLM", {}, "..."),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": False}, "..."),
        ("Qwen2ForCausalLM", {"sliding_window": 512}, "..."),
        ("Qwen3ForCausalLM", {"sliding_window": 512, "use_sliding_window": True}, "..."),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2},
            "..w",
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0},
            "www",
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 512}, "w.w"),
        ("Gemma3ForCausalLM", {"sliding_window": 512, "sliding_window_pattern": 3}, "ww."),
        ("Gemma3ForCausalLM", {"sliding_window": 512, "layer_types": SLIDING}, "w.."),
        (
            "SmolLM3ForCausalLM",
            {"sliding_window": 512, "use_sliding_window": True, "no_rope_layer_interval": 2},
            ".w.",
        ),
    ],
)
def test_each_layer_has_the_window_its_architecture_gives_it(
    architecture: str, changes: dict[str, Any], windowed: str
) -> None:
    config = read(architecture, **changes)
    windows = [layer.window for layer in config.layers]
    assert windows == [512 if sign == "w" else NO_WINDOW for sign in windowed]
    assert config.context_length == 8192


def test_a_window_that_no_key_sizes_is_the_one_of_transformers() -> None:
    assert {layer.window for layer in read("MistralForCausalLM").layers} == {4096}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"layer_types": SLIDING[:2]}, ConfigError, "legal is a list of 3, one per layer"),
        ({"layer_types": ["linear_attention"] * 3}, UnsupportedError, "has 'linear_attention'"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read("Gemma2ForCausalLM", **changes)


def test_layers_without_rotation_are_listed_or_every_nth() -> None:
    every_second = read("SmolLM3ForCausalLM", no_rope_layer_interval=2)
    listed = read("SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1])
    assert every_second.layers == listed.layers
    assert [layer.rope for layer in listed.layers][1] == NoRope()
    assert listed.ropes == (DefaultRope(2e6), NoRope())
    with pytest.raises(ConfigError, match=r"no_rope_layers is .* legal is a list of 3"):
        read("SmolLM3ForCausalLM", no_rope_layers=[1, 0])


LONGROPE = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1024}),
        (
            "Ministral3ForCausalLM",
            {
                "rope_parameters": {
                    "type": "yarn",
                    "factor": 8.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 1024,
                }
            },
        ),
    ],
)
def test_context_ends_where_positions_would_change_their_meaning(
    architecture: str, changes: dict[str, Any]
) -> None:
    assert read(architecture, **changes).context_length == 1024


def test_longrope_has_a_factor_for_every_pair() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling\.short_factor is .* a list of 8"):
        read("Phi3ForCausalLM", rope_scaling={**LONGROPE, "short_factor": [1.0] * 7})


def test_the_decoder_of_a_folder_with_towers_is_in_text_config() -> None:
    plain = read("Qwen3ForCausalLM", tie_word_embeddings=True)
    text = minimal("Qwen3ForCausalLM", rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True}
    config = ModelConfig.from_hf({**outer, "text_config": text, "vocab_size": 3}, FILE)
    assert replace(config, architecture=plain.architecture) == plain
    del text["hidden_size"]
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size is missing"):
        ModelConfig.from_hf({**outer, "text_config": text}, FILE)


def test_the_tensors_say_what_is_fused_and_where_the_decoder_is() -> None:
    def layout(architecture: str, *tensors: str) -> Layout:
        return ModelConfig.from_hf(minimal(architecture), FILE, tensors).layout

    assert layout("Phi3ForCausalLM").fused == {QKV, GATE_UP}
    assert layout("Phi3ForCausalLM", "model.layers.0.mlp.up_proj.qweight").fused == {QKV}
    assert layout("LlamaForCausalLM", "model.layers.0.self_attn.qkv_proj.weight").fused == {QKV}
    nested = layout(
        "Gemma3ForConditionalGeneration",
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    )
    assert (nested.embedding, nested.head) == (
        "language_model.model.embed_tokens",
        "language_model.lm_head",
    )


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 500000}, DefaultRope(500000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5}, LinearRope(5.0, 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5.0}},
            LinearRope(5.0, 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5.0},
            Llama3Rope(5.0, 8.0, 1.0, 4.0, 8192),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5.0,
                    "original_max_position_embeddings": 1024,
                    **LLAMA3,
                }
            },
            Llama3Rope(5.0, 8.0, 1.0, 4.0, 1024),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            YarnRope(1e4, 4.0, 1.5, 32.0, 1.0, 8192, whole_pairs=True),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(changes: dict[str, Any], rope: object) -> None:
    assert read(**changes).ropes == (rope,)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["dynamic", "mrope"])
def test_an_unsupported_rope_is_refused_by_name(spelling: str, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{spelling}\.rope_type is '{kind}'"):
        read(**{spelling: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("extra", "magnitude"),
    [
        ({}, 1.1386294),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772589 / 1.1386294),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_computes_the_magnitude_that_is_not_given(
    extra: dict[str, Any], magnitude: float
) -> None:
    (rope,) = read(rope_scaling={"type": "yarn", "factor": 4.0, **extra}).ropes
    assert isinstance(rope, YarnRope)
    assert rope.magnitude == pytest.approx(magnitude)


def test_a_missing_rope_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: rope_scaling\.factor is missing"):
        read(rope_scaling={"type": "linear"})


def test_frequency_bands_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match=r"high_freq_factor is 1\.0; legal is more than"):
        read(rope_scaling={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0})


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.5}])
def test_partial_rotation_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor is 0\.5"):
        read(**changes)


LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
}


def test_latents_are_read_with_the_defaults_of_transformers() -> None:
    config = read("DeepseekV2ForCausalLM", num_experts_per_tok=2)
    assert config.heads == Latent(1536, 512, 128, 64, 128)
    assert (config.head_dim, config.num_kv_heads, config.rotary_dim) == (192, 4, 64)
    config = read("DeepseekV2ForCausalLM", **LATENT, head_dim=8, first_k_dense_replace=2)
    assert config.heads == Latent(DIRECT, 32, 16, 8, 16)
    assert config.multipliers.attention == pytest.approx(24**-0.5)
    assert [isinstance(mlp, DenseMlp) for mlp in config.mlps] == [True, True, False]


def test_yarn_stretches_the_scores_of_deepseek() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = read("DeepseekV2ForCausalLM", **LATENT, rope_scaling=yarn)
    assert config.multipliers.attention == pytest.approx(24**-0.5 * 1.2608038**2)
    (rope,) = config.ropes
    assert isinstance(rope, YarnRope)
    assert rope.magnitude == 1.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"topk_method": "group_limited_greedy"}, UnsupportedError, "only 'greedy' is supported"),
        ({"scoring_func": "sigmoid"}, UnsupportedError, "only 'softmax' is supported"),
        ({"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob is True"),
        ({"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq is 2"),
        ({"v_head_dim": 32}, ConfigError, "v_head_dim is 32; legal is at most 24"),
        ({"qk_rope_head_dim": 7}, ConfigError, "qk_rope_head_dim is 7; legal is an even number"),
        ({"kv_lora_rank": 0}, ConfigError, "kv_lora_rank is 0; legal is a positive"),
    ],
)
def test_latents_that_cannot_be(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read("DeepseekV2ForCausalLM", **{**LATENT, **changes})
