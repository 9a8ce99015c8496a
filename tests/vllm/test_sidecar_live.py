"""A sidecar brings deltas to live weights through the spool. The server is a double; test_swaps.py uses real ones."""

from __future__ import annotations

import contextlib

import pytest
from sidecar_scene import Scene

from deltawire import Publisher, Subscriber
from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import SERVING
from deltawire.errors import EngineQuarantined, EngineRefused, StoreUnavailable
from deltawire.format.digest import Digest
from deltawire.store import open_store


def spooled(scene: Scene) -> list[str]:
    return sorted(path.name for path in (scene.folder / "spool").glob("hop-*.json"))


def test_deltas_go_to_live_weights_through_the_spool_one_version_after_the_other(live: Scene) -> None:
    first = live.publish()
    last = live.publish()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"] * 2
    assert live.server.name == str(last)
    assert spooled(live) == [f"hop-{first - 1}-{first}.json", f"hop-{first}-{last}.json"]
    assert [event.fields["live"] for event in live.events if event.name == "swapped"] == [1, 1]
    assert not live.cached_mirror.exists()
    assert (live.report().state, live.report().seq) == (SERVING, last)
    for _ in range(3):
        live.publish()
        live.sidecar.step()
    assert len(spooled(live)) == 2
    live.sidecar.close()
    assert spooled(live) == []


def test_a_new_sidecar_goes_on_with_live_weights(live: Scene) -> None:
    with contextlib.closing(live.start()) as again:
        again.step()
        assert live.server.calls == ["learn"]
        live.publish()
        again.step()
    assert live.server.calls == ["learn", "prepare", "swap drop"]


def test_a_version_of_another_chain_with_the_same_number_is_not_recognised(live: Scene) -> None:
    live.server.commit = "0" * 64
    seq = live.publish()
    with contextlib.closing(live.start()) as again:
        again.step()
    assert live.server.calls == ["learn", f"adopt {seq}", f"adopt {seq - 1}", "swap drop store"]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_server_that_was_started_with_a_version_is_not_loaded_again(scene: Scene, is_held: bool) -> None:
    scene.server.one_call = True
    scene.server.held = scene.server.paused = is_held
    scene.server.started_with = scene.publish()
    last = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls[:5] == ["learn", f"adopt {last}", f"adopt {last - 1}", "prepare", "swap drop"]
    assert (scene.server.name, scene.server.paused) == (str(last), False)
    assert not scene.cached_mirror.exists()
    assert [event.fields["seq"] for event in scene.events if event.name == "adopted"] == [last - 1]


def test_a_held_server_that_was_started_with_the_newest_version_is_resumed(scene: Scene) -> None:
    scene.server.one_call = scene.server.held = scene.server.paused = True
    seq = scene.server.started_with = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls == ["learn", f"adopt {seq}", "resume"]
    assert (scene.server.name, scene.server.paused) == (str(seq), False)


def test_a_held_server_that_restarts_with_the_newest_version_is_resumed_by_the_same_sidecar(live: Scene) -> None:
    seq = live.publish()
    live.sidecar.step()  # in one call, after which the server needs no request to resume
    live.server.restart()
    live.server.held = live.server.paused = True
    live.server.started_with = seq
    live.server.calls.clear()
    live.sidecar.step()
    assert live.server.calls == ["learn", f"adopt {seq}", "resume"]
    assert (live.server.name, live.server.paused) == (str(seq), False)
    assert live.sidecar.readiness()[0]


def test_a_server_that_refuses_two_deltas_is_loaded_from_a_mirror(live: Scene) -> None:
    seq = live.publish()
    live.server.answers = ["refused", "refused"]
    for _ in range(2):
        with pytest.raises(EngineRefused):
            live.sidecar.step()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"] * 2 + ["swap drop mirror"]
    assert live.server.name == str(seq)
    assert live.cached_mirror.exists()
    assert [event.fields["reason"] for event in live.events if event.name == "mirror-used"] == ["the server has refused 2 deltas"]
    live.server.calls.clear()
    live.publish()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"]


def test_live_weights_in_an_unknown_state_are_repaired_from_the_store(live: Scene) -> None:
    seq = live.publish()
    live.server.answers = ["quarantined"]
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop", "swap drop store"]
    assert (live.server.name, live.server.paused) == (str(seq), False)


@pytest.mark.parametrize("is_quarantined", [False, True])
def test_workers_that_cannot_load_from_the_store_load_from_a_mirror(scene: Scene, is_quarantined: bool) -> None:
    scene.server.one_call = True
    if is_quarantined:
        scene.serve()
    seq = scene.publish()
    scene.server.answers = ["quarantined", "refused"] if is_quarantined else ["refused"]
    scene.sidecar.step()
    assert scene.server.calls[-2:] == ["swap drop store", "swap drop mirror"]
    assert (scene.server.name, scene.server.paused) == (str(seq), False)
    assert "url" not in scene.server.info
    assert scene.server.info["mirror"] == str(scene.cached_mirror)
    assert "refused" in str([event.fields["reason"] for event in scene.events if event.name == "mirror-used"])
    scene.server.restart()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls[-1] == "swap drop mirror"  # it is at hand, and needs no credentials


@pytest.mark.parametrize("is_quarantined", [False, True])
def test_no_mirror_hides_that_the_store_was_replaced(scene: Scene, is_quarantined: bool) -> None:
    """A new mirror has no memory of the run, so it would accept what the workers refuse."""
    scene.server.one_call = True
    if is_quarantined:
        scene.serve()
    scene.publish()
    scene.server.answers = ["quarantined", "refused"] if is_quarantined else ["refused"]
    scene.server.why_refused = "RollbackDetected: commit 1 is not the one that was seen."
    with pytest.raises(EngineQuarantined if is_quarantined else EngineRefused, match="RollbackDetected"):
        scene.sidecar.step()
    assert not scene.cached_mirror.exists()
    assert "mirror-used" not in {event.name for event in scene.events}


