"""The public API is short, sorted and importable, and importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import terrazzo


def test_the_public_names() -> None:
    assert terrazzo.__all__ == [
        "DENSE",
        "LLM",
        "Checkpoint",
        "Plan",
        "QuantSpec",
        "RuleSet",
        "SamplingParams",
        "TerrazzoError",
        "quantize",
        "resolve",
    ]


@pytest.mark.parametrize("name", terrazzo.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(terrazzo, name).__doc__


def test_the_api_lists_itself() -> None:
    assert set(terrazzo.__all__) <= set(dir(terrazzo))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load'"):
        terrazzo.load  # noqa: B018


@pytest.mark.parametrize("module", ["terrazzo", "terrazzo.cli"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
