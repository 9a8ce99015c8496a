"""Test every transition of a swap's state machine, with an engine whose steps fail as the test decides."""

from __future__ import annotations

import re

import pytest
from toy_chain import ToyChain, first_state

from deltawire.chain.version import Version
from deltawire.engines import KvCache
from deltawire.engines.swap.live_intervals import LiveIntervals
from deltawire.engines.swap.swap_controller import SwapController, SwapState
from deltawire.errors import EngineQuarantined, EngineRefused, EngineUnavailable, SwapFailed
from deltawire.events import Event
from deltawire.store.memory import MemoryStore

SERVING, HALTED, QUARANTINED = SwapState.SERVING, SwapState.HALTED, SwapState.QUARANTINED


class ScriptedEngine:
    """An engine and a prepared change in one. It records each step, and fails in those that `errors` names."""

    name = "scripted"

    def __init__(self, errors: dict[str, BaseException]) -> None:
        self.errors = errors
        self.steps: list[str] = []
        self.states: list[SwapState] = []
        self.controller: SwapController

    def pause(self, kv_cache: KvCache) -> None:
        self._take("pause")

    def resume(self) -> None:
        self._take("resume")

    def apply(self) -> None:
        self._take("apply")

    def confirm(self, *, full: bool) -> None:
        self._take("confirm in full" if full else "confirm")

    def revert(self) -> None:
        self._take("revert")

    def _take(self, step: str) -> None:
        self.steps.append(step)
        self.states.append(self.controller.state)
        if (error := self.errors.get(step.split()[0])) is not None:
            raise error


class Scene:
    def __init__(self, *fails: str, state: SwapState = SERVING, confirm_every: int = 1) -> None:
        self.engine = ScriptedEngine({step: RuntimeError(f"{step} failed") for step in fails})
        self.events: list[Event] = []
        self.times = iter(range(1000))
        self.intervals = LiveIntervals(lambda: float(next(self.times)))
        self.controller = SwapController(
            self.engine,
            kv_cache=KvCache.KEEP,
            confirm_every=confirm_every,
            intervals=self.intervals,
            details=lambda record: {"preempted": record.version.seq, "wait_seconds": 0.5},
            on_event=self.events.append,
        )
        self.engine.controller = self.controller
        self.intervals.begin(VERSIONS[0])
        self.controller.assume(state)

    def swap(self, number: int = 1) -> None:
        self.controller.swap(self.engine, VERSIONS[number])

    def event_names(self) -> list[str]:
        return [event.name for event in self.events]


def _versions() -> list[Version]:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(3)
    return [Version.of(chain.commits[seq]) for seq in (1, 2, 3)]


VERSIONS = _versions()


@pytest.mark.parametrize("state", [SERVING, HALTED])
@pytest.mark.parametrize(
    ("fails", "steps", "error", "then", "events"),
    [
        ("", "pause apply confirm resume", None, SERVING, "swapped"),
        ("resume", "pause apply confirm resume", None, HALTED, "resume-failed swapped"),
        ("pause", "pause resume", EngineUnavailable, SERVING, ""),
        ("pause resume", "pause resume", EngineUnavailable, HALTED, "resume-failed"),
        ("apply", "pause apply revert resume", SwapFailed, SERVING, "swap-failed"),
        ("confirm", "pause apply confirm revert resume", SwapFailed, SERVING, "swap-failed"),
        ("apply resume", "pause apply revert resume", SwapFailed, HALTED, "swap-failed resume-failed"),
        ("apply revert", "pause apply revert", EngineQuarantined, QUARANTINED, "swap-failed engine-quarantined"),
        ("confirm revert", "pause apply confirm revert", EngineQuarantined, QUARANTINED, "swap-failed engine-quarantined"),
    ],
)
def test_a_swap_of_an_engine_with_known_weights(
    state: SwapState, fails: str, steps: str, error: type[Exception] | None, then: SwapState, events: str
) -> None:
    scene = Scene(*fails.split(), state=state)
    if error is None:
        scene.swap()
    else:
        with pytest.raises(error) as raised:
            scene.swap()
        assert raised.value is scene.controller.last_error
    assert [step.split()[0] for step in scene.engine.steps] == steps.split()
    assert scene.controller.state is then
    assert scene.event_names() == events.split()
    assert scene.intervals.latest == VERSIONS[1 if error is None else 0]
    assert (scene.controller.last is None) is (error is not None)
    assert scene.engine.states[0] is state
    assert {found for step, found in zip(scene.engine.steps, scene.engine.states, strict=True) if step in ("apply", "revert")} <= {
        SwapState.PAUSED
    }


@pytest.mark.parametrize(
    ("fails", "steps", "error", "then", "events"),
    [
        ("", "pause apply confirm resume", None, SERVING, "repaired swapped"),
        ("resume", "pause apply confirm resume", None, HALTED, "resume-failed repaired swapped"),
        ("pause", "pause", EngineUnavailable, QUARANTINED, ""),
        ("apply", "pause apply revert", EngineQuarantined, QUARANTINED, "swap-failed engine-quarantined"),
        ("confirm revert", "pause apply confirm revert", EngineQuarantined, QUARANTINED, "swap-failed engine-quarantined"),
    ],
)
def test_a_swap_of_a_quarantined_engine(fails: str, steps: str, error: type[Exception] | None, then: SwapState, events: str) -> None:
    scene = Scene(*fails.split(), state=QUARANTINED, confirm_every=1000)
    if error is None:
        scene.swap()
    else:
        with pytest.raises(error):
            scene.swap()
    assert [step.split()[0] for step in scene.engine.steps] == steps.split()
    assert "confirm" not in scene.engine.steps  # such a swap always confirms in full
    assert scene.controller.state is then
    assert scene.event_names() == events.split()
    assert set(scene.engine.states[:-1]) <= {QUARANTINED}


