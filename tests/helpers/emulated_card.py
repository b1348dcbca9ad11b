"""A card without a card: kernels compiled for the CPU, where fibers stand in for threads."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch

from terrazzo.kernels.gpu.card import SOURCES, Source

COMPILER = shutil.which("g++")
EMULATOR = Path(__file__).parent / "emulator"

_MAIN = """
#include "{file}"
extern "C" void emulate(int x, int y, int threads, const void* arguments) {{
  const auto& given = *static_cast<const terrazzo::Arguments*>(arguments);
  emulator::launch({{x, y, 1}}, threads, [&] {{ terrazzo::{name}(given); }});
}}
"""


class EmulatedCard:
    """Shared memory starts as NaN in every block. folder: of the compiled kernels."""

    def __init__(self, folder: Path, num_sms: int = 3) -> None:
        self.device = torch.device("cpu")
        self.num_sms = num_sms
        self._folder = folder
        self._functions: dict[tuple[Source, int], EmulatedFunction] = {}

    def function(self, source: Source, threads: int) -> EmulatedFunction:
        if (source, threads) not in self._functions:
            library = compile_for_cpu(source, self._folder)
            self._functions[source, threads] = EmulatedFunction(library, threads)
        return self._functions[source, threads]


class EmulatedFunction:
    def __init__(self, library: Path, threads: int) -> None:
        self._emulate = ctypes.CDLL(str(library)).emulate
        self._threads = threads

    def launch(self, grid: tuple[int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        assert shared_bytes <= 227 * 1024
        self._emulate(*grid, self._threads, ctypes.byref(arguments))


def compile_for_cpu(source: Source, folder: Path) -> Path:
    """The shared library of one kernel in `folder`, compiled unless it is there."""
    assert COMPILER is not None
    name = hashlib.sha256(repr((source.name, source.defines)).encode()).hexdigest()[:24]
    library, main = folder / f"{name}.so", folder / f"{name}.cpp"
    if library.is_file():
        return library
    main.write_text(_MAIN.format(file=source.file.name, name=source.name))
    defines = [f"-D{each}" for each in ("EMULATED", *source.defines)]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", *defines]
    includes = [f"-I{SOURCES}", f"-I{EMULATOR}"]
    aside = library.with_suffix(f".{id(source)}")
    command = [COMPILER, *options, *includes, str(main), "-o", str(aside)]
    subprocess.run(command, check=True, capture_output=True)
    aside.rename(library)
    return library
