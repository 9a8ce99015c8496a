"""The live demo in short: a canary is promoted, a damaged one is rolled back, and no request fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

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
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "rolled the damaged version back" in page
