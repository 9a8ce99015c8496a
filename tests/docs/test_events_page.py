"""The registry has every event that the source emits, and pages and deploy/ name only events and metrics that exist."""

from __future__ import annotations

import re
import sys

import pytest
from emitted_events import emitted
from markdown_blocks import PAGES, ROOT

sys.path.insert(0, str(ROOT / "docs" / "_site"))

import generated_parts

from deltawire.events.registry import GROUPS, REGISTRY
from deltawire.telemetry.metric_table import EVENTS, METRICS

EMITTED = emitted(ROOT / "src" / "deltawire")


def test_the_registry_has_every_event_that_is_emitted_and_no_other() -> None:
    assert REGISTRY.keys() == EMITTED.keys()
    assert sum(map(len, GROUPS.values())) == len(REGISTRY)


def test_the_registry_has_the_fields_of_every_event() -> None:
    for name, fields in EMITTED.items():
        assert fields <= {field.name for field in REGISTRY[name].fields}, name


@pytest.mark.parametrize("name", generated_parts.PARTS)
def test_the_tables_of_a_page_are_made_from_the_source(name: str) -> None:
    text = (generated_parts.DOCS / name).read_text(encoding="utf-8")
    assert text == generated_parts.page(name), "run `python docs/_site/generated_parts.py`"


def test_pages_name_only_events_that_exist() -> None:
    named = {(page.name, name) for page in PAGES for name in re.findall(r"\bevents? `([a-z-]+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert {(page, name) for page, name in named if name not in REGISTRY} == {
        ("operations.md", "exec-failed")
    }  # only `follow --json` has it


def test_every_meaning_is_a_sentence() -> None:
    for kind in REGISTRY.values():
        for text in [kind.meaning, *(field.meaning for field in kind.fields)]:
            assert text[0].isupper() or text[0] == "`", (kind.name, text)
            assert text.endswith("."), (kind.name, text)
            assert not text.startswith("So "), (kind.name, text)


def test_metrics_are_fed_by_events_and_fields_that_exist() -> None:
    for metric in METRICS.values():
        assert metric.changes, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert {change.event for change in metric.changes} <= REGISTRY.keys(), metric.name


NAMES = {*METRICS, EVENTS.full_name, "deltawire_build_info"}
SERIES = NAMES | {f"{name}_{part}" for name, metric in METRICS.items() if metric.type == "histogram" for part in ("bucket", "sum", "count")}


CALLS = {"deltawire_swap", "deltawire_status", "deltawire_lease"}
"""Calls of /collective_rpc that the pages name."""


def _metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bdeltawire_[a-z_]+[a-z]\b(?!\()", text)) - CALLS


def test_pages_name_only_metrics_that_exist() -> None:
    for page in PAGES:
        assert _metrics_in(page.read_text(encoding="utf-8")) <= SERIES, page.name


def test_rules_and_dashboard_use_only_metrics_that_exist() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "deploy").rglob("*.*") if path.suffix in (".json", ".yml")}
    assert {"deltawire.rules.yml", "deltawire.rules.test.yml", "deltawire.json", "prometheus.yml"} <= texts.keys()
    for name, text in texts.items():
        assert _metrics_in(text) <= SERIES, name


def test_every_metric_is_in_the_dashboard() -> None:
    shown = _metrics_in((ROOT / "deploy" / "grafana" / "deltawire.json").read_text(encoding="utf-8"))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in NAMES else name for name in shown}
    assert plain == NAMES
