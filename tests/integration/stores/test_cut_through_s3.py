"""Cut-through over a real S3 server: a reader has all files of a version before its commit exists."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from announced_files import BeforeCommits, announce_at_once, look_and_arrive
from servers import Server
from support import bits_of, publisher_arguments
from toy_chain import first_state, next_state

from deltawire.events import Event
from deltawire.publish import Publisher
from deltawire.store import open_store
from deltawire.subscribe import Subscriber


@pytest.mark.parametrize("kind", ["memory", "mirror"])
def test_all_files_come_before_the_commit(seaweedfs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    announce_at_once(monkeypatch)
    events: list[Event] = []
    url = seaweedfs.fresh_url()
    with mock.patch.dict(os.environ, seaweedfs.environment), open_store(url) as plain:
        store = BeforeCommits(plain)
        state = first_state()
        with Publisher(store, **publisher_arguments(segment_bytes=300, attachments={})) as publisher:
            publisher.publish(state, step=0)
            with Subscriber(url, tmp_path / "mirror" if kind == "mirror" else None, on_event=events.append) as reader:
                reader.sync()
                store.action = lambda: look_and_arrive(reader)
                for number in range(1, 4):
                    state = next_state(state, number)
                    version = publisher.publish(state, step=number)
                    assert reader._look()
                    assert reader.sync().step == number
                    assert bits_of(reader.state) == bits_of(state)
                    fields = [event.fields for event in events if event.name == "synced"][-1]
                    assert fields["ahead_bytes"] == fields["bytes"] == version.bytes > 0
