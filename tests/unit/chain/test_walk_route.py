"""Test the loop that finds a route, takes its hops, and tries another route if one fails. The hops of these tests do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hand_made_chain import HandMadeChain, make_state, step

from deltawire.chain.routes.restore import Hop
from deltawire.chain.routes.walk_route import HopFailed, taking, walk_route
from deltawire.errors import BaseMismatch, CheckpointError, CorruptDelta, DataDamaged, DeltaError, StateError, StoreUnavailable


class Planned:
    """A planner that returns these routes in turn, and records the hops that it must avoid."""

    def __init__(self, *routes: list[Hop]) -> None:
        self.left = list(routes)
        self.avoided: list[Hop] = []

    def find(self) -> Sequence[Hop]:
        return self.left.pop(0)

    def avoid(self, failure: HopFailed) -> None:
        if failure.hop in self.avoided:
            raise failure.error
        self.avoided.append(failure.hop)


@pytest.fixture
def hops() -> dict[str, Hop]:
    chain = HandMadeChain()
    chain.fence()
    chain.anchor(make_state(0))
    newest = chain.delta(step(make_state(0), 1))
    return {
        "own": Hop(newest, newest.seq - 1, (), "commit"),
        "skip": Hop(newest, newest.seq - 2, (), "skip"),
        "anchor": Hop(newest, None, (), "anchor"),
    }


def take_failing(failing: dict[str, Exception], taken: list[Hop]) -> Any:
    def take(route: Sequence[Hop]) -> str:
        for hop in route:
            taken.append(hop)
            with taking(hop):
                if hop.source in failing:
                    raise failing[hop.source]
        return "reached"

    return take


def test_a_route_that_succeeds_is_the_only_one_taken(hops: dict[str, Hop]) -> None:
    routes, taken = Planned([hops["anchor"], hops["own"]]), list[Hop]()
    assert walk_route(routes, routes.find, take_failing({}, taken)) == "reached"
    assert taken == [hops["anchor"], hops["own"]]
    assert routes.avoided == []


@pytest.mark.parametrize("kind", [DataDamaged, CorruptDelta, BaseMismatch, CheckpointError])
def test_without_a_base_of_its_own_every_failure_condemns_the_hop(hops: dict[str, Hop], kind: type[Exception]) -> None:
    routes, taken = Planned([hops["skip"]], [hops["anchor"]]), list[Hop]()
    assert walk_route(routes, routes.find, take_failing({"skip": kind("x")}, taken)) == "reached"
    assert routes.avoided == [hops["skip"]]


@pytest.mark.parametrize(
    ("hop", "error", "extra", "condemned"),
    [
        ("own", BaseMismatch("x"), (), "base"),
        ("own", DataDamaged("x"), (), "hop"),
        ("own", CorruptDelta("x"), (), "hop"),
        ("own", CorruptDelta("x"), (DeltaError,), "base"),
        ("skip", BaseMismatch("x"), (), "hop"),
        ("anchor", BaseMismatch("x"), (), "hop"),
    ],
)
def test_an_error_condemns_the_base_or_the_hop(
    hops: dict[str, Hop], hop: str, error: Exception, extra: tuple[type[Exception], ...], condemned: str
) -> None:
    routes, taken, dropped = Planned([hops[hop]], [hops["anchor"], hops["own"]] if hop != "anchor" else [hops["own"]]), [], []
    failing = {hops[hop].source: error}

    def take(route: Sequence[Hop]) -> str:
        result = take_failing(dict(failing), taken)
        try:
            return result(route)
        finally:
            failing.clear()

    assert walk_route(routes, routes.find, take, drop_base=dropped.append, base_errors=(StateError, *extra)) == "reached"
    assert [failure.error for failure in dropped] == ([error] if condemned == "base" else [])
    assert routes.avoided == ([] if condemned == "base" else [hops[hop]])


def test_a_hop_that_fails_again_although_it_was_ruled_out_ends_the_walk(hops: dict[str, Hop]) -> None:
    routes = Planned(*[[hops["anchor"]]] * 5)
    with pytest.raises(DataDamaged):
        walk_route(routes, routes.find, take_failing({"anchor": DataDamaged("x")}, []))
    assert len(routes.left) == 3


def test_errors_of_the_store_end_the_walk_and_condemn_nothing(hops: dict[str, Hop]) -> None:
    routes, dropped = Planned([hops["own"]]), []
    with pytest.raises(StoreUnavailable):
        walk_route(routes, routes.find, take_failing({"commit": StoreUnavailable("x")}, []), drop_base=dropped.append)
    assert routes.avoided == dropped == []
