"""What goes along into a new folder, and what a hostile folder would like to take along."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.checkpoint.companions import companion_files
from terrazzo.errors import ConfigError


def test_weights_configs_and_hidden_files_stay(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", ".secret", "tokenizer.json", "LICENSE"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in companion_files(tmp_path)] == ["LICENSE", "tokenizer.json"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_link_out_of_the_folder_is_refused_by_name(tmp_path: Path, depth: int) -> None:
    secret, folder = tmp_path / "id_rsa", tmp_path / "model"
    secret.write_text("private")
    folder.mkdir()
    if depth == 2:
        (folder / ".step").symlink_to(secret)
    (folder / "tokenizer.json").symlink_to(secret if depth == 1 else folder / ".step")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a link to .*id_rsa, outside"):
        companion_files(folder)


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "LICENSE").write_text("free")
    (folder / "COPYING").symlink_to("LICENSE")
    (tmp_path / "alias").symlink_to(folder)
    names = [file.name for file in companion_files(tmp_path / "alias")]
    assert names == ["COPYING", "LICENSE"]


def test_snapshots_of_the_hub_link_to_their_blobs_and_nowhere_else(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    assert [file.name for file in companion_files(snapshot)] == ["tokenizer.json"]
    (repository / "refs").write_text("main")
    (snapshot / "NOTICE").symlink_to("../../refs")
    with pytest.raises(ConfigError, match="NOTICE is a link"):
        companion_files(snapshot)
