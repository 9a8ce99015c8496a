"""Fixtures for tests of faults. These tests never wait between attempts, nor for a disk, since no machine loses power here."""

from __future__ import annotations

import os

import pytest
from fetch_clock import Waiting

from deltawire.chain.fetch import Fetcher
from deltawire.store import create_rule


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_rule, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Make fetchers wait by a clock that the test controls."""
    clock = Waiting()
    defaults = Fetcher.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "sleep", clock.sleep)
    monkeypatch.setitem(defaults, "clock", lambda: clock.now)
    return clock
