"""A sidecar drives a server that swaps in one call. The server is a double; test_one_call.py uses real ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from sidecar_scene import Scene

from deltawire.chain.records.reports import QUARANTINED, REFUSED, SERVING
from deltawire.engines.vllm.driver.routes import EngineUnreachable
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL
from deltawire.errors import EngineAsleep, EngineQuarantined, EngineRefused, SwapFailed


def test_a_swap_in_one_call_sends_one_request(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop"]
    assert one_call.server.name == str(seq)
    (swapped,) = (event.fields for event in one_call.events if event.name == "swapped")
    assert (swapped["http_calls"], swapped["kv_cache"], swapped["preempted"]) == (1, "drop", 3)
    assert swapped["pause_seconds"] == 3e-3  # the time that the server reports, without the request's own


@pytest.mark.parametrize(("pause", "allowed"), [("abort", True), ("wait", True), ("keep", False)])
def test_routes_are_used_if_one_call_is_not_possible_or_not_wanted(scene: Scene, pause: Any, allowed: bool) -> None:
    scene.server.one_call = True
    scene.serve()
    scene.publish()
    with contextlib.closing(scene.start(pause=pause, one_call=allowed)) as sidecar:
        sidecar.step()
    assert scene.server.calls == ["learn", "prepare", f"pause {pause} clear", "start", "write", "finish", "resume"]
    assert scene.server.pause_leases == [(60.0, False), (60.0, True)][: 2 if pause == "wait" else 1]  # requests take a part of one


def test_a_refused_swap_changes_nothing_and_is_reported(one_call: Scene) -> None:
    before = one_call.server.name
    one_call.publish()
    one_call.server.answers = ["refused"]
    with pytest.raises(EngineRefused, match="worker 0: refused"):
        one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop"]
    assert (one_call.server.name, one_call.report().state) == (before, REFUSED)


def test_a_quarantined_server_is_repaired_by_the_next_call(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.server.answers = ["quarantined", "quarantined"]
    with pytest.raises(EngineQuarantined):
        one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop", "swap drop store"]
    assert (one_call.server.paused, one_call.server.name) == (True, QUARANTINED_LABEL)
    assert one_call.report().state == QUARANTINED
    one_call.sidecar.step()
    assert one_call.server.calls[3:] == ["learn", "swap drop store"]
    assert (one_call.server.paused, one_call.server.name) == (False, str(seq))
    assert one_call.report().state == SERVING


@pytest.mark.parametrize("was_made", [True, False])
def test_a_server_whose_answer_was_lost_is_asked_what_it_has(one_call: Scene, was_made: bool) -> None:
    seq = one_call.publish()
    one_call.server.lost = {"swap drop"}
    one_call.server.answers = [] if was_made else ["refused"]
    if was_made:
        one_call.sidecar.step()
        assert one_call.report().seq == seq
    else:
        with pytest.raises(SwapFailed):
            one_call.sidecar.step()
        one_call.server.lost = set()
        one_call.sidecar.step()
    assert "resume" not in one_call.server.calls
    assert one_call.server.name == str(seq)


def test_a_server_that_is_gone_during_a_swap_is_asked_by_the_next_step(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.server.lost = {"swap drop", "status after a swap"}
    with pytest.raises(EngineUnreachable):
        one_call.sidecar.step()
    one_call.server.lost = set()
    one_call.server.calls.clear()
    one_call.sidecar.step()
    assert one_call.server.calls == ["learn"]  # it has made the swap
    assert one_call.server.name == str(seq)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_server_that_is_asleep_is_not_changed(one_call: Scene, when: str) -> None:
    before = one_call.server.name
    one_call.publish()
    one_call.server.asleep = when == "before"
    one_call.server.answers = ["asleep"] if when == "during" else []
    with pytest.raises(EngineAsleep):
        one_call.sidecar.step()
    assert one_call.server.calls == ([] if when == "before" else ["prepare", "swap drop"])
    assert one_call.server.name == before
    one_call.server.asleep = False
    one_call.sidecar.step()
    assert one_call.server.name != before


def test_a_held_server_is_reported_once_for_each_reason(one_call: Scene) -> None:
    for asleep in (True, True, False, True):
        one_call.publish()
        one_call.server.asleep = asleep
        with contextlib.suppress(EngineAsleep):
            one_call.sidecar.step()
    assert [event.fields["reason"] for event in one_call.events if event.name == "engine-held"] == ["it is asleep"] * 2


@pytest.mark.parametrize("is_one_call", [True, False])
def test_a_held_server_is_resumed_only_by_a_version(scene: Scene, is_one_call: bool) -> None:
    scene.server.one_call, scene.server.held, scene.server.paused = is_one_call, True, True
    scene.publish()
    scene.server.answers, scene.server.failing = ["refused", "refused"], {"start"}
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    assert scene.server.paused
    scene.server.failing = set()
    scene.sidecar.step()
    assert not scene.server.paused


@pytest.mark.parametrize("is_one_call", [True, False])
def test_a_server_that_an_operator_pauses_gets_versions_and_stays_paused(scene: Scene, is_one_call: bool) -> None:
    server = scene.server
    server.one_call = is_one_call
    scene.serve()
    server.paused = server.paused_by_others = True
    seq = scene.publish()
    scene.sidecar.step()
    assert (server.paused, server.name) == (True, str(seq))
    assert not scene.sidecar.readiness()[0]
    assert [event.fields["reason"] for event in scene.events if event.name == "engine-held"] == ["somebody else has paused it"]
    with contextlib.closing(scene.start()) as again:  # a new sidecar finds a server that is paused
        again.step()
        assert (server.paused, again.readiness()[0]) == (True, False)
        server.resume()
        again.step()
        assert again.readiness()[0]
    assert "resume" in server.calls
    server.calls.clear()
    scene.publish()
    scene.sidecar.step()
    assert not server.paused


def test_a_sidecar_says_why_a_server_stays_paused_after_an_update_that_nobody_has_ended(one_call: Scene) -> None:
    server, sidecar = one_call.server, one_call.sidecar
    server.paused = server.paused_by_others = True
    one_call.publish()
    sidecar.step()
    assert sidecar.readiness() == (False, {"reason": "somebody else has paused the server: POST /resume ends this."})
    server.unended_update = "nobody has ended an update"  # the server has found out
    sidecar.step()
    assert sidecar.readiness() == (False, {"reason": "the server stays paused: nobody has ended an update."})
    reasons = [event.fields["reason"] for event in one_call.events if event.name == "engine-held"]
    assert reasons == ["somebody else has paused it", "nobody has ended an update"]
    server.resume()
    sidecar.step()
    assert sidecar.readiness()[0]


def test_a_refused_swap_resumes_a_server_that_a_killed_sidecar_has_paused(one_call: Scene) -> None:
    one_call.publish()
    one_call.server.paused = True
    one_call.server.answers = ["refused"]
    with contextlib.closing(one_call.start()) as again, pytest.raises(EngineRefused):
        again.step()
    assert not one_call.server.paused


def test_a_version_of_another_chain_with_the_same_number_is_not_taken_for_the_one_that_is_wanted(one_call: Scene) -> None:
    """The server follows another run. It refuses to load the version, and its answer is lost."""
    seq = one_call.publish()
    server = one_call.server
    server.worker["seq"], server.commit, server.name = seq, "0" * 64, str(seq)
    server.answers, server.lost = ["refused", "refused"], {"swap drop store", "swap drop mirror"}
    with contextlib.closing(one_call.start()) as sidecar, contextlib.suppress(SwapFailed, EngineRefused, EngineUnreachable):
        sidecar.step()
    assert sidecar.served is None
    assert one_call.report().state != SERVING or one_call.report().seq != seq
