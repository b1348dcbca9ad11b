"""Folders made to do harm: each is refused by name, in little time and memory, at every door."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers.doors import Visit, visit
from helpers.tiny_tokenizer import write_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "llama-w4-g32-asym-v2"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODULE = "model.layers.0.mlp.down_proj"
MORE_RSS = 200 << 20
"""Bytes that opening may take beyond what a sound folder takes."""
HUGE = 1 << 40
DEEP = 200_000
PARTS = 4
"""Workers of a test run share them."""


class Door(Enum):
    """Where the harm is done, and must be refused."""

    FILES = "seen when the folder is opened"
    NUMBERS = "seen when weights are read"
    TEXT = "seen when text is read or written"
    NOWHERE = "it may open"


DOORS = {Door.FILES: "weights", Door.NUMBERS: "weights", Door.TEXT: "text"}
ALL = "weights text inspect"
WAYS = {Door.FILES: "weights inspect", Door.NUMBERS: "weights inspect", Door.TEXT: "text"}
"""Which doors see the harm at all; to open the others again for every case tells nothing new."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    door: Door
    harm: Callable[[Path], object]


def sound(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "quantize_config.json", WEIGHTS):
        shutil.copyfile(GOLDEN / name, folder / name)
    write_tokenizer(folder, vocab_size=320)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """What `make` makes stands where the file was."""

    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def duplicated(name: str, key: str) -> Callable[[Path], object]:
    """The first key twice, as text."""

    def harm(folder: Path) -> None:
        text = (folder / name).read_text().lstrip()
        (folder / name).write_text("{" + f'"{key}": [], ' + text[1:])

    return harm


def field(name: str, key: str, value: object) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, key: value}))

    return harm


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        content = json.loads(data[8 : 8 + length])
        change(content)
        write_header(folder, json.dumps(content).encode(), data[8 + length :])

    return harm


def write_header(folder: Path, text: bytes, body: bytes = b"") -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + body)


def entry(key: str, value: object, tensor: str = f"{MODULE}.scales") -> Callable[[Path], object]:
    return header(lambda content: content[tensor].update({key: value}))


def added(name: str, **fields: object) -> Callable[[Path], object]:
    """One more tensor that no byte of the file stands for."""
    end = os.path.getsize(GOLDEN / WEIGHTS)

    def change(content: dict[str, Any]) -> None:
        last = max(e["data_offsets"][1] for n, e in content.items() if n != "__metadata__")
        assert last < end
        content[name] = {"dtype": "F16", "shape": [0], "data_offsets": [last, last], **fields}

    return header(change)


def twice_in_header(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].strip()
    one = json.dumps({"x": json.loads(text)[f"{MODULE}.scales"]})[6:-1]
    again = b', "' + f"{MODULE}.scales".encode() + b'": ' + one.encode() + b"}"
    write_header(folder, text[:-1] + again, data[8 + length :])


def countless_experts(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        last = max(e["data_offsets"][1] for n, e in content.items() if n != "__metadata__")
        empty = {"dtype": "F16", "data_offsets": [last, last]}
        content["model.layers.9.mlp.experts.gate_up_proj"] = {**empty, "shape": [2**40, 0, 0]}
        content["model.layers.9.mlp.experts.down_proj"] = {**empty, "shape": [2**40, 0, 0]}

    header(change)(folder)


def index(weight_map: object) -> Callable[[Path], object]:
    return put(INDEX, json.dumps({"weight_map": weight_map}).encode())


def in_shards(folder: Path, first: str = "a.safetensors", second: str = "b.safetensors") -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    half = len(names) // 2
    save_file({n: tensors[n] for n in names[:half]}, folder / "a.safetensors")
    save_file({n: tensors[n] for n in names[half - 1 :]}, folder / "b.safetensors")
    shards = {name: first if at < half else second for at, name in enumerate(names)}
    index(shards)(folder)


def numbers(suffix: str, value: float) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[f"{MODULE}.{suffix}"].view(-1)[3] = value
        save_file(tensors, folder / WEIGHTS)

    return harm


def pickled(folder: Path) -> None:
    """A pickle that makes a file when it is opened."""
    (folder / WEIGHTS).unlink()
    code = b"cos\nsystem\n(S'touch " + str(folder / "pwned").encode() + b"'\ntR."
    (folder / "pytorch_model.bin").write_bytes(code)


def pickle_by_index(folder: Path) -> None:
    pickled(folder)
    index({f"{MODULE}.scales": "pytorch_model.bin"})(folder)


def pickle_in_disguise(folder: Path) -> None:
    pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / WEIGHTS)


