"""Write a GPTQ checkpoint of random weights, to time shapes, widths and rules without a model.

    python benchmarks/synthetic_gptq.py out --rules '{"bits": 4, "desc_act": true}'
    python benchmarks/synthetic_gptq.py out --like folder --rules '{"bits": 3, "lm_head": true}'

The default shape is that of a Llama of 1.1 billion parameters. `--like` takes shape and tokenizer
of a folder instead. `--rules` are what `terrazzo quantize` takes, with `dynamic` where modules
differ. Codes are uniform, scales keep activations near one, and act-order is a random permutation.
At most two shards are in memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.names import is_quantizable
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.models.config import ModelConfig
from terrazzo.models.parameters import Parameter, ParameterKind, head_parameter, parameters
from terrazzo.packing import QuantTensor, sequential_groups
from terrazzo.quantization.rules_file import read_rules
from terrazzo.rules import LM_HEAD, Plan, Rule, RuleSet
from terrazzo.spec import WORD_BITS, Format, QuantSpec, packed_shapes

WEIGHT_STD = 0.02
SHARD_BYTES = 512 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
HEAD_RULE = {"bits": 8, "group_size": 128}
"""Of a head that `lm_head` asks for and no rule speaks of."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--rules", default='{"bits": 4}', help="JSON, or a file that holds it")
    parser.add_argument("--like", type=Path, help="folder whose shape and tokenizer are taken")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--context", type=int, default=2048)
    return parser.parse_args()


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """A config.json."""
    if arguments.like:
        config: dict[str, Any] = json.loads((arguments.like / "config.json").read_text())
        config.pop("quantization_config", None)
        return config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "intermediate_size": arguments.intermediate,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "vocab_size": arguments.vocab,
        "max_position_embeddings": arguments.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float16",
    }


def rules_of(text: str) -> RuleSet:
    rules = read_rules(text)
    if not rules.lm_head or any(rule.matches(LM_HEAD) for rule in rules.rules):
        return rules
    return replace(rules, rules=(*rules.rules, Rule.parse(LM_HEAD, HEAD_RULE)))


def random_weight(spec: QuantSpec, out_features: int, in_features: int) -> QuantTensor:
    """Words of random bits are uniform codes, where codes fill their words."""
    shapes = packed_shapes(spec, out_features, in_features)
    assert in_features * spec.bits % WORD_BITS == 0, f"{in_features} inputs leave bits unused"
    low, high = -(1 << 31), 1 << 31
    step = WEIGHT_STD * math.sqrt(12) / (1 << spec.bits)
    scales = step * (0.5 + torch.rand(shapes.scales))
    middle = torch.full(shapes.scales, spec.mid_code, dtype=torch.uint8)
    nudge = torch.randint(0, 2, shapes.scales, dtype=torch.uint8)
    g_idx = sequential_groups(in_features, spec.group_of(in_features))
    return QuantTensor(
        spec,
        torch.randint(low, high, shapes.qweight, dtype=torch.int32),
        scales.half(),
        middle if spec.sym else middle - nudge,
        g_idx[torch.randperm(in_features)] if spec.desc_act else g_idx,
    )


def dense_tensor(parameter: Parameter) -> Tensor:
    if parameter.kind is ParameterKind.NORM:
        return torch.ones(parameter.shape, dtype=torch.float16)
    return torch.empty(parameter.shape, dtype=torch.float16).normal_(0.0, WEIGHT_STD)


def untied(config: Mapping[str, Any], plan: Plan, head: str) -> dict[str, Any]:
    """A quantized head has weights of its own."""
    return {**config, **({"tie_word_embeddings": False} if head in plan.quantized else {})}


def linears(config: ModelConfig) -> Iterator[Parameter]:
    for parameter in (*parameters(config), head_parameter(config)):
        if parameter.kind is ParameterKind.LINEAR:
            yield parameter


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    fields = shape_of(arguments)
    rules = rules_of(arguments.rules)
    config = ModelConfig.from_hf(fields, arguments.out / "config.json")
    names = dict.fromkeys(each.name for each in linears(config))
    plan = Plan(rules.resolve_name(name) for name in names if is_quantizable(name))
    fields = untied(fields, plan, config.layout.head)
    config = ModelConfig.from_hf(fields, arguments.out / "config.json")
    with CheckpointWriter(arguments.out, Format.GPTQ, SHARD_BYTES) as writer:
        for parameter in parameters(config):
            spec = plan.quantized.get(parameter.name)
            if parameter.kind is ParameterKind.LINEAR and spec is not None:
                writer.add_quantized(parameter.name, random_weight(spec, *parameter.shape))
            else:
                writer.add_tensor(parameter.tensor, dense_tensor(parameter))
        for name in TOKENIZER_FILES:
            if arguments.like and (arguments.like / name).is_file():
                writer.copy_file(arguments.like / name)
        writer.commit(Description(fields, rules, plan))
    size = sum(file.stat().st_size for file in arguments.out.glob("*.safetensors"))
    print(f"{arguments.out}: {len(plan.quantized)} quantized linears, {size:,} bytes of tensors")


if __name__ == "__main__":
    main()
