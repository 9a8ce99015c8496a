"""Members are real processes that are killed, frozen, told to leave, or have wrong clocks.

The run continues, and no task is trained twice.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from member_nursery import LiveMember, MemberNursery, wait_until
from small_run import TASKS, SmallRun

from deltawire.chain.find import newest_version
from deltawire.chain.log import ChainLog
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.format.records.member_records import Heartbeat
from deltawire.publish.channels import ChannelWriter
from deltawire.store import Store, fleet_keys, open_store

LENGTH, HELD = ("--env", "rewards_for_tests:length"), ("--env", "rewards_for_tests:held")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemberNursery]:
    with MemberNursery(tmp_path_factory.mktemp("members")) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


def source(store: Store) -> tuple[str, str]:
    return "--from", store.url


def heartbeat(store: Store, member: str) -> Heartbeat:
    return Heartbeat.parse(store.get(fleet_keys.member_key(member), limit=1 << 16))


def kill_in_mid_generation(members: list[LiveMember]) -> LiveMember:
    """Freeze members one after the other until one is found generating, and kill that one."""
    caught: list[LiveMember] = []

    def catch() -> bool:
        for member in members:
            if len(member.events("generating")) > len(member.events("generated")):
                member.signal(signal.SIGSTOP)
                if len(member.events("generating")) > len(member.events("generated")):
                    caught.append(member)
                    return True
                member.signal(signal.SIGCONT)
        return False

    wait_until(catch, "a member that generates")
    caught[0].signal(signal.SIGKILL)
    assert caught[0].ended() == -signal.SIGKILL
    return caught[0]


def test_a_run_continues_while_its_members_are_killed_in_mid_generation(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store, tokens=48)
    members = [nursery.start(f"m{number}", *source(store), *LENGTH) for number in range(2)]
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(lambda: [run.train() for _ in iter(is_over.is_set, True)])
        try:
            for number in range(2, 5):
                members.remove(kill_in_mid_generation(members))
                members.append(nursery.start(f"m{number}", *source(store), *LENGTH))
        finally:
            is_over.set()
        training.result()
    run.train()
    run.check()
    end(run, members)


def test_a_member_that_was_frozen_past_its_lease_is_too_late(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store, lease_seconds=2)
    hold = tmp_path / "hold"
    hold.touch()
    frozen = nursery.start("frozen", *source(store), *HELD, environment={"DELTAWIRE_TEST_HOLD": str(hold)})
    run.open(1)
    wait_until(lambda: (run.fleet.poll(), hold.with_suffix(".reached").exists())[1], frozen.log)
    frozen.signal(signal.SIGSTOP)
    other = nursery.start("other", *source(store), *LENGTH)
    batch = run.train()
    assert {rollouts.member for rollouts in batch.rollouts} == {"other"}
    run.open(2)
    frozen.signal(signal.SIGCONT)
    hold.unlink()
    frozen.wait_for("rollout-uploaded")
    wait_until(lambda: (run.fleet.poll(), run.fleet.rejected.total())[1], "the late result is counted")
    assert set(run.fleet.rejected) <= {"late", "duplicate", "stale"}
    run.train()
    run.check()
    end(run, [frozen, other])


def test_a_result_that_is_uploaded_twice_is_trained_once(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store)
    member = nursery.start("eager", *source(store), *LENGTH, how="everything_twice")
    run.train()
    run.train()
    run.check()
    wait_until(
        lambda: (run.fleet.poll(), run.fleet.rejected["duplicate"] + run.fleet.rejected["late"] >= TASKS)[1], "duplicates are counted"
    )
    end(run, [member])


def test_clocks_that_are_an_hour_off_decide_nothing(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    """Only clocks could make this trainer give a task to a second member: no member is a straggler, and leases last ten minutes."""
    run = SmallRun(tmp_path, store, lease_seconds=600, scheduler=Scheduler(straggler=1e6, patience=1e6))
    members = [nursery.start(how, *source(store), *LENGTH, how=how) for how in ("an_hour_late", "an_hour_early")]
    wait_until(lambda: all(member.events("swapped") for member in members), "both have the policy")
    for _ in range(3):
        run.train()
    run.check()
    assert run.fleet.rejected.total() == 0
    times = [heartbeat(store, how).time / 1000 - run.versions[0].time for how in ("an_hour_late", "an_hour_early")]
    assert times[0] < -3000
    assert times[1] > 3000
    end(run, members)


def test_a_member_that_is_told_to_leave_gives_back_its_task_at_once(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store, lease_seconds=1000)  # the lease is long, so the task is free again only if the member leaves
    hold = tmp_path / "hold"
    hold.touch()
    leaver = nursery.start("leaver", *source(store), *HELD, environment={"DELTAWIRE_TEST_HOLD": str(hold)})
    run.open(1)
    wait_until(lambda: (run.fleet.poll(), hold.with_suffix(".reached").exists())[1], leaver.log)
    leaver.signal(signal.SIGTERM)
    hold.unlink()
    assert leaver.ended() == 0, leaver.log()
    assert heartbeat(store, "leaver").state == "left"
    other = nursery.start("other", *source(store), *LENGTH)
    run.train()
    run.check()
    end(run, [other])


def test_a_member_leaves_when_the_fleet_that_started_it_has_ended(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    member = nursery.start("orphan", *source(store), *LENGTH, how="until_the_pipe_closes", environment={"DELTAWIRE_TEST_PIPE": str(pipe)})
    with pipe.open("wb"):
        run.train()
    assert member.ended() == 0, member.log()
    assert heartbeat(store, "orphan").state == "left"
    run.close()


def test_rewards_that_always_fail_end_the_member_with_the_reason(tmp_path: Path, store: Store, nursery: MemberNursery) -> None:
    run = SmallRun(tmp_path, store, lease_seconds=1)
    member = nursery.start("unlucky", *source(store), "--env", "rewards_for_tests:broken")
    run.open(1)
    wait_until(lambda: (run.fleet.poll(), len(member.events("work-failed")) >= 3)[1], member.log)
    assert member.ended() == 1
    assert "this task has no answer" in member.log()
    assert heartbeat(store, "unlucky").state == "left"
    run.close()


def test_a_member_whose_channel_is_rolled_back_generates_with_the_old_version_again(
    tmp_path: Path, store: Store, nursery: MemberNursery
) -> None:
    run = SmallRun(tmp_path, store, staleness=2)
    log = ChainLog(store)
    channel = ChannelWriter(log, "stable")

    def train() -> set[int]:
        """Train the next step, and return the commits of the versions that made its tokens. Nothing is offered ahead."""
        run.open(run.step + 1)
        batch = run.fleet.collect(run.step + 1, timeout=120.0)
        run.take(batch)
        return {span.seq for rollouts in batch.rollouts for made in rollouts.completions for span in made.spans}

    first = run.versions[0].seq
    channel.promote(newest_version(log))
    member = nursery.start("follower", *source(store), *LENGTH, "--channel", "stable")
    assert train() == {first}
    second = run.versions[1].seq
    channel.promote(newest_version(log))
    member.wait_for("swapped", 2)
    assert train() == {second}
    channel.rollback()
    member.wait_for("swapped", 3)
    assert train() == {first}
    assert [event["seq"] for event in member.events("swapped")] == [first, second, first]  # later versions were never on the channel
    wait_until(lambda: heartbeat(store, "follower").seq == first, member.log)
    run.check()  # also that the weights named in the results are those that were published
    end(run, [member])


def end(run: SmallRun, members: list[LiveMember]) -> None:
    """Let the trainer announce that the run is over, and wait until all members have left."""
    run.fleet.stop()
    for member in members:
        assert member.ended() == 0, member.log()
    run.close()
