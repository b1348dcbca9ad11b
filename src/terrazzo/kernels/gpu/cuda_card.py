"""An NVIDIA card, driven through the CUDA driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from terrazzo.errors import KernelError
from terrazzo.kernels.gpu.card import Source
from terrazzo.kernels.gpu.nvrtc import machine_code


class CudaCard:
    """The current device of torch, whose context and current stream its launches use."""

    def __init__(self, cache_folder: Path) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()  # the driver has a context from here on
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms: int = properties.multi_processor_count
        # Hopper's own instructions need the `a`.
        own = "a" if properties.major >= 9 else ""
        self._architecture = f"sm_{properties.major}{properties.minor}{own}"
        self._cache_folder = cache_folder
        self._functions: dict[tuple[Source, int], CudaFunction] = {}

    def function(self, source: Source, threads: int) -> CudaFunction:
        if (source, threads) not in self._functions:
            image = machine_code(source, self._architecture, self._cache_folder)
            self._functions[source, threads] = CudaFunction(source, image, threads, self.device)
        return self._functions[source, threads]


class CudaFunction:
    """A kernel that may use all the shared memory that one block can have."""

    def __init__(self, source: Source, image: bytes, threads: int, device: torch.device) -> None:
        module = _answer(driver.cuModuleLoadData(image))
        self._handle = _answer(driver.cuModuleGetFunction(module, source.name.encode()))
        self._threads = threads
        self._device = device
        self._attributes = [_early_start()]
        kinds = driver.CUfunction_attribute
        static = kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        most = _answer(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                _answer(driver.cuCtxGetDevice()),
            )
        )
        taken = _answer(driver.cuFuncGetAttribute(static, self._handle))
        _answer(driver.cuFuncSetAttribute(self._handle, dynamic, most - taken))

    def launch(self, grid: tuple[int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        config.attrs = self._attributes
        config.numAttrs = 1
        values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _answer(driver.cuLaunchKernelEx(config, self._handle, ctypes.addressof(values), 0))


def _early_start() -> Any:
    """Programmatic dependent launch: a kernel may start before the one ahead of it has ended."""
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    return early


def _answer(answer: tuple[Any, ...]) -> Any:
    """What a call returned beside its status. Raises KernelError."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the CUDA driver answered {answer[0].name}")
    return answer[1] if len(answer) > 1 else None
