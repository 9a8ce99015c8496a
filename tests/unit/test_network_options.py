"""Commands take rates with units, and pass them on to the store."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.cli.options.network import bytes_per_second, store_options
from deltawire.rl.member import MemberOptions
from deltawire.store import StoreOptions
from deltawire.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200Mbit", 25e6),
        ("200Mbit/s", 25e6),
        ("8bit", 1.0),
        ("25MB", 25e6),
        ("1.5GiB", 1.5 * 2**30),
        ("24MiB/s", 24 * 2**20),
        ("10kB", 1e4),
        ("1kibit", 128.0),
        ("1000B", 1000.0),
    ],
)
def test_rates_have_units(text, rate):
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "200", "0Mbit", "-1MB", "1e9B", "1mbit", "1 MB", "MB", "nanB", "infB", "1TB", "9" * 99 + "B"])
def test_other_texts_are_not_rates(text):
    assert bytes_per_second(text) is None


def test_commands_without_limits_use_the_usual_options():
    assert store_options(None, None) is None
    assert store_options("8Mbit", 5) == StoreOptions(max_rate=1e6, max_requests=5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "checkpoint", "chain"],
        ["pull", "chain", "directory"],
        ["follow", "chain", "directory"],
        ["member", "--from", "chain", "--env", "m:f"],
        ["fleet", "1", "--from", "chain", "--env", "m:f"],
        ["sidecar", "--from", "chain", "--engine", "http://127.0.0.1:1"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("limit", [["--max-rate", "fast"], ["--max-requests", "0"], ["--max-requests", "nan"]], ids=" ".join)
def test_wrong_limits_are_wrong_usage(arguments, limit):
    done = CliRunner().invoke(app, [*arguments, *limit])
    assert done.exit_code == 2
    assert limit[0] in done.output


def test_members_in_other_processes_get_the_limits():
    options = MemberOptions("chain", "transformers", ("m:f",), store=StoreOptions(max_rate=1e6 / 3, max_requests=2.5))
    arguments = options.to_arguments()
    rate = bytes_per_second(arguments[arguments.index("--max-rate") + 1])
    assert rate == pytest.approx(1e6 / 3, abs=1e-3)
    assert arguments[arguments.index("--max-requests") + 1] == "2.5"
    assert "--max-rate" not in MemberOptions("chain", "transformers", ("m:f",)).to_arguments()


def test_a_command_opens_its_store_with_the_limits(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("deltawire.store.copies.locations.open_store", lambda url, **given: seen.append(given["options"]) or MemoryStore())
    for arguments in (["pull", "chain", str(tmp_path / "out")], ["follow", "chain", str(tmp_path / "mirror"), "--once"]):
        CliRunner().invoke(app, [*arguments, "--max-rate", "8Mbit", "--max-requests", "5"])
    assert seen == 2 * [StoreOptions(max_rate=1e6, max_requests=5)]
