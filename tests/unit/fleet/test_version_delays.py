"""The trainer sees when versions reach members, and believes members only as far as that allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.fleet.rules.version_delays import VersionDelays, admissible_share, believed_delay

SECONDS = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("claimed", "seen", "believed"),
    [
        (None, None, None),
        (7.0, None, 7.0),
        (None, 30.0, 30.0),
        (25.0, 30.0, 25.0),
        (0.0, 30.0, 20.0),  # it cannot have been that fast
        (500.0, 30.0, 30.0),  # nor that slow
        (0.0, 4.0, 0.0),
    ],
)
def test_a_claim_counts_as_far_as_the_trainers_own_observation_allows(
    claimed: float | None, seen: float | None, believed: float | None
) -> None:
    assert believed_delay(claimed, seen, slack=10.0) == believed


@given(SECONDS, SECONDS, SECONDS)
def test_no_claim_makes_a_member_faster_than_it_was_seen_to_be_at_best(claimed: float, seen: float, slack: float) -> None:
    believed = believed_delay(claimed, seen, slack)
    assert believed is not None
    assert seen - slack <= believed <= seen


@pytest.mark.parametrize(
    ("delay", "staleness", "share"),
    [(0.0, 0, 1.0), (5.0, 0, 1.0), (7.5, 0, 1 / 3), (10.0, 0, 0.0), (100.0, 0, 0.0), (10.0, 1, 1.0), (15.0, 1, 1 / 3), (15.0, 2, 1.0)],
)
def test_a_version_is_admissible_until_it_is_too_old_for_every_open_round(delay: float, staleness: int, share: float) -> None:
    assert admissible_share(delay, 10.0, staleness) == pytest.approx(share)


def published(*times: float) -> VersionDelays:
    """Return delays that saw commits 1, 2, 3 … published at these times."""
    delays = VersionDelays()
    for seq, at in enumerate(times, start=1):
        delays.published(seq, at)
    return delays


def test_the_delay_is_the_time_until_a_heartbeat_names_the_version() -> None:
    delays = published(100, 200, 300)
    delays.heard("m", 1, None, 150)  # it had joined before, so this says nothing
    assert delays.delay("m", 150, 0) is None
    delays.heard("m", 2, None, 230)
    assert delays.delay("m", 230, 0) == 30
    delays.heard("m", 3, None, 310)
    assert delays.delay("m", 310, 0) == pytest.approx(0.7 * 30 + 0.3 * 10)
    assert delays.delay("unknown", 310, 0) is None


def test_a_member_that_waits_for_a_version_is_at_least_as_slow_as_it_has_waited() -> None:
    delays = published(100, 200, 300)
    delays.heard("m", 1, None, 150)
    delays.heard("m", 2, 0.0, 210)
    assert delays.delay("m", 300, 5) == 5
    assert delays.delay("m", 400, 5) == 95
    delays.heard("liar", 1, 0.0, 110)
    assert delays.delay("liar", 200, 5) == 0.0
    assert delays.delay("liar", 450, 5) == 245


def test_a_member_that_skips_versions_is_not_slower_than_it_is() -> None:
    delays = published(100, 200, 210, 220)
    delays.heard("m", 1, None, 150)
    delays.heard("m", 4, None, 225)
    assert delays.delay("m", 230, 0) == 5


def test_members_that_begin_anew_or_go_back_keep_their_delay_and_are_not_measured() -> None:
    delays = published(100, 200, 300)
    delays.heard("m", 1, None, 150)
    delays.heard("m", 2, None, 230)
    delays.heard("m", None, None, 240)
    delays.heard("m", 3, None, 900)  # it was started again
    assert delays.delay("m", 900, 0) == 30
    delays.heard("m", 2, None, 950)  # a rewind
    delays.keep(["other"])
    assert delays.delay("m", 950, 0) is None


def test_versions_that_the_trainer_did_not_publish_are_not_measured() -> None:
    delays = published(100)
    delays.heard("m", 1, None, 110)
    delays.heard("m", 77, None, 120)
    assert delays.delay("m", 130, 0) is None
    delays.heard("early", 0, None, 50)
    delays.heard("early", 1, None, 60)  # it says so before the version was published
    assert delays.delay("early", 60, 0) is None


def test_the_period_is_the_median_of_the_last_intervals() -> None:
    assert published(0, 10).period is None
    assert published(0, 10, 30).period == 15
    assert published(*range(0, 100, 10), 1000).period == 10
    delays = published(0, 10, 20)
    delays.published(3, 500)  # the same commit again
    assert delays.period == 10
