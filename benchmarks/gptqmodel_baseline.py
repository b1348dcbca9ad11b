"""Quantize with the real GPTQModel on the calibration tokens that Terrazzo would take.

The other side of every quality figure: the same tokens, GPTQModel's own defaults for the rest. It
runs in the environment that `scripts/interop.sh` makes.

    .venv-interop/bin/python benchmarks/gptqmodel_baseline.py dense-folder out-folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig

from terrazzo.quantization.calibration import load_calibration
from terrazzo.quantization.options import BUILTIN, DEFAULT_CALIBRATION, CalibrationOptions

BATCH_SIZE = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path, help="folder of the dense model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--calibration", type=Path, help="text file; the text we ship by default")
    parser.add_argument(
        "--calibration-tokens", type=int, default=DEFAULT_CALIBRATION.num_tokens, metavar="TOKENS"
    )
    parser.add_argument(
        "--sequence-length", type=int, default=DEFAULT_CALIBRATION.sequence_length, metavar="TOKENS"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    options = CalibrationOptions(
        BUILTIN if arguments.calibration is None else arguments.calibration,
        arguments.calibration_tokens,
        arguments.sequence_length,
    )
    tokens = load_calibration(arguments.model / "tokenizer.json", options)
    data = [
        {"input_ids": sequence, "attention_mask": [1] * len(sequence)}
        for sequence in tokens.token_ids_BL.tolist()
    ]
    # float32 on CPU, as ours: 16-bit matrix products have no fast path on older processors.
    model = GPTQModel.load(
        str(arguments.model),
        QuantizeConfig(bits=arguments.bits, group_size=arguments.group_size),
        device="cpu",
        dtype=torch.float32,
    )
    model.quantize(data, batch_size=BATCH_SIZE)
    model.save(str(arguments.out))
    print(f"calibration tokens {tokens.num_tokens}, sha256 {tokens.sha256}")


if __name__ == "__main__":
    main()
