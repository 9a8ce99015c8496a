"""All readers of a chain, as functions that raise `WrongWeights` if they got other weights than those of the version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from chain_drafts import handmade_chain, published_chain
from support import bits_of
from toy_chain import first_state, next_state

import deltawire
from deltawire.chain.channels import ChannelReader, kept_targets
from deltawire.chain.find import find_step, find_version
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.cli.chain_history import read_history
from deltawire.cli.doctor.examine import examine
from deltawire.errors import DeltawireError, NoChannel
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, keys
from deltawire.subscribe import Subscriber
from deltawire.subscribe.pull import pull


class WrongWeights(AssertionError):
    """A reader got weights that are not those of the version."""


def check_weights(state: Any, digest: Any, expected: Any = None) -> None:
    found = bits_of(state)
    if digest is not None and deltawire.state_digest(state) != digest:
        raise WrongWeights(f"the weights do not have the digest {digest.hex()} of their version")
    text = digest.hex() if digest is not None else ""
    known = expected if expected is not None else (handmade_chain()[1] | handmade_chain(listed=True)[1] | published_chain()[1]).get(text)
    if known is not None and found != known:
        raise WrongWeights("other weights than those that were published, of the same digest")


def _seqs(store: Store) -> list[int]:
    return list(range(sum(1 for _ in store.list(keys.COMMITS)) + 2))


def read_log(store: Store, folder: Path) -> None:
    log = ChainLog(store)
    head = log.head()
    if head is not None:
        log.in_force(head)
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            log.version(seq)
    log.floor()
    list(log.tail(-1))


def read_routes(store: Store, folder: Path) -> None:
    log = ChainLog(store)
    head = log.head()
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            commit = log.read(seq)
            if commit is not None and head is not None:
                Routes(log).find(None, commit)
                Routes(log).find(log.ref(commit), head)


def read_command_log(store: Store, folder: Path) -> None:
    for count in (None, 3):
        for by_commits in (False, True):
            with contextlib.suppress(DeltawireError):
                read_history(ChainLog(store), count, by_commits=by_commits)
    log = ChainLog(store)
    for number in (1, 2, 5, 9):
        for find in (find_version, find_step):
            with contextlib.suppress(DeltawireError):
                assert find(log, number).kind != "fence"


def read_fleet_versions(store: Store, folder: Path) -> None:
    versions = ChainVersions(ChainLog(store))
    for seq in _seqs(store):
        with contextlib.suppress(DeltawireError):
            versions.find(seq)
    versions.newest()


def _sync(subscriber: Subscriber, target: int | None = None) -> None:
    version = subscriber.sync(seq=target)
    check_weights(subscriber.state, version.digest)


def sync_memory(store: Store, folder: Path) -> None:
    with Subscriber(store, options=ReaderOptions(patience=0.0, reader="memory")) as subscriber:
        for seq in _seqs(store)[::3]:
            with contextlib.suppress(DeltawireError):
                _sync(subscriber, seq)
        for _ in range(2):
            with contextlib.suppress(DeltawireError):
                _sync(subscriber)
        if subscriber.version is not None:  # the reader's version is whole, whatever failed
            check_weights(subscriber.state, subscriber.version.digest)


def sync_mirror(store: Store, folder: Path) -> None:
    """Sync a mirror twice to the newest version, first from a late version and then from an early one.

    The second sync finds what the first one left.
    """
    for targets in ((_seqs(store)[-4], None, None), (3, None, None)):
        with Subscriber(store, folder / "mirror", options=ReaderOptions(patience=0.0, reader="mirror")) as subscriber:
            for target in targets:
                with contextlib.suppress(DeltawireError):
                    _sync(subscriber, target)
            if subscriber.version is not None:
                check_weights(subscriber.state, subscriber.version.digest)


def pull_newest(store: Store, folder: Path) -> None:
    version = pull(store, folder / "pulled", options=ReaderOptions(patience=0.0, pin=False))
    check_weights(Checkpoint(folder / "pulled"), version.digest)


def follow_channel(store: Store, folder: Path) -> None:
    """Follow channels in memory and in mirrors, from versions before and after their targets. Some chains have no channels."""
    for name in ("stable", "canary"):
        options = ReaderOptions(patience=0.0, pin=False, channel=name)
        for mirror in (None, folder / f"mirror of {name}"):
            with Subscriber(store, mirror, options=options) as subscriber:
                for target in (None, 3, None, _seqs(store)[-3], None):
                    with contextlib.suppress(DeltawireError):
                        _sync(subscriber, target)
                if subscriber.version is not None:
                    check_weights(subscriber.state, subscriber.version.digest)
        with contextlib.suppress(NoChannel):
            list(ChannelReader(ChainLog(store), name).targets())
    kept_targets(ChainLog(store))


def verify_all(store: Store, folder: Path) -> None:
    verify(store, deep=True)


def examine_as_doctor(store: Store, folder: Path) -> None:
    """The doctor raises nothing, because errors are its findings."""
    try:
        examine(store, "URL", read_only=True, test_bytes=1000)
    except DeltawireError as error:
        raise AssertionError(f"the doctor raised {error!r}") from error


def collect_garbage(store: Store, folder: Path) -> None:
    """Collect in a dry run, then announce, then delete. A sync after that ends with the right weights or with an error."""
    with contextlib.suppress(DeltawireError):
        collect(store, grace=0.0, dry_run=True)
    with contextlib.suppress(DeltawireError):
        for _ in range(2):
            collect(store, grace=0.0, now=datetime(2100, 1, 1, tzinfo=timezone.utc))
    with Subscriber(store, options=ReaderOptions(patience=0.0, pin=False)) as subscriber:
        _sync(subscriber)


def _publish(store: Store, resume_from_seq: int | None = None) -> None:
    with Publisher(store, options=WriterOptions(segment_bytes=500), resume_from_seq=resume_from_seq) as publisher:
        for number in range(2):
            state = next_state(first_state(), 1000 + number)
            published = publisher.publish(state, step=1000 + number)
            assert published is not None
    with Subscriber(store, options=ReaderOptions(patience=0.0, pin=False)) as subscriber:
        version = subscriber.sync()
        if version.seq == published.seq:
            check_weights(subscriber.state, version.digest, bits_of(state))
        check_weights(subscriber.state, version.digest)


def resume(store: Store, folder: Path) -> None:
    _publish(store)


def resume_an_older_one(store: Store, folder: Path) -> None:
    _publish(store, resume_from_seq=4)


READERS: list[Callable[[Store, Path], None]] = [
    read_log,
    read_routes,
    read_command_log,
    read_fleet_versions,
    sync_memory,
    sync_mirror,
    pull_newest,
    follow_channel,
    verify_all,
    examine_as_doctor,
    collect_garbage,
    resume,
    resume_an_older_one,
]
