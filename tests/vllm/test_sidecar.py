"""A sidecar sends requests in the right order. The server is a double; test_swaps.py and test_failures.py use real ones."""

from __future__ import annotations

import threading

import pytest
from sidecar_scene import Scene

from deltawire.chain.log import ChainLog
from deltawire.chain.records.reports import LOST, QUARANTINED, REFUSED, SERVING, read_reports
from deltawire.cli.commands.sidecar import _Listener
from deltawire.dtypes import dtype_named
from deltawire.engines.http_session import Answer
from deltawire.engines.vllm.driver.routes import EngineUnreachable, WrongServer, failed_route
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL
from deltawire.engines.vllm.model_fit import describe_types
from deltawire.errors import EngineModelDiffers, EngineQuarantined, EngineRefused, EngineUnavailable
from deltawire.format.records.record_parts import RecipeRecord
from deltawire.quantise.recipe import Recipe
from deltawire.store import open_store
from deltawire.subscribe.tensor_table import TensorSpec


def test_a_version_is_staged_before_the_pause_and_named_before_the_server_continues(scene: Scene) -> None:
    scene.serve()
    seq = scene.publish()
    assert scene.sidecar.step() is not None
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)
    assert scene.sidecar.step() is None
    (swapped,) = (event for event in scene.events if event.name == "swapped")
    assert swapped.fields["http_calls"] == 5
    assert scene.server.pause_leases == [(60.0, False)]  # so the server continues if this process dies in the pause


def test_a_version_that_cannot_be_staged_never_pauses_the_server(scene: Scene) -> None:
    scene.serve()
    scene.publish()
    scene.server.failing = {"stage"}
    with pytest.raises(EngineRefused, match="no such version"):
        scene.sidecar.step()
    assert scene.server.calls == ["prepare"]
    assert scene.report().state == REFUSED


def test_a_chain_of_another_model_ends_the_sidecar_and_leaves_the_server_alone(scene: Scene) -> None:
    scene.publish()
    scene.server.misfit = "1 of its 1 tensors do not fit: 'w'"
    with pytest.raises(EngineModelDiffers, match=r"holds F32 weights, but the server serves bfloat16: start it .* `deltawire pull .*'w'"):
        scene.sidecar.run()
    assert scene.server.calls == ["learn"]
    assert (scene.server.name, scene.server.paused, scene.report().state) == ("default", False, REFUSED)
    assert not scene.cached_mirror.exists()
    assert "mirror-used" not in {event.name for event in scene.events}


def test_types_that_are_equal_are_not_called_different(scene: Scene) -> None:
    scene.publish()
    scene.server.misfit, scene.server.loaded_types = "1 of its 1 tensors do not fit: 'w'", "float32"
    with pytest.raises(EngineModelDiffers, match=r"^the tensors of the chain are not those of the model that .*: start it .*'w'"):
        scene.sidecar.step()


def test_a_sidecar_that_ends_leaves_no_report_of_a_version_that_nobody_updates(scene: Scene) -> None:
    scene.serve()
    assert scene.report().state == SERVING
    scene.sidecar.close()
    with open_store(scene.folder / "store") as store:
        assert read_reports(store, ChainLog(store).run) == []


def test_a_sidecar_that_ends_leaves_the_report_of_what_went_wrong(scene: Scene) -> None:
    scene.serve()
    scene.publish()
    scene.server.failing.add("stage")
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    scene.sidecar.close()
    assert scene.report().state == REFUSED


@pytest.mark.parametrize(
    ("recipe", "name", "holds"),
    [
        ("int4-128", "w.weight_packed", "int4-128 weights"),
        ("int4", "w.weight_packed", "int4 weights"),
        ("fp8-block-ue8m0", "w", "fp8-block-ue8m0 weights"),
        ("fp8-channel", "w", "fp8-channel weights"),
        (None, "w", "F32 weights"),
        (None, "w.lora_A.weight", "a LoRA adapter"),
    ],
)
def test_the_weights_of_a_chain_are_described_by_their_recipe(recipe: str | None, name: str, holds: str) -> None:
    table = {name: TensorSpec(dtype_named("F32"), (4,))}
    values = {} if recipe is None else Recipe.of(recipe).to_json()
    assert describe_types(table, RecipeRecord(values.pop("name"), values.pop("release"), values) if values else None) == holds


