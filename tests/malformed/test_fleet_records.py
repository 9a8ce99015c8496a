"""Readers refuse fleet records that break a rule with a named error, and never use a part of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deltawire.errors import CorruptRecord, LimitExceeded, UnsupportedVersion
from deltawire.format.records.fleet_files import Accepted, AcceptedResult, Tasks
from deltawire.format.records.fleet_parts import ObjectRef
from deltawire.format.records.member_records import MAX_FAILURES, MAX_GOODPUT, MAX_MILLISECONDS, Heartbeat, Lease, LinkReport, UpdateReport
from deltawire.format.records.record_parts import Signature
from deltawire.format.records.trainer_records import BatchRecord, Board, Rejection, Round, Sampling

ID, NONCE, HASH = "ab" * 16, "cd" * 16, "ef" * 32
SAMPLING = Sampling(samples=8, max_tokens=256, temperature=0.7, top_p=0.9, seed=11)
ROUND = Round(ID, 7, 2, NONCE, 5, 3, 4, ObjectRef(f"fleet/tasks/0000000007/{HASH}.json", 99, HASH), 60, SAMPLING, 1)
LEASE = Lease(ID, 7, 3, 1, "gpu-7", NONCE, 12, 1)
BATCH = BatchRecord(ID, 2, 5, 7, NONCE, ObjectRef(f"fleet/accepted/0000000007/{HASH}.json", 99, HASH), 1)
BEAT = Heartbeat(ID, "gpu-7", NONCE, "working", 12, 4, 1, 1000, 20, ((7, 3, 1), (7, 2, 0)), 1)
BOARD = Board(ID, 2, 12, 4, 60, {"gpu-7": ((7, 3, 2), (8, 0, 0)), "b": ()}, False)
ACCEPTED = Accepted(7, (AcceptedResult(0, 1, HASH, 99, "gpu-7"), AcceptedResult(2, 0, HASH, 98, "b")))
REJECTION = Rejection(ID, 2, 5, 7, ((0, 1, HASH), (3, 0, HASH)), "its loss is not finite", 1)
GOODBYE = replace(BEAT, state="left", working=(), reason="RewardError: it failed")
LINK = LinkReport(12_500_000, 80, 3)
LINKED = replace(BEAT, link=LINK, behind_ms=1234)
LINKED_GOODBYE = replace(GOODBYE, link=LinkReport(MAX_GOODPUT, MAX_MILLISECONDS, MAX_FAILURES), behind_ms=MAX_MILLISECONDS)
ENGINED = replace(BEAT, engine="vllm 0.32.0+cpu")
UPDATED = replace(ENGINED, update=UpdateReport(fetch_us=4000, pause_us=900, total_us=6000))
RECORDS = [ROUND, LEASE, BATCH, REJECTION, BEAT, GOODBYE, LINKED, LINKED_GOODBYE, ENGINED, BOARD, ACCEPTED]
SIGNATURE = Signature("12" * 32, "34" * 64)
SIGNED = [replace(record, signature=SIGNATURE) for record in (ROUND, BATCH, REJECTION, replace(BOARD, number=7))]


def edited(record: Any, **changes: Any) -> bytes:
    plain = json.loads(record.to_bytes()) | changes
    return json.dumps({name: value for name, value in plain.items() if value is not ...}, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("record", RECORDS + SIGNED, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was_written(record: Any) -> None:
    assert type(record).parse(record.to_bytes()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_that_is_cut_or_spelt_otherwise_is_refused(record: Any) -> None:
    data = record.to_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptRecord):
            type(record).parse(data[:length])
    for wrong in (data + b" ", data.replace(b":", b": ", 1), edited(record, more=1), edited(record, deltawire="other"), b"[]"):
        with pytest.raises(CorruptRecord):
            type(record).parse(wrong)
    with pytest.raises(UnsupportedVersion):
        type(record).parse(edited(record, version=9))


@pytest.mark.parametrize("record", [ROUND, BATCH, REJECTION, BOARD], ids=lambda record: type(record).__name__)
def test_records_of_version_1_have_no_signature_and_are_read(record: Any) -> None:
    without = {"version": 1, "signature": ..., **({"number": ...} if record is BOARD else {})}
    assert type(record).parse(edited(record, **without)) == record
    for name in without.keys() - {"version"}:
        with pytest.raises(CorruptRecord):
            type(record).parse(edited(record, **{key: value for key, value in without.items() if key != name}))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_field_is_needed_and_of_its_type(record: Any) -> None:
    for name in json.loads(record.to_bytes()):
        for value in (..., {"x": 1.5}, [None], -1):
            with pytest.raises(CorruptRecord):
                type(record).parse(edited(record, **{name: value}))


WRONG: list[tuple[Any, dict[str, Any]]] = [
    (ROUND, {"tasks": 0}),
    (ROUND, {"tasks": 10**5 + 1}),
    (ROUND, {"lease_seconds": 0}),
    (ROUND, {"oldest_step": 5}),
    (ROUND, {"round": 8}),
    (ROUND, {"rows": BATCH.accepted.plain()}),
    (ROUND, {"rows": {"key": f"fleet/tasks/0000000007/{'00' * 32}.json", "size": 1, "blake3": HASH}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"samples": 0}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"temperature": "nan"}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"temperature": "-1.0"}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"temperature": "0.70"}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"top_p": "0.0"}}),
    (ROUND, {"sampling": SAMPLING.plain() | {"top_p": "1.5"}}),
    (LEASE, {"member": "../x"}),
    (LEASE, {"task": 10**5}),
    (LEASE, {"attempt": 1000}),
    (BATCH, {"round": 8}),
    (REJECTION, {"results": []}),
    (REJECTION, {"results": [[0, 1, HASH]] * 501}),
    (REJECTION, {"results": [[0, 1]]}),
    (REJECTION, {"results": [[0, 1, HASH[1:]]]}),
    (REJECTION, {"results": [[10**5, 1, HASH]]}),
    (REJECTION, {"results": [[0, 1000, HASH]]}),
    (REJECTION, {"results": [[True, 1, HASH]]}),
    (REJECTION, {"why": "x" * 501}),
    (GOODBYE, {"reason": ""}),
    (GOODBYE, {"reason": "x" * 501}),
    (GOODBYE, {"version": 1}),
    (BEAT, {"version": 2}),
    (BEAT, {"version": 3}),
    (GOODBYE, {"version": 3}),
    (LINKED, {"version": 1}),
    (LINKED, {"version": 2}),
    (LINKED, {"link": None, "behind_ms": None}),
    (LINKED, {"link": LINK.plain() | {"goodput": MAX_GOODPUT + 1}}),
    (LINKED, {"link": LINK.plain() | {"goodput": -1}}),
    (LINKED, {"link": LINK.plain() | {"latency_ms": MAX_MILLISECONDS + 1}}),
    (LINKED, {"link": LINK.plain() | {"latency_ms": "80"}}),
    (LINKED, {"link": LINK.plain() | {"failures": None}}),
    (LINKED, {"link": LINK.plain() | {"failures": MAX_FAILURES + 1}}),
    (LINKED, {"link": LINK.plain() | {"streams": 4}}),
    (LINKED, {"link": {"goodput": 1, "latency_ms": 1}}),
    (LINKED, {"behind_ms": MAX_MILLISECONDS + 1}),
    (LINKED, {"reason": ""}),
    (LINKED, {"version": 4}),
    (LINKED, {"engine": "vllm"}),
    (ENGINED, {"version": 3}),
    (ENGINED, {"engine": None}),
    (ENGINED, {"update": {}}),
    (UPDATED, {"update": None}),
    (UPDATED, {"update": UpdateReport(total_us=10**15 + 1).plain()}),
    (UPDATED, {"update": UpdateReport().plain() | {"more": 1}}),
    (UPDATED, {"engine": "\x1b[2J"}),
    (ENGINED, {"engine": ""}),
    (ENGINED, {"engine": "x" * 65}),
    (ENGINED, {"engine": "\x1b[2J"}),
    (ENGINED, {"reason": ""}),
    (ENGINED, {"behind_ms": MAX_MILLISECONDS + 1}),
    (BEAT, {"state": "dead"}),
    (BEAT, {"seq": None}),
    (BEAT, {"working": [[7, 3]]}),
    (BEAT, {"working": [[7, 3, -1]]}),
    (BEAT, {"working": [[7, 3, True]]}),
    (BEAT, {"working": [[7, 3, 1]] * 257}),
    (BOARD, {"stop": 2}),
    (BOARD, {"lease_seconds": 0}),
    (BOARD, {"offers": {"../x": []}}),
    (BOARD, {"offers": {"x": [[1, 2, 3, 4]]}}),
    (BOARD, {"offers": {"x": {}}}),
    (ACCEPTED, {"results": [[0, 1, HASH, 99, "x"], [0, 2, HASH, 99, "x"]]}),
    (ACCEPTED, {"results": [[0, 1, "x", 99, "x"]]}),
    (ACCEPTED, {"results": [[0, 1, HASH, -1, "x"]]}),
    (ACCEPTED, {"results": [[0, 1, HASH, 99, ""]]}),
]


@pytest.mark.parametrize(("record", "changes"), WRONG)
def test_a_record_that_contradicts_itself_is_refused(record: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecord):
        type(record).parse(edited(record, **changes))


@pytest.mark.parametrize(
    ("beat", "version"),
    [
        (BEAT, 1),
        (GOODBYE, 2),
        (LINKED, 3),
        (replace(BEAT, link=LINK), 3),
        (replace(BEAT, behind_ms=0), 3),
        (LINKED_GOODBYE, 3),
        (ENGINED, 4),
        (replace(LINKED_GOODBYE, engine="transformers"), 4),
        (UPDATED, 5),
        (replace(BEAT, update=UpdateReport(pause_us=1)), 5),
    ],
)
def test_a_heartbeat_has_the_lowest_version_that_can_hold_it(beat: Heartbeat, version: int) -> None:
    assert json.loads(beat.to_bytes())["version"] == version
    assert Heartbeat.parse(beat.to_bytes()) == beat


def test_a_writer_refuses_what_a_reader_would() -> None:
    with pytest.raises(CorruptRecord):
        replace(ROUND, tasks=0).to_bytes()
    with pytest.raises(LimitExceeded):
        replace(BOARD, offers={f"member-{index}": ((1, 2, 3),) * 16 for index in range(10_000)}).to_bytes()


def test_rows_may_hold_what_json_can() -> None:
    rows = ({"prompt": [{"role": "user", "content": "größer"}], "answer": 0.1, "nothing": None, "many": [1, [2.5]]},)
    assert Tasks.parse(Tasks((rows, rows)).to_bytes()).rows == (rows, rows)


@pytest.mark.parametrize("rows", [(), ((),), (({"x": float("nan")},),), (({"x": object()},),), (({"x": b"bytes"},),)])
def test_rows_that_json_cannot_hold_are_refused_by_the_writer(rows: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the message comes from json
        Tasks(rows).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"deltawire":"tasks","version":1,"tasks":[]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[]]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[1]]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[{"x":1e999}]]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[{"x":NaN}]]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[{"x":1,"x":2}]]}',
        b'{"deltawire":"other","version":1,"tasks":[[{}]]}',
        b'{"deltawire":"tasks","version":1,"tasks":[[{}]],"more":1}',
    ],
)
def test_files_of_tasks_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        Tasks.parse(data)


def test_a_later_version_of_tasks_is_called_by_its_name() -> None:
    with pytest.raises(UnsupportedVersion):
        Tasks.parse(b'{"deltawire":"tasks","version":2,"tasks":[[{}]]}')
