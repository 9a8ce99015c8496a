"""The help of commands, and the page of the documentation that is made from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from test_cli import run

_REFERENCE = Path(__file__).parents[2] / "docs" / "_site" / "cli_reference.py"


def test_help_shows_flags_without_types_and_arguments_without_braces() -> None:
    text = run("publish", "--help", columns=80).stdout
    assert "deltawire publish [OPTIONS] CKPT URL" in text
    assert "<bool>" not in text + run("--help", columns=80).stdout
    assert "PUBKEY|FILE" in text


def test_the_reference_names_choices_and_defaults() -> None:
    spec = importlib.util.spec_from_file_location("cli_reference", _REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    lines = reference.page().splitlines()
    for expected, default in (
        ("| `--pause keep|wait|abort` |", "`keep`"),
        ("| `--kv-cache drop|keep|mark` |", "`drop`"),
        ("| `--poll SECONDS` |", "`1.0`"),
        ("| `--no-pin`, `--pin` |", "`--pin`"),
    ):
        assert any(line.startswith(expected) and line.endswith(f" Default: {default}. |") for line in lines), expected
    assert any(line.startswith("| `--trust PUBKEY|FILE` |") for line in lines)
    assert any(line.startswith("| `--full` |") and "Default" not in line for line in lines)
