"""A sidecar brings a server to the versions of a channel, and to no other. The server is a double; test_one_call.py uses a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_scene import Scene

from deltawire.chain.log import ChainLog
from deltawire.engines.vllm.driver.routes import EngineUnreachable
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL, default_mirror
from deltawire.errors import DeltawireError, NoChannel
from deltawire.publish.channels import ChannelWriter
from deltawire.store import open_store


class ChannelScene(Scene):
    """A sidecar that follows the channel "stable", at the first version."""

    def __init__(self, folder: Path, *, one_call: bool) -> None:
        super().__init__(folder)
        self.sidecar.close()
        self.server.one_call = one_call
        self.follower = self.start(channel="stable")
        self.first = self.publish()

    def promote(self, seq: int) -> None:
        with open_store(self.folder / "store") as store:
            log = ChainLog(store)
            commit = log.read(seq)
            assert commit is not None
            ChannelWriter(log, "stable").promote(commit)

    def rollback(self) -> None:
        with open_store(self.folder / "store") as store:
            ChannelWriter(ChainLog(store), "stable").rollback()

    def begin(self) -> None:
        self.promote(self.first)
        self.follower.step()
        self.server.calls.clear()
        self.server.swaps.clear()


@pytest.fixture(params=[True, False], ids=["call", "routes"])
def channel(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChannelScene]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scene = ChannelScene(tmp_path, one_call=request.param)
    yield scene
    scene.follower.close()
    scene.publisher.close()


def test_a_server_gets_nothing_before_its_channel_exists(channel: ChannelScene) -> None:
    with pytest.raises(NoChannel):
        channel.follower.step()
    assert channel.server.calls == []
    channel.promote(channel.first)
    step = channel.follower.step()
    assert step is not None
    assert step.seq == channel.first
    channel.publish()
    assert channel.follower.step() is None


def test_a_move_over_several_versions_is_one_swap(channel: ChannelScene) -> None:
    channel.begin()
    seqs = [channel.publish() for _ in range(3)]
    channel.promote(seqs[-1])
    channel.follower.step()
    assert channel.server.name == str(seqs[-1])
    if channel.server.one_call:
        assert channel.server.swaps == [seqs]
        assert channel.server.calls == ["prepare", "swap drop"]
    else:  # each update by routes is one pause, so the server loads everything
        assert channel.server.calls == ["pause keep clear", "start", "load", "finish", "resume"]
    channel.server.calls.clear()
    next_ = channel.publish()
    channel.promote(next_)
    channel.follower.step()
    assert channel.server.name == str(next_)
    assert "load" not in channel.server.calls
    channel.rollback()
    channel.follower.step()
    assert channel.server.name == str(seqs[-1])


@pytest.mark.parametrize("kept", ["by all", "by one"])
def test_a_rollback_writes_back_what_all_workers_have_kept(channel: ChannelScene, kept: str) -> None:
    channel.begin()
    seqs = [channel.publish() for _ in range(3)]
    channel.promote(seqs[-1])
    channel.follower.step()
    channel.server.calls.clear()
    channel.server.swaps.clear()
    back = [seqs[1], seqs[0], channel.first]
    channel.server.undo = [back, back if kept == "by all" else back[:2]]
    assert channel.server.info["undo_bytes"] == 512 << 20
    channel.rollback()
    channel.follower.step()
    assert channel.server.name == str(channel.first)
    if kept == "by all" and channel.server.one_call:
        assert channel.server.swaps == [back]
        assert channel.server.calls == ["prepare", "swap drop"]
    else:  # by routes, it would serve the versions between
        assert "load" in channel.server.calls or channel.server.calls == ["swap drop store"]


def test_a_rollback_that_the_workers_refuse_loads_a_checkpoint(channel: ChannelScene) -> None:
    channel.begin()
    seq = channel.publish()
    channel.promote(seq)
    channel.follower.step()
    channel.server.undo = [[channel.first], [channel.first]]
    channel.server.failing = {"stage"}  # a worker was started again
    channel.server.calls.clear()
    channel.rollback()
    channel.follower.step()
    assert channel.server.name == str(channel.first)
    assert channel.server.calls[-1] in ("swap drop store", "resume")


@pytest.mark.parametrize("channel", [True], indirect=True)
def test_a_rollback_that_fails_while_the_workers_write_loads_a_checkpoint(channel: ChannelScene) -> None:
    channel.begin()
    seq = channel.publish()
    channel.promote(seq)
    channel.follower.step()
    channel.server.undo = [[channel.first], [channel.first]]
    channel.server.answers = ["quarantined"]
    channel.rollback()
    channel.follower.step()
    assert (channel.server.name, channel.server.paused) == (str(channel.first), False)
    assert channel.server.calls[-1] == "swap drop store"


@pytest.mark.parametrize("channel", [True], indirect=True)
def test_a_server_that_fails_between_versions_loads_the_new_one_in_full(channel: ChannelScene) -> None:
    channel.begin()
    seqs = [channel.publish() for _ in range(3)]
    channel.promote(seqs[-1])
    channel.server.answers = ["quarantined"]
    channel.follower.step()
    assert channel.server.swaps == [seqs, seqs[-1]]
    assert (channel.server.name, channel.server.paused) == (str(seqs[-1]), False)


@pytest.mark.parametrize("channel", [True], indirect=True)
def test_a_server_that_is_held_between_versions_is_never_resumed_there(channel: ChannelScene) -> None:
    """The answer of the swap is lost, and the sidecar is killed. The next one finds a server with a version of no channel."""
    channel.begin()
    between = channel.publish()
    target = channel.publish()
    channel.promote(target)
    channel.server.worker |= {"seq": between}
    channel.server.commit = channel.hash_of(between)
    channel.server.name, channel.server.held, channel.server.paused = QUARANTINED_LABEL, True, True
    channel.server.started_with = between
    channel.server.answers = ["refused", "refused"]  # from the store, and from a mirror
    channel.follower.close()
    channel.follower = again = channel.start(channel="stable")
    with pytest.raises(DeltawireError):
        again.step()
    assert "resume" not in channel.server.calls
    assert channel.server.paused
    assert again.served is None
    channel.server.answers = []
    again.step()
    assert (channel.server.name, channel.server.paused) == (str(target), False)


@pytest.mark.parametrize("channel", [True], indirect=True)
def test_a_lost_answer_between_versions_does_not_resume_the_server(channel: ChannelScene) -> None:
    channel.begin()
    seqs = [channel.publish() for _ in range(2)]
    channel.promote(seqs[-1])
    swap = channel.server.swap

    def half_done(*arguments: object, **options: object) -> object:
        channel.server.worker |= {"seq": seqs[0]}
        channel.server.commit = channel.hash_of(seqs[0])
        channel.server.name, channel.server.held, channel.server.paused = QUARANTINED_LABEL, True, True
        channel.server.swap = swap  # type: ignore[method-assign]
        channel.server.calls.append("swap drop")
        raise EngineUnreachable("no answer.")

    channel.server.swap = half_done  # type: ignore[method-assign,assignment]
    channel.follower.step()
    assert channel.server.calls == ["prepare", "swap drop", "swap drop store"]  # nothing resumes it between
    assert (channel.server.name, channel.server.paused) == (str(seqs[-1]), False)


@pytest.mark.parametrize("channel", [True], indirect=True)
def test_a_rollback_while_the_workers_stage_is_not_swapped_in(channel: ChannelScene) -> None:
    channel.begin()
    next_ = channel.publish()
    channel.promote(next_)
    prepare = channel.server.prepare

    def prepare_and_roll_back(seq: int) -> list[dict[str, object]]:
        channel.rollback()
        return prepare(seq)

    channel.server.prepare = prepare_and_roll_back  # type: ignore[method-assign]
    assert channel.follower.step() is None
    assert channel.server.swaps == []
    assert channel.server.name == str(channel.first)


def test_mirrors_of_channels_are_separate() -> None:
    assert len({default_mirror("s3://bucket/run", channel) for channel in (None, "stable", "canary")}) == 3
