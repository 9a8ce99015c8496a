"""The page as one file holds its data, runs only its own scripts, and is never half written."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from shown_run import MARKUP, ShownRun

from deltawire.dashboard import Observer, write_report
from deltawire.dashboard.single_file import report_text


@pytest.fixture
def text(tmp_path: Path) -> str:
    run = ShownRun(tmp_path / "run", name=f"</script>{MARKUP}")
    run.publish({"note": f"</script>{MARKUP}"})
    with Observer(run.store) as observer:
        observer.look()
        found = report_text(observer, details=1, notes=[f"a note: {MARKUP}"])
    run.close()
    return found


def test_the_data_cannot_leave_their_element(text: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["status"]["run"] == f"</script>{MARKUP}"
    assert data["notes"] == [f"a note: {MARKUP}"]
    assert MARKUP not in text
    assert list(data["details"]) == ["2"]


def test_the_policy_allows_exactly_the_scripts_of_the_page(text: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    allowed = set(re.findall(r"'(sha256-[^']+)'", policy[1]))
    inline = re.findall(r"<script>(.*?)</script>", text, re.DOTALL) + re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert allowed == {"sha256-" + base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inline}
    assert policy[1].startswith("default-src 'none'")
    assert "src=" not in text.replace("src=x", "")


def test_a_report_replaces_a_file_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ShownRun(tmp_path / "run")
    target = tmp_path / "out" / "run.html"
    with Observer(run.store) as observer:
        observer.look()
        size = write_report(observer, target)
        first = target.read_bytes()
        assert len(first) == size

        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="full"):
            write_report(observer, target)
    assert target.read_bytes() == first
    assert [path.name for path in target.parent.iterdir()] == ["run.html"]
    run.close()
