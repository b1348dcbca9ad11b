"""The next writer removes what killed ones of its name left, and nothing else ever."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.tiny_llama import write_text, write_tiny_llama
from terrazzo import cli
from terrazzo.checkpoint.aside import LOCK_FILE, Aside
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.rules import RuleSet, resolve
from terrazzo.spec import Format

DEADLINE_S = 60


def abandoned(out: Path) -> Path:
    """As a killed process leaves it: the lock file is there, and nobody holds it."""
    aside = Aside.beside(out)
    os.close(aside.lock)
    (aside.folder / "shard-0.safetensors").write_bytes(b"half")
    return aside.folder


def write(out: Path) -> None:
    with CheckpointWriter(out, Format.GPTQ) as writer:
        writer.add_tensor("model.norm.weight", torch.ones(1))
        writer.commit(Description({}, RuleSet(), resolve(RuleSet(), [])))


def hidden(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f".{out.name}.*"))


def kill_while_it_writes(command: list[str], out: Path) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while not any((folder / LOCK_FILE).exists() for folder in hidden(out)):
        assert process.poll() is None, "it ended before it wrote anything"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_after_a_killed_run_the_next_one_cleans_up(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    model, out = write_tiny_llama(tmp_path / "model"), tmp_path / "out"
    text = ["--calibration", str(tmp_path / "text.txt"), "--calibration-tokens", "512"]
    run = ["quantize", str(model), str(out), *text, "--sequence-length", "32"]
    kill_while_it_writes([sys.executable, "-m", "terrazzo", *run], out)
    assert len(hidden(out)) == 1
    assert not out.exists()
    assert cli.run(run) == 0
    assert hidden(out) == []
    assert not (out / LOCK_FILE).exists()
    assert len(Checkpoint(out).plan.quantized) > 0


def test_the_folder_of_a_living_writer_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    living = Aside.beside(out)
    dead = abandoned(out)
    write(out)
    assert hidden(out) == [living.folder]
    assert not dead.exists()
    living.close()
    assert hidden(out) == []


def test_writers_of_other_names_stay(tmp_path: Path) -> None:
    dead = [abandoned(tmp_path / name) for name in ("out.b", "output", "ou", ".out")]
    write(tmp_path / "out")
    assert all(folder.is_dir() for folder in dead)


def test_what_proves_nothing_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bare, empty, file = (tmp_path / f".out.{name}" for name in ("bare", "empty", "file"))
    bare.mkdir()
    (bare / "precious").write_text("keep me")
    empty.mkdir()
    (empty / LOCK_FILE).write_text("")
    file.write_text("a file")
    pipe = tmp_path / ".out.pipe"
    pipe.mkdir()
    os.mkfifo(pipe / LOCK_FILE)
    write(out)
    assert hidden(out) == sorted([bare, empty, file, pipe])


def test_copies_renamed_folders_and_links_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dead = abandoned(out)
    copy, elsewhere = tmp_path / ".out.copy", tmp_path / "rescued"
    shutil.copytree(dead, copy)
    dead.rename(elsewhere)
    (tmp_path / f".out.{'l' * 8}").symlink_to(elsewhere)
    linked = tmp_path / ".out.linked"
    linked.mkdir()
    (linked / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    write(out)
    assert (elsewhere / "shard-0.safetensors").read_bytes() == b"half"
    assert len(hidden(out)) == 3


def test_what_another_host_left_stays(tmp_path: Path) -> None:
    dead = abandoned(tmp_path / "out")
    claim = json.loads((dead / LOCK_FILE).read_text())
    (dead / LOCK_FILE).write_text(json.dumps({**claim, "host": claim["host"] + "-other"}))
    write(tmp_path / "out")
    assert dead.is_dir()


def test_without_locks_writing_works_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = abandoned(tmp_path / "out")

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "out")
    assert hidden(tmp_path / "out") == [dead]
    assert sorted(file.name for file in (tmp_path / "out").iterdir() if file.name[0] == ".") == []
