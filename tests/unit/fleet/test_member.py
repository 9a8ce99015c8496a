"""Test what a member does when the trainer offers tasks. The test decides what the engine does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deltawire import Publisher, Version
from deltawire.chain.reader_options import ReaderOptions
from deltawire.cli import app
from deltawire.engines import KvCache
from deltawire.engines.vllm.driver import generation
from deltawire.errors import EngineError, EngineRefused, EngineUnavailable, RewardError
from deltawire.events import Event
from deltawire.fleet import Coordinator, FleetOptions, Sampling
from deltawire.fleet import member as member_module
from deltawire.fleet.generation import Generated, GeneratedSpan, Interrupted
from deltawire.fleet.member import Member
from deltawire.fleet.steps.member_state import write_heartbeat
from deltawire.fleet.steps.requests import Generate, Sync, run_steps
from deltawire.format.records.fleet_parts import ObjectRef
from deltawire.format.records.member_records import Heartbeat, Lease
from deltawire.format.records.signing import SigningKey
from deltawire.format.records.trainer_records import Round
from deltawire.format.routing import RecordedExperts, RoutingLayout
from deltawire.publish.writer_options import WriterOptions
from deltawire.rl import member as rl_member
from deltawire.rl.member import MemberOptions, RewardScorer, parse_engine
from deltawire.store import Store, StoreOptions, fleet_keys
from deltawire.store.fleet_keys import member_key
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore

NONCE = "0" * 32


class FakeGenerator:
    """A generator that makes two tokens for each prompt. The version `next`, if set, makes the second token."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.next: Version | None = None
        self.problem: Exception | None = None
        self.failure: Exception | None = None
        self.routing: RecordedExperts | None = None

    def start(self) -> None:
        pass

    def encode(self, rows: Sequence[Any]) -> list[list[int]]:
        return [[7, 8] for _ in rows]

    def decode(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> list[Any]:
        return [" ".join(map(str, each)) for each in tokens]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Any = None) -> list[Generated]:
        if self.failure is not None:
            raise self.failure
        assert self.version is not None
        spans = (GeneratedSpan(0, 1, self.version), GeneratedSpan(1, 2, self.next or self.version))
        made = Generated(np.array([1, 2], np.int32), np.array([-1, -2], np.float32), spans, True, self.routing)
        return [made] * (len(prompts) * sampling.samples)

    def close(self) -> None:
        pass


