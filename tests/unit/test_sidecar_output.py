"""The lines that `deltawire sidecar` prints about events, and how wrong options are reported."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.cli.commands.sidecar import _Listener
from deltawire.events import Event


def told(capsys: pytest.CaptureFixture[str], name: str, *, verbose: bool = False, **fields: str | int | float | None) -> str:
    _Listener(verbose)(Event(name, fields))
    return " ".join(capsys.readouterr().err.split())


def test_only_what_is_tried_again_is_said_to_be_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "sync-failed", error="StoreDenied", reason="no access.", retryable=0) == ""  # the command ends with this error
    assert "will try again: no answer." in told(capsys, "sync-failed", error="StoreUnavailable", reason="no answer.", retryable=1)
    assert "will try again" in told(capsys, "swap-failed", error="EngineRefused", reason="no.")


def test_a_quarantined_server_is_not_called_unused(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, "engine-held", reason="its weights are in an unknown state, because a swap failed")
    assert "the server answers no requests: its weights are in an unknown state" in line


def test_verbose_lines_have_rounded_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, "staged", verbose=True, seconds=0.123456789012345, time=1763300000.123456, small=1.23456789e-05, seq=1234567)
    assert "staged seconds=0.1235 time=1763300000 small=1.235e-05 seq=1234567" in line


def test_a_choice_that_does_not_exist_is_reported_in_plain_words() -> None:
    done = CliRunner().invoke(app, ["sidecar", "--engine", "http://127.0.0.1:1", "--from", "a", "--kv-cache", "marks", "--json"])
    assert done.exit_code == 2
    assert "'marks' is not one of" in done.output
    assert "Value error" not in done.output


def test_the_help_names_every_check_of_the_canary() -> None:
    text = CliRunner().invoke(app, ["sidecar", "--help"], env={"COLUMNS": "300"}).output
    (line,) = [line for line in text.splitlines() if "--canary" in line]
    assert all(word in line for word in ("(off)", "(self)", "(recorded"))
