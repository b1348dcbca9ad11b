"""CUDA C++ compiled when first used, and kept as machine code on disk.

NVRTC compiles one kernel in a quarter of a second, so that only the widths a checkpoint has are
ever built; a second start finds them in the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from cuda.bindings import nvrtc

from terrazzo.errors import KernelError
from terrazzo.kernels.gpu.card import SOURCES, Source


@dataclass(frozen=True, slots=True)
class Compiled:
    """image: machine code. log: what the compiler had to say."""

    image: bytes
    log: str


def machine_code(source: Source, architecture: str, cache_folder: Path) -> bytes:
    """From the cache, or compiled and put there. Raises KernelError."""
    file = cache_folder.expanduser() / "kernels" / f"{_key(source, architecture)}.cubin"
    if file.is_file():
        return file.read_bytes()
    image = compile_source(source, architecture).image
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, delete=False) as aside:
        aside.write(image)
    Path(aside.name).rename(file)
    return image


def compile_source(source: Source, architecture: str, options: Sequence[str] = ()) -> Compiled:
    """Machine code for `architecture`, `sm_90a` for example. Needs no card.

    Raises KernelError with what the compiler said.
    """
    text, name = source.file.read_bytes(), source.file.name.encode()
    program = _answer(nvrtc.nvrtcCreateProgram(text, name, 0, None, None))
    every = [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        f"--include-path={SOURCES}",
        *(f"--define-macro={each}" for each in source.defines),
        *options,
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(every), [each.encode() for each in every])
    log = bytes(_answer(nvrtc.nvrtcGetProgramLogSize(program)))
    _answer(nvrtc.nvrtcGetProgramLog(program, log))
    said = log.decode(errors="replace").strip("\0\n ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"{source.file}, compiled with {source.defines}: {said}")
    image = bytes(_answer(nvrtc.nvrtcGetCUBINSize(program)))
    _answer(nvrtc.nvrtcGetCUBIN(program, image))
    _answer(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(image, said)


def _key(source: Source, architecture: str) -> str:
    """Of everything the machine code follows from."""
    version = _answer(nvrtc.nvrtcVersion())
    known = (source.name, source.defines, architecture, version, _texts())
    return hashlib.sha256(repr(known).encode()).hexdigest()


@cache
def _texts() -> tuple[bytes, ...]:
    return tuple(file.read_bytes() for file in sorted(SOURCES.iterdir()))


def _answer(answer: tuple[Any, ...]) -> Any:
    """What a call returned beside its status. Raises KernelError."""
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC answered {answer[0].name}")
    results = answer[1:]
    return results[0] if len(results) == 1 else results
