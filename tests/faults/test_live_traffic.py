"""No interaction is trained on twice, none without consent, and each with the reward that its feedback says, whatever fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from live_fleet import WINDOW, Answers, LiveTrainer, all_trained, live_fleet, text, trained_on
from live_samples import EPISODE, ID
from publications import state_at
from small_fleet import Fleet, make_rollouts, place_lease, upload_result

from deltawire import Digest
from deltawire.errors import Fenced
from deltawire.events import Event
from deltawire.fleet.rules.live_tasks import LIVE_MEMBER
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.format.feedback import Feedback
from deltawire.format.records.live_records import Metric
from deltawire.format.records.trainer_records import Board
from deltawire.live.steps.joiner_steps import JoinerOptions
from deltawire.store import fleet_keys, live_keys
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied, Reading, call

BIG = 1 << 24


def first_answers(fleet: Fleet) -> dict[str, float]:
    """Let two gateways answer and receive feedback, late enough that everything has its reward. Return the reward of each interaction."""
    west, east = Answers(fleet), Answers(fleet, "east.0123456789abcde1")
    one, two, three = west.answer(11, 12, 13)
    west.answer(14, train=False)
    four, five, six = east.answer(21, 22, 23)
    east.says(Feedback(ID(1), "thumbs", True, inference=one), Feedback(ID(2), "thumbs", True, inference=four))
    west.says(Feedback(ID(3), "thumbs", False, inference=two), Feedback(ID(4), "other", True, inference=two))
    fleet.time += WINDOW / 2
    west.says(Feedback(ID(5), "thumbs", False, inference=four, revision=1))
    fleet.time += WINDOW
    west.says(Feedback(ID(6), "thumbs", True, inference=five))  # too late
    return {one: 1.0, two: 0.0, three: 0.25, four: 0.0, five: 0.25, six: 0.25}


def check_trained(fleet: Fleet, expected: dict[str, float]) -> None:
    found = all_trained(fleet.inner)
    assert sorted(name for name, *_ in found) == sorted(expected)
    assert {name: reward for name, reward, *_ in found} == expected


def test_interactions_are_trained_on_once_with_their_rewards_and_only_with_consent() -> None:
    fleet = live_fleet()
    expected = first_answers(fleet)
    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, fleet.store).run_live(2)
    check_trained(fleet, expected)
    assert [token for _, _, token, _ in all_trained(fleet.inner)] == [11, 12, 13, 21, 22, 23] or [
        token for _, _, token, _ in all_trained(fleet.inner)
    ] == [21, 22, 23, 11, 12, 13]


def test_members_and_live_traffic_share_a_round_and_members_are_never_offered_live_tasks() -> None:
    fleet = live_fleet()
    expected = first_answers(fleet)
    offered: set[int] = set()

    def watch() -> None:
        board = Board.parse(fleet.inner.get(fleet_keys.BOARD, limit=BIG))
        offered.update(attempt.task for attempts in board.offers.values() for attempt in attempts)

    fleet.meanwhile = watch
    fleet.join("a", "b")
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, tasks=2)
        trainer.run_live(2)
    check_trained(fleet, expected)
    assert offered == {0, 1}
    for _, batch in fleet.collected:
        assert [rollouts.member == LIVE_MEMBER for rollouts in batch.rollouts] == [False, False, True, True, True]
    assert not fleet.reasons()


def world() -> tuple[Fleet, dict[str, float]]:
    fleet = live_fleet(staleness=9, keep_steps=1)
    return fleet, first_answers(fleet)


def calls_of_a_trainer() -> list[Call]:
    fleet, _ = world()
    store = FaultyStore(fleet.store)
    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, store, most=2).run_live(3)
    made = {each.key.split("/")[1] for each in store.calls if each.key.startswith("live/") and each.op != "list"}
    assert made == {"interactions", "feedback", "clock.json", "used", "used-lists"}
    return store.calls


def next_trainer(fleet: Fleet, expected: dict[str, float], last: int = 4) -> None:
    """Let another trainer take over. It also trains on answers that come later, so that it can reach the last step."""
    late = Answers(fleet, "late.0123456789abcde2")
    expected.update(dict.fromkeys(late.answer(31, 32, 33, 34, 35, 36), 0.25))
    fleet.time += 2 * WINDOW
    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, fleet.store, most=2).run_live(last)


def check_some_trained(fleet: Fleet, expected: dict[str, float]) -> None:
    found = all_trained(fleet.inner)
    names = [name for name, *_ in found]
    assert len(set(names)) == len(names)
    assert {name: reward for name, reward, *_ in found}.items() <= expected.items()


@pytest.mark.parametrize("fault", [Before, After])
def test_a_trainer_killed_at_any_call_trains_on_no_interaction_twice_and_loses_none(fault: Any) -> None:
    for each in calls_of_a_trainer():
        print(each)
        fleet, expected = world()
        store = FaultyStore(fleet.store, [fault(each.index, "crash")])
        with contextlib.suppress(ProcessDied), fleet.publisher() as publisher:
            LiveTrainer(fleet, publisher, store, most=2).run_live(3)
        assert store.died
        first = dict(expected)
        next_trainer(fleet, expected, last=6)
        check_some_trained(fleet, expected)
        assert first.keys() <= {name for name, *_ in all_trained(fleet.inner)}  # nothing is lost


@pytest.mark.parametrize("fault", [Before, After])
def test_a_call_without_an_answer_costs_no_interaction_and_trains_on_none_twice(fault: Any) -> None:
    for each in calls_of_a_trainer():
        print(each)
        fleet, expected = world()
        kind = "unknown" if each.op == "put_if_absent" else "unavailable"
        with fleet.publisher() as publisher:
            LiveTrainer(fleet, publisher, FaultyStore(fleet.store, [fault(each.index, kind)]), most=2).run_live(3, tries=2)
        check_trained(fleet, expected)


def test_a_trainer_that_is_taken_over_between_any_two_calls_trains_on_nothing_twice() -> None:
    """The first trainer does not know that it was replaced, and continues. Then a third one takes over."""
    for each in calls_of_a_trainer():
        print(each)
        fleet, expected = world()
        first = fleet.publisher()
        store = FaultyStore(fleet.store, [Before(_takeover(fleet, expected, each.index), "unavailable")])
        with contextlib.suppress(Fenced):
            LiveTrainer(fleet, first, store, most=2).run_live(3, tries=2)
        with contextlib.suppress(Fenced):
            first.close()
        more = Answers(fleet, "more.0123456789abcde3")
        expected.update(dict.fromkeys(more.answer(41, 42, 43, 44), 0.25))
        fleet.time += 2 * WINDOW
        with fleet.publisher() as publisher:
            LiveTrainer(fleet, publisher, fleet.store, most=2).run_live(6)
        check_some_trained(fleet, expected)


def _takeover(fleet: Fleet, expected: dict[str, float], index: int) -> Callable[[Call], bool]:
    def strikes(each: Call) -> bool:
        if each.index == index:
            next_trainer(fleet, expected, last=2)
        return False

    return strikes


def test_two_trainers_that_open_rounds_at_the_same_time_never_train_on_the_same_interaction_in_two_steps() -> None:
    """A trainer that was replaced opens a round for step 2 after the other has listed all rounds, and both name the same interactions."""
    fleet, expected = world()
    fleet.options = fleet.options.__class__(60, keep_steps=4)
    first = fleet.publisher()
    old = LiveTrainer(fleet, first, fleet.store, most=3)
    old.go(old.steps.resume())
    old.open_live(1)
    with fleet.publisher() as publisher:
        new = LiveTrainer(fleet, publisher, fleet.store, most=3)
        new.go(new.steps.resume())
        new.go(new.steps.live_tasks.learn())
        opened = old.open_live(2)  # the new trainer does not know of it
        assert opened is not None
        new.train(new.collect(1))
        assert new.open_live(3) is not None  # its rows are those of the old trainer's round for step 2
        assert new.open_live(2) is not None
        new.train(new.collect(2))
        new.train(new.collect(3))
    check_trained(fleet, expected)


def test_a_live_result_of_anybody_else_is_not_used() -> None:
    fleet = live_fleet()
    expected = first_answers(fleet)
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, tasks=1)
        fleet.join("a")
        trainer.go(trainer.steps.resume())
        record = trainer.open_live(1)
        version = trainer.steps.newest
        for task, attempt in ((1, 16), (1, 0), (0, 0)):
            lease = place_lease(fleet, record, task, attempt, LIVE_MEMBER)
            forged = make_rollouts(record, lease, [{}], version, task=task)
            upload_result(fleet, record, lease, forged)
        batch = trainer.collect(1)
    assert {name: reward for name, reward, *_ in trained_on(batch)}.items() <= expected.items()
    assert batch.rollouts[0].member == "a"
    assert fleet.reasons() == ["unleased"]


@pytest.mark.parametrize("lie", ["missing", "flip", "truncate"])
def test_a_live_task_whose_file_is_gone_or_damaged_is_given_up_and_the_round_goes_on(lie: Any) -> None:
    fleet = live_fleet()
    expected = first_answers(fleet)
    with fleet.publisher() as publisher:
        store = FaultyStore(fleet.store)
        trainer = LiveTrainer(fleet, publisher, store, most=6)
        trainer.go(trainer.steps.resume())
        trainer.open_live(1)
        west = [info.key for info in fleet.inner.list(live_keys.INTERACTIONS) if "/west" in info.key]
        trainer.store = FaultyStore(fleet.store, [Reading(call("get", west[0]), lie, times=None)])
        found = trained_on(trainer.collect(1))
    assert [token for _, _, token, _ in found] == [21, 22, 23]
    assert {name: reward for name, reward, *_ in found}.items() <= expected.items()
    assert fleet.reasons() == ["malformed"] * 3


def test_interactions_of_versions_that_the_chain_does_not_have_or_that_are_too_old_are_not_trained_on() -> None:
    fleet = live_fleet(staleness=1)
    answers = Answers(fleet)
    answers.answer(11, version=KnownVersion(1, 0, Digest((9, 9, 9, 9))))
    answers.answer(12, version=KnownVersion(77, 0, Digest()))
    [good] = answers.answer(13)
    fleet.time += 2 * WINDOW
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, most=9)
        trainer.run_live(1)
        assert sorted(fleet.reasons()) == ["future", "wrong-digest"]
        assert [name for name, *_ in all_trained(fleet.inner)] == [good]
        answers.answer(14, version=KnownVersion(1, 0, trainer.chain.find(1).digest))  # type: ignore[union-attr]
        for step in (2, 3):
            answers.answer(20 + step)
            fleet.time += 2 * WINDOW
            trainer.run_live(step)
    assert trainer.joiner.counts["stale"] == 0
    tokens = [token for _, _, token, _ in all_trained(fleet.inner)]
    assert tokens == [13, 14, 22, 23]


def test_clocks_of_gateways_and_trainers_that_are_hours_off_change_nothing() -> None:
    found = []
    for hours in (0, -30, 30):
        fleet = live_fleet()
        answers = Answers(fleet, time=(40 + hours) * 3600_000)
        one, two = answers.answer(11, 12)
        answers.says(Feedback(ID(1), "thumbs", True, inference=one, time=answers.time))
        fleet.time += WINDOW + 5
        answers.says(Feedback(ID(2), "thumbs", True, inference=two, time=answers.time))
        with fleet.publisher() as publisher:
            trainer = LiveTrainer(fleet, publisher, fleet.store)
            trainer.joiner._clock._ticks = lambda fleet=fleet, hours=hours: fleet.time + hours * 3600
            trainer.run_live(1)
        found.append(all_trained(fleet.inner))
    assert found[0] == found[1] == found[2]
    assert [reward for _, reward, *_ in found[0]] == [1.0, 0.25]


def test_no_interaction_is_joined_before_its_window_ends_by_the_clock_of_the_store() -> None:
    fleet = live_fleet()
    Answers(fleet).answer(11)
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store)
        trainer.go(trainer.steps.resume())
        for _ in range(WINDOW // 10):
            assert trainer.open_live(1) is None
            fleet.time += 10
        assert trainer.open_live(1) is None  # the store's times are only exact to a second
        fleet.time += 1
        assert trainer.open_live(1) is not None


def test_a_value_that_has_settled_is_final_before_the_window_ends() -> None:
    fleet = live_fleet()
    answers = Answers(fleet)
    one, _ = answers.answer(11, 12)
    metric = Metric("thumbs", window=WINDOW, settle=10, default=0.5)
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, metrics=(metric,))
        trainer.go(trainer.steps.resume())
        answers.says(Feedback(ID(1), "thumbs", False, inference=one))
        fleet.time += 6
        answers.says(Feedback(ID(2), "thumbs", True, inference=one, revision=1))
        fleet.time += 6
        assert trainer.open_live(1) is None
        fleet.time += 6
        assert trainer.open_live(1) is not None
        assert [(name, reward) for name, reward, *_ in trained_on(trainer.collect(1))] == [(one, 1.0)]


def test_forged_foreign_and_unknown_feedback_and_files_of_other_runs_are_ignored() -> None:
    fleet = live_fleet()
    answers = Answers(fleet)
    [own] = answers.answer(11, caller="app", episode=EPISODE)
    answers.says(
        Feedback(ID(1), "thumbs", True, inference=ID(999)),  # nobody has this id
        Feedback(ID(2), "thumbs", True, inference=own, caller="other"),  # it belongs to another caller
        Feedback(ID(3), "thumbs", 1.0, inference=own),  # it is a number
        Feedback(ID(4), "thumbs", True, episode=EPISODE),  # the metric is not one of episodes
    )
    answers.says(Feedback(ID(5), "thumbs", False, inference=own, caller="app"))
    for key in [info.key for info in fleet.inner.list(live_keys.LIVE)]:
        data = fleet.inner.get(key, limit=BIG)
        other = data.replace(fleet.log.run.id.encode(), b"ee" * 16)
        parts = live_keys.parse_interactions_key(key) or live_keys.parse_feedback_key(key)
        assert parts is not None
        fleet.store.put(key.replace("/west.", "/evil."), other)  # the hash is not that of the key
    fleet.time += 2 * WINDOW
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store)
        trainer.run_live(1)
    check_trained(fleet, {own: 0.0})
    assert trainer.joiner.counts["files"] == 3


def test_the_next_message_of_the_user_is_judged_unless_there_is_feedback() -> None:
    fleet = live_fleet()
    answers = Answers(fleet)
    [one] = answers.answer(11, episode=EPISODE, text=text("What is 2+2?", answer="5"))
    [two] = answers.answer(12, episode=EPISODE, text=text("What is 2+2?", "5", "No, wrong.", answer="4"))
    [three] = answers.answer(13, episode=EPISODE, text=text("What is 2+2?", "5", "No, wrong.", "4", "Thanks!", answer="Sure."))
    answers.says(Feedback(ID(1), "thumbs", False, inference=two))
    fleet.time += 2 * WINDOW
    seen: list[tuple[str, str]] = []

    def judge(conversation: Any, message: str) -> bool | None:
        seen.append((conversation.answer, message))
        return "wrong" not in message

    with fleet.publisher() as publisher:
        options = JoinerOptions(judge_metric="thumbs")
        LiveTrainer(fleet, publisher, fleet.store, judge=judge, options=options).run_live(1)
    assert seen == [("5", "No, wrong."), ("4", "Thanks!")]
    check_trained(fleet, {one: 0.0, two: 0.0, three: 0.25})


def test_a_judge_that_fails_costs_only_its_own_value() -> None:
    fleet = live_fleet()
    answers = Answers(fleet)
    [one] = answers.answer(11, episode=EPISODE, text=text("a", answer="b"))
    [two] = answers.answer(12, episode=EPISODE, text=text("a", "b", "c", answer="d"))
    fleet.time += 2 * WINDOW

    def judge(conversation: Any, message: str) -> bool | None:
        raise RuntimeError("the judge is out")

    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, fleet.store, judge=judge, options=JoinerOptions(judge_metric="thumbs")).run_live(1)
    check_trained(fleet, {one: 0.25, two: 0.25})
    assert [event.name for event in fleet.events if isinstance(event, Event)].count("judge-failed") == 1


def test_files_are_swept_after_their_retention_and_never_before_they_are_joined() -> None:
    fleet = live_fleet(staleness=9, keep_steps=1)
    answers = Answers(fleet)
    day = 86400.0
    slow = Metric("slow", window=int(2 * day), default=0.0)
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, metrics=(slow,), most=1, options=JoinerOptions(retention=3 * day))
        trainer.go(trainer.steps.resume())
        for step in range(1, 8):
            answers.answer(step)
            answers.says(Feedback(ID(step), "slow", True, inference=ID(1000 * 16 + step - 1)))
        fleet.time += 2.5 * day
        for step in range(1, 4):
            trainer.run_live(step)
        fleet.time += 1.0 * day
        trainer.run_live(4)
        owners = trainer.steps.open_rounds.owners
        trainer.go(trainer.joiner.sweep(owners))
        left = [live_keys.parse_interactions_key(info.key).number for info in fleet.inner.list(live_keys.INTERACTIONS)]  # type: ignore[union-attr]
        assert left == list(range(owners.first_needed(answers.session), 7))
        assert 1 <= left[0] <= 4
        assert len(list(fleet.inner.list(live_keys.FEEDBACK))) == 7  # the next trainer needs it to join the others
        trainer.run_live(7)
        trainer.go(trainer.joiner.look(owners))
        trainer.go(trainer.joiner.sweep(owners))
        assert not list(fleet.inner.list(live_keys.FEEDBACK))
    assert [(token, reward) for _, reward, token, _ in all_trained(fleet.inner)] == [(step, 1.0) for step in range(1, 8)]


def test_a_trainer_without_live_traffic_keeps_the_list_of_used_interactions() -> None:
    """It adopts and sweeps rounds with live tasks, and a later trainer with live traffic does not use their interactions again."""
    fleet, expected = world()
    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, fleet.store, most=4).run_live(1)
    assert not list(fleet.inner.list(live_keys.USED))
    fleet.join("a", "b")
    with fleet.publisher() as publisher:
        plain = fleet.trainer(publisher)
        plain.go(plain.steps.resume())
        for step in (2, 3, 4):
            plain.open(step)
            plain.collect(step)
            version = publisher.publish(state_at(step), step=step, meta={"trained": json.dumps([])})
            plain.steps.published(KnownVersion(version.seq, step, version.digest))
            plain.go(plain.steps.poll())
    fleet.members.clear()
    assert len(list(fleet.inner.list(live_keys.USED))) == 1
    with fleet.publisher() as publisher:
        LiveTrainer(fleet, publisher, fleet.store, most=9).run_live(5)
    check_trained(fleet, expected)


def test_the_list_of_used_interactions_stays_small_and_old_ones_are_deleted() -> None:
    fleet = live_fleet(keep_steps=1)
    answers = Answers(fleet)
    with fleet.publisher() as publisher:
        trainer = LiveTrainer(fleet, publisher, fleet.store, most=2)
        for step in range(1, 9):
            answers.answer(step, step)
            fleet.time += 2 * WINDOW
            trainer.run_live(step)
    records, lists = (list(fleet.inner.list(prefix)) for prefix in (live_keys.USED, live_keys.USED_LISTS))
    assert len(records) == len(lists) == 1
    assert lists[0].size < 200
    assert len(all_trained(fleet.inner)) == 16
