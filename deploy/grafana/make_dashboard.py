"""Write deltawire.json, the dashboard for Grafana.

    python deploy/grafana/make_dashboard.py

The panels stand here once, as lines. A test compares the file with what this program writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("deltawire.json")
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_RUN = '{run=~"$run"}'


def _p95(metric: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric}_bucket{_RUN}[$__rate_interval])))"


def _mean(metric: str, by: str) -> str:
    selected = f"{_RUN}[$__rate_interval]"
    return f"sum by ({by}) (rate({metric}_sum{selected})) / sum by ({by}) (rate({metric}_count{selected}))"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{_RUN}[$__rate_interval]))"


ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Run": [
        ("Newest version", "none", [(f"max(deltawire_published_version{_RUN})", "published")]),
        ("Since the newest version", "s", [(f"time() - max(deltawire_last_commit_timestamp_seconds{_RUN})", "age")]),
        ("Step", "none", [(f"max(deltawire_trained_step{_RUN})", "step")]),
        ("Reward and loss", "none", [(f"deltawire_reward{_RUN}", "reward"), (f"deltawire_loss{_RUN}", "loss")]),
    ],
    "Members": [
        ("Version of each member", "none", [(f"deltawire_applied_version{_RUN}", "{{member}} {{instance}}")]),
        ("Versions behind", "none", [(f"deltawire_version_lag{_RUN}", "{{member}} {{instance}}")]),
        ("Since the last sync", "s", [(f"time() - deltawire_last_sync_timestamp_seconds{_RUN}", "{{member}} {{instance}}")]),
        ("Quarantined, fenced", "none", [(f"deltawire_engine_quarantined{_RUN}", "{{instance}}"), (f"deltawire_fenced{_RUN}", "fenced")]),
        ("Pause, 95%", "s", [(_p95("deltawire_pause_seconds", "engine"), "{{engine}}")]),
        ("From publishing to serving, 95%", "s", [(_p95("deltawire_behind_seconds", "run"), "{{run}}")]),
        ("Phases of a swap, mean", "s", [(_mean("deltawire_swap_seconds", "phase"), "{{phase}}")]),
        ("Phases of a sync, mean", "s", [(_mean("deltawire_sync_seconds", "phase"), "{{phase}}")]),
        ("Fetched", "Bps", [(_rate("deltawire_fetched_bytes_total", "source"), "{{source}}")]),
        ("Generated tokens per second", "none", [(_rate("deltawire_generated_tokens_total", "member"), "{{member}}")]),
    ],
    "Publisher": [
        ("Phases of publishing, mean", "s", [(_mean("deltawire_publish_seconds", "phase"), "{{phase}}")]),
        (
            "Size of a version",
            "bytes",
            [
                (f"deltawire_delta_bytes{_RUN}", "delta"),
                (f"deltawire_anchor_bytes{_RUN}", "full checkpoint"),
                (f"deltawire_state_bytes{_RUN}", "all weights"),
            ],
        ),
        ("Changed weights", "none", [(f"deltawire_changed_weights{_RUN}", "weights")]),
        ("Bits per changed weight", "none", [(f"deltawire_bits_per_change{_RUN}", "bits")]),
        (
            "Uploaded and collected",
            "Bps",
            [
                (_rate("deltawire_published_bytes_total", "kind"), "{{kind}}"),
                (_rate("deltawire_collected_bytes_total", "run"), "collected"),
            ],
        ),
    ],
    "Training": [
        ("Phases of a step, mean", "s", [(_mean("deltawire_train_seconds", "phase"), "{{phase}}")]),
        ("Staleness in steps, 95%", "none", [(_p95("deltawire_staleness_steps", "run"), "{{run}}")]),
        ("Results per second", "none", [(_rate("deltawire_rollouts_total", "result"), "{{result}}")]),
        ("Accepted tokens per second", "none", [(_rate("deltawire_accepted_tokens_total", "run"), "{{run}}")]),
        (
            "Mismatch in nats per token",
            "none",
            [(f"deltawire_mismatch_kl{_RUN}", "all"), (f"deltawire_member_mismatch_kl{_RUN}", "{{of}}")],
        ),
        ("Routing that could not be replayed", "percentunit", [(f"deltawire_routed_experts_missing_ratio{_RUN}", "share")]),
    ],
    "Relays": [
        ("Version of each region", "none", [(f"deltawire_relayed_version{_RUN}", "{{instance}}")]),
        ("Versions behind", "none", [(f"deltawire_relay_behind{_RUN}", "{{instance}}")]),
        ("Into the region", "Bps", [(_rate("deltawire_relayed_bytes_total", "instance, how"), "{{instance}} {{how}}")]),
    ],
    "Channels": [
        ("Commit of each channel", "none", [(f"max by (channel) (deltawire_channel_commit{_RUN})", "{{channel}}")]),
        ("Promotions and rollbacks", "none", [(f"max by (channel, kind) (deltawire_channel_moves_total{_RUN})", "{{channel}} {{kind}}")]),
    ],
    "Gates": [
        ("Answers of the canary", "none", [(f"deltawire_gate_answers{_RUN}", "{{instance}}")]),
        ("Limits", "none", [(f"deltawire_gate_limit_mean{_RUN}", "{{limit}} {{group}}")]),
        ("What the test has proved", "none", [(f"deltawire_gate_limit_difference{_RUN}", "{{limit}} {{bound}}")]),
        ("Limits that hold (1) or are broken (-1)", "none", [(f"deltawire_gate_limit_verdict{_RUN}", "{{limit}}")]),
        ("Decisions", "none", [(f"deltawire_gate_decisions_total{_RUN}", "{{outcome}}")]),
    ],
    "Gateways": [
        ("Answers per second", "none", [(_rate("deltawire_gateway_answers_total", "route, channel"), "{{route}} {{channel}}")]),
        (
            "Answers per second by version and channel",
            "none",
            [(_rate("deltawire_gateway_version_answers_total", "seq, channel"), "commit {{seq}} {{channel}}")],
        ),
        ("Time of an answer", "s", [(_p95("deltawire_gateway_answer_seconds", "route"), "{{route}}")]),
        ("Engines that answer", "none", [(f"deltawire_gateway_engine_up{_RUN}", "{{engine}}")]),
        (
            "Recorded per second",
            "none",
            [
                (_rate("deltawire_interactions_stored_total", "run"), "answers"),
                (_rate("deltawire_feedback_stored_total", "run"), "feedback"),
                (_rate("deltawire_interactions_unusable_total", "run"), "answers that cannot be recorded"),
            ],
        ),
        ("Age of answers when feedback comes, 95%", "s", [(_p95("deltawire_feedback_age_seconds", "metric"), "{{metric}}")]),
        ("Time to store feedback", "s", [(_p95("deltawire_store_feedback_seconds", "run"), "95%")]),
        ("Refused per second", "none", [(_rate("deltawire_gateway_refusals_total", "reason"), "{{reason}}")]),
        ("Recording stopped", "none", [(f"deltawire_recording_stopped{_RUN}", "{{instance}}")]),
    ],
    "Faults": [
        (
            "Failures per second",
            "none",
            [
                (_rate("deltawire_publish_failures_total", "reason"), "publish {{reason}}"),
                (_rate("deltawire_sync_failures_total", "reason"), "sync {{reason}}"),
                (_rate("deltawire_relay_failures_total", "reason"), "relay {{reason}}"),
            ],
        ),
        (
            "Rare things per second",
            "none",
            [
                (_rate("deltawire_digest_mismatch_total", "run"), "not as it should be"),
                (_rate("deltawire_rollbacks_total", "run"), "rolled back"),
                (_rate("deltawire_store_retries_total", "run"), "requests repeated"),
                (_rate("deltawire_member_deaths_total", "run"), "members that died"),
            ],
        ),
        ("Warnings and errors per second", "none", [(_rate("deltawire_events_total", "event, level"), "{{level}} {{event}}")]),
        ("Releases", "none", [(f"count by (version) (deltawire_build_info{_RUN})", "{{version}}")]),
    ],
}
"""The rows of the dashboard: for each panel its title, its unit, and its queries with their legends."""


def dashboard() -> str:
    """Return the dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, entries in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        y += 1
        for index, (title, unit, queries) in enumerate(entries):
            position = {"h": 7, "w": 8, "x": 8 * (index % 3), "y": y + 7 * (index // 3)}
            panels.append(_panel(title, unit, queries, position))
        y += 7 * -(-len(entries) // 3)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": _SOURCE,
            "query": "label_values(deltawire_build_info, run)",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "label": "Run",
        },
    ]
    made = {
        "title": "deltawire",
        "uid": "deltawire",
        "tags": ["deltawire"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def _panel(title: str, unit: str, queries: list[tuple[str, str]], position: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"datasource": _SOURCE, "expr": expression, "legendFormat": legend, "refId": chr(ord("A") + index)}
        for index, (expression, legend) in enumerate(queries)
    ]
    defaults = {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 5, "showPoints": "auto"}}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


if __name__ == "__main__":
    FILE.write_text(dashboard(), encoding="utf-8")
