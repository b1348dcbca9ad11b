"""A GGUF file written here comes back as the Hugging Face folder it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from terrazzo.errors import ConfigError, MissingFileError, UnsupportedError
from terrazzo.importing import gguf as importing
from terrazzo.importing.gguf import import_gguf

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab", "12"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"

SHAPES = {
    "token_embd": ("model.embed_tokens", (len(TOKENS), HIDDEN)),
    "output_norm": ("model.norm", (HIDDEN,)),
    "blk.0.attn_norm": ("model.layers.0.input_layernorm", (HIDDEN,)),
    "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN)),
    "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (KV_HEADS * 16, HIDDEN)),
    "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (KV_HEADS * 16, HIDDEN)),
    "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (HIDDEN, HIDDEN)),
    "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (HIDDEN,)),
    "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
    "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (INTERMEDIATE, HIDDEN)),
    "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (HIDDEN, INTERMEDIATE)),
}


def random_weights() -> dict[str, np.ndarray]:
    """Values that float16 holds exactly, by GGUF name."""
    source = np.random.default_rng(0)
    return {
        name: source.standard_normal(shape).astype(np.float16).astype(np.float32)
        for name, (_, shape) in SHAPES.items()
    }


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's rotary embedding, from the two halves of each head."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def write_gguf(file: Path, weights: dict[str, np.ndarray], architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}
    for name, weight in weights.items():
        on_disk = interleaved(weight, heads[name]) if name in heads else weight
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(on_disk))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    write_gguf(root / "tiny.gguf", random_weights())
    imported = import_gguf(root / "tiny.gguf", root / "tiny")
    assert imported.architecture == "LlamaForCausalLM"
    assert imported.num_tensors == len(SHAPES)
    return imported.folder


def read(file: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return content


def test_every_weight_is_where_hugging_face_has_it(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    weights = random_weights()
    assert set(tensors) == {f"{name}.weight" for name, _ in SHAPES.values()}
    for name, (module, _) in SHAPES.items():
        np.testing.assert_array_equal(tensors[f"{module}.weight"].float().numpy(), weights[name])


def test_the_config_describes_the_model_alone(folder: Path) -> None:
    config = read(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 50000.0
    assert config["dtype"] == config["torch_dtype"] == "float16"
    assert not set(config) & set(importing.NOISE)


def test_every_end_token_ends_generation(folder: Path) -> None:
    assert read(folder / "generation_config.json")["eos_token_id"] == [0, 2]


def test_the_tokenizer_cuts_as_its_label_says(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12<|im_end|>").tokens == ["1", "2", "<|im_end|>"]
    assert read(folder / "tokenizer_config.json")["chat_template"] == TEMPLATE


def test_nothing_is_left_aside_and_nothing_overwritten(folder: Path) -> None:
    assert [each.name for each in folder.parent.glob(".*")] == []
    with pytest.raises(ConfigError, match="exists"):
        import_gguf(folder.parent / "tiny.gguf", folder)


def test_what_others_left_beside_it_stays(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / ".again.partial" / "notes"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    import_gguf(folder.parent / "tiny.gguf", tmp_path / "again")
    assert theirs.read_text() == "mine"


def test_large_models_are_split_into_indexed_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "SHARD_BYTES", 20_000)
    imported = import_gguf(folder.parent / "tiny.gguf", tmp_path / "split")
    weight_map = read(imported.folder / "model.safetensors.index.json")["weight_map"]
    assert isinstance(weight_map, dict)
    assert set(weight_map) == {f"{name}.weight" for name, _ in SHAPES.values()}
    for file in set(weight_map.values()):
        names = {name for name, home in weight_map.items() if home == file}
        assert set(load_file(imported.folder / file)) == names


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"absent\.gguf is not a file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")


def test_a_file_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model, but long enough to have a header " * 9)
    with pytest.raises(UnsupportedError, match="cannot be read as a GGUF model"):
        import_gguf(tmp_path / "text.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_architecture_nobody_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", {}, architecture="abacus")
    with pytest.raises(UnsupportedError, match="abacus"):
        import_gguf(tmp_path / "odd.gguf", tmp_path / "out")


def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"terrazzo\[gguf\]"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
