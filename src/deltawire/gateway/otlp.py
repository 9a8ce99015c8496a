"""Reads the event `gen_ai.evaluation.result` from what OpenTelemetry exporters send: log records, or events of spans.

Exporters send protobuf or JSON over HTTP. This module reads only the few fields that are needed. Nothing in a message makes it take more
memory than the message itself.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestMalformed
from .http.bodies import parse_object
from .http.memory import Reservation

EVENT = "gen_ai.evaluation.result"
_MOST_EVENTS = 10_000
_MOST_DIGITS = 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One event `gen_ai.evaluation.result`.

    Parameters
    ----------
    attributes
        Its attributes: texts, numbers and booleans by name.
    time
        When it happened, in nanoseconds. 0 if the exporter does not tell.
    span
        The ids of its trace and span, in hexadecimal digits.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    time: int = 0
    span: str = ""


def read_results(body: bytes, kind: str, *, is_traces: bool, memory: Reservation | None = None) -> list[EvaluationResult]:
    """Return the evaluation results in the body of a request. Other events are left out. Raises `RequestMalformed` and `GatewayFull`.

    Parameters
    ----------
    body
        The body.
    kind
        Its content type.
    is_traces
        Whether it has spans. Otherwise it has log records.
    memory
        The memory of the request.
    """
    try:
        found = _from_json(parse_object(body, memory), is_traces) if "json" in kind else _from_protobuf(body, is_traces)
        results = []
        for each in found:
            results.append(each)
            if len(results) > _MOST_EVENTS:
                raise RequestMalformed(f"the request has more than {_MOST_EVENTS:,} evaluation results.")
        return results
    except _Unexpected as error:
        raise RequestMalformed(f"the body is not what an OpenTelemetry exporter sends: {error}.") from None
    except (ValueError, IndexError):  # IndexError: a number at the end lacks bytes
        what = "traces" if is_traces else "logs"
        hint = "Send JSON with the header content-type: application/json." if body.lstrip().startswith(b"{") else None
        message = f"the body is not what an OpenTelemetry exporter sends: it is not a protobuf message with {what}."
        raise RequestMalformed(message, hint=hint) from None


def response_body(rejected: int, why: str, kind: str, *, is_traces: bool) -> bytes:
    """Return the answer for an exporter, which says how many results were refused, and why."""
    if "json" in kind:
        from .http.bodies import dump

        name = "rejectedSpans" if is_traces else "rejectedLogRecords"
        return dump({"partialSuccess": {name: str(rejected), "errorMessage": why}} if rejected else {})
    text = why.encode()[:1000]
    inner = b"\x08" + _varint_bytes(rejected) + b"\x12" + _varint_bytes(len(text)) + text
    return b"\x0a" + _varint_bytes(len(inner)) + inner if rejected else b""


class _Unexpected(Exception):
    """A field has something else than what exporters send."""


def _from_json(body: Mapping[str, Any], is_traces: bool) -> Iterator[EvaluationResult]:
    outer, middle, inner = ("resourceSpans", "scopeSpans", "spans") if is_traces else ("resourceLogs", "scopeLogs", "logRecords")
    for resource in _objects(body, outer):
        for scope in _objects(resource, middle):
            for item in _objects(scope, inner):
                span = f"{item.get('traceId', '')}{item.get('spanId', '')}"
                for event in _objects(item, "events") if is_traces else (item,):
                    attributes = {_attribute_name(each): _json_value(each) for each in _objects(event, "attributes")}
                    name = event.get("name") if is_traces else event.get("eventName") or attributes.get("event.name")
                    if name == EVENT:
                        yield EvaluationResult(attributes, _number(event.get("timeUnixNano") or 0, "timeUnixNano"), span[:64])


def _objects(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the list in a field, which may be missing."""
    found = holder.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _Unexpected(f"{name} must be a list of objects")
    return found


def _attribute_name(attribute: Mapping[str, Any]) -> str:
    name = attribute.get("key")
    if not isinstance(name, str):
        raise _Unexpected("the key of an attribute must be a text")
    return name


