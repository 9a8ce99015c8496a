"""The checker of `make chaos` finds each violation. Each test adds one violation to a chain that is otherwise sound."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from checker import Seen, check
from small_model import state_of
from support import publish_fully

from deltawire.publish import AnchorPolicy, Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore

Objects = dict[str, bytes]
LAST = 34
"""The number of steps. It is large enough for a new tensor and a shortcut of each kind."""


@pytest.fixture(scope="module")
def sound() -> tuple[Objects, list[Seen]]:
    """Publish a chain by two publishers, the second from an older version on, and return its objects and versions."""
    store = MemoryStore()
    versions: list[Any] = []
    with Publisher(store, options=WriterOptions(segment_bytes=6000, anchor_policy=AnchorPolicy(4, 9))) as publisher:
        versions += [publish_fully(publisher, state_of(step), step=step) for step in range(LAST)]
    with Publisher(store, options=WriterOptions(segment_bytes=6000), resume_from_seq=versions[-2].seq) as publisher:
        versions += [publish_fully(publisher, state_of(step), step=step) for step in (LAST - 1, LAST)]
    assert any(store.list("anchor/"))
    assert any(store.list("skip/"))
    return {info.key: store.get(info.key, limit=1 << 20) for info in store.list("")}, [(version.seq, version.step) for version in versions]


def commit_key(seq: int) -> str:
    return f"commit/{seq:020}.json"


def edited(data: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(data) | fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def data_of(objects: Objects, name: str) -> str:
    return str(json.loads(objects[name])["files"][0]["key"])


def flip(objects: Objects, key: str) -> None:
    objects[key] = objects[key][:-1] + bytes([objects[key][-1] ^ 1])


def other_weights(objects: Objects) -> None:
    """Change the step of the newest commit, so that its data belong to another step."""
    last = max(name for name in objects if name.startswith("commit/"))
    objects[last] = edited(objects[last], step=LAST + 1)


def shortcut(kind: str) -> Callable[[Objects], str]:
    return lambda objects: next(name for name in sorted(objects) if name.startswith(kind))


PLANTED: dict[str, tuple[Callable[[Objects, list[Seen], list[Seen]], Any], str]] = {
    "an acknowledged version is gone": (lambda o, acked, read: o.pop(max(n for n in o if n.startswith("commit/"))), "does not have"),
    "a commit in the middle is gone": (lambda o, acked, read: o.pop(commit_key(5)), "a gap"),
    "a commit was replaced": (lambda o, acked, read: o.update({commit_key(5): edited(o[commit_key(5)], step=77)}), "does not fit"),
    "an acknowledged step is another": (lambda o, acked, read: acked.__setitem__(3, (acked[3][0], 9)), "as step 9"),
    "acknowledged out of order": (lambda o, acked, read: acked.reverse(), "after"),
    "a fence was acknowledged": (lambda o, acked, read: acked.insert(0, (0, 0)), "does not have"),
    "a reader was given what is not there": (lambda o, acked, read: read.append((1000, 0)), "does not have"),
    "a reader went back": (lambda o, acked, read: read.append(read[0]), "after"),
    "a bit of a delta flipped": (lambda o, acked, read: flip(o, data_of(o, commit_key(8))), "damaged"),
    "a bit of a checkpoint flipped": (lambda o, acked, read: flip(o, data_of(o, shortcut("anchor/")(o))), "damaged"),
    "a bit of a skip flipped": (lambda o, acked, read: flip(o, data_of(o, shortcut("skip/")(o))), "damaged"),
    "data of a version are gone": (lambda o, acked, read: o.pop(data_of(o, commit_key(8))), "are missing"),
    "weights of another step": (lambda o, acked, read: other_weights(o), "lead to the weights"),
}  # fmt: skip


def test_a_sound_chain_has_no_violations(sound: tuple[Objects, list[Seen]]) -> None:
    objects, acknowledged = sound
    verdict = check(objects, {"publisher": acknowledged}, {"reader": acknowledged[::3]})
    assert verdict.violations == []
    assert verdict.rebuilt > LAST
    assert (verdict.acknowledged, verdict.void) == (len(acknowledged), 0)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found(sound: tuple[Objects, list[Seen]], what: str) -> None:
    objects, acknowledged, read = dict(sound[0]), list(sound[1]), list(sound[1])
    plant, expected = PLANTED[what]
    plant(objects, acknowledged, read)
    violations = check(objects, {"publisher": acknowledged}, {"reader": read}).violations
    assert any(expected in violation for violation in violations), violations


def test_a_version_of_a_publisher_that_was_fenced_off_must_not_be_acknowledged(sound: tuple[Objects, list[Seen]]) -> None:
    """A commit of an earlier epoch after the fence of a later one is void."""
    objects, acknowledged = dict(sound[0]), sound[1]
    last = max(name for name in objects if name.startswith("commit/"))
    objects[last] = edited(objects[last], epoch=1)
    verdict = check(objects, {"publisher": acknowledged}, {})
    assert verdict.void == 1
    assert any("does not have" in violation for violation in verdict.violations)


def test_the_checker_reports_unsigned_records_in_a_signed_chain(sound: tuple[Objects, list[Seen]]) -> None:
    assert any("is signed by None" in violation for violation in check(sound[0], {}, {}, key="ab" * 32).violations)


def test_the_checker_reports_a_newest_version_without_a_route(sound: tuple[Objects, list[Seen]]) -> None:
    objects = {name: data for name, data in sound[0].items() if not name.startswith(("data/", "anchor/", "skip/"))}
    objects["gc/0000000001.json"] = json.dumps({"floor": 10**6}, separators=(",", ":")).encode()
    assert check(objects, {}, {}).violations == ["nothing leads to the newest version"]
