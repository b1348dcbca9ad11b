"""`terrazzo import-gguf`: what it prints, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terrazzo import cli
from terrazzo.cli import import_gguf
from terrazzo.importing.gguf import Imported
from terrazzo.importing.precision import Precision


def test_a_missing_file_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "model.gguf"
    assert cli.run(["import-gguf", str(missing), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"terrazzo: {missing} is not a file")


def test_it_says_what_it_wrote_and_what_rounding_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretend(file: Path, out: Path) -> Imported:
        assert file == Path("model.gguf")
        return Imported(out, "LlamaForCausalLM", 272, Precision(torch.float16, 2.1e-4))

    monkeypatch.setattr(import_gguf, "import_gguf", pretend)
    assert cli.run(["import-gguf", "model.gguf", "out"]) == 0
    out = capsys.readouterr().out
    assert "out: LlamaForCausalLM, 272 tensors\n" in out
    assert "float16 (largest relative rounding error of a tensor: 2.1e-04)" in out
