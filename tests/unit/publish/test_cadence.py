"""Tables list when an anchor is due."""

from __future__ import annotations

import pytest

from deltawire.publish.shortcuts.cadence import AnchorPolicy, ChainCost, Replay, Speed, anchor_due

FAST = Speed(network=1000.0, codec=1e12)


def chain(*deltas: int) -> ChainCost:
    cost = ChainCost()
    for size in deltas:
        cost.add_update(size)
    return cost


@pytest.mark.parametrize(
    ("policy", "cost", "speed", "due"),
    [
        pytest.param(AnchorPolicy(1), chain(), FAST, False, id="nothing since the last one"),
        pytest.param(AnchorPolicy(4), chain(900, 900, 900), FAST, False, id="too soon, whatever it costs"),
        pytest.param(AnchorPolicy(3), chain(400, 400, 400), FAST, True, id="more bytes than a checkpoint"),
        pytest.param(AnchorPolicy(3), chain(300, 300, 300), FAST, False, id="fewer bytes than a checkpoint"),
        pytest.param(AnchorPolicy(3, max_chain_ratio=0.5), chain(200, 200, 200), FAST, True, id="the user wants joins cheap"),
        pytest.param(AnchorPolicy(1, 3), chain(0, 0, 0), FAST, True, id="at the latest after max_versions"),
        pytest.param(AnchorPolicy(1, None), chain(*[0] * 5000), FAST, False, id="unless that is unbounded"),
        pytest.param(AnchorPolicy(1), chain(1, 1, 1), Speed(1000.0, 2000.0), True, id="three slow passes against one load"),
        pytest.param(AnchorPolicy(1), chain(1, 1, 1), Speed(1000.0, 4000.0), False, id="three passes that are fast enough"),
        pytest.param(AnchorPolicy(1), chain(1, 1, 1), Speed(1000.0, None), False, id="nothing measured yet"),
        pytest.param(AnchorPolicy(1, max_replay_seconds=0.1), chain(1, 1, 1), Speed(1000.0, 4000.0), True, id="the user is impatient"),
    ],
)
def test_an_anchor_is_due_when_a_joiner_is_better_off_with_it(policy, cost, speed, due):
    assert anchor_due(policy, cost, 1000, speed) is due


def test_skips_shorten_the_route_only_if_they_are_cheaper():
    cost = chain(10, 10, 10, 10)
    cost.add_skip(4, 25)
    assert cost.replay == Replay(25, 1)
    cost.add_update(10)
    cost.add_skip(4, 1000)
    assert cost.replay == Replay(35, 2)


def test_an_anchor_starts_the_count_again_where_it_stands():
    cost = chain(10, 10, 10)
    cost.anchored()
    assert (cost.versions, cost.replay) == (0, Replay())
    cost = chain(10, 10, 10)
    cost.anchored(behind=2)
    assert (cost.versions, cost.replay) == (2, Replay(20, 2))
    cost.add_skip(4, 1)
    assert cost.replay == Replay(20, 2), "a skip that starts before the anchor does not shorten the replay after it"


def test_a_resumed_chain_counts_what_came_before():
    cost = ChainCost.resumed(5, Replay(70, 3))
    cost.add_update(10)
    assert (cost.versions, cost.replay) == (6, Replay(80, 4))
    cost.anchored(behind=4)
    assert cost.versions == 4


def test_the_best_measurement_counts():
    speed = Speed().observe(sent=100, send_seconds=1.0).observe(sent=1, send_seconds=1.0, scanned=50, scan_seconds=0.5)
    assert speed == Speed(100.0, 100.0)
    assert speed.observe(sent=0, send_seconds=1.0, scanned=10, scan_seconds=0.0) == speed


@pytest.mark.parametrize("wrong", [{"min_versions": 0}, {"max_versions": 3}, {"max_chain_ratio": 0}, {"max_replay_seconds": 0}])
def test_senseless_policies_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        AnchorPolicy(**wrong)


def test_a_skip_that_is_made_late_shortens_the_routes_to_newer_versions():
    late, prompt = chain(10, 10, 10, 10), chain(10, 10, 10, 10)
    prompt.add_skip(4, 25)
    for cost in (late, prompt):
        cost.add_update(10)
        cost.add_update(10)
    late.add_skip(4, 25, behind=2)
    assert late.replay == prompt.replay == Replay(45, 3)
    late.add_skip(4, 30, behind=2)  # it saves nothing
    late.add_skip(4, 1, behind=9)  # it was made of a version before the anchor
    assert late.replay == prompt.replay
