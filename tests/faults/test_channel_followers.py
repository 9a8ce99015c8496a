"""Followers of a channel never serve a version that was not on it, whatever fails, and whenever the channel is moved."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from channel_followers import KINDS, Follower, InEngine, WatchedStore
from channelled_chain import ChannelledChain
from forked_python import ForkedPopen

from deltawire import SigningKey, Subscriber, state_digest
from deltawire.chain.memory_state import MemoryState, UpdateStep
from deltawire.errors import ChannelMoved, DeltawireError, MirrorError, NoChannel, StoreUnavailable
from deltawire.format.digest import Digest
from deltawire.store import keys
from deltawire.store.local import LocalStore
from deltawire.testing.faulty_store import Before, ProcessDied

KEY = SigningKey.generate()
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
SIGNED = pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
NEWEST = 5
"""A move from version 1 to this one leads over a delta for each version between."""


class Scene:
    """A follower at version 1 of a channel, and everything that it has ever served."""

    def __init__(self, kind: str, folder: Path, key: SigningKey | None = None, **options: Any) -> None:
        self.chain = ChannelledChain(NEWEST, key=key)
        self.chain.promote(1)
        self.kind, self.folder = kind, folder
        self.seen: set[Digest] = set()
        self.store = WatchedStore(self.chain.store)
        self.follower = self.open(self.store)
        assert self.follower.sync().seq == 1

    def open(self, store: WatchedStore) -> Follower:
        return KINDS[self.kind](self.chain, store, self.folder, self.seen)

    def restart(self) -> Follower:
        """Return a follower in a new process: only files are left of the old one."""
        self.follower.close()
        self.follower = self.open(WatchedStore(self.chain.store))
        return self.follower

    def sync(self) -> int:
        return self.follower.sync().seq

    def check(self, *versions: int) -> None:
        """Check that nothing was served except these versions."""
        self.follower.look()
        known = {state_digest(self.chain.state(version)): version for version in range(1, NEWEST + 1)}
        assert {known.get(digest, digest) for digest in self.seen} <= set(versions)


def arm(scene: Scene, *faults: Any) -> None:
    """Let a store fail from now on. Calls are counted from 0 again, and what the follower serves is looked at before each."""
    scene.store.__init__(scene.chain.store, list(faults), lambda number: scene.follower.look())  # type: ignore[misc]


def calls_of_a_move(kind: str, folder: Path, key: SigningKey | None) -> int:
    scene = Scene(kind, folder, key)
    scene.chain.promote(NEWEST)
    arm(scene)
    assert scene.sync() == NEWEST
    scene.check(1, NEWEST)
    scene.follower.close()
    return len(scene.store.calls)


def moves(kind: str, folder: Path, key: SigningKey | None = None) -> Iterator[tuple[int, Scene]]:
    """Yield the number of each call of a move over several versions, with a follower that has this move before it."""
    for number in range(calls_of_a_move(kind, folder / "count", key)):
        scene = Scene(kind, folder / str(number), key)
        scene.chain.promote(NEWEST)
        yield number, scene
        scene.check(1, NEWEST)
        scene.follower.close()


@ALL_KINDS
@SIGNED
def test_a_follower_that_dies_at_any_call_never_serves_a_version_between(kind: str, key: SigningKey | None, tmp_path: Path) -> None:
    for number, scene in moves(kind, tmp_path, key):
        arm(scene, Before(number, "crash"))
        with pytest.raises(ProcessDied):
            scene.sync()
        scene.restart()
        scene.check(1, NEWEST)
        assert scene.sync() == NEWEST


@ALL_KINDS
def test_a_store_that_fails_at_any_call_shows_no_version_between(kind: str, tmp_path: Path) -> None:
    for number, scene in moves(kind, tmp_path):
        arm(scene, Before(number, "unavailable"))
        with pytest.raises(StoreUnavailable):
            scene.sync()
        scene.check(1, NEWEST)
        assert scene.sync() == NEWEST


@ALL_KINDS
def test_a_rollback_at_any_call_of_a_sync_is_followed_by_the_same_sync(kind: str, tmp_path: Path) -> None:
    for number, scene in moves(kind, tmp_path):
        arm(scene)

        def happens(call: int, scene: Scene = scene, number: int = number) -> None:
            scene.follower.look()
            if call == number:
                scene.chain.rollback()

        scene.store.happens = happens
        assert scene.sync() == 1


@ALL_KINDS
def test_a_version_that_is_rolled_back_while_it_is_fetched_is_never_served(kind: str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path / "mirror")
    scene.chain.promote(NEWEST)
    arm(scene)
    turn = threading.Lock()

    def happens(number: int) -> None:
        is_fetching = any(call.key.startswith(keys.DATA) for call in list(scene.store.calls))
        if is_fetching and turn.acquire(blocking=False):  # once
            scene.chain.rollback()

    scene.store.happens = happens
    assert scene.sync() == 1
    scene.check(1)
    scene.follower.close()


@pytest.mark.parametrize("kind", ["memory", "engine"])
@pytest.mark.parametrize("bad", range(2, NEWEST + 1))
def test_a_wrong_delta_on_the_way_leaves_the_old_version(kind: str, bad: int, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path / "mirror")
    chain = scene.chain.chain
    first = len(chain.commits)
    for version in range(first, first + NEWEST - 1):
        chain.delta(files=chain.delta_files(scene.chain.state(2), scene.chain.state(3)) if version == first + bad - 2 else None)
    scene.chain.promote(first - 1)
    assert scene.sync() == first - 1
    newest = len(chain.commits) - 1
    scene.chain.promote(newest)
    arm(scene)
    with pytest.raises(DeltawireError):
        scene.sync()
    assert scene.follower.version is not None
    assert scene.follower.version.seq == first - 1
    if isinstance(scene.follower, InEngine):
        assert not scene.follower.engine.is_paused
    chain.add_skip(newest, first - 1)
    assert scene.sync() == newest
    states = [state_digest(state) for state in chain.states[1:] if state is not None]
    assert scene.seen <= {states[0], states[first - 2], states[newest - 1]}
    scene.follower.close()


@pytest.mark.parametrize("kind", ["memory", "engine"])
@pytest.mark.parametrize("hop", range(1, NEWEST))
def test_a_sync_that_is_interrupted_after_any_hop_leaves_the_old_version(
    kind: str, hop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(kind, tmp_path / "mirror")
    scene.chain.promote(NEWEST)
    made: list[UpdateStep] = []
    redo = MemoryState.redo

    def interrupted(state: MemoryState, step: UpdateStep) -> None:
        redo(state, step)
        made.append(step)
        if len(made) == hop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MemoryState, "redo", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.sync()
    scene.check(1)
    assert scene.sync() == NEWEST
    scene.check(1, NEWEST)
    scene.follower.close()


@ALL_KINDS
@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 70_000, "target", "unsigned"])
def test_a_hostile_move_changes_nothing(kind: str, data: bytes | str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path / "mirror", KEY)
    move = scene.chain.promote(NEWEST)
    key = keys.channel_key("stable", 1)
    if data == "target":
        move = KEY.sign(dataclasses.replace(move, target=dataclasses.replace(move.target, digest=Digest((1, 2, 3, 4)))))
    elif data == "unsigned":
        move = dataclasses.replace(move, signature=None)
    good = scene.chain.store.get(key, limit=1 << 20)
    scene.chain.store.put(key, data if isinstance(data, bytes) else move.to_bytes())
    with pytest.raises(DeltawireError):
        scene.sync()
    scene.check(1)
    scene.chain.store.put(key, good)
    assert scene.sync() == NEWEST
    scene.follower.close()


@ALL_KINDS
def test_a_follower_waits_for_its_channel(kind: str, tmp_path: Path) -> None:
    chain = ChannelledChain(NEWEST)
    seen: set[Digest] = set()
    follower = KINDS[kind](chain, chain.store, tmp_path / "mirror", seen)
    for _ in range(2):
        with pytest.raises(NoChannel) as found:
            follower.sync()
        assert found.value.retryable
    assert not seen
    chain.promote(2)
    assert follower.sync().seq == 2
    follower.look()
    assert seen == {state_digest(chain.state(2))}
    follower.close()


def test_files_that_are_announced_reach_no_follower_of_a_channel(tmp_path: Path) -> None:
    scene = Scene("memory", tmp_path)
    chain = scene.chain.chain
    files = chain.delta_files(chain.state, scene.chain.state(2))
    scene.chain.promote(NEWEST)
    chain.announce(files)
    arm(scene)
    scene.sync()
    subscriber: Subscriber = scene.follower._subscriber  # type: ignore[attr-defined]
    subscriber._look()
    subscriber._look_ahead()
    asked = {each.key for each in scene.store.calls}
    assert keys.COMING not in asked
    assert not asked & {entry.key for entry in files}
    scene.follower.close()


def test_a_mirror_follows_one_channel(tmp_path: Path) -> None:
    scene = Scene("mirror", tmp_path / "mirror")
    scene.chain.promote(2, "canary")
    for channel in ("canary", None):
        with pytest.raises(MirrorError, match="one for each channel"):
            Subscriber(scene.chain.store, tmp_path / "mirror", options=scene.chain.options(channel))
    with Subscriber(scene.chain.store, tmp_path / "head", options=scene.chain.options(None)) as subscriber:
        subscriber.sync()
    with pytest.raises(MirrorError, match="follows the newest version"):
        Subscriber(scene.chain.store, tmp_path / "head", options=scene.chain.options())
    scene.follower.close()


# Two writers


def test_a_second_promoter_at_any_call_of_the_first_lets_one_win() -> None:
    def calls() -> Iterator[int]:
        chain = ChannelledChain(NEWEST)
        chain.promote(1)
        store = WatchedStore(chain.store)
        chain.writer(store=store).promote(chain.chain.commits[2])
        yield from range(len(store.calls))

    lost = 0
    for number in calls():
        chain = ChannelledChain(NEWEST)
        chain.promote(1)
        store = WatchedStore(chain.store)
        store.happens = lambda each, chain=chain, number=number: chain.promote(3) if each == number else None  # type: ignore[misc]
        try:
            chain.writer(store=store).promote(chain.chain.commits[2])
            won = 2
        except ChannelMoved:
            won, lost = 3, lost + 1
        history = [move.target.seq for move in chain.reader().history()]
        assert history == ([2, 3, 1] if won == 2 else [3, 1])
    assert lost


@pytest.mark.parametrize("number", range(8))
def test_a_promoter_that_dies_at_any_call_has_moved_the_channel_or_not(number: int) -> None:
    chain = ChannelledChain(NEWEST)
    chain.promote(1)
    store = WatchedStore(chain.store, [Before(number, "crash")])
    died = False
    try:
        chain.writer(store=store).promote(chain.chain.commits[2])
    except ProcessDied:
        died = True
    assert chain.reader().newest().target.seq in ((1, 2) if died else (2,))
    assert chain.promote(3).target.seq == 3


def test_of_several_processes_that_promote_at_once_one_wins(tmp_path: Path) -> None:
    chain = ChannelledChain(NEWEST, store=LocalStore(tmp_path / "toy"))
    chain.promote(1)
    command = ["-m", "deltawire", "promote", str(tmp_path / "toy"), "stable", "--expect", "0", "--json", "--version"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [ForkedPopen("light", [*command, str(version)], **pipes) for version in (2, 3, 4)]
    answers = [json.loads(each.communicate()[0]) for each in running]
    winners = [answer["version"] for answer in answers if "error" not in answer]
    assert len(winners) == 1
    assert [answer["error"]["type"] for answer in answers if "error" in answer] == ["ChannelMoved"] * 2
    assert sorted(each.returncode for each in running) == [0, 1, 1]
    assert [move.target.seq for move in chain.reader().history()] == [winners[0], 1]
