"""Starts of a process; what they take is not judged, only that it adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from terrazzo.bench import startup
from terrazzo.bench.startup import Start, measure_startup, start_once
from terrazzo.engine.config import AUTO
from terrazzo.errors import CheckpointError, ConfigError


def test_the_phases_of_a_start_add_up(tmp_path: Path) -> None:
    start = start_once(write_tiny_llama(tmp_path), AUTO)
    phases = (start.interpreter, start.imports, start.load, start.first_token)
    assert all(phase > 0 for phase in phases)
    assert sum(phases) == pytest.approx(start.total)


def test_folders_take_turns_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Path] = []

    def fake(folder: Path, policy: object) -> Start:
        seen.append(folder)
        return Start(1.0, 1.0, 1.0, 1.0, float(len(seen)))

    monkeypatch.setattr(startup, "start_once", fake)
    one, two = Path("one"), Path("two")
    first, second = measure_startup([one, two], repeats=2)
    assert seen == [one, two] * 3
    assert first.phases["total"].values == (3.0, 5.0)
    assert second.phases["total"].values == (4.0, 6.0)


def test_a_folder_that_does_not_load_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no-such did not start: .*no-such"):
        start_once(tmp_path / "no-such", AUTO)


def test_no_repeats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repeats is 0"):
        measure_startup([tmp_path], repeats=0)
