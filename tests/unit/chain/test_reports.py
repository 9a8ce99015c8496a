"""Test how the publisher's side reads the reports of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import QUARANTINED, SERVING, put_report, read_reports
from deltawire.store import Store, keys, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    Publisher(tmp_path / "store").close()
    return open_store(tmp_path / "store")


def test_a_report_replaces_the_readers_last_one(store: Store) -> None:
    run = ChainLog(store).run
    put_report(store, run, "engine-1", QUARANTINED, None, "out of memory — " + "x" * 10_000)
    put_report(store, run, "engine-2", SERVING, 7)
    failed, serving = read_reports(store, run)
    assert (failed.reader, failed.state, failed.seq) == ("engine-1", QUARANTINED, None)
    assert failed.error is not None
    assert failed.error.startswith("out of memory — x")
    assert len(failed.error) == 4000
    assert (serving.reader, serving.state, serving.seq, serving.error) == ("engine-2", SERVING, 7, None)
    put_report(store, run, "engine-1", SERVING, 8)
    assert [report.seq for report in read_reports(store, run)] == [8, 7]


def test_objects_that_are_no_reports_are_ignored(store: Store) -> None:
    run = ChainLog(store).run
    put_report(store, run, "engine", SERVING, 7)
    honest = store.get(keys.report_key("engine"), limit=65536)
    store.put(keys.report_key("impostor"), honest)
    store.put(keys.report_key("noise"), b"{}")
    store.put(keys.report_key("dreamer"), honest.replace(b'"engine"', b'"dreamer"').replace(b'"serving"', b'"dreaming"'))
    store.put(keys.report_key("stranger"), honest.replace(b'"engine"', b'"stranger"').replace(run.id.encode(), b"0" * 32))
    assert [report.reader for report in read_reports(store, run)] == ["engine"]
    with pytest.raises(ValueError, match="cannot name a reader"):
        put_report(store, run, "../run", SERVING, 7)
