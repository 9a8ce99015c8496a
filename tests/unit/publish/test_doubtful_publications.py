"""Test rare publications: the publisher is closed while it takes them, or reads them back damaged."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.chain.version import Version
from deltawire.errors import CorruptRecord, PublisherClosed
from deltawire.publish import PendingVersion, background
from deltawire.store.memory import MemoryStore
from deltawire.testing.faulty_store import After, FaultyStore, Reading, call


def state(value: int) -> dict[str, np.ndarray]:
    return {"w": np.full(64, value, np.uint16)}


def test_a_state_that_is_copied_while_another_thread_closes_the_publisher_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, may_copy = threading.Event(), threading.Event()
    publisher = Publisher(MemoryStore(), background=True)
    copy = background.copy_tensors

    def slowly(source: object, target: object, *, wait: bool) -> None:
        copying.set()
        may_copy.wait(120)
        copy(source, target, wait=wait)  # type: ignore[arg-type]

    monkeypatch.setattr(background, "copy_tensors", slowly)
    pending: list[Version | PendingVersion] = []
    publishing = threading.Thread(target=lambda: pending.append(publisher.publish(state(1))))
    publishing.start()
    assert copying.wait(120)
    closing = threading.Thread(target=publisher.close)
    closing.start()  # it waits for the copy, and then for the version
    may_copy.set()
    for thread in (publishing, closing):
        thread.join(120)
    (accepted,) = pending
    assert isinstance(accepted, PendingVersion)
    assert accepted.result(0) == publisher.version
    with pytest.raises(PublisherClosed):
        publisher.publish(state(2))


@pytest.mark.parametrize("lie", ["flip", "truncate"])
def test_a_commit_that_was_read_back_damaged_is_asked_for_again(lie: str) -> None:
    inner = MemoryStore()
    with Publisher(inner) as publisher:
        publisher.publish(state(0))
    commits = call("get", "commit/")
    ambiguous = After(lambda each: each.op == "put_if_absent" and each.key.endswith("3.json"), "unknown")
    damaged = Reading(lambda each: commits(each) and each.key.endswith("3.json"), lie)  # type: ignore[arg-type]
    with Publisher(FaultyStore(inner, [ambiguous, damaged])) as publisher:
        with pytest.raises(CorruptRecord):
            publisher.publish(state(1))
        version = publisher.publish(state(2))
        assert isinstance(version, Version)
        assert version.updates == 3  # the commit in doubt had landed
