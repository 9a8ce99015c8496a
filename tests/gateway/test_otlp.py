"""The exporters of OpenTelemetry's own SDK send evaluation results to the gateway unchanged, and this module reads what they write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_scene import Scene, stored_feedback

from deltawire.errors import RequestMalformed
from deltawire.gateway.otlp import EVENT, EvaluationResult, read_results, response_body

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter is not installed")

from google.protobuf.json_format import MessageToJson
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor


def attributes(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"gen_ai.evaluation.name": "thumbs", "gen_ai.evaluation.score.value": value, "gen_ai.response.id": name, **more}


def test_the_log_exporter_and_the_span_exporter_send_feedback(scene: Scene) -> None:
    name = scene.chat()[1]["id"]
    logs = LoggerProvider(shutdown_on_exit=False)
    logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(f"{scene.url}/v1/logs")))
    logger = logs.get_logger("judge")
    logger.emit(LogRecord(timestamp=5, event_name=EVENT, attributes=attributes(name, 0.5)))
    logger.emit(LogRecord(timestamp=5, event_name=EVENT, attributes=attributes(name, 0.5)))  # the same again counts once
    logger.emit(LogRecord(timestamp=6, event_name="other", attributes=attributes(name, 0.75)))
    logger.emit(LogRecord(timestamp=7, event_name=EVENT, attributes=attributes("0190a0b0-c0d0-7000-8000-000000000001", 1)))  # unknown
    logs.shutdown()
    spans = TracerProvider(shutdown_on_exit=False)
    spans.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{scene.url}/v1/traces")))
    with spans.get_tracer("judge").start_as_current_span("evaluate") as span:
        span.add_event(EVENT, attributes(name, 1.0, **{"deltawire.revision": 2}))
    spans.shutdown()
    found = [(each.metric, each.value, each.revision, each.inference) for file in stored_feedback(scene.store) for each in file.feedback]
    assert found == [("thumbs", 0.5, 0, name[9:]), ("thumbs", 1.0, 2, name[9:])]


def request(*results: dict[str, Any]) -> Any:
    """Return a request as the protobuf library makes it."""
    made = ExportLogsServiceRequest()
    records = made.resource_logs.add().scope_logs.add().log_records
    for number, each in enumerate(results):
        record = records.add(time_unix_nano=number, event_name=EVENT, trace_id=b"t" * 16, span_id=b"s" * 8, severity_text="x" * 300)
        for name, value in each.items():
            held = record.attributes.add(key=name).value
            kind = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value", bytes: "bytes_value"}[type(value)]
            setattr(held, kind, value)
    return made


def test_protobuf_and_json_are_read_as_the_protobuf_library_writes_them() -> None:
    values = {"text": "größer", "yes": True, "no": False, "few": -3, "many": 2**62, "part": -0.25, "blob": b"\0\xff"}
    made = request(values, {}, {"a": "b"})
    expected = [
        EvaluationResult(each, number, (b"t" * 16 + b"s" * 8).hex())
        for number, each in enumerate([{**values, "blob": "AP8="}, {}, {"a": "b"}])
    ]
    assert read_results(made.SerializeToString(), "application/x-protobuf", is_traces=False) == expected
    as_json = read_results(MessageToJson(made).encode(), "application/json", is_traces=False)
    assert [{name: value for name, value in each.attributes.items() if name != "blob"} for each in as_json] == [
        {name: value for name, value in each.attributes.items() if name != "blob"} for each in expected
    ]


def test_results_that_cannot_be_used_are_counted_in_the_answer(scene: Scene) -> None:
    name = scene.chat()[1]["id"]
    made = request(attributes(name, 1.0), attributes("nobody", 1.0), {"gen_ai.response.id": name}, {"gen_ai.evaluation.name": "thumbs"})
    status, data, _ = scene.post("/v1/logs", made.SerializeToString(), {"content-type": "application/x-protobuf"})
    answer = ExportLogsServiceResponse.FromString(data)
    assert (status, answer.partial_success.rejected_log_records) == (200, 3)
    assert "RequestMalformed" in answer.partial_success.error_message
    status, answer, _ = scene.post("/v1/logs", MessageToJson(request(attributes("nobody", 1.0))).encode())
    assert (status, answer["partialSuccess"]["rejectedLogRecords"]) == (200, "1")
    assert scene.post("/v1/logs", b"\xff\xff", {"content-type": "application/x-protobuf"})[0] == 400
    assert response_body(0, "", "application/x-protobuf", is_traces=False) == b""
    assert len([each for file in stored_feedback(scene.store) for each in file.feedback]) == 1


LONG = "9" * 5000
JUNK: dict[str, dict[str, Any]] = {
    "timeUnixNano must be a whole number of at most 64 bits": {"timeUnixNano": 1e999},
    "timeUnixNano must be a whole number": {"timeUnixNano": [1]},
    "timeUnixNano must be a": {"timeUnixNano": LONG},
    "doubleValue must be a number": {"attributes": [{"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 10**400}}]},
    "intValue must be a whole number of at most 64 bits": {"attributes": [{"key": "a", "value": {"intValue": LONG}}]},
    "intValue must be": {"attributes": [{"key": "a", "value": {"intValue": 1 << 64}}]},
    "attributes must be a list of objects": {"attributes": [7]},
    "attributes must be a list": {"attributes": {"key": 1}},
    "the key of an attribute must be a text": {"attributes": [{"value": {}}]},
    "the value of an attribute must be an object": {"attributes": [{"key": "a", "value": 7}]},
}


@pytest.mark.parametrize("told", JUNK)
def test_what_no_exporter_sends_is_refused_with_the_field_and_what_it_must_be(told: str) -> None:
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": EVENT, **JUNK[told]}]}]}]}
    with pytest.raises(RequestMalformed, match=f"exporter sends: {told}") as caught:
        read_results(json.dumps(body).replace("Infinity", "1e999").encode(), "application/json", is_traces=False)
    assert len(str(caught.value)) < 400
    assert not any(word in str(caught.value) for word in ("Error", "sys.", "NoneType", "int("))


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\xff", b"\x0a", b"\x0b"])
def test_what_is_no_protobuf_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(RequestMalformed, match=r"it is not a protobuf message with traces\. Correct the request") as caught:
        read_results(data, "application/x-protobuf", is_traces=True)
    assert "Error(" not in str(caught.value)


def test_json_with_the_wrong_content_type_is_told_the_right_one() -> None:
    with pytest.raises(RequestMalformed, match="Send JSON with the header content-type: application/json"):
        read_results(b' {"resourceLogs": []}', "application/x-www-form-urlencoded", is_traces=False)
