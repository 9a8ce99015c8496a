"""Feedback for a metric that nobody declared is noticed, and refused if the gateway is strict."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_scene import gateway, serving, stored_feedback
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import RequestMalformed
from deltawire.events import Event
from deltawire.format.records.live_records import Metric, Metrics
from deltawire.gateway.metric_names import _MOST_TOLD, MetricNames
from deltawire.store import Store
from deltawire.store.live_keys import metrics_key


def declare(store: Store, *names: str) -> None:
    run = ReaderOptions().open_log(store).run.id
    store.put_if_absent(metrics_key(0), Metrics(run, 0, "ab" * 16, tuple(map(Metric, names)), 1).to_bytes())


@pytest.mark.parametrize("is_strict", [False, True])
def test_feedback_for_an_undeclared_metric_is_told_or_refused(is_strict: bool, policy: TinyPolicy, store: Store, tmp_path: Path) -> None:
    declare(store, "thumbs", "other")
    with (
        serving(ScriptedEngine(str(policy.first.seq)).serve) as engine,
        gateway(store, tmp_path, engine, strict_metrics=is_strict) as scene,
    ):
        answer = scene.chat()[1]["id"]
        right = scene.post("/feedback", {"inference_id": answer, "metric_name": "thumbs", "value": True})
        assert right[0] == 200
        assert right[1].keys() == {"feedback_id"}
        for _ in range(2):
            status, told, _ = scene.post("/feedback", {"inference_id": answer, "metric_name": "thumb", "value": True})
            if is_strict:
                assert (status, told["error"]["type"]) == (400, "RequestMalformed")
                assert "'thumb' is not declared; declared are 'other', 'thumbs'." in told["error"]["message"]
            else:
                assert (status, told["declared"]) == (200, False)
        dry = scene.post("/feedback", {"inference_id": answer, "metric_name": "thumb", "value": True, "dryrun": True})
        assert dry[0] == (400 if is_strict else 200)
        event = {"name": "gen_ai.evaluation.result", "attributes": []}
        for name, value in (("gen_ai.evaluation.name", "thmbs"), ("gen_ai.evaluation.score.label", "yes"), ("gen_ai.response.id", answer)):
            event["attributes"].append({"key": name, "value": {"stringValue": value}})
        spans = {"resourceSpans": [{"scopeSpans": [{"spans": [{"events": [event]}]}]}]}
        status, told, _ = scene.post("/v1/traces", spans)
        assert (status, told.get("partialSuccess", {}).get("rejectedSpans")) == (200, "1" if is_strict else None)
        undeclared = [event.fields["metric"] for event in scene.events if event.name == "metric-undeclared"]
        assert undeclared == ([] if is_strict else ["thumb", "thmbs"])
        stored = [one.metric for file in stored_feedback(store) for one in file.feedback]
        assert stored == (["thumbs"] if is_strict else ["thumbs", "thumb", "thumb", "thmbs"])


def test_without_a_declaration_no_name_is_wrong_unless_the_gateway_is_strict() -> None:
    events: list[Event] = []
    assert not MetricNames(dict, on_event=events.append).is_undeclared("thumb")
    assert events == []
    with pytest.raises(RequestMalformed, match="no metric is declared yet"):
        MetricNames(dict, is_strict=True).is_undeclared("thumb")


def test_callers_cannot_make_the_gateway_tell_names_without_end() -> None:
    events: list[Event] = []
    declared = {f"metric {number}": Metric(f"metric {number}") for number in range(50)}
    names = MetricNames(lambda: declared, on_event=events.append)
    for number in range(2 * _MOST_TOLD):
        assert names.is_undeclared(f"name {number}")
        assert names.is_undeclared(f"name {number}")
    assert [event.fields["metric"] for event in events] == [f"name {number}" for number in range(_MOST_TOLD)]
    with pytest.raises(RequestMalformed) as caught:
        MetricNames(lambda: declared, is_strict=True).is_undeclared("x" * 10_000)
    assert "and 30 others" in str(caught.value)
    assert len(str(caught.value)) < 1000
