"""A damaged or hostile folder opens, or ends in a TerrazzoError: never in anything else.

Each mutation is one random change to a small sound folder: bytes of the weight file, its header as
JSON, its length prefix, the configs, or the numbers in a tensor.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import MODULE, config_of, packed_module, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import TerrazzoError
from terrazzo.spec import QuantSpec

MUTATIONS = 1200
WEIGHTS = "model.safetensors"
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**200, 1e308, "", "x", "4", "\ud800", "../x", [], [[]],
    [-1], [2**62, 2**62], {}, {"": None}, "F16", "I32", "F4", [0, 2**60],
)  # fmt: skip


FIELDS = (
    "dynamic", "lm_head", "pack_dtype", "format", "quant_method", "meta", "w_bit", "zero_point",
    "packing_format", "backend", "extra_config", "block_name_to_quantize", "quant_block_list",
    "act_bits", "data_type", "rotation_config", "modules_in_block_to_quantize", "text_config",
    "rotation",
)  # fmt: skip
METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"quant_method": "auto-round", "packing_format": "auto_round:gptq", "extra_config": {}},
)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + body


def flip_bytes(folder: Path, dice: random.Random) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    (folder / WEIGHTS).write_bytes(data)


def flip_header_bytes(folder: Path, dice: random.Random) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    for _ in range(dice.randint(1, 4)):
        data[dice.randrange(8 + length)] = dice.randrange(256)
    (folder / WEIGHTS).write_bytes(data)


def change_length(folder: Path, dice: random.Random) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = dice.choice([0, 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1, dice.randrange(4096)])
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])


def cut_or_grow(folder: Path, dice: random.Random) -> None:
    data = (folder / WEIGHTS).read_bytes()
    cut = data[: dice.randrange(len(data))]
    (folder / WEIGHTS).write_bytes(dice.choice([cut, data + b"\0" * dice.randint(1, 64)]))


def change_header(folder: Path, dice: random.Random) -> None:
    header, body = split((folder / WEIGHTS).read_bytes())
    name = dice.choice(sorted(header))
    choice = dice.randrange(4)
    if choice == 0:
        header[dice.choice([f"{name}x", "", "a" * 5000])] = header.pop(name)
    elif choice == 1:
        header[name] = dice.choice(STRANGE)
    elif isinstance(header[name], dict) and header[name]:
        header[name][dice.choice(sorted(header[name]))] = dice.choice(STRANGE)
    (folder / WEIGHTS).write_bytes(joined(header, body))


def duplicate_name(folder: Path, dice: random.Random) -> None:
    header, body = split((folder / WEIGHTS).read_bytes())
    one, other = dice.sample([each for each in header if each != "__metadata__"], 2)
    text = json.dumps(header).replace(json.dumps(one), json.dumps(other)).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + body)


def change_config(folder: Path, dice: random.Random) -> None:
    file = folder / dice.choice(["config.json", "quantize_config.json"])
    content = json.loads(file.read_text())
    inner = dice.choice(
        [".*", "\ud800", MODULE, "pack_dtype", "quantizer", "quantization_config", "bits"]
    )
    value = dice.choice([*STRANGE, {inner: dice.choice(STRANGE)}, {".*": {inner: 16}}])
    content[dice.choice([*content, *FIELDS])] = value
    file.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))


def flip_config_bytes(folder: Path, dice: random.Random) -> None:
    file = folder / dice.choice(["config.json", "quantize_config.json"])
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] = dice.randrange(256)
    file.write_bytes(dice.choice([bytes(data), b"[" * 100_000, b"\xff\xfe" + data, b"9" * 5000]))


def hostile_index(folder: Path, dice: random.Random) -> None:
    shard = dice.choice(["../../etc/passwd", "/etc/passwd", WEIGHTS, "config.json", *STRANGE])
    index: Any = dice.choice([{MODULE: shard}, shard, {shard: WEIGHTS} if shard == "x" else {}])
    text = json.dumps({"weight_map": index}).encode("utf-8", "surrogatepass")
    (folder / f"{WEIGHTS}.index.json").write_bytes(text)


def change_numbers(folder: Path, dice: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensor = tensors[dice.choice(sorted(tensors))].flatten()
    if tensor.dtype.is_floating_point:
        tensor[dice.randrange(len(tensor))] = dice.choice([math.nan, math.inf, -math.inf])
    else:
        tensor[dice.randrange(len(tensor))] = dice.choice([-1, -(2**31), 2**31 - 1, 1])
    save_file(tensors, folder / WEIGHTS)


def change_shape(folder: Path, dice: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = dice.choice(sorted(tensors))
    shape = dice.choice([(0,), (1,), (), (0, 5), (64, 64), (1, 1, 1), (2, 3)])
    dtype = dice.choice([torch.int32, torch.float16, torch.int64, torch.bool, torch.float64])
    tensors[name] = torch.zeros(shape, dtype=dtype)
    save_file(tensors, folder / WEIGHTS)


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bytes, flip_header_bytes, change_length, cut_or_grow, change_header, duplicate_name,
    change_config, flip_config_bytes, hostile_index, change_numbers, change_shape,
)  # fmt: skip


def sound_folder(folder: Path, dice: random.Random) -> Path:
    sym, desc_act = dice.random() < 0.5, dice.random() < 0.5
    spec = QuantSpec(dice.choice([2, 3, 4, 8]), 32, sym, desc_act)
    tensors = packed_module(random_affine(spec, 32, 64, seed=0), spec.bits)
    tensors["model.norm.weight"] = torch.ones(4)
    return write_folder(folder, tensors, config_of(spec, **dice.choice(METHODS)))


def use(folder: Path) -> bool:
    """Whether the folder opened and every weight was read."""
    try:
        checkpoint = Checkpoint(folder)
        for module in checkpoint.plan:
            checkpoint.dequantize(module)
    except TerrazzoError:
        return False
    return True


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_mutation_ends_in_anything_but_our_errors(
    change: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    rounds = -(-MUTATIONS // len(CHANGES))
    opened = 0
    for seed in range(rounds):
        dice = random.Random(seed)
        folder = sound_folder(tmp_path / str(seed), dice)
        assert use(folder)
        change(folder, dice)
        opened += use(folder)
    assert opened < rounds, "the mutations never damage anything"


def test_there_are_enough_mutations() -> None:
    assert len(CHANGES) * -(-MUTATIONS // len(CHANGES)) >= 1000