def test_a_spool_that_cannot_be_used_does_not_stop_updates(live: Scene) -> None:
    spool = live.folder / "spool"
    spool.rename(live.folder / "moved")
    spool.write_text("not a directory")
    seq = live.publish()
    live.sidecar.step()
    assert live.server.calls == ["swap drop mirror"]
    assert live.server.name == str(seq)
    assert any(event.name == "mirror-used" for event in live.events)


def test_a_layout_that_cannot_be_learnt_is_loaded_from_a_mirror(scene: Scene) -> None:
    scene.server.one_call, scene.server.is_live = True, False
    for _ in range(2):
        scene.publish()
        scene.sidecar.step()
    assert scene.server.calls == ["learn", "swap drop mirror", "swap drop mirror"]
    assert [event.fields["reason"] for event in scene.events if event.name == "mirror-used"] == ["of its layout"]


def test_a_server_that_restarts_while_the_store_is_away_gets_the_version_of_the_mirror(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailable("it is away")

    seq = scene.publish()
    with contextlib.closing(scene.start(has_mirror=True)) as sidecar:
        sidecar.step()
        monkeypatch.setattr(sidecar._subscriber, "_move", fail)
        assert sidecar.step() is None  # the server keeps its version
        scene.server.restart()
        assert sidecar.step() is not None
    assert scene.server.name == str(seq)


def test_live_weights_go_over_fences_and_rewinds(live: Scene) -> None:
    live.publisher.close()
    live.publisher = Publisher(live.folder / "store")  # this writes a fence
    seq = live.publish()
    live.sidecar.step()
    assert live.server.name == str(seq)
    assert spooled(live) == [f"hop-1-{seq}.json"]
    live.publisher.close()
    live.publisher = Publisher(live.folder / "store", resume_from_seq=1)  # this goes back
    live.sidecar.step()
    assert live.sidecar.served is not None
    assert live.server.name == str(live.sidecar.served.seq)
    assert live.server.name != str(seq)
    assert live.server.calls.count("swap drop store") <= 1  # if no route leads back, a full checkpoint does


def test_the_workers_load_full_checkpoints_from_the_store_and_the_host_keeps_none(scene: Scene) -> None:
    scene.server.one_call = True
    first = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls == ["learn", f"adopt {first}", "swap drop store"]
    store = (scene.folder / "store").as_uri()
    expected = {"confirm": "auto", "threads": None, "url": store, "run": None, "trusted_keys": [], "spool": str(scene.folder / "spool")}
    assert scene.server.info == expected
    scene.publish()
    scene.sidecar.step()
    assert scene.server.calls[3:] == ["prepare", "swap drop"]
    scene.server.answers = ["quarantined"]
    last = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls[5:] == ["prepare", "swap drop", "swap drop store"]
    assert (scene.report().state, scene.report().seq) == (SERVING, last)
    assert not scene.cached_mirror.exists()
    assert "mirror-used" not in [event.name for event in scene.events]


def test_with_a_mirror_the_workers_load_full_checkpoints_from_it_and_need_no_store(scene: Scene) -> None:
    scene.server.one_call = True
    first = scene.publish()
    with contextlib.closing(scene.start(has_mirror=True)) as sidecar:
        sidecar.step()
        assert scene.server.calls == ["learn", f"adopt {first}", "swap drop mirror"]
        mirror, spool = str(scene.folder / "mirror"), str(scene.folder / "spool")
        assert scene.server.info == {"confirm": "auto", "threads": None, "mirror": mirror, "spool": spool}
        scene.publish()
        sidecar.step()
        assert scene.server.calls[3:] == ["prepare", "swap drop"]  # updates are live, and do not touch the mirror
        with Subscriber(scene.folder / "store", mirror) as reader:
            assert reader.version is not None
            assert reader.version.seq == first
        scene.server.answers = ["quarantined"]
        scene.publish()
        sidecar.step()
        assert scene.server.calls[5:] == ["prepare", "swap drop", "swap drop mirror"]


def test_a_server_that_was_started_with_an_earlier_version_goes_on_from_there(scene: Scene) -> None:
    scene.server.one_call = True
    scene.publish()
    seq = scene.server.started_with = scene.publish()
    scene.publisher.close()
    scene.publisher = Publisher(scene.folder / "store")  # this writes a fence, which has the same digest
    last = [scene.publish() for _ in range(3)][-1]
    with open_store(scene.folder / "store") as store:
        commit = ChainLog(store).read(seq)
        assert commit is not None
        assert commit.digest is not None
        half = Digest((1, 2, 3, 4))  # two workers hold parts of the model, whose digests add up
        halves = [half.hex(), (commit.digest - half).hex()]
    status = scene.server.status
    scene.server.status = lambda: [{**worker, "digest": digest} for worker, digest in zip(status(), halves, strict=True)]  # type: ignore[method-assign]
    scene.sidecar.step()
    assert scene.server.calls[:2] == ["learn", f"adopt {seq}"]
    assert scene.server.calls[2:] == ["prepare", "swap drop"] * 3
    assert scene.server.name == str(last)
    assert not scene.cached_mirror.exists()


def test_a_draft_that_is_not_in_the_chain_is_told_once(live: Scene) -> None:
    live.server.worker["draft"] = {"model": "Eagle", "follows": False, "why_not": "it has a checkpoint of its own"}
    with contextlib.closing(live.start()) as again:
        for _ in range(2):
            live.publish()
            again.step()
    assert [event.fields["reason"] for event in live.events if event.name == "draft-kept"] == ["it has a checkpoint of its own"]
