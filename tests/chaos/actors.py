"""The processes of a chaos run: publishers, readers, mirrors, collectors. Each records in a journal what deltawire reported to it.

An actor ends with 0 if it was asked to end, with `FENCED` if another publisher took over, and with 1 if something happened that must not
happen. In that case its log says what happened. Actors repeat what fails with a retryable error.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from journal import Journal
from safetensors.numpy import load_file
from small_model import bits, state_of

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.errors import DeltawireError, Fenced, MirrorError
from deltawire.format.records.signing import SigningKey
from deltawire.publish import AnchorPolicy, PendingVersion, Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import StoreOptions, open_store
from deltawire.subscribe import Subscriber, reading_mirror

FENCED = 10
GRACE = 5.0
"""Seconds between the announcement of a collection and its deletions."""


@dataclass(frozen=True)
class Setting:
    """A chain, and the folder in which its actors keep their files."""

    url: str
    folder: Path
    signing_key: Path | None = None

    @property
    def key(self) -> SigningKey | None:
        return None if self.signing_key is None else SigningKey.load(self.signing_key)

    @property
    def trusted(self) -> list[str]:
        return [] if self.key is None else [self.key.public]

    @property
    def options(self) -> StoreOptions:
        return StoreOptions(retries=2, timeout=10)


def patiently(work: Callable[[], Any]) -> Any:
    """Repeat some work as long as it fails with retryable errors."""
    while True:
        try:
            return work()
        except Fenced:
            sys.exit(FENCED)
        except DeltawireError as error:
            if not error.retryable:
                raise
            time.sleep(0.1)


def landed(pending: PendingVersion) -> Version:
    """Wait for a version that is published in the background.

    One wait may seem long because this process was frozen, but many in a row are a hang.
    """
    for _ in range(60):
        with contextlib.suppress(TimeoutError):
            version = pending.result(5)
            assert version is not None, "it was superseded, although nothing newer was published"
            return version
    raise AssertionError("a publication does not end")


def publish(setting: Setting, name: str, seed: int, last: int | None = None) -> None:
    """Take the run over, sometimes from an older version, and publish step after step. `last` is the number of the last one, if given."""
    chance = random.Random(seed)
    acknowledged = Journal(setting.folder / f"acknowledged-{name}")

    def take_over() -> Publisher:
        resume_from_seq = None
        if last is None and chance.random() < 0.15:
            with open_store(setting.url, options=setting.options) as store, contextlib.suppress(DeltawireError):
                log = ChainLog(store, trusted_keys=setting.trusted)
                versions = [commit.seq for commit in log.tail(-1) if commit.kind != "fence" and commit.seq > log.floor()]
                resume_from_seq = chance.choice(versions[-4:]) if versions else None
        return Publisher(
            setting.url,
            options=WriterOptions(
                segment_bytes=6000,
                anchor_policy=AnchorPolicy(min_versions=4, max_versions=9),
                auto_collect=GRACE if chance.random() < 0.5 else None,
                signing_key=setting.key,
                store=setting.options,
            ),
            resume_from_seq=resume_from_seq,
            background=chance.random() < 0.3,
        )

    publisher: Publisher = patiently(take_over)
    step = 0 if publisher.version is None else (publisher.version.step or 0) + 1
    while True:

        def one() -> Any:
            version = publisher.publish(state_of(step), step=step)  # noqa: B023
            return version if isinstance(version, Version) else landed(version)

        version = patiently(one)
        acknowledged.write(version.seq, version.step)
        step += 1
        if last is not None:
            publisher.close()
            return
        time.sleep(chance.uniform(0.0, 0.05))


def _note(journal: Journal, seq: int, step: int | None, state: Any) -> None:
    if step is None or bits(state) != bits(state_of(step)):
        raise AssertionError(f"version {seq} was given with other weights than those of step {step}")
    journal.write(seq, step)


def _follow(subscriber: Subscriber, journal: Journal, until: int | None) -> None:
    """Record every version. With `until`, also record the version of the first sync, because a mirror may already have the newest."""
    if until is not None:
        version = patiently(subscriber.sync)
        _note(journal, version.seq, version.step, subscriber.state)
        if version.seq >= until:
            return
    for version in subscriber.follow(poll=0.05):
        _note(journal, version.seq, version.step, subscriber.state)
        if until is not None and version.seq >= until:
            return


def read(setting: Setting, name: str, seed: int, until: int | None = None) -> None:
    """Follow the chain in memory, and compare all weights of every version with its step."""
    journal = Journal(setting.folder / f"read-{name}")
    with Subscriber(setting.url, options=ReaderOptions(trusted_keys=setting.trusted, reader=name, store=setting.options)) as subscriber:
        _follow(subscriber, journal, until)


def mirror(setting: Setting, name: str, seed: int, until: int | None = None) -> None:
    """Keep a mirror, which other processes share, at the newest version."""
    journal = Journal(setting.folder / f"read-{name}")
    with Subscriber(
        setting.url, setting.folder / "mirror", options=ReaderOptions(trusted_keys=setting.trusted, reader=name, store=setting.options)
    ) as subscriber:
        _follow(subscriber, journal, until)


def load(setting: Setting, name: str, seed: int) -> None:
    """Load the mirror as an engine does, without deltawire, and compare all weights."""
    journal = Journal(setting.folder / f"read-{name}")
    last = -1
    while True:
        try:
            with reading_mirror(setting.folder / "mirror") as path:
                record = json.loads(json.loads((path / "deltawire.json").read_text())["record"])
                state = load_file(path / "model.safetensors")
        except (MirrorError, FileNotFoundError):
            if last >= 0:
                raise
            time.sleep(0.05)
            continue
        if record["seq"] > last:
            last = record["seq"]
            _note(journal, last, record["step"], state)
        elif record["seq"] < last:
            raise AssertionError(f"the mirror went back from version {last} to {record['seq']}")
        time.sleep(0.01)


def tidy(setting: Setting, name: str, seed: int) -> None:
    """Collect garbage twice, with the grace period in between. It is only used while there is no publisher."""
    with open_store(setting.url, options=setting.options) as store:
        for pause in (GRACE, 0.0):
            patiently(lambda: collect(store, grace=GRACE, log=ChainLog(store, trusted_keys=setting.trusted)))
            time.sleep(pause)


ACTORS: dict[str, Callable[..., None]] = {"publish": publish, "read": read, "mirror": mirror, "load": load, "tidy": tidy}
