"""The live demo in short: a canary is promoted, a damaged one is rolled back, and no request fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_run

pytest.importorskip("transformers", reason="the policy is a transformers model")
pytest.importorskip("fastapi", reason="the gateway needs the extra `gateway`")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_loop_is_closed_and_a_damaged_version_is_rolled_back(tmp_path: Path) -> None:
    options = ["--seconds", "0", "--longest", "3600", "--damaged-step", "5", "--learning-rate", "3e-3", "--alpha", "0.05"]
    arguments = [ROOT / "examples" / "live_demo", "--json", "--out", tmp_path / "out", *options]
    done = forked_run("torch", arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert results["failed"] == 0
    assert results["promoted"] >= 2
    assert results["damaged_rolled_back"]
    assert results["rollback_seconds"] is not None
    assert results["feedback_to_release_seconds"] is not None
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert sum(part["answers"] for part in results["parts"]) == results["answers"]
    told = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert_the_loop_is_better_closed_than_open(told)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "rolled the damaged version back" in page


def assert_the_loop_is_better_closed_than_open(told: list[dict[str, Any]]) -> None:
    """Check that the first promotion has the proof that a version that was learned is liked better than the one of the channel `open`.

    Ratings of a short run are few, so this asks for the proof that the gate needs, and not for the means at the end.
    """
    first = next(each["seq"] for each in told if (each["from"], each["event"]) == ("trainer", "ready"))
    number = next(n for n, each in enumerate(told) if (each["event"], each.get("outcome")) == ("gate-decided", "promote"))
    proof = [each for each in told[:number] if each["event"] == "gate-limit" and each["limit"].startswith("liked")][-1]
    assert proof["verdict"] == "holds"
    assert proof["low"] > 0
    swapped = [each for each in told if each["event"] == "swapped"]
    assert {each["seq"] for each in swapped if each["channel"] == "open"} <= {first}
    assert {each["seq"] for each in swapped if each["channel"] == "stable" and each["at"] < told[number]["at"]} <= {first}
    assert told[number]["seq"] > first
