"""A real Prometheus reads our metrics, and its tool accepts the rules and every query of the dashboard."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import free_port, program_or_skip, running

from deltawire.events import Event
from deltawire.telemetry import PrometheusMetrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "grafana"))

import make_dashboard

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MISSING = "Debian's package prometheus is not installed"


def promtool(*arguments: object) -> None:
    done = subprocess.run([program_or_skip("promtool", MISSING), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_configuration_and_the_rules():
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then():
    promtool("test", "rules", DEPLOY / "prometheus" / "deltawire.rules.test.yml")


def test_the_dashboard_is_what_its_program_writes():
    assert make_dashboard.FILE.read_text(encoding="utf-8") == make_dashboard.dashboard()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, PrometheusMetrics]]:
    """Run Prometheus, which reads our metrics. Yield its URL and the metrics."""
    program = program_or_skip("prometheus", MISSING)
    with PrometheusMetrics(0, member="member-0") as metrics:
        rules, port = DEPLOY / "prometheus" / "deltawire.rules.yml", free_port()
        target = {"targets": [f"127.0.0.1:{metrics.port}"], "labels": {"run": "run-7"}}
        scraped = {"job_name": "deltawire", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": [target]}
        config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(rules)], "scrape_configs": [scraped]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        with running([*command, f"--web.listen-address=127.0.0.1:{port}"], tmp_path / "log", lambda: is_ready(port), tmp_path):
            yield f"http://127.0.0.1:{port}", metrics


def is_ready(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2).close()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return False
    return True


def ask(url: str, query: str) -> list[Any]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


def wait_for(url: str, query: str) -> list[Any]:
    """Ask until there is a result."""
    for _ in range(2400):  # Prometheus reads once a second; a busy machine may need many times as long
        if found := ask(url, query):
            return found
        time.sleep(0.05)
    pytest.fail(f"Prometheus has no result for {query}")


def test_prometheus_reads_the_metrics_and_raises_an_alert(prometheus: tuple[str, PrometheusMetrics]):
    url, metrics = prometheus
    metrics(Event("swapped", {"engine": "vllm", "updates": 7, "pause_seconds": 0.004}))
    metrics(Event("fenced", {"epoch": 3}))
    (found,) = wait_for(url, 'deltawire_applied_version{member="member-0"}')
    assert (found["metric"]["run"], found["value"][1]) == ("run-7", "7")
    (found,) = wait_for(url, 'deltawire_pause_seconds_bucket{le="0.005"} == 1')
    assert found["metric"]["engine"] == "vllm"
    (found,) = wait_for(url, 'ALERTS{alertstate="firing"}')
    assert found["metric"]["alertname"] == "DeltawireFenced"


def test_prometheus_understands_every_query_of_the_dashboard(prometheus: tuple[str, PrometheusMetrics]):
    url, _ = prometheus
    queries = [query for panels in make_dashboard.ROWS.values() for _, _, parts in panels for query, _ in parts]
    for query in queries:
        ask(url, query.replace("$__rate_interval", "1m").replace("$run", ".*"))  # an error is no status 200
    assert len(queries) > 30
