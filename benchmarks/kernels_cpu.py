"""The CPU kernels against each other and against what was left out, microseconds per product.

Shapes are those of SmolLM2-135M and of a 1.1B Llama; weights rotate through more copies than the
last cache level holds, because a model meets each of its weights once per token. Candidates take
turns, so that a busy moment of the machine hits all of them.

    OMP_NUM_THREADS=1 python benchmarks/kernels_cpu.py

Beside the kernels of the package: `mm` is torch.mm on float32 weights without the transposition of
kernels/product.py, `int4pack` is aten's own int4 weight-only product with float32 activations.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from terrazzo.kernels.base import Kernel, Prepared
from terrazzo.kernels.choose import KERNELS, KernelPolicy
from terrazzo.packing import QuantTensor, pack, sequential_groups, unpack
from terrazzo.spec import QuantSpec

SPEC = QuantSpec(4, 64, sym=False)
SHAPES = (
    ("q_proj, o_proj", 576, 576),
    ("k_proj, v_proj", 192, 576),
    ("gate_proj, up_proj", 1536, 576),
    ("down_proj", 576, 1536),
    ("lm_head", 49152, 576),
    ("1.1B gate_proj", 5632, 2048),
)
ROWS = (1, 8, 512)
COLD_BYTES = 96 << 20
"""float32 bytes of all copies of one weight."""
SECONDS, MIN_TURNS, MAX_TURNS = 3.0, 3, 400
SLOW = frozenset({"int4pack"})
"""Not measured with many rows, where one product takes seconds."""

Product = Callable[[Tensor, Tensor], None]
"""x_MK, out_MN -> nothing: one product with the next copy of the weight."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each turn."""

    seconds: tuple[float, ...]

    def __str__(self) -> str:
        return f"{min(self.seconds) * 1e6:.0f} / {median(self.seconds) * 1e6:.0f}"


def random_weight(out_features: int, in_features: int) -> QuantTensor:
    groups, legal = SPEC.num_groups(in_features), SPEC.max_code + 1
    return QuantTensor(
        SPEC,
        pack(torch.randint(legal, (in_features, out_features), dtype=torch.uint8), SPEC.bits),
        torch.rand((groups, out_features)).to(torch.float16),
        torch.randint(legal, (groups, out_features), dtype=torch.uint8),
        sequential_groups(in_features, SPEC.group_size),
    )


def of_kernel(kernel: Kernel, weight: QuantTensor, copies: int) -> Product:
    first = kernel.prepare(weight)
    cold = [
        Prepared(first.problem, tuple(each.clone() for each in first.tensors))
        for _ in range(copies)
    ]
    turns = count()
    return lambda x_MK, out_MN: kernel.run(x_MK, cold[next(turns) % copies], out_MN)


def of_mm(weight: QuantTensor, copies: int) -> Product:
    shape = (weight.out_features, weight.in_features)
    cold = [torch.rand(shape) for _ in range(copies)]
    turns = count()

    def product(x_MK: Tensor, out_MN: Tensor) -> None:
        torch.mm(x_MK, cold[next(turns) % copies].T, out=out_MN)

    return product


def of_int4pack(weight: QuantTensor, copies: int) -> Product:
    codes_NK = unpack(weight.qweight, weight.in_features, SPEC.bits).T.to(torch.int32).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 1)
    scales = weight.scales.float()
    affine = torch.stack([scales, scales * (SPEC.mid_code - weight.zeros.float())], dim=-1)
    cold = [(packed.clone(), affine.clone()) for _ in range(copies)]
    turns = count()

    def product(x_MK: Tensor, out_MN: Tensor) -> None:
        words, groups = cold[next(turns) % copies]
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        out_MN.copy_(multiply(x_MK, words, SPEC.group_size, groups))

    return product


def candidates(out_features: int, in_features: int) -> dict[str, Product]:
    weight = random_weight(out_features, in_features)
    copies = max(1, COLD_BYTES // (4 * out_features * in_features))
    kernels = [each for each in KERNELS[KernelPolicy.SPEED] if each.name != "torch_dense"]
    return {
        "mm": of_mm(weight, copies),
        **{kernel.name: of_kernel(kernel, weight, copies) for kernel in kernels},
        "int4pack": of_int4pack(weight, copies),
    }


def take_turns(products: Mapping[str, Product], x_MK: Tensor, out_MN: Tensor) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {name: [] for name in products}
    for product in products.values():
        product(x_MK, out_MN)
    begin, turns = time.perf_counter(), 0
    while turns < MIN_TURNS or (turns < MAX_TURNS and time.perf_counter() - begin < SECONDS):
        for name, product in products.items():
            start = time.perf_counter()
            product(x_MK, out_MN)
            seconds[name].append(time.perf_counter() - start)
        turns += 1
    return {name: Timing(tuple(each)) for name, each in seconds.items()}


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    print(
        f"{datetime.date.today()}, {processor()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {SPEC}; microseconds, min / median"
    )
    names = [*candidates(64, 64)]
    print("|".join(["", "module", "N x K", "M", *names, ""]))
    print("|---" * (3 + len(names)) + "|")
    for module, out_features, in_features in SHAPES:
        products = candidates(out_features, in_features)
        for rows in ROWS:
            fast = {name: each for name, each in products.items() if rows < 64 or name not in SLOW}
            x_MK, out_MN = torch.randn(rows, in_features), torch.empty(rows, out_features)
            timings = take_turns(fast, x_MK, out_MN)
            cells = [str(timings[name]) if name in timings else "-" for name in names]
            shape = f"{out_features} x {in_features}"
            print("|".join(["", module, shape, str(rows), *cells, ""]), flush=True)


if __name__ == "__main__":
    main()
