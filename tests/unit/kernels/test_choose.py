"""The chooser: the first kernel that accepts, and a reason for every other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from terrazzo.errors import NoKernelError
from terrazzo.kernels.base import GemmProblem, Kernel, Prepared, Weight
from terrazzo.kernels.choose import KERNELS, KernelPolicy, choose, choose_among
from terrazzo.kernels.machine import why_not_native
from terrazzo.spec import DENSE, QuantSpec

PROBLEM = GemmProblem(QuantSpec(4, 32, sym=False), 576, 1536)


@dataclass(frozen=True)
class Picky:
    """A kernel that rejects for its reason, or accepts; it never runs."""

    name: str
    reason: str | None

    def rejects(self, problem: GemmProblem) -> str | None:
        return self.reason

    def prepared_bytes(self, problem: GemmProblem) -> int:
        raise NotImplementedError

    def prepare(self, weight: Weight) -> Prepared:
        raise NotImplementedError

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        raise NotImplementedError


def lines(kernels: list[Kernel]) -> list[str]:
    return [str(verdict) for verdict in choose_among(kernels, PROBLEM).verdicts]


def test_the_first_that_accepts_is_chosen_and_all_have_a_reason() -> None:
    kernels: list[Kernel] = [Picky("a", "too odd"), Picky("b", None), Picky("c", None)]
    assert choose_among(kernels, PROBLEM).kernel is kernels[1]
    assert lines(kernels) == ["a: too odd", "b: chosen", "c: could run it too, after b"]


def test_no_kernel_lists_every_reason() -> None:
    kernels: list[Kernel] = [Picky("a", "too odd"), Picky("b", "too large")]
    with pytest.raises(NoKernelError) as caught:
        choose_among(kernels, PROBLEM)
    assert str(caught.value).splitlines() == [
        "no kernel runs 4-bit g32 asym, 576 x 1536 on cpu:",
        "  a: too odd",
        "  b: too large",
    ]


@pytest.mark.skipif(bool(why_not_native()), reason="no native kernels here")
@pytest.mark.parametrize(
    ("policy", "spec", "expected"),
    [
        (KernelPolicy.INT8, QuantSpec(3), "native_int8"),
        (KernelPolicy.SPEED, QuantSpec(3), "native_float32"),
        (KernelPolicy.MEMORY, QuantSpec(3), "native_float32"),
        (KernelPolicy.INT8, DENSE, "native_dense_int8"),
        (KernelPolicy.SPEED, DENSE, "native_dense"),
        (KernelPolicy.MEMORY, DENSE, "native_dense"),
    ],
)
def test_native_kernels_come_first(policy: KernelPolicy, spec: QuantSpec, expected: str) -> None:
    assert choose(GemmProblem(spec, 64, 64), policy).kernel.name == expected


@pytest.mark.parametrize(
    ("policy", "spec", "expected"),
    [
        (KernelPolicy.INT8, QuantSpec(3), "torch_dequantized"),
        (KernelPolicy.SPEED, QuantSpec(3), "torch_dequantized"),
        (KernelPolicy.MEMORY, QuantSpec(3), "torch_panels"),
        (KernelPolicy.SPEED, DENSE, "torch_dense"),
        (KernelPolicy.MEMORY, DENSE, "torch_dense"),
    ],
)
def test_without_a_compiler_torch_takes_over(
    policy: KernelPolicy, spec: QuantSpec, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terrazzo.kernels.native.why_not_native", lambda: "not built")
    choice = choose(GemmProblem(spec, 64, 64), policy)
    assert choice.kernel.name == expected
    assert "not built" in {verdict.reason for verdict in choice.verdicts}


def test_every_policy_runs_everything_in_torch_too() -> None:
    for policy in (KernelPolicy.INT8, KernelPolicy.SPEED, KernelPolicy.MEMORY):
        names = {kernel.name for kernel in KERNELS[policy]}
        assert names >= {"torch_dense", "torch_dequantized", "torch_panels", "torch_reference"}