class StopAfter(threading.Event):
    """Ends the loop of a sidecar after a number of steps, without waiting."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        if self._left == 0:
            self.set()
        return self.is_set()


def test_a_server_that_was_never_reached_is_reported_once_for_each_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.publish()
    reasons = ["/a: refused.", "/a: refused.", "/a: refused.", "/a: timed out."]

    def refuse(info: object) -> None:
        raise EngineUnreachable(reasons[0] if len(reasons) == 1 else reasons.pop(0))

    monkeypatch.setattr(scene.server, "initialise", refuse)
    scene.sidecar.run(stop=StopAfter(6))
    waiting = [event for event in scene.events if event.name == "waiting"]
    assert [str(event.fields["reason"]).partition(" Check")[0] for event in waiting] == ["/a: refused.", "/a: timed out."]
    _Listener()(waiting[0])
    assert "waits for the server: /a: refused." in capsys.readouterr().err


def test_a_server_that_is_lost_is_no_longer_reported_as_serving(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    seq = scene.serve()

    def refuse() -> str:
        raise EngineUnreachable("/weight_info: refused.")

    monkeypatch.setattr(scene.server, "weight_version", refuse)
    scene.sidecar.run(stop=StopAfter(3))
    report = scene.report()
    assert (report.state, report.seq, report.error) == (LOST, None, "/weight_info: refused.")
    assert [event.name for event in scene.events if event.name == "engine-lost"] == ["engine-lost"]  # once
    monkeypatch.undo()
    scene.sidecar.step()
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_a_server_that_is_not_the_right_one_ends_the_sidecar_unless_it_was_before(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(info: object) -> None:
        raise failed_route("/init_weight_transfer_engine", Answer(404, b'{"detail":"Not Found"}', "application/json"))

    monkeypatch.setattr(scene.server, "initialise", not_found)
    scene.publish()
    with pytest.raises(WrongServer, match="VLLM_SERVER_DEV_MODE=1, and give its URL without /v1"):
        scene.sidecar.run(stop=StopAfter(3))
    monkeypatch.undo()
    scene.serve()
    scene.publish()
    monkeypatch.setattr(scene.server, "initialise", not_found)
    scene.sidecar.run(stop=StopAfter(3))  # the server may be one that is being restarted
    assert "swap-failed" in {event.name for event in scene.events}


def test_a_server_that_refuses_continues_with_what_it_has(scene: Scene) -> None:
    scene.serve()
    scene.publish()
    scene.server.failing = {"start"}
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    assert not scene.server.paused
    assert scene.report().state == REFUSED


def test_an_update_that_fails_half_way_is_repaired_before_the_server_continues(scene: Scene) -> None:
    scene.serve()
    seq = scene.publish()
    scene.server.failing = {"write"}
    scene.sidecar.step()
    assert scene.server.calls[3:] == ["write", "pause keep clear", "start", "load", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert [event.name for event in scene.events if event.name in ("engine-quarantined", "repaired")] == ["engine-quarantined", "repaired"]


def test_a_server_that_cannot_be_repaired_stays_paused_until_it_can(scene: Scene) -> None:
    scene.serve()
    scene.publish()
    scene.server.failing = {"write", "load"}
    for _ in range(2):
        with pytest.raises(EngineQuarantined):
            scene.sidecar.step()
        assert scene.server.paused
        assert scene.server.name == QUARANTINED_LABEL
        assert (scene.report().state, scene.report().error) == (QUARANTINED, "worker 0: half-way; worker 1: half-way")
    scene.server.failing = set()
    seq = scene.publish()
    scene.sidecar.step()
    assert not scene.server.paused
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_new_weights_are_never_served_under_the_old_label(scene: Scene) -> None:
    first = scene.serve()
    seq = scene.publish()
    scene.server.failing = {"finish"}
    with pytest.raises(EngineQuarantined):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == QUARANTINED_LABEL != str(first)
    scene.server.failing = set()
    scene.sidecar.step()
    assert not scene.server.paused
    assert scene.server.name == str(seq)


def test_a_server_that_does_not_resume_is_resumed_by_the_next_step(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.failing = {"resume"}
    with pytest.raises(EngineUnavailable):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == str(seq)
    scene.server.failing = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["resume"]
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_a_server_that_is_lost_during_an_update_is_asked_what_it_has(scene: Scene) -> None:
    scene.serve()
    seq = scene.publish()
    scene.server.lost = {"write"}
    with pytest.raises(EngineUnreachable):
        scene.sidecar.step()
    scene.server.lost = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)


def test_a_server_that_was_restarted_is_brought_to_the_newest_version(scene: Scene) -> None:
    seq = scene.publish()
    scene.sidecar.step()
    scene.server.restart()
    assert scene.sidecar.step() is not None
    assert scene.server.name == str(seq)


def test_a_new_sidecar_resumes_a_server_that_the_one_before_left_paused(scene: Scene) -> None:
    scene.publish()
    scene.sidecar.step()
    scene.server.paused = True
    scene.server.calls.clear()
    again = scene.start()
    again.step()
    again.close()
    assert scene.server.calls == ["learn", "resume"]