def template(text: object) -> Callable[[Path], object]:
    return field("tokenizer_config.json", "chat_template", text)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "zeros": link("/dev/zero"),
    "terminal": link("/dev/tty"),
    "random": link("/dev/urandom"),
    "memory": link("/proc/self/mem"),
    "out_of_folder": link("/etc/passwd"),
    "nowhere": link("nowhere"),
    "huge": huge,
    "empty": lambda path: path.write_bytes(b""),
}
FILES = {
    "config.json": Door.FILES,
    "quantize_config.json": Door.FILES,
    WEIGHTS: Door.FILES,
    INDEX: Door.FILES,
    "tokenizer.json": Door.TEXT,
    "tokenizer_config.json": Door.TEXT,
    "generation_config.json": Door.TEXT,
    "chat_template.jinja": Door.TEXT,
    "chat_template.json": Door.TEXT,
}
HARMLESS = {("chat_template.jinja", "out_of_folder"), ("chat_template.jinja", "empty")}
"""Any text is a template; an empty one is none."""
TEXTS: dict[str, bytes] = {
    "deep_lists": b"[" * DEEP,
    "deep_closed": b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep_objects": b'{"a":' * DEEP,
    "not_utf8": b'{"a": "\xff\xfe\x80"}',
    "surrogate": b'{"model_type": "\\ud800", "a": "\\udfff"}',
    "number": b'{"a": ' + b"9" * 10_000 + b"}",
    "list": b"[1]",
    "many_values": b'{"a": [' + b"[]," * 5_000_000 + b"[]]}",
}
JSON_FILES = [name for name in FILES if name.endswith(".json")]
SHARDS: tuple[Any, ...] = (
    "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..",
    "x\0.safetensors", "\udcff.safetensors", "a" * 5000 + ".safetensors", "", ".safetensors", "\n",
    "gone.safetensors", "\x1b[2J.safetensors", 1, None, True, [], {}, 1.5,
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    [-1, 64], [2**63, 2], [2**32, 2**32], [2**200], [1.5, 64], [True, 64], ["4", 64], None, 4,
    "4x64", {}, [[4, 64]], [1] * 100_000, [4, 65],
)  # fmt: skip
OFFSETS: tuple[Any, ...] = (
    [0, 2**62], [2**63, 2**64], [-1, 511], [512, 0], [0], [0, 1, 2], [0.0, 512.0], None, "x",
    [False, True], [0, 2**200], [0, 512], [7, 519],
)  # fmt: skip
DTYPES: tuple[Any, ...] = ("F4", "F17", "", None, 16, [], "I32", "F32", "f16", "BOOL", "C64")
GENERATION: tuple[tuple[str, Any], ...] = (
    ("eos_token_id", "2"), ("eos_token_id", 2.0), ("eos_token_id", [[2]]), ("eos_token_id", {}),
    ("eos_token_id", True), ("temperature", "hot"), ("temperature", True), ("temperature", []),
    ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", 10**400),
    ("top_k", float("inf")), ("top_p", {}), ("repetition_penalty", [1.1]), ("min_p", "x"),
)  # fmt: skip
TOKENIZERS: dict[str, bytes] = {
    "object": b"{}",
    "list": b"[]",
    "null_model": b'{"model": null}',
    "wrong_types": b'{"version": 1, "model": {"type": "BPE", "vocab": [1], "merges": {}}}',
    "merges_of_nothing": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}',
    "huge_id": b'{"model": {"type": "BPE", "vocab": {"a": 99999999999999}, "merges": []}}',
    "deep": b'{"model": ' * DEEP,
    "deep_decoder": b'{"decoder": {"type": "Sequence", "decoders": [' * DEEP,
    "unigram_without_unknown": b'{"model": {"type": "Unigram", "vocab": [], "unk_id": 5}}',
    "bad_pattern": b'{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, '
    b'"behavior": "Isolated", "invert": false}, "model": {"type": "BPE", "vocab": {}, '
    b'"merges": []}}',
}
TEMPLATES: dict[str, Any] = {
    "number": 5,
    "names_only": ["default"],
    "no_name": [{"template": "x"}],
    "unhashable_name": [{"name": [], "template": "x"}],
    "template_is_a_list": [{"name": "default", "template": ["x"]}],
    "object": {"default": "x"},
    "true": True,
    "huge": "x" * (2 << 20),
    "syntax": "{% for %}",
    "recursive": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "includes_itself": "{% include 'x' %}",
    "imports": "{% import 'os' as os %}",
    "division": "{{ 1 / 0 }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}",
    "attribute": "{{ messages.x.y.z }}",
    "index": "{{ (1, 2)[9].x }}",
    "deep_expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep_loops": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "huge_range": "{% for a in range(10 ** 12) %}x{% endfor %}",
    "huge_text": "{{ ('x' * 10 ** 11) | length }}",
    "huge_number": "{{ '%d' % (10 ** 6000) }}{{ 10.0 ** 400 }}",
}
TEXT_HARMLESS = {"attribute", "index"}


