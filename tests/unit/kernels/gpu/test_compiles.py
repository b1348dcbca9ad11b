"""What the compiler makes of the kernels for Hopper; needs no card."""

from __future__ import annotations

import re

import pytest
import torch

from terrazzo.errors import KernelError
from terrazzo.kernels.gpu.card import Source
from terrazzo.kernels.gpu.decode import Epilogue, decode_source
from terrazzo.kernels.gpu.records import RecordKind

pytest.importorskip("cuda.bindings.nvrtc")
from terrazzo.kernels.gpu.nvrtc import compile_source

UNIFORM = [(RecordKind(bits, 128, True),) for bits in (2, 3, 4, 5, 6, 7, 8, 16)]
MIXED = (RecordKind(8, 128, True), RecordKind(4, 32, False), RecordKind(3, 64, True))


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("kinds", [*UNIFORM, MIXED], ids=str)
def test_decode_keeps_everything_in_registers(kinds: tuple[RecordKind, ...], rows: int) -> None:
    source = decode_source(kinds, torch.bfloat16, rows, Epilogue.SILU, False)
    log = compile_source(source, "sm_90a", ["--ptxas-options=-v"]).log
    assert re.findall(r"(\d+) bytes spill", log) == ["0", "0"], log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) <= 128  # two blocks of 256 threads on an SM


def test_what_the_compiler_says_reaches_the_user() -> None:
    with pytest.raises(KernelError, match="FLOAT"):
        compile_source(Source("decode", ("ROWS=8",)), "sm_90a")