def _json_value(attribute: Mapping[str, Any]) -> Any:
    value = attribute.get("value") or {}
    if not isinstance(value, dict):
        raise _Unexpected('the value of an attribute must be an object, such as {"doubleValue": 1}')
    if "stringValue" in value:
        return str(value["stringValue"])
    if "boolValue" in value:
        return bool(value["boolValue"])
    if "intValue" in value:
        return _number(value["intValue"], "intValue")
    if "doubleValue" in value:
        try:
            return float(value["doubleValue"])
        except (TypeError, ValueError, OverflowError):
            raise _Unexpected("doubleValue must be a number") from None
    return None


def _number(value: Any, name: str) -> int:
    """Return a whole number, which exporters write as a text because it may have 64 bits."""
    if isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= _MOST_DIGITS):
        try:
            if abs(found := int(value)) < 1 << 64:
                return found
        except (ValueError, OverflowError):
            pass
    raise _Unexpected(f"{name} must be a whole number of at most 64 bits")


def _from_protobuf(body: bytes, is_traces: bool) -> Iterator[EvaluationResult]:
    for resource in _submessages(memoryview(body), 1):
        for scope in _submessages(resource, 2):
            for item in _submessages(scope, 2):
                yield from _span_events(item) if is_traces else _log_record(item)


def _log_record(item: memoryview) -> Iterator[EvaluationResult]:
    attributes: dict[str, Any] = {}
    time, name, trace, span = 0, "", b"", b""
    for number, kind, value in _fields(item):
        if (number, kind) == (1, _FIXED64):
            time = value
        elif (number, kind) == (6, _BYTES):
            attributes |= [_attribute(value)]
        elif (number, kind) == (9, _BYTES):
            trace = bytes(value)
        elif (number, kind) == (10, _BYTES):
            span = bytes(value)
        elif (number, kind) == (12, _BYTES):
            name = _text(value)
    if (name or attributes.get("event.name")) == EVENT:
        yield EvaluationResult(attributes, time, (trace + span).hex()[:64])


def _span_events(item: memoryview) -> Iterator[EvaluationResult]:
    trace, span = b"", b""
    events = []
    for number, kind, value in _fields(item):
        if kind == _BYTES and number == 1:
            trace = bytes(value)
        elif kind == _BYTES and number == 2:
            span = bytes(value)
        elif kind == _BYTES and number == 11:
            events.append(value)
    for event in events:
        attributes: dict[str, Any] = {}
        time, name = 0, ""
        for number, kind, value in _fields(event):
            if (number, kind) == (1, _FIXED64):
                time = value
            elif (number, kind) == (2, _BYTES):
                name = _text(value)
            elif (number, kind) == (3, _BYTES):
                attributes |= [_attribute(value)]
        if name == EVENT:
            yield EvaluationResult(attributes, time, (trace + span).hex()[:64])


def _attribute(data: memoryview) -> tuple[str, Any]:
    name, found = "", None
    for number, kind, value in _fields(data):
        if (number, kind) == (1, _BYTES):
            name = _text(value)
        elif (number, kind) == (2, _BYTES):
            found = _any_value(value)
    return name, found


def _any_value(data: memoryview) -> Any:
    for number, kind, value in _fields(data):
        if (number, kind) == (1, _BYTES):
            return _text(value)
        if (number, kind) == (2, _VARINT):
            return bool(value)
        if (number, kind) == (3, _VARINT):
            return value - (1 << 64) if value >= 1 << 63 else value
        if (number, kind) == (4, _FIXED64):
            return struct.unpack("<d", struct.pack("<Q", value))[0]
        if (number, kind) == (7, _BYTES):
            return base64.b64encode(value).decode()
    return None


def _submessages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, kind, value in _fields(data):
        if (number, kind) == (wanted, _BYTES):
            yield value


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number, kind and value of each field of a message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        value: Any
        if kind == _VARINT:
            value, position = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            width = 8 if kind == _FIXED64 else 4
            value = int.from_bytes(_cut(data, position, width), "little")
            position += width
        elif kind == _BYTES:
            length, position = _varint(data, position)
            value = _cut(data, position, length)
            position += length
        else:
            raise ValueError(f"a field has the unknown kind {kind}")
        yield number, kind, value


def _cut(data: memoryview, start: int, length: int) -> memoryview:
    if start + length > len(data):
        raise ValueError("a field ends after its message")
    return data[start : start + length]


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise ValueError("a number is too long")


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")
