"""Interactions get the rewards that a plain reading of docs/protocol.md §13 gives, in whatever order files are read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import ID
from thorough import examples

from deltawire.fleet.rules.live_tasks import LiveItem
from deltawire.format.feedback import Feedback
from deltawire.format.records.live_records import Metric
from deltawire.live.rules.join import Pending, StoredFeedback
from deltawire.live.rules.join_table import JoinTable
from deltawire.live.rules.revisions import MOST_REVISIONS

METRICS = (
    Metric("thumbs", window=20, default=0.5, weight=2.0),
    Metric("rating", "episode", "float", window=30, low=0.0, high=1.0),
    Metric("unused", weight=0.0, window=1000),
)
EPISODES = [None, ID(101), ID(102)]


@st.composite
def interactions(draw: Any) -> list[Pending]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        found.append(
            Pending(
                item=LiveItem(f"gw.{'0' * 16}", number, 0),
                key=str(number),
                id=ID(draw(st.integers(1, 3))),
                choice=draw(st.integers(0, 1)),
                stored=float(draw(st.integers(0, 40))),
                steps=(0, 0),
                prompt_tokens=1,
                tokens=1,
                episode=draw(st.sampled_from(EPISODES)),
                caller=draw(st.sampled_from([None, "app"])),
            )
        )
    return found


@st.composite
def all_feedback(draw: Any) -> list[StoredFeedback]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        about: dict[str, Any] = draw(
            st.sampled_from([{"inference": ID(each)} for each in (1, 2, 3, 9)] + [{"episode": each} for each in EPISODES[1:]])
        )
        feedback = Feedback(
            id=ID(draw(st.integers(200, 206))),
            metric=draw(st.sampled_from(["thumbs", "rating", "other"])),
            value=draw(st.sampled_from([True, False, 0.25, 0.75, 7.0, "good"])),
            revision=draw(st.integers(0, 2)),
            time=draw(st.integers(0, 2)),
            caller=draw(st.sampled_from([None, "app", "other"])),
            **about,
        )
        found.append(
            StoredFeedback(feedback, float(draw(st.integers(0, 80))), (draw(st.sampled_from(["gw.1", "gw.2"])), number // 3, number % 3))
        )
    return found


def reference(pending: list[Pending], given: list[StoredFeedback]) -> dict[LiveItem, float]:
    """Return the reward of each interaction that has one, written as the rules read, without any of the code that is tested."""
    first: dict[tuple[str | None, str], StoredFeedback] = {}
    useful = [
        one
        for one in given
        if (one.feedback.metric == "thumbs" and one.feedback.inference is not None and type(one.feedback.value) is bool)
        or (one.feedback.metric == "rating" and one.feedback.episode is not None and one.feedback.value in (0.25, 0.75))
    ]
    for one in sorted(useful, key=lambda one: (one.stored, one.index)):
        first.setdefault((one.feedback.caller, one.feedback.id), one)
    kept: dict[tuple[str, int], Pending] = {}
    for each in sorted(pending, key=lambda each: (each.stored, each.item)):
        kept.setdefault((each.id, each.choice), each)
    rewards = {}
    for each in kept.values():
        votes = []
        ratings = []
        for one in first.values():
            feedback = one.feedback
            if feedback.caller is not None and feedback.caller != each.caller:
                continue
            order = (feedback.revision, one.stored, *one.index)
            on_time = one.stored <= each.stored + 20
            if feedback.metric == "thumbs" and feedback.inference == each.id and type(feedback.value) is bool and on_time:
                votes.append((order, 1.0 if feedback.value else 0.0))
            in_range = type(feedback.value) is float and 0.0 <= feedback.value <= 1.0
            same = feedback.episode is not None and feedback.episode == each.episode
            if feedback.metric == "rating" and same and in_range and one.stored <= each.stored + 30:
                ratings.append((order, float(feedback.value)))
        reward = 2.0 * (max(votes)[1] if votes else 0.5)
        rewards[each.item] = reward + (max(ratings)[1] if ratings else 0.0)
    return rewards


@examples(150)
@given(interactions(), all_feedback(), st.randoms(use_true_random=False))
def test_rewards_do_not_depend_on_the_order_in_which_files_are_read(
    pending: list[Pending], given: list[StoredFeedback], random: Any
) -> None:
    table = JoinTable(METRICS)
    arriving: list[Any] = [*pending, *given, *random.sample(given, len(given) // 2)]  # some of it is read twice
    random.shuffle(arriving)
    for one in arriving:
        if isinstance(one, Pending):
            table.add_interaction(one)
        else:
            table.add_feedback(one)
        if random.random() < 0.3:
            table.ripe(0.0)  # nothing can be ripe yet
    found = {one.pending.item: one.reward for one in table.ripe(1000.0)}
    assert found == reference(pending, given)


@examples(150)
@given(interactions(), all_feedback(), st.randoms(use_true_random=False))
def test_rewards_do_not_depend_on_when_a_trainer_looks(pending: list[Pending], given: list[StoredFeedback], random: Any) -> None:
    """The trainer sees everything soon after it was stored, and takes interactions as soon as they are ripe."""
    table = JoinTable(METRICS)
    expected = reference(pending, given)
    found: dict[LiveItem, float] = {}
    shown = 0.0
    while shown < 200.0:
        now = shown + random.randint(1, 30)
        new = [one for one in [*pending, *given] if shown <= one.stored < now]
        random.shuffle(new)
        for one in new:
            (table.add_interaction if isinstance(one, Pending) else table.add_feedback)(one)  # type: ignore[operator]
        for joined in table.ripe(now):
            assert joined.pending.item not in found
            assert joined.pending.stored + 31 <= now
            found[joined.pending.item] = joined.reward
            if random.random() < 0.5:
                table.drop(joined.pending.item)
            else:
                del found[joined.pending.item]
        shown = now
    found |= {one.pending.item: one.reward for one in table.ripe(1000.0)}
    again = {item: reward for item, reward in found.items() if item not in expected}  # a repeated id, after the first one was taken
    assert {item: reward for item, reward in found.items() if item not in again} == expected


def test_a_table_has_a_limit_and_drops_feedback_without_an_interaction_first() -> None:
    table = JoinTable(METRICS, most_pending=1, most_feedback=3)
    table.add_interaction(Pending(LiveItem("gw.0", 0, 0), "k", ID(1), 0, 50.0, (0, 0), 1, 1))
    assert table.is_full
    for number in range(6):
        about = ID(1) if number < 2 else ID(2)
        table.add_feedback(StoredFeedback(Feedback(ID(10 + number), "thumbs", True, inference=about), float(number), ("gw.0", number, 0)))
    assert table.ripe(60.0) == []
    assert table.feedback == 3
    assert table.counts["dropped"] == 3
    [joined] = table.ripe(100.0)
    assert joined.values == {"thumbs": 1.0}


def thumbs(number: int, stored: float, value: bool = True, **more: Any) -> StoredFeedback:
    feedback = Feedback(ID(1000 + number), more.pop("metric", "thumbs"), more.pop("value", value), **{"inference": ID(1), **more})
    return StoredFeedback(feedback, stored, ("gw.0", number, 0))


JUNK = [{"metric": "other"}, {"metric": "unused"}, {"value": "so so"}, {"value": 7.0}, {"inference": None, "episode": ID(101)}]


@pytest.mark.parametrize("junk", JUNK, ids=str)
def test_feedback_that_can_give_no_reward_takes_nobodys_place(junk: dict[str, Any]) -> None:
    table = JoinTable(METRICS, most_feedback=10)
    table.add_feedback(thumbs(0, 0.0))
    for number in range(1, 2000):
        table.add_feedback(thumbs(number, 0.5, **junk))
    table.add_feedback(thumbs(2000, 1.0, False, revision=1))
    table.add_interaction(Pending(LiveItem("gw.0", 0, 0), "k", ID(1), 0, 0.0, (0, 0), 1, 1, episode=ID(101)))
    assert [one.values for one in table.ripe(100.0)] == [{"thumbs": 0.0}]
    assert (table.feedback, table.counts["unused"], table.counts["dropped"]) == (2, 1999, 0)


def test_the_last_revision_counts_however_many_there_are() -> None:
    """The window ends at 20: later revisions are too late. The one before counts, and so does one that stood for long."""
    table = JoinTable(METRICS)
    table.add_interaction(Pending(LiveItem("gw.0", 0, 0), "k", ID(1), 0, 0.0, (0, 0), 1, 1))
    for number in range(5000):
        table.add_feedback(thumbs(number, number / 500, number == 4999))
    table.add_feedback(thumbs(5000, 15.0, False))
    table.add_feedback(thumbs(5001, 19.0))
    for number in range(5002, 9000):
        table.add_feedback(thumbs(number, 20.5 + number / 5000, False))
    assert table.feedback == MOST_REVISIONS
    assert [one.values for one in table.ripe(100.0)] == [{"thumbs": 1.0}]


@pytest.mark.parametrize("others_are_first", [False, True])
def test_only_the_caller_that_sends_too_much_loses_feedback(others_are_first: bool) -> None:
    table = JoinTable(METRICS, most_feedback=400)
    flood = [thumbs(number, 10.0 + number / 1e4, caller="loud", inference=ID(number % 10 + 1)) for number in range(5000)]
    others = [thumbs(9000 + number, 5.0, False, caller="quiet", inference=ID(number % 100 + 200)) for number in range(200)]
    for one in [*others, *flood] if others_are_first else [*flood, *others]:
        table.add_feedback(one)
    table.ripe(0.0)
    kept = [given for number in range(200, 300) for given in table.given_to(_waiting(ID(number), "quiet"))]
    assert len(kept) == 200
    assert table.feedback <= 400
    assert all(table.given_to(_waiting(ID(number), "loud")) for number in range(1, 11))


@pytest.mark.parametrize("revisions", [1, 3])
def test_a_caller_that_rates_too_many_answers_loses_its_own_feedback(revisions: int) -> None:
    metrics = [Metric(f"metric{number}", window=1000) for number in range(8)]
    table = JoinTable(metrics, most_feedback=1000)
    for number in range(400):
        caller = "quiet" if number < 100 else "loud"
        item = LiveItem("gw.0", 0, number)
        table.add_interaction(Pending(item, "k", ID(number), 0, 0.0, (0, 0), 1, 1, caller=caller))
    quiet = [thumbs(number, 1.0, metric="metric0", inference=ID(number), caller="quiet") for number in range(100)]
    quiet += [thumbs(100 + number, 1.0 + number, metric="metric1", inference=ID(0), caller="quiet") for number in range(20)]
    loud = [
        thumbs(1000 + number, 2.0 + number, metric=f"metric{number % 8}", inference=ID(100 + number // 8 % 300), caller="loud")
        for number in range(2400 * revisions)
    ]
    for one in [*quiet, *loud]:
        table.add_feedback(one)
    table.ripe(3.0)
    kept = {one.feedback.id for number in range(400) for one in table.given_to(_waiting(ID(number), ""))}
    assert {one.feedback.id for one in quiet} <= kept  # also the revisions, although the other caller has as many
    assert table.feedback == len(kept) == 1000
    newest = loud[-880:]
    assert {one.feedback.id for one in newest} <= kept


def test_callers_that_are_equal_lose_the_oldest_feedback() -> None:
    table = JoinTable(METRICS, most_feedback=5)
    for number in range(20):
        table.add_feedback(thumbs(number, float(number), inference=ID(number), caller=f"caller{number % 10}"))
    table.ripe(0.0)
    assert [number for number in range(20) if table.given_to(_waiting(ID(number), ""))] == list(range(15, 20))


def _waiting(name: str, caller: str) -> Pending:
    return Pending(LiveItem("gw.0", 0, 0), "k", name, 0, 0.0, (0, 0), 1, 1, caller=caller)


def test_feedback_stays_when_an_earlier_interaction_replaces_a_repeated_one() -> None:
    table = JoinTable(METRICS)
    table.add_interaction(Pending(LiveItem("gw.0", 1, 0), "k1", ID(1), 0, 51.0, (0, 0), 1, 1))
    table.add_feedback(StoredFeedback(Feedback(ID(10), "thumbs", True, inference=ID(1)), 52.0, ("gw.0", 0, 0)))
    table.add_interaction(Pending(LiveItem("gw.0", 0, 0), "k0", ID(1), 0, 50.0, (0, 0), 1, 1))
    [joined] = table.ripe(100.0)
    assert (joined.pending.key, joined.values) == ("k0", {"thumbs": 1.0})
