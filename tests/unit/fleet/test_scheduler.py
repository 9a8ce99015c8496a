"""Shares follow the trainer's measurements, new members start with small shares, and members gain nothing by claims about themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.fleet.rules.assignment import OpenTask
from deltawire.fleet.rules.scheduler import Candidate, Scheduler

NOW = 10_000.0


def measured(rates: Mapping[str, float], **options: float) -> Scheduler:
    """Return a scheduler that trusts each member, because it has seen the member deliver at its rate for long enough."""
    scheduler = Scheduler(**options)  # type: ignore[arg-type]
    scheduler.note_alive(list(rates), NOW - 1000)
    for name, rate in rates.items():
        for second in range(0, 100, 10):
            at = NOW - 100 + second
            scheduler.delivered(name, tokens=round(10 * rate), offered=at, leased=at, finished=at + 10)
    return scheduler


def tasks(number: int, **fields: object) -> list[OpenTask]:
    return [OpenTask(task, **fields) for task in range(number)]  # type: ignore[arg-type]


def counts(
    scheduler: Scheduler, number: int, members: list[Candidate], *, oldest_step: int = 0, now: float = NOW, later: int = 0
) -> dict[str, int]:
    return dict(Counter(scheduler.offers(tasks(number), members, oldest_step=oldest_step, now=now, later=later).values()))


def test_shares_are_proportional_to_measured_speed() -> None:
    scheduler = measured({"fast": 400, "slow": 100})
    assert counts(scheduler, 10, [Candidate("fast", 0), Candidate("slow", 0)]) == {"fast": 8, "slow": 2}
    assert scheduler.shares({"fast": 1.0, "slow": 1.0}) == pytest.approx({"fast": 0.8, "slow": 0.2})
    assert scheduler.shares({"fast": 0.25, "slow": 1.0}) == pytest.approx({"fast": 0.5, "slow": 0.5})
    assert scheduler.shares({"fast": 0.0, "slow": 0.0}) == {"fast": 0.0, "slow": 0.0}


def test_tasks_that_a_member_holds_count_as_part_of_its_share() -> None:
    scheduler = measured({"one": 100, "two": 100})
    assert counts(scheduler, 4, [Candidate("one", 0, holding=4, since=NOW), Candidate("two", 0)]) == {"two": 4}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 1000), min_size=1), st.integers(0, 100))
def test_every_task_is_offered_so_that_the_last_one_is_done_as_early_as_possible(rates: dict[str, float], number: int) -> None:
    scheduler = measured(rates)
    given_out = counts(scheduler, number, [Candidate(name, 0) for name in rates])
    assert sum(given_out.values()) == number
    speeds = {name: scheduler.rate(name) or 0.0 for name in rates}
    last = max((count / speeds[name] for name, count in given_out.items()), default=0.0)
    for name, speed in speeds.items():  # no member could take the last task and be done with it earlier
        assert (given_out.get(name, 0) + 1) / speed >= last * (1 - 1e-9)


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 5)), max_size=8),
    st.integers(0, 9),
    st.lists(st.tuples(st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8))), max_size=20),
)
def test_only_eligible_members_get_offers_and_never_of_a_task_that_they_work_on(
    members: list[tuple[int | None, int]], oldest: int, open_tasks: list[tuple[set[int], set[int]]]
) -> None:
    candidates = [Candidate(f"m{i}", step, holding) for i, (step, holding) in enumerate(members)]
    offered = [
        OpenTask(i, busy=frozenset(f"m{b}" for b in busy), failed=frozenset(f"m{f}" for f in failed))
        for i, (busy, failed) in enumerate(open_tasks)
    ]
    scheduler = Scheduler()
    scheduler.note_alive([one.name for one in candidates], NOW)
    offers = scheduler.offers(offered, candidates, oldest_step=oldest, now=NOW)
    eligible = {one.name for one in candidates if one.step is not None and one.step >= oldest}
    for task in offered:
        willing = eligible - task.busy
        member = offers.get(task.task)
        assert (member in willing) if willing else member is None
        assert member not in task.failed or not willing - task.failed


def test_a_member_too_far_behind_gets_nothing_until_it_has_caught_up() -> None:
    scheduler = measured({"behind": 100, "there": 100})
    assert counts(scheduler, 4, [Candidate("behind", 3), Candidate("there", 4)], oldest_step=4) == {"there": 4}
    assert counts(scheduler, 4, [Candidate("behind", 4), Candidate("there", 4)], oldest_step=4) == {"behind": 2, "there": 2}
    assert counts(scheduler, 4, [Candidate("new", None)]) == {}


def test_a_member_keeps_its_offer_while_that_is_fair() -> None:
    scheduler = measured({"one": 100, "two": 100})
    standing = {0: "two", 1: "one", 2: "two", 3: "one"}
    open_tasks = [OpenTask(task, offered_to=name) for task, name in standing.items()]
    assert scheduler.offers(open_tasks, [Candidate("one", 0), Candidate("two", 0)], oldest_step=0, now=NOW) == standing


def test_a_joiner_holds_two_tasks_then_four_then_eight_then_its_share() -> None:
    scheduler = measured({"old": 100})
    members = [Candidate("new", 0), Candidate("old", 0)]
    scheduler.note_alive(["new", "old"], NOW)
    for expected in (2, 4, 8, 10):
        assert counts(scheduler, 20, members)["new"] == expected
        scheduler.delivered("new", tokens=1000, offered=NOW, leased=NOW, finished=NOW + 10 * expected)
        scheduler._records["new"].rate = 100.0  # this test does not depend on its speed


def test_a_rejoiner_ramps_up_again_and_its_speed_is_remembered() -> None:
    scheduler = measured({"one": 300, "two": 100})
    scheduler.note_alive(["two"], NOW)
    scheduler.note_alive(["one", "two"], NOW)
    assert counts(scheduler, 12, [Candidate("one", 0), Candidate("two", 0)]) == {"one": 2, "two": 10}
    assert scheduler.rate("one") == pytest.approx(300)


def test_newcomers_get_all_tasks_if_there_are_no_other_members() -> None:
    scheduler = Scheduler()
    scheduler.note_alive(["a", "b"], NOW)
    assert counts(scheduler, 10, [Candidate("a", 0), Candidate("b", 0)]) == {"a": 5, "b": 5}


def test_a_member_that_vanished_gets_nothing() -> None:
    scheduler = measured({"gone": 900, "here": 100})
    scheduler.note_alive(["here"], NOW)
    assert counts(scheduler, 5, [Candidate("gone", 0), Candidate("here", 0)]) == {"here": 5}


def test_the_average_is_of_accepted_tokens_over_all_time_since_the_result_before() -> None:
    scheduler = Scheduler()
    scheduler.delivered("m", tokens=1000, offered=0, leased=0, finished=10)
    assert scheduler.rate("m") == pytest.approx(100)
    # The member syncs for 10 s and then generates for 10 s. It takes the lease late, but the time before also counts.
    scheduler.delivered("m", tokens=1000, offered=10, leased=20, finished=30)
    assert scheduler.rate("m") == pytest.approx(0.8 * 100 + 0.2 * 50)


def test_waiting_for_work_is_not_held_against_a_member() -> None:
    scheduler = Scheduler()
    scheduler.delivered("m", tokens=1000, offered=0, leased=0, finished=10)
    scheduler.delivered("m", tokens=1000, offered=500, leased=501, finished=510)
    assert scheduler.rate("m") == pytest.approx(100)


def test_results_made_before_the_offer_do_not_make_a_member_fast() -> None:
    """A dishonest member generates before it takes the lease. Its time counts from its previous result or the offer, not from the lease."""
    scheduler = Scheduler()
    scheduler.delivered("liar", tokens=1000, offered=0, leased=9.9, finished=10)
    assert scheduler.rate("liar") == pytest.approx(100)


def test_results_that_come_in_a_burst_are_measured_together() -> None:
    scheduler = Scheduler()
    for at in (10.0, 10.01, 10.02, 10.03):
        scheduler.delivered("m", tokens=250, offered=0, leased=0, finished=at)
    for at in (20.0, 20.01, 20.02, 20.03):
        scheduler.delivered("m", tokens=250, offered=0, leased=0, finished=at)
    assert scheduler.rate("m") == pytest.approx(0.8 * 25 + 0.2 * 100, rel=0.01)


def test_rejected_work_is_speed_zero_and_ends_the_trust() -> None:
    scheduler = measured({"good": 100, "poisoner": 100})
    for at in range(10):
        scheduler.delivered("poisoner", tokens=0, offered=NOW, leased=NOW, finished=NOW + 10 * (at + 1))
    assert scheduler.rate("poisoner") == pytest.approx(100 * 0.8**10, rel=0.01)
    assert counts(scheduler, 10, [Candidate("good", 0), Candidate("poisoner", 0)], now=NOW + 100).get("poisoner", 0) <= 1


def test_a_member_that_slows_down_loses_its_share_before_it_delivers() -> None:
    scheduler = measured({"slowing": 100, "steady": 100})
    members = [Candidate("slowing", 0, holding=1, since=NOW), Candidate("steady", 0)]
    assert counts(scheduler, 18, members, now=NOW + 12)["slowing"] < 9
    assert counts(scheduler, 18, members, now=NOW + 1000) == {"steady": 18}


def test_a_member_without_work_for_long_gets_a_task_to_show_its_speed() -> None:
    scheduler = measured({"one": 100, "two": 100, "three": 100}, rest_seconds=60)
    members = [Candidate("one", 0), Candidate("three", 0), Candidate("two", 0)]
    assert counts(scheduler, 2, members, now=NOW + 50) == {"one": 1, "three": 1}
    assert counts(scheduler, 2, members, now=NOW + 100) == {"three": 1, "two": 1}
    assert counts(scheduler, 2, members, now=NOW + 110) == {"one": 1, "three": 1}


def delivers(scheduler: Scheduler, name: str, *, every: float, after: float, results: int = 20) -> None:
    """Let a member deliver a result every so many seconds, each so many seconds after it was leased."""
    for number in range(results):
        at = NOW - every * (results - 1 - number)
        scheduler.delivered(name, tokens=1000, offered=at - after, leased=at - after, finished=at)


def test_a_member_whose_results_arrive_late_gets_no_task_that_others_finish_earlier() -> None:
    scheduler = Scheduler()
    scheduler.note_alive(["far", "near"], NOW - 2000)
    delivers(scheduler, "near", every=10, after=10)
    delivers(scheduler, "far", every=10, after=40)
    assert scheduler.rate("far") == pytest.approx(scheduler.rate("near"), rel=0.1)
    members = [Candidate("far", 0), Candidate("near", 0)]
    assert counts(scheduler, 3, members) == {"near": 3}
    assert counts(scheduler, 13, members) == {"near": 8, "far": 5}
    holding = [Candidate("far", 0, holding=1, since=NOW), Candidate("near", 0)]
    assert counts(scheduler, 3, holding) == {"near": 2, "far": 1}  # what it holds already says how late it is


def test_a_task_that_a_member_has_almost_done_hardly_counts() -> None:
    scheduler = measured({"one": 100, "two": 100})
    members = [Candidate("one", 0, holding=2, since=NOW - 9), Candidate("two", 0, holding=2, since=NOW)]
    assert counts(scheduler, 1, members, later=9) == {"one": 1}


def test_the_last_tasks_wait_for_members_that_can_begin_them() -> None:
    scheduler = measured({"one": 100, "two": 100, "three": 100, "four": 100})
    busy = [Candidate("one", 0, holding=1, since=NOW), Candidate("two", 0, holding=1, since=NOW)]
    members = [*busy, Candidate("three", 0, holding=2, since=NOW), Candidate("four", 0)]
    assert counts(scheduler, 2, members) == {"four": 1}
    assert sum(counts(scheduler, 2, members, later=1).values()) == 2
    assert counts(scheduler, 2, members[:3], later=0) != {}  # there are two tasks for three members
    assert counts(scheduler, 1, members[:3]) == {}
    failed = [OpenTask(0, failed=frozenset({"four"}))]
    assert scheduler.offers(failed, members, oldest_step=0, now=NOW) != {}


def test_a_member_that_would_hold_up_the_step_is_tried_seldom() -> None:
    scheduler = measured({"fast": 1000, "slow": 1}, rest_seconds=60)
    members = [Candidate("fast", 0), Candidate("slow", 0)]
    assert counts(scheduler, 8, members, now=NOW + 100) == {"fast": 8}
    assert counts(scheduler, 8, members, now=NOW + 700) == {"fast": 7, "slow": 1}
    assert counts(scheduler, 8, members, now=NOW + 800) == {"fast": 8}


def test_a_copy_of_a_task_is_worth_it_if_an_idle_member_is_clearly_faster_or_the_lease_is_far_too_old() -> None:
    scheduler = Scheduler()
    assert not scheduler.is_worth_a_copy("far", NOW, NOW + 60, None)  # nothing is measured yet, and patience is 120 seconds
    assert scheduler.is_worth_a_copy("far", NOW, NOW + 61, None)
    delivers(scheduler, "near", every=10, after=10, results=40)
    delivers(scheduler, "far", every=10, after=40)
    assert scheduler.expected_seconds("far") == pytest.approx(40)
    assert scheduler.expected_seconds("stranger") == pytest.approx(10)
    assert scheduler.is_worth_a_copy("far", NOW, NOW + 1, 10)
    assert not scheduler.is_worth_a_copy("far", NOW, NOW + 1, 30)
    assert not scheduler.is_worth_a_copy("far", NOW, NOW + 25, 10)  # it should be done soon
    assert scheduler.is_worth_a_copy("far", NOW, NOW + 31, 10)  # it should have been done long ago
    assert not scheduler.is_worth_a_copy("near", NOW, NOW + 9, 1)
    delivers(scheduler, "quick", every=2, after=2)
    assert not scheduler.is_worth_a_copy("quick", NOW, NOW + 6, 10)
    assert scheduler.is_worth_a_copy("quick", NOW, NOW + 7, 10)  # long for this member, although others need longer


def test_a_member_that_lost_its_first_task_is_tried_again_soon_and_counts_as_fast_as_it_then_is() -> None:
    scheduler = measured({"old": 100}, rest_seconds=60)
    members = [Candidate("old", 0), Candidate("new", 0)]
    scheduler.note_alive(["old", "new"], NOW)
    scheduler.delivered("new", tokens=0, offered=NOW, leased=NOW, finished=NOW + 10)  # its engine was warming up
    assert counts(scheduler, 8, members, now=NOW + 50) == {"old": 8}
    assert counts(scheduler, 8, members, now=NOW + 80) == {"old": 7, "new": 1}
    scheduler.delivered("new", tokens=0, offered=NOW + 80, leased=NOW + 80, finished=NOW + 90)
    assert counts(scheduler, 8, members, now=NOW + 300) == {"old": 8}  # it has lost two in a row
    scheduler.delivered("new", tokens=4000, offered=NOW + 700, leased=NOW + 700, finished=NOW + 710)
    assert scheduler.rate("new") == pytest.approx(400)


def test_a_lease_far_longer_than_others_is_a_straggler_unless_the_member_is_just_slow() -> None:
    scheduler = measured({"m": 100})
    assert not scheduler.is_straggler("other", NOW, NOW + 25)
    assert scheduler.is_straggler("other", NOW, NOW + 31)
    scheduler.delivered("slow", tokens=100, offered=NOW, leased=NOW, finished=NOW + 40)
    assert not scheduler.is_straggler("slow", NOW, NOW + 100)
    assert scheduler.is_straggler("slow", NOW, NOW + 121)
    assert not scheduler.is_straggler("slow", NOW, NOW + 200, times=2)


def test_results_of_leases_that_the_trainer_did_not_see_begin_say_nothing_about_speed() -> None:
    scheduler = Scheduler(patience=100)
    scheduler.delivered("found", tokens=100, offered=NOW - 3e8, leased=NOW - 3e8, finished=NOW, is_timed=False)
    assert (scheduler.proven("found"), scheduler.rate("found"), scheduler.expected_seconds("found")) == (1, None, None)
    scheduler.delivered("found", tokens=0, offered=NOW - 3e8, leased=NOW - 3e8, finished=NOW, is_timed=False)
    assert (scheduler.proven("found"), scheduler.rate("found")) == (0, None)
    assert scheduler.is_straggler("found", NOW, NOW + 101)
    scheduler.delivered("found", tokens=100, offered=NOW, leased=NOW, finished=NOW + 10)
    assert (scheduler.rate("found"), scheduler.expected_seconds("other")) == (10, 10)


def test_before_anything_is_measured_patience_is_what_it_was_set_to() -> None:
    assert not Scheduler(patience=50).is_straggler("anyone", NOW, NOW + 50)
    assert Scheduler(patience=50).is_straggler("anyone", NOW, NOW + 51)


def test_an_ignored_offer_goes_to_another_member() -> None:
    scheduler = measured({"deaf": 100, "ready": 100})
    members = [Candidate("deaf", 0), Candidate("ready", 0)]
    lying = [OpenTask(task, offered_to="deaf", offered_at=NOW) for task in range(4)]
    assert set(scheduler.offers(lying, members, oldest_step=0, now=NOW + 25).values()) == {"deaf", "ready"}
    assert set(scheduler.offers(lying, members, oldest_step=0, now=NOW + 35).values()) == {"ready"}
    assert (scheduler.rate("deaf") or 0.0) < 100


def test_a_busy_member_may_ignore_its_next_offers() -> None:
    scheduler = measured({"busy": 100, "ready": 100})
    members = [
        Candidate("busy", 0, holding=1, since=NOW + 30, latest=NOW + 30),
        Candidate("ready", 0, holding=1, since=NOW + 30, latest=NOW + 30),
    ]
    lying = [OpenTask(task, offered_to="busy", offered_at=NOW) for task in range(2)]
    assert set(scheduler.offers(lying, members, oldest_step=0, now=NOW + 35).values()) == {"busy", "ready"}


def test_a_member_that_never_delivers_is_soon_offered_almost_nothing() -> None:
    scheduler = measured({"good": 100})
    scheduler.note_alive(["good", "hog"], NOW)
    scheduler.delivered("hog", tokens=0, offered=NOW, leased=NOW, finished=NOW + 60)
    assert counts(scheduler, 10, [Candidate("good", 0), Candidate("hog", 0)], now=NOW + 60) == {"good": 10}


def test_typical_durations_follow_the_recent_ones() -> None:
    scheduler = Scheduler()
    for at in range(100):
        scheduler.delivered("m", tokens=1, offered=at, leased=at, finished=at + 1)
    assert scheduler.is_straggler("other", 0, 20)
    for at in range(100, 200):
        scheduler.delivered("m", tokens=1, offered=at, leased=at, finished=at + 10)
    assert not scheduler.is_straggler("other", 0, 20)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        Scheduler(beta=1.0)