def cases() -> list[Case]:
    listed = [
        Case(f"{kind}_as_{name}", door, instead(name, make))
        for name, door in FILES.items()
        for kind, make in NOT_FILES.items()
        if (name, kind) not in HARMLESS
    ]
    listed += [
        Case(f"{kind}_in_{name}", FILES[name], put(name, text))
        for name in JSON_FILES
        for kind, text in TEXTS.items()
    ]
    listed += [
        Case("duplicate_key_in_config", Door.FILES, duplicated("config.json", "model_type")),
        Case("duplicate_bits", Door.FILES, duplicated("quantize_config.json", "bits")),
        Case("duplicate_template", Door.TEXT, duplicated("tokenizer_config.json", "chat_template")),
        Case("duplicate_eos", Door.TEXT, duplicated("generation_config.json", "eos_token_id")),
        Case("duplicate_tensor_in_header", Door.FILES, twice_in_header),
        Case("duplicate_tensor_across_shards", Door.FILES, in_shards),
        Case("shards_exchanged", Door.FILES,
             partial(in_shards, first="b.safetensors", second="a.safetensors")),
        Case("shard_missing", Door.FILES, partial(in_shards, second="c.safetensors")),
        Case("countless_experts", Door.NOWHERE, countless_experts),
        Case("pickle", Door.FILES, pickled),
        Case("pickle_by_index", Door.FILES, pickle_by_index),
        Case("pickle_in_disguise", Door.FILES, pickle_in_disguise),
        Case("deep_header", Door.FILES, lambda f: write_header(f, b'{"a":' * DEEP)),
        Case("deep_metadata", Door.FILES,
             lambda f: write_header(f, b'{"__metadata__":' + b"[" * DEEP + b"]" * DEEP + b"}")),
        Case("deep_unknown_field", Door.FILES, lambda f: write_header(
            f, b'{"a":{"dtype":"F16","shape":[0],"data_offsets":[0,0],"x":'
            + b"[" * DEEP + b"]" * DEEP + b"}}")),
        Case("header_of_null", Door.FILES, lambda f: write_header(f, b"null")),
        Case("empty_header", Door.FILES, lambda f: write_header(f, b"")),
        Case("tensor_that_clears_the_screen", Door.FILES, added("\x1b[2J.weight")),
        Case("empty_tensor_of_huge_sides", Door.NOWHERE,
             added("model.x_proj.weight", shape=[0, 2**62])),
        Case("empty_tensor_of_too_huge_sides", Door.NOWHERE,
             added("model.x_proj.weight", shape=[2**62, 0, 2**62])),
        *(Case(f"{n}_tensor", Door.NOWHERE, added(f"model.y.{n}", shape=[0, 2**40], dtype=d))
          for n, d in (("qweight", "I32"), ("qzeros", "I32"), ("scales", "F16"), ("g_idx", "I32"))),
        *(Case(f"header_length_{n}", Door.FILES, lambda f, n=n: (f / WEIGHTS).write_bytes(
            struct.pack("<Q", n) + (GOLDEN / WEIGHTS).read_bytes()[8:]))
          for n in (0, 1, 7, 10**8 - 1, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1)),
        *(Case(f"{n}_bytes_of_weights", Door.FILES, put(WEIGHTS, b"\0" * n)) for n in (0, 1, 7, 8)),
        *(Case(f"shard_{i}", Door.FILES, index({f"{MODULE}.scales": s}))
          for i, s in enumerate(SHARDS)),
        *(Case(f"index_{i}", Door.FILES, index(m)) for i, m in enumerate(([], {}, None, "x", 1))),
        Case("index_promises_more", Door.FILES, index({"x": WEIGHTS})),
        *(Case(f"shape_{i}", Door.FILES, entry("shape", v)) for i, v in enumerate(SHAPES)),
        *(Case(f"offsets_{i}", Door.FILES, entry("data_offsets", v))
          for i, v in enumerate(OFFSETS)),
        *(Case(f"dtype_{i}", Door.FILES, entry("dtype", v)) for i, v in enumerate(DTYPES)),
        *(Case(f"g_idx_{v}", Door.NUMBERS, numbers("g_idx", v))
          for v in (-5, 4, 2**31 - 1, -2**31)),
        *(Case(f"scale_{v}", Door.NUMBERS, numbers("scales", v))
          for v in (float("nan"), float("inf"), float("-inf"))),
        *(Case(f"generation_{i}", Door.TEXT, field("generation_config.json", *pair))
          for i, pair in enumerate(GENERATION)),
        *(Case(f"tokenizer_{n}", Door.TEXT, put("tokenizer.json", t))
          for n, t in TOKENIZERS.items()),
        *(Case(f"template_{n}", Door.NOWHERE if n in TEXT_HARMLESS else Door.TEXT, template(t))
          for n, t in TEMPLATES.items()),
    ]  # fmt: skip
    return listed