def reward(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    return [float(number) for number in answer]


@pytest.fixture
def store() -> Store:
    return MemoryStore("memory://member")


@pytest.fixture
def publisher(store: Store) -> Publisher:
    return Publisher(store)


def publish(publisher: Publisher, step: int | None) -> Version:
    version = publisher.publish({"weight": np.full(8, step or 0, np.float32)}, step=step)
    assert isinstance(version, Version)
    return version


@pytest.fixture
def engine() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def member(store: Store, publisher: Publisher, engine: FakeGenerator) -> Member:
    return Member(store, engine, RewardScorer([reward]), name="m", patience=0.0)


def work(for_step: int, oldest_step: int, answer: int = 5) -> Generate:
    rows = ObjectRef(f"fleet/tasks/0000000000/{'0' * 64}.json", 1, "0" * 64)
    record = Round(NONCE, 0, 1, NONCE, for_step, oldest_step, 1, rows, 60, Sampling(samples=2, max_tokens=4), 0)
    return Generate(record, Lease(NONCE, 0, 0, 0, "m", NONCE, 1, 0), ({"prompt": "a", "answer": answer},))


def test_rollouts_name_every_version_that_made_tokens(member: Member, publisher: Publisher, engine: FakeGenerator) -> None:
    engine.version, engine.next = publish(publisher, 3), publish(publisher, 4)
    made = member._perform(work(5, 3))
    assert {seq: ref.step for seq, ref in made.versions.items()} == {engine.version.seq: 3, engine.next.seq: 4}
    assert [[(span.start, span.end, span.seq) for span in one.spans] for one in made.completions] == [
        [(0, 1, engine.version.seq), (1, 2, engine.next.seq)]
    ] * 2
    assert made.reward_names == ("reward",)
    assert [one.rewards for one in made.completions] == [(5.0,), (5.0,)]
    assert type(made).parse(made.to_bytes()).tokens == 4


def test_recorded_experts_are_part_of_the_result(store: Store, publisher: Publisher, engine: FakeGenerator) -> None:
    events: list[Event] = []
    member = Member(store, engine, RewardScorer([reward]), name="m", patience=0.0, on_event=events.append)
    engine.version = publish(publisher, 3)
    layout = RoutingLayout(4, 2, (0, 2))
    experts = np.array([[[0, 1], [2, 3]], [[3, 1], [0, 0]], [[1, 2], [1, 3]], [[-1, -1], [-1, -1]]])
    engine.routing = RecordedExperts(layout, experts)
    made = member._perform(work(5, 3))
    assert made.routing is not None
    assert made.routing.broken == 2  # one row of each completion
    back = type(made).parse(made.to_bytes())
    experts[1, 1] = -1
    assert [one.experts.tolist() for one in back.completions] == [np.sort(experts, -1).tolist()] * 2
    assert [(event.name, event.fields["rows"], event.fields["of"]) for event in events if event.name.startswith("routing")] == [
        ("routing-broken", 2, 16)
    ]


@pytest.mark.parametrize("shape", [(3, 2, 2), (4, 1, 2), (4, 2, 3)])
def test_experts_that_do_not_fit_are_left_out_of_the_result(
    store: Store, publisher: Publisher, engine: FakeGenerator, shape: tuple[int, ...]
) -> None:
    events: list[Event] = []
    member = Member(store, engine, RewardScorer([reward]), name="m", patience=0.0, on_event=events.append)
    engine.version = publish(publisher, 3)
    engine.routing = RecordedExperts(RoutingLayout(4, 2, (0, 2)), np.zeros(shape, np.int64))
    made = member._perform(work(5, 3))
    assert made.routing is None
    assert made.completions[0].experts is None
    assert "routing-unusable" in [event.name for event in events]


@pytest.mark.parametrize("step", [2, 6])
def test_a_version_outside_the_budget_makes_nothing(member: Member, publisher: Publisher, engine: FakeGenerator, step: int) -> None:
    engine.version = publish(publisher, step)
    with pytest.raises(EngineUnavailable):
        member._perform(work(6, 3))


def test_without_a_version_nothing_is_made_and_none_is_told(member: Member, engine: FakeGenerator) -> None:
    assert member._perform(Sync(0)) is None
    with pytest.raises(EngineUnavailable):
        member._perform(work(1, 0))


def test_a_version_without_a_step_is_refused(member: Member, publisher: Publisher, engine: FakeGenerator) -> None:
    engine.version = publish(publisher, None)
    with pytest.raises(EngineError, match="without a training step"):
        member._perform(Sync(0))


def test_an_engine_that_cannot_follow_any_more_ends_the_member(member: Member, engine: FakeGenerator) -> None:
    engine.problem = EngineRefused("another model")
    with pytest.raises(EngineRefused):
        member._perform(Sync(0))
    engine.problem = EngineUnavailable("for the moment")
    assert member._perform(Sync(0)) is None


@pytest.mark.parametrize("number", [1e39, -1e39, float("nan"), float("inf")])
def test_rewards_of_any_scorer_are_bounded(store: Store, publisher: Publisher, engine: FakeGenerator, number: float) -> None:
    class Wild:
        names = ("wild",)

        def __call__(self, rows: Any, completions: Any, completion_ids: Any) -> list[tuple[float | None, ...]]:
            return [(number,) for _ in completions]

    engine.version = publish(publisher, 0)
    member = Member(store, engine, Wild(), name="m", patience=0.0)
    with pytest.raises(EngineUnavailable, match="a reward is not a number from"):
        member._perform(work(1, 0))


def test_tasks_may_fail_but_not_time_after_time(member: Member, publisher: Publisher, engine: FakeGenerator) -> None:
    engine.version = publish(publisher, 0)
    for _ in range(2):
        with pytest.raises(EngineUnavailable):  # the member tries again with another task
            member._perform(work(1, 0, answer="no number"))  # type: ignore[arg-type]
    member._perform(work(1, 0))
    for expected in (EngineUnavailable, EngineUnavailable, RewardError):
        with pytest.raises(expected):
            member._perform(work(1, 0, answer="no number"))  # type: ignore[arg-type]


def test_a_member_that_is_told_to_leave_stops_generating(member: Member, publisher: Publisher, engine: FakeGenerator) -> None:
    engine.version = publish(publisher, 0)
    engine.failure = Interrupted()
    assert member._perform(work(1, 0)) is None


@pytest.mark.parametrize("signed", [False, True])
def test_a_member_works_until_the_run_is_over(store: Store, engine: FakeGenerator, signed: bool) -> None:
    publisher = Publisher(store, options=WriterOptions(signing_key=SigningKey.generate() if signed else None))
    engine.version = publish(publisher, 0)
    events: list[Event] = []
    keys = publisher.trusted_keys
    assert len(keys) == signed
    member = Member(
        store, engine, RewardScorer([reward]), name="m", options=ReaderOptions(trusted_keys=keys), poll=0.01, on_event=events.append
    )
    thread = threading.Thread(target=member.run, args=(threading.Event(),))
    options = FleetOptions(poll_seconds=0.01)
    with Coordinator(store, epoch=publisher.epoch, signing_key=publisher.signing_key, trusted_keys=keys, options=options) as fleet:
        fleet.open_round([[{"prompt": "a", "answer": 1}], [{"prompt": "b", "answer": 2}]], for_step=1, sampling=Sampling(2, 4))
        thread.start()
        batch = fleet.collect(1, timeout=120)
        fleet.stop()
        thread.join(120)
    assert not thread.is_alive()
    assert [one.completions[0].rewards for one in batch.rollouts] == [(1.0,), (2.0,)]
    assert [event.name for event in events if event.name in ("joined", "left")] == ["joined", "left"]


class FourAtOnce(FakeGenerator):
    """Begins four tasks at the same time. One of them fails, and the others wait until they are told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.all_here = threading.Barrier(4)
        self.stopped: list[bool] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Any = None) -> list[Generated]:
        if self.all_here.wait(300) == 0:
            raise RuntimeError("out of memory")
        while not stop():
            time.sleep(0.001)
        self.stopped.append(True)
        raise Interrupted


def test_an_engine_that_fails_in_one_of_four_threads_ends_the_member_and_frees_its_tasks(store: Store) -> None:
    publisher, engine = Publisher(store), FourAtOnce()
    engine.version = publish(publisher, 0)
    member = Member(store, engine, RewardScorer([reward]), name="m", tasks=4, poll=0.01, grace=300)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            member.run(threading.Event())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with Coordinator(store, epoch=publisher.epoch, options=FleetOptions(poll_seconds=0.01)) as fleet:
        fleet.open_round([[{"prompt": "a", "answer": number}] for number in range(6)], for_step=1, sampling=Sampling(1, 4))
        thread.start()
        thread.join(300)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["out of memory"]
    assert engine.stopped == [True] * 3
    beat = Heartbeat.parse(store.get(member_key("m"), limit=10_000))
    assert (beat.state, beat.working, beat.reason) == ("left", (), "RuntimeError: out of memory")
    assert not list(store.list(fleet_keys.ROLLOUTS))


class SilentStore(WrappedStore):
    """Does not answer the creation of a lease until it is told to."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_asked, self.may_answer, self.has_answered = threading.Event(), threading.Event(), threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.is_asked.set()
        self.may_answer.wait(300)
        super().put_if_absent(key, data)
        self.has_answered.set()


def test_a_member_that_leaves_while_it_claims_a_task_begins_nothing_whenever_the_store_answers(store: Store, engine: FakeGenerator) -> None:
    publisher, silent, stop = Publisher(store), SilentStore(store), threading.Event()
    engine.version = publish(publisher, 0)
    member = Member(silent, engine, RewardScorer([reward]), name="m", poll=0.01, grace=0.0)
    thread = threading.Thread(target=member.run, args=(stop,))
    with Coordinator(store, epoch=publisher.epoch, options=FleetOptions(poll_seconds=0.01)) as fleet:
        fleet.open_round([[{"prompt": "a", "answer": 1}]], for_step=1, sampling=Sampling(1, 4))
        thread.start()
        assert silent.is_asked.wait(300)
        stop.set()
        thread.join(300)
        assert not thread.is_alive()
        silent.may_answer.set()
        assert silent.has_answered.wait(300)
    for each in threading.enumerate():
        if each.name.startswith("deltawire-member-"):
            each.join(300)
    assert not list(store.list(fleet_keys.ROLLOUTS))


def test_a_heartbeat_soon_names_a_change_of_what_a_member_works_on(
    store: Store, member: Member, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_SHORTEST_BEAT", 0.0)
    publish(publisher, 0)
    state = member._state(publisher._writer.run.id)
    for working, said in (((3, 1, 0), "working"), (None, "joining")):
        run_steps(write_heartbeat(state), store)
        rest = threading.Thread(target=member._wait_for_heartbeat, args=(state, 1e6), daemon=True)
        state.lease_seconds = 1e6
        rest.start()
        state.working = set() if working is None else {working}
        rest.join(300)
        assert not rest.is_alive()
        run_steps(write_heartbeat(state), store)
        beat = Heartbeat.parse(store.get(member_key("m"), limit=10_000))
        assert (beat.state, beat.working) == (said, () if working is None else (working,))


def test_heartbeats_say_how_long_updates_take(store: Store, publisher: Publisher, engine: FakeGenerator) -> None:
    times = iter([0.0])
    engine.version = publish(publisher, 0)
    member = Member(store, engine, RewardScorer([reward]), name="m", clock=lambda: next(times, engine.version.time + 1.5))  # type: ignore[union-attr]
    state = member._state(NONCE)
    for step in (1, 2):
        member._link.saw(engine.version)
        engine.version = publish(publisher, step)
    member._wait_for_heartbeat(state, 0.0)
    run_steps(write_heartbeat(state), store)
    beat = Heartbeat.parse(store.get(member_key("m"), limit=4096))
    assert (beat.link, beat.behind_ms) == (None, 1500)


@pytest.mark.parametrize(
    "options",
    [
        MemberOptions("s3://bucket/run", "transformers", ("a:b",), "m"),
        MemberOptions("store", "vllm=http://127.0.0.1:8000", ("a:b",), "m", kv_cache="mark", canary="recorded"),
        MemberOptions(
            "store", "vllm=http://127.0.0.1:8000", ("a:b",), "m", lora=(("math", "s3://bucket/math"), ("code", "s3://bucket/code"))
        ),
        MemberOptions("store", "transformers", ("a:b",), "m", store=StoreOptions(max_rate=1.25e6, max_requests=2.5)),
        MemberOptions("store", "transformers", ("a:b",), "m", host_cache="auto"),
        MemberOptions("store", "transformers", ("a:b",), "m", channel="stable"),
        MemberOptions("store", "transformers", ("a:b",), "m", relays=("copy", "s3://bucket/copy"), find_relays=True),
        MemberOptions("store", "vllm=http://127.0.0.1:8000", ("a:b", "c:d"), "m", "cuda:1", "mirror", ("0" * 64, "1" * 64), 0.25, "prod"),
    ],
)
def test_the_command_takes_options_as_they_are(options: MemberOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[MemberOptions] = []
    monkeypatch.setattr("deltawire.rl.member.serve", lambda options, **_: served.append(options))
    monkeypatch.setattr("sys.path", list(sys.path))
    done = CliRunner().invoke(app, ["member", *options.to_arguments()])
    assert done.exit_code == 0, done.output
    assert served == [options]


def test_a_member_with_vllm_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(generation, "VllmGenerator", lambda *_, **options: made.append(options))
    options = MemberOptions("store", "vllm=http://127.0.0.1:8000", ("a:b",), "m", kv_cache="mark", canary="self")
    rl_member._generator(options, "m", MemoryStore(), None)
    assert [(each["kv_cache"], each["canary"]) for each in made] == [(KvCache.MARK, "self")]


def test_engines_are_named_as_documented() -> None:
    assert parse_engine("transformers") is None
    assert parse_engine("vllm=http://127.0.0.1:8000") == "http://127.0.0.1:8000"
    for wrong in ("vllm", "vllm=127.0.0.1", "sglang=http://127.0.0.1", ""):
        with pytest.raises(ValueError, match="is not an engine"):
            parse_engine(wrong)


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(RewardError, match="the same name"):
        RewardScorer([reward, reward])
