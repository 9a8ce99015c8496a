"""Readers refuse hostile and damaged files of live traffic with a named error, and never use a part of them."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from live_samples import EPISODE, FEEDBACK, FULL, ID, INTERACTIONS, METRICS, PLAIN, ROLLOUTS, RUN, SESSION

from deltawire.errors import CorruptFeedback, CorruptInteractions, CorruptRecord, CorruptRollouts, LimitExceeded, UnsupportedVersion
from deltawire.format.feedback import MAX_FEEDBACK, MAX_FEEDBACK_BYTES, Feedback, FeedbackFile
from deltawire.format.interactions import MAX_INTERACTIONS_BYTES, MAX_TEXT, AnswerFacts, ConversationText, Interactions, Message
from deltawire.format.live_parts import INFERENCE_ID, is_session, new_inference_id, new_session
from deltawire.format.records.live_records import Metric, Metrics
from deltawire.store.live_keys import (
    LiveKey,
    feedback_key,
    interactions_key,
    metrics_key,
    parse_feedback_key,
    parse_interactions_key,
    parse_metrics_key,
    parse_used_key,
    parse_used_list_key,
    used_key,
    used_list_key,
)

DATA, NOTES, DECLARED = INTERACTIONS.to_bytes(), FEEDBACK.to_bytes(), METRICS.to_bytes()
HEAD = 8 + int.from_bytes(DATA[:8], "little")
KINDS: list[tuple[Any, bytes, Any]] = [
    (Interactions, DATA, CorruptInteractions),
    (FeedbackFile, NOTES, CorruptFeedback),
    (Metrics, DECLARED, CorruptRecord),
]
EVERY = pytest.mark.parametrize(("kind", "data", "error"), KINDS, ids=["interactions", "feedback", "metrics"])


def spelled(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def with_record(record: bytes, rest: bytes = DATA[HEAD:]) -> bytes:
    return len(record).to_bytes(8, "little") + record + rest


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a good file after an edit of its record, in canonical form."""
    plain = json.loads(data[8:HEAD] if data is DATA else data)
    edit(plain)
    return with_record(spelled(plain)) if data is DATA else spelled(plain)


def test_a_file_with_answers_whose_text_was_lost_is_of_version_2() -> None:
    lost = replace(INTERACTIONS, interactions=(replace(PLAIN, facts=AnswerFacts(3, has_text=False)), FULL))
    data = lost.to_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    plain = json.loads(data[8:head])
    assert (plain["version"], json.loads(DATA[8:HEAD])["version"]) == (2, 1)
    assert plain["interactions"][0]["facts"] == {"length": 3}
    assert Interactions.parse(data).interactions == lost.interactions
    for facts in ({"length": 10**9 + 1}, {"length": 3, "tool_calls": 1}, {}, PLAIN.facts.plain()):
        plain["interactions"][0]["facts"] = facts
        with pytest.raises(CorruptInteractions):
            Interactions.parse(with_record(spelled(plain), data[head:]))


@EVERY
def test_a_file_comes_back_as_it_was_written(kind: Any, data: bytes, error: Any) -> None:
    assert kind.parse(data).to_bytes() == data
    assert Interactions.parse(DATA).interactions == INTERACTIONS.interactions
    assert FeedbackFile.parse(NOTES) == FEEDBACK
    assert Metrics.parse(DECLARED) == METRICS


def test_tokens_come_back_bit_for_bit() -> None:
    for back, one in zip(Interactions.parse(DATA).rollouts.completions, ROLLOUTS.completions, strict=True):
        assert back.spans == one.spans
        for name in ("tokens", "logprobs", "mask"):
            assert getattr(back, name).tobytes() == getattr(one, name).tobytes()


@EVERY
def test_a_file_cut_short_anywhere_or_with_anything_behind_it_is_refused(kind: Any, data: bytes, error: Any) -> None:
    for length in range(len(data)):
        with pytest.raises(error):
            kind.parse(data[:length])
    with pytest.raises(error):
        kind.parse(data + b"\0")


@EVERY
def test_any_bit_that_flips_is_refused_or_leaves_a_file_that_is_one(kind: Any, data: bytes, error: Any) -> None:
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index % 8
        with contextlib.suppress(error, UnsupportedVersion):
            assert kind.parse(bytes(flipped)).to_bytes() == flipped


@EVERY
def test_every_field_is_needed_and_none_is_unknown(kind: Any, data: bytes, error: Any) -> None:
    record = json.loads(data[8:HEAD] if data is DATA else data)
    entries = next(name for name in ("interactions", "feedback", "metrics") if name in record)
    for name in record:
        with pytest.raises(error):
            kind.parse(edited(data, lambda plain, name=name: plain.pop(name)))
    for name in record[entries][0]:
        with pytest.raises(error):
            kind.parse(edited(data, lambda plain, name=name: plain[entries][0].pop(name)))
    with pytest.raises(error):
        kind.parse(edited(data, lambda plain: plain.update(more=1)))
    with pytest.raises(error):
        kind.parse(edited(data, lambda plain: plain[entries][0].update(more=1)))
    with pytest.raises(UnsupportedVersion):
        kind.parse(edited(data, lambda plain: plain.update(version=3)))


