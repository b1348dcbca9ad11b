from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from helpers.tiny_tokenizer import SENTENCES, write_tokenizer
from terrazzo.engine.folder import GenerationDefaults
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.errors import ConfigError, MissingFileError, RequestError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path))


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    for sentence in SENTENCES:
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_bos_is_added_where_the_file_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode("a")[0] != 0
    adding = Tokenizer(write_tokenizer(tmp_path, adds_bos=True))
    assert adding.encode("a")[0] == 0
    assert adding.encode("a", add_special_tokens=False)[0] != 0
    assert adding.decode(adding.encode("a")) == "a"
    assert adding.decode(adding.encode("a"), skip_special_tokens=False) == "<s>a"


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in [*SENTENCES, "🪨 \n\x00\x7f\xad"]:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_bytes(10_000) == b""


def test_token_bytes_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"<0xE2>": 0, "\u2581the": 1}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_bytes(token) for token in (0, 1)] == [b"\xe2", b" the"]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, {1}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {1, 7, 8, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {1, 7}),
    ],
)
def test_every_eos_counts(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tokenizer(write_tokenizer(tmp_path)).eos_token_ids == expected


def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"tokenizer.json is not there; copy it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer \(invalid type"):
        Tokenizer(tmp_path)


def test_a_conversation_is_rendered_with_whitespace_trimmed(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(HELLO) == "<s><|user|>hello<|assistant|>"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<s><|user|>hello"
    ids = tokenizer.encode_chat(HELLO)
    assert (ids[:2], ids[-1]) == ((0, 2), 3)


def test_a_template_that_refuses_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no system role"):
        tokenizer.render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(RequestError, match="messages is empty"):
        tokenizer.render_chat([])


def rendered(folder: Path, template: Any, **arguments: Any) -> str:
    write_tokenizer(folder, config={"chat_template": template})
    return Tokenizer(folder).render_chat(HELLO, **arguments)


def test_what_templates_may_use(tmp_path: Path) -> None:
    assert rendered(tmp_path, "{{ messages | tojson }}") == json.dumps(HELLO)
    assert rendered(tmp_path, "{{ '<é>' | tojson }}") == '"<é>"'
    assert rendered(tmp_path, "{{ strftime_now('%Y') | length }}") == "4"
    assert rendered(tmp_path, "{{ tools is none }}") == "True"
    assert rendered(tmp_path, "{% generation %}x{% endgeneration %}") == "x"
    assert rendered(tmp_path, "{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert rendered(tmp_path, "{{ think }}", variables={"think": False}) == "False"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, attack: str) -> None:
    with pytest.raises(RequestError, match="chat template cannot render"):
        rendered(tmp_path, attack)


def test_a_template_that_writes_without_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrazzo.engine.chat_template.LONGEST_PROMPT", 1000)
    endless = "{% for i in range(99999) %}{{ i }}{% endfor %}"
    with pytest.raises(RequestError, match="it writes more than 1000 characters"):
        rendered(tmp_path, endless)


@pytest.mark.parametrize(
    ("part", "content", "door"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "open"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "ab c"}, "open"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "encode"),
        ("decoder", {"type": "Strip", "content": "a", "start": 0, "stop": 2**32 - 1}, "decode"),
    ],
)
def test_panics_of_the_tokenizer_library_are_errors_that_name_the_file(
    tmp_path: Path, part: str, content: dict[str, Any], door: str
) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    ids = Tokenizer(tmp_path).encode("a floor")
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: content}))
    if door == "open":
        with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
            Tokenizer(tmp_path)
        return
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: cannot {door} th"):
        tokenizer.encode("a floor") if door == "encode" else tokenizer.decode(ids)


def test_what_a_caller_does_wrong_is_not_blamed_on_the_file(tokenizer: Tokenizer) -> None:
    with pytest.raises(OverflowError):
        tokenizer.decode([-1])


def test_templates_for_tools_and_from_files(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    assert rendered(tmp_path, named) == "plain"
    assert rendered(tmp_path, named, tools=[{"name": "f"}]) == "f"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered(tmp_path, named) == "json"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path, named) == "file"


def test_a_folder_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no chat template"):
        rendered(tmp_path, None)


def defaults(folder: Path, **generation: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return GenerationDefaults.read(folder)


def test_recommended_sampling(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert defaults(tmp_path, **given, max_length=20).sampling == given
    assert defaults(tmp_path).sampling == {}
    greedy = defaults(tmp_path, do_sample=False, temperature=0.7).sampling
    assert greedy == {"temperature": 0.0}


def test_damaged_recommendations_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p is 'high'"):
        defaults(tmp_path, top_p="high")
    with pytest.raises(ConfigError, match="eos_token_id is 'x'"):
        defaults(tmp_path, eos_token_id="x")
