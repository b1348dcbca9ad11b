"""Prefill and decode of a tiny model, by a clock that ticks when it is looked at."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from terrazzo import LLM, Checkpoint
from terrazzo.bench import offline
from terrazzo.bench.hardware import MemoryReader
from terrazzo.bench.offline import OfflineSpeed, Workload, measure
from terrazzo.engine.config import EngineConfig
from terrazzo.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def ticking(folder: Path, workload: Workload) -> tuple[LLM, OfflineSpeed]:
    """Between any two looks at the clock lies one second."""
    llm = LLM(folder, workload.engine_config(Checkpoint(folder)))
    ticks = count()

    def clock() -> float:
        return float(next(ticks))

    return llm, measure(llm, workload, MemoryReader(0, clock), clock)


def test_every_batch_has_all_its_tokens_in_every_repeat(folder: Path) -> None:
    llm, speed = ticking(folder, Workload((1, 3), input_len=20, output_len=5, repeats=2))
    assert [each.batch for each in speed.batches] == [1, 3]
    assert [each.prefill.values for each in speed.batches] == [(20.0, 20.0), (60.0, 60.0)]
    assert [each.decode.values for each in speed.batches] == [(5.0, 5.0), (15.0, 15.0)]
    assert len(speed.memory_read.values) == 2
    assert not llm.engine.has_work
    assert llm.engine.stats.prefix_hit_tokens == 0


def test_a_batch_whose_prompts_take_many_steps_still_decodes_as_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "STEP_TOKENS", 16)
    _, speed = ticking(folder, Workload((4,), input_len=20, output_len=6, repeats=1))
    assert speed.batches[0].decode.values == (24.0,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batches": (1, 0)}, "batch is 0"),
        ({"batches": ()}, "no batch"),
        ({"input_len": 0}, "input_len is 0"),
        ({"output_len": -1}, "output_len is -1"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_illegal_numbers_are_named(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Workload(**changes)  # type: ignore[arg-type]


def test_sequences_longer_than_the_model_knows_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="need 66 positions, and the model knows 64"):
        Workload((1,), input_len=40, output_len=24).engine_config(Checkpoint(folder))


def test_a_cache_that_is_too_small_is_refused_before_anything_runs(folder: Path) -> None:
    workload = Workload((4,), input_len=20, output_len=5)
    llm = LLM(folder, EngineConfig(max_num_seqs=4, kv_cache_tokens=64, max_model_len=27))
    with pytest.raises(ConfigError, match="batch 4 needs 128 tokens of KV cache, and memory holds"):
        measure(llm, workload, MemoryReader(0))