def test_only_a_file_with_a_diverted_answer_is_of_version_2() -> None:
    data = replace(INTERACTIONS, interactions=(PLAIN, replace(FULL, diverted_from="beta"))).to_bytes()
    assert json.loads(DATA[8:HEAD])["version"] == 1  # readers of older releases can read it
    record = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert record["version"] == 2
    assert [one.diverted_from for one in Interactions.parse(data).interactions] == [None, "beta"]
    assert Interactions.parse(data).to_bytes() == data
    for lie in ({"version": 1}, {"interactions": [record["interactions"][0]] * 2}):
        with pytest.raises(CorruptInteractions):
            Interactions.parse(with_record(spelled(record | lie)))
    for wrong in ("", "../x", FULL.channel):
        with pytest.raises(CorruptInteractions):
            replace(INTERACTIONS, interactions=(PLAIN, replace(FULL, diverted_from=wrong))).to_bytes()
    with pytest.raises(CorruptInteractions, match="version 2"):
        Interactions.parse(edited(DATA, lambda plain: plain.update(version=2)))
    with pytest.raises(CorruptInteractions):
        Interactions.parse(edited(DATA, lambda plain: (plain.update(version=2), plain["interactions"][0].update(diverted_from=None))))


def _first(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain.get("interactions", plain.get("feedback", plain.get("metrics")))[0].update(changes)


LIES: list[tuple[bytes, Callable[[dict[str, Any]], object]]] = [
    (DATA, _first(id="0190A0B0-c0d0-7000-8000-000000000001")),
    (DATA, _first(id="0190a0b0-c0d0-4000-8000-000000000001")),
    (DATA, _first(id=ID(1) + "\n")),
    (DATA, _first(id=ID(2), choice=1)),
    (DATA, _first(episode="my episode")),
    (DATA, _first(user="alice")),
    (DATA, _first(train=2)),
    (DATA, _first(train=True)),
    (DATA, _first(time=1 << 48)),
    (DATA, _first(temperature="-1.0")),
    (DATA, _first(top_p="0.0")),
    (DATA, _first(top_p="nan")),
    (DATA, _first(choice=128)),
    (DATA, _first(channel="../x")),
    (DATA, _first(tags={str(number): "" for number in range(17)})),
    (DATA, _first(tags={"": "x"})),
    (DATA, _first(tags={"x": "y" * 257})),
    (DATA, _first(tags={"x": "\n"})),
    (DATA, _first(model="")),
    (DATA, _first(model="x" * 201)),
    (DATA, _first(facts=FULL.facts.plain() | {"refusal": 2})),
    (DATA, _first(facts=FULL.facts.plain() | {"length": 10**9 + 1})),
    (DATA, _first(facts={"length": 3})),  # only files of version 2 may have this
    (DATA, _first(text={"messages": [], "answer": ""})),
    (DATA, _first(text={"messages": [["user", "x" * MAX_TEXT]], "answer": "y"})),
    (DATA, _first(text={"messages": [["user"]], "answer": "y"})),
    (DATA, _first(text={"messages": [["user", "\ud800"]], "answer": "y"})),
    (DATA, lambda plain: plain.update(gateway="west-2.0123456789abcdef")),
    (DATA, lambda plain: plain.update(gateway="west.1.0123456789abcdef")),
    (DATA, lambda plain: plain.update(run="ba" * 16)),
    (DATA, lambda plain: plain["interactions"].pop()),
    (DATA, lambda plain: plain["interactions"].clear()),
    (DATA, lambda plain: plain["interactions"].append(replace(PLAIN, id=ID(9)).plain())),
    (NOTES, _first(inference="x")),
    (NOTES, _first(episode=EPISODE)),
    (NOTES, _first(feedback=ID(12))),
    (NOTES, _first(value=1)),
    (NOTES, _first(value=None)),
    (NOTES, _first(value="")),
    (NOTES, _first(value="x" * 4097)),
    (NOTES, _first(value="\ud800")),
    (NOTES, _first(value={"float": "inf"})),
    (NOTES, _first(value={"float": "1e+300"})),
    (NOTES, _first(value={"float": "1"})),
    (NOTES, _first(value={"float": "1.0", "more": 1})),
    (NOTES, _first(revision=10**9 + 1)),
    (NOTES, _first(metric="")),
    (NOTES, _first(caller="../x")),
    (NOTES, lambda plain: plain["feedback"].clear()),
    (NOTES, lambda plain: plain.update(gateway="west")),
    (DECLARED, _first(level="user")),
    (DECLARED, _first(type="text")),
    (DECLARED, _first(low="0.0")),
    (DECLARED, _first(default="2.0")),
    (DECLARED, _first(settle=3601)),
    (DECLARED, _first(window=10**9)),
    (DECLARED, _first(weight="1e+10")),
    (DECLARED, _first(name="rating")),
]


@pytest.mark.parametrize(("data", "edit"), LIES, ids=range(len(LIES)))
def test_a_file_that_breaks_a_rule_is_refused(data: bytes, edit: Callable[[dict[str, Any]], object]) -> None:
    kind, _, error = next(each for each in KINDS if each[1] is data)
    with pytest.raises(error):
        kind.parse(edited(data, edit))


def test_rollouts_of_a_task_or_with_rewards_are_no_interactions() -> None:
    other = replace(ROLLOUTS, round=1)
    scored = replace(ROLLOUTS, reward_names=("x",), completions=tuple(replace(one, rewards=(1.0,)) for one in ROLLOUTS.completions))
    for rollouts in (other, scored):
        with pytest.raises(CorruptInteractions):
            Interactions.parse(with_record(DATA[8:HEAD], rollouts.to_bytes()))


def test_a_writer_notices_its_own_mistake() -> None:
    with pytest.raises(CorruptInteractions):
        replace(INTERACTIONS, interactions=(PLAIN, PLAIN)).to_bytes()
    with pytest.raises(CorruptRollouts):
        replace(INTERACTIONS, rollouts=replace(ROLLOUTS, nonce="x")).to_bytes()
    with pytest.raises(CorruptFeedback):
        replace(FEEDBACK, feedback=FEEDBACK.feedback[:1] * 2).to_bytes()
    with pytest.raises(CorruptFeedback):
        FeedbackFile(RUN, SESSION, 0, (Feedback(ID(1), "x", float("nan"), inference=ID(1)),)).to_bytes()
    with pytest.raises(LimitExceeded):
        FeedbackFile(RUN, SESSION, 0, tuple(Feedback(ID(n), "x", "y" * 4096, inference=ID(n)) for n in range(300))).to_bytes()
    with pytest.raises(CorruptInteractions):
        replace(INTERACTIONS, interactions=(replace(PLAIN, text=ConversationText((Message("x\n", ""),), "")), FULL)).to_bytes()
    with pytest.raises(ValueError, match="default"):
        Metric("x", default=2.0)
    with pytest.raises(ValueError, match="numbers"):
        Metric("x", weight=float("nan"))


def test_no_file_is_read_beyond_its_limits() -> None:
    """A length that a file claims takes no memory, and neither does a list that is too long."""
    claims = [
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (1 << 20).to_bytes(8, "little") + b"{}",
        bytes(MAX_INTERACTIONS_BYTES + 1),
        b" " * (MAX_FEEDBACK_BYTES + 1),
    ]
    tracemalloc.start()
    try:
        for data in claims:
            with pytest.raises(CorruptInteractions):
                Interactions.parse(data)
            with pytest.raises(CorruptFeedback):
                FeedbackFile.parse(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    many = [Feedback(ID(n), "x", True, inference=ID(n)).plain() for n in range(MAX_FEEDBACK + 1)]
    with pytest.raises(CorruptFeedback):
        FeedbackFile.parse(edited(NOTES, lambda plain: plain.update(feedback=many)))


def test_a_metric_accepts_values_of_its_type_and_range_only() -> None:
    thumbs, rating = METRICS.metrics
    assert [thumbs.number(value) for value in (True, False, 1.0, "yes")] == [1.0, 0.0, None, None]
    assert [rating.number(value) for value in (0.25, 1.5, -0.5, True, float("nan"))] == [0.25, None, None, None, None]


def test_ids_rise_with_time_and_are_uuids_of_version_7() -> None:
    ids = [new_inference_id(time) for time in (0, 1, 2**40, 2**48 - 1)]
    assert ids == sorted(ids)
    assert all(INFERENCE_ID.fullmatch(each) for each in ids)
    assert len({new_inference_id(5) for _ in range(100)}) == 100
    with pytest.raises(ValueError, match="cannot be a part"):
        new_inference_id(2**48)


def test_keys_come_back_and_other_keys_are_not_read() -> None:
    key = LiveKey(SESSION, 7, "ab" * 32)
    assert parse_interactions_key(interactions_key(key)) == key
    assert parse_feedback_key(feedback_key(key)) == key
    assert (parse_interactions_key(feedback_key(key)), parse_feedback_key(interactions_key(key))) == (None, None)
    assert parse_metrics_key(metrics_key(3)) == 3
    assert parse_used_key(used_key(4)) == 4
    assert parse_used_list_key(used_list_key(4, "ab" * 32)) == (4, "ab" * 32)
    assert is_session(new_session("west-1"))
    assert parse_interactions_key(interactions_key(key).replace("west-1", "..")) is None
    for wrong in ("", ".x", "a.b", "a/b", "x" * 41):
        with pytest.raises(ValueError, match="gateway"):
            new_session(wrong)
    with pytest.raises(ValueError, match="session"):
        interactions_key(key._replace(gateway="west-1"))
