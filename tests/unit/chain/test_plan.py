"""The planner finds the cheapest route; tables list the cases."""

import itertools

import pytest

from deltawire.chain.routes.plan import HOP_COST, Edge, plan
from deltawire.errors import VersionGone

MIB = 1 << 20


def commit(target, mib=1, base=None):
    return Edge(target - 1 if base is None else base, target, mib * MIB, 1, "commit")


def skip(base, target, mib):
    return Edge(base, target, mib * MIB, 1, "skip")


def anchor(target, mib=1000):
    return Edge(None, target, mib * MIB, 3, "anchor")


def same(base, target, source="fence"):
    return Edge(base, target, 0, 0, source)


CHAIN = [anchor(1), *(commit(seq) for seq in range(2, 20))]


@pytest.mark.parametrize(
    ("have", "target", "edges", "expected"),
    [
        pytest.param(3, 3, CHAIN, [], id="already there"),
        pytest.param(3, 5, CHAIN, [4, 5], id="commit by commit"),
        pytest.param(None, 3, CHAIN, [1, 2, 3], id="a joiner begins with the anchor"),
        pytest.param(None, 12, [*CHAIN, anchor(10)], [10, 11, 12], id="the nearest anchor"),
        pytest.param(2, 12, [*CHAIN, anchor(10)], list(range(3, 13)), id="deltas are cheaper than an anchor"),
        pytest.param(2, 12, [*CHAIN, anchor(10, 5)], [10, 11, 12], id="a small model's anchor is cheaper than many deltas"),
        pytest.param(2, 10, [*CHAIN, skip(4, 8, 3)], [3, 4, 8, 9, 10], id="a skip in the middle"),
        pytest.param(5, 10, [*CHAIN, skip(4, 8, 3)], [6, 7, 8, 9, 10], id="a skip that begins before the present state"),
        pytest.param(4, 8, [*CHAIN, skip(4, 8, 100)], [5, 6, 7, 8], id="a skip that is dearer than what it skips"),
        pytest.param(
            1, 17, [*CHAIN, skip(1, 5, 3), skip(5, 9, 3), skip(9, 13, 3), skip(13, 17, 3), skip(1, 17, 9)], [17], id="the long skip"
        ),
        pytest.param(6, 9, [anchor(1), commit(2), same(2, 9, "rewind"), Edge(6, 2, MIB, 0, "undo")], [2, 9], id="undo, then rewind"),
        pytest.param(6, 9, [anchor(1), commit(2), same(2, 9, "rewind")], [1, 2, 9], id="a rewind without undo begins anew"),
        pytest.param(2, 4, [same(2, 3), commit(4)], [3, 4], id="through a fence"),
        pytest.param(3, 4, [same(3, 2), same(2, 3), commit(4, base=2)], [2, 4], id="back through a fence"),
        pytest.param(5, 2, [anchor(1), commit(2)], [1, 2], id="to an older version"),
    ],
)
def test_plan_takes_the_cheapest_route(have, target, edges, expected):
    for order in (edges, edges[::-1]):
        found = plan(have, target, order)
        assert [hop.target for hop in found.hops] == expected
        assert found.cost == sum(hop.cost for hop in found.hops)
        assert found.bytes == sum(hop.bytes for hop in found.hops)


def test_plan_hops_fit_together():
    hops = plan(None, 12, [*CHAIN, skip(3, 7, 2)]).hops
    assert hops[0].base is None
    assert all(hop.base == before.target for before, hop in itertools.pairwise(hops))


def test_plan_says_when_nothing_leads_there():
    for have, edges in [(None, [commit(2), commit(3)]), (1, [commit(3)]), (None, [])]:
        with pytest.raises(VersionGone):
            plan(have, 3, edges)


def test_plan_is_not_caught_in_circles():
    edges = [same(1, 2), same(2, 1), same(2, 3), same(3, 2)]
    assert [hop.target for hop in plan(1, 3, edges).hops] == [2, 3]
    with pytest.raises(VersionGone):
        plan(1, 9, edges)


def test_relabelling_is_free_and_a_hop_is_not():
    assert same(1, 2).cost == 0
    assert Edge(1, 2, 0, 0, "commit").cost == HOP_COST