@pytest.mark.parametrize(("state", "steps"), [(SERVING, []), (QUARANTINED, []), (HALTED, ["resume"])])
def test_only_a_halted_engine_is_resumed(state: SwapState, steps: list[str]) -> None:
    scene = Scene(state=state)
    scene.controller.ensure_running()
    assert scene.engine.steps == steps
    assert scene.controller.state is (SERVING if state is HALTED else state)


@pytest.mark.parametrize("state", [SERVING, HALTED, QUARANTINED])
def test_an_engine_can_be_quarantined_after_its_swap(state: SwapState) -> None:
    scene = Scene(state=state)
    error = scene.controller.quarantine(VERSIONS[0], "its tokens are wrong")
    assert isinstance(error, EngineQuarantined)
    assert scene.controller.last_error is error
    assert (scene.engine.steps, scene.controller.state, scene.event_names()) == ([], QUARANTINED, ["engine-quarantined"])
    scene.swap()
    assert (scene.controller.state, scene.event_names()[1:]) == (SERVING, ["repaired", "swapped"])


def test_an_engine_that_does_not_resume_stays_halted_and_says_why() -> None:
    scene = Scene("resume", state=HALTED)
    with pytest.raises(EngineUnavailable, match="does not resume: resume failed"):
        scene.controller.ensure_running()
    assert scene.controller.state is HALTED
    own = EngineUnavailable("the server does not answer.")
    scene.engine.errors["resume"] = own
    with pytest.raises(EngineUnavailable) as raised:
        scene.controller.ensure_running()
    assert raised.value is own


def test_an_engine_that_refuses_an_update_keeps_serving_and_its_error_is_raised_itself() -> None:
    scene = Scene()
    scene.engine.errors["apply"] = refusal = EngineRefused("the workers did not take it.")
    with pytest.raises(EngineRefused) as raised:
        scene.swap()
    assert raised.value is refusal
    assert scene.engine.steps == ["pause", "apply", "revert", "resume"]
    assert scene.controller.state is SERVING


@pytest.mark.parametrize("step", ["pause", "apply", "confirm"])
def test_an_interrupted_swap_is_reverted_and_the_interrupt_raised(step: str) -> None:
    scene = Scene()
    scene.engine.errors[step] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.swap()
    assert scene.engine.steps[-1] == "resume"
    assert scene.controller.state is SERVING
    assert scene.intervals.latest == VERSIONS[0]


@pytest.mark.parametrize("state", [SERVING, HALTED, QUARANTINED])
def test_an_interrupt_in_resume_leaves_the_swap_made_and_is_raised_later(state: SwapState) -> None:
    scene = Scene(state=state)
    scene.engine.errors["resume"] = KeyboardInterrupt()
    scene.swap()
    assert scene.controller.state is HALTED
    assert scene.intervals.latest == VERSIONS[1]
    del scene.engine.errors["resume"]
    with pytest.raises(KeyboardInterrupt):
        scene.controller.ensure_running()
    assert scene.controller.state is SERVING
    scene.controller.ensure_running()


def test_the_first_and_every_third_swap_is_confirmed_in_full() -> None:
    scene = Scene(confirm_every=3)
    for _ in range(5):
        scene.swap()
    assert [step for step in scene.engine.steps if step.startswith("confirm")] == [
        "confirm in full",
        "confirm",
        "confirm",
        "confirm in full",
        "confirm",
    ]
    with pytest.raises(ValueError, match="confirm_every"):
        Scene(confirm_every=0)


def test_events_tell_the_version_the_times_and_the_details() -> None:
    scene = Scene()
    scene.swap(2)
    (event,) = scene.events
    fields = dict(event.fields)
    assert (fields["engine"], fields["seq"], fields["updates"], fields["preempted"]) == ("scripted", 3, VERSIONS[2].updates, 3)
    assert fields["wait_seconds"] == 0.5
    last = scene.controller.last
    assert last is not None
    assert fields["pause_seconds"] == last.pause_seconds > last.apply_seconds + last.confirm_seconds > 0


def test_the_message_of_a_quarantine_names_both_failures() -> None:
    scene = Scene("apply", "revert")
    with pytest.raises(EngineQuarantined, match=r"could not be brought to .*: apply failed; reverting this failed too: revert failed"):
        scene.swap()


def test_the_documented_table_names_every_state() -> None:
    rows = re.findall(r"^ +\| (\w+) +\|.*\| (\w*) +\| \w* +\|$", SwapController.__doc__ or "", re.MULTILINE)
    states = {state.value for state in SwapState} - {"paused"}
    assert len(rows) == 20
    assert {row[0] for row in rows} - {"from", "any"} == states
    assert {row[1] for row in rows} - {"to", ""} == states