CASES = cases()


def problems(case: Case, seen: Visit, usual: Visit) -> list[str]:
    """What is wrong about how a folder was received."""
    found = []
    if seen.ended != "well":
        found.append(seen.ended)
    if not set(seen.outcomes.values()) <= {"opened", "refused"}:
        found.append(f"raised {seen.outcomes}")
    if case.door in DOORS and seen.outcomes.get(DOORS[case.door]) != "refused":
        found.append(f"opened {seen.outcomes}")
    if seen.rss > usual.rss + MORE_RSS:
        found.append(f"took {seen.rss} bytes")
    if seen.status not in ((2,) if case.door is Door.FILES else (0, 1, 2)):
        found.append(f"inspect ended with {seen.status}")
    lines = seen.message.splitlines()
    if seen.status == 2 and (len(lines) != 1 or not lines[0].startswith("terrazzo: ")):
        found.append(f"inspect said {seen.message!r}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_harm_is_refused_at_every_door(part: int, tmp_path: Path) -> None:
    chosen = CASES[part::PARTS]
    folders = [sound(tmp_path / "sound")]
    for number, case in enumerate(chosen):
        folders.append(shutil.copytree(folders[0], tmp_path / str(number)))
        case.harm(folders[-1])
    usual, *visits = visit(folders, [ALL, *(WAYS.get(case.door, ALL) for case in chosen)])
    assert set(usual.outcomes.values()) == {"opened"}
    assert (usual.status, usual.message, usual.ended) == (0, "", "well")
    received = {c.name: problems(c, v, usual) for c, v in zip(chosen, visits, strict=True)}
    assert {name: found for name, found in received.items() if found} == {}
    assert not list(tmp_path.glob("*/pwned"))


def test_no_case_replaces_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 300
