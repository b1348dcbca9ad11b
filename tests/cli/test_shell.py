"""The shell: exit statuses, one-line errors, help without heavy imports."""

from __future__ import annotations

import pytest

import terrazzo
from terrazzo import cli
from terrazzo.errors import ConfigError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == terrazzo.__version__


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    assert f"terrazzo {command}" in capsys.readouterr().out


def test_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["quantise"]) == 2
    assert "quantise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["inspect", "no/such/folder"], "no/such/folder"),
        (["generate", "no/such/folder", "Hello"], "no/such/folder"),
        (["serve", "no/such/folder"], "no/such/folder"),
        (["quantize", "no/such/folder", "out"], "no/such/folder"),
        (["inspect"], "FOLDER"),
    ],
)
def test_bad_input_is_one_message_and_status_two(
    arguments: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert seen in err
    assert "Traceback" not in err


def test_a_user_error_is_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ConfigError("config.json: hidden_size is missing; add it")

    monkeypatch.setattr(cli, "app", fail)
    assert cli.run(["inspect", "folder"]) == 2
    assert capsys.readouterr().err == "terrazzo: config.json: hidden_size is missing; add it\n"


def test_an_interrupt_has_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    assert cli.run(["serve", "folder"]) == 130
