"""Plans react to each of their numbers in the right direction, and refuse numbers that make no sense."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import UnusablePlan
from deltawire.planning import FleetShape, Link, Network, Prices, Region, Workload, plan, transfer_seconds
from deltawire.planning.fleet_shape import gpus_to_hold, step_seconds
from deltawire.planning.link_model import parse_link
from deltawire.planning.network import Arrival
from deltawire.planning.plan import DELTAWIRE, FULL, NO_RELAYS
from deltawire.planning.quantities import count, duration, rate, share, size

LINK = Link(1e9, 0.08)


def network(regions: int = 2, members: int = 8, link: Link = LINK, **options: object) -> Network:
    return Network([Region(f"r{number}", link, members) for number in range(regions)], **options)  # type: ignore[arg-type]


more = st.floats(1.0, 100.0)


@settings(max_examples=60, deadline=None)
@given(
    objects=st.integers(1, 5000),
    nbytes=st.floats(1, 1e13),
    speed=st.floats(1e6, 1e11),
    rtt=st.floats(0, 1),
    streams=st.none() | st.integers(1, 64),
    factor=more,
)
def test_transfers_take_longer_with_more_bytes_and_objects_and_slower_links(
    objects: int, nbytes: float, speed: float, rtt: float, streams: int | None, factor: float
) -> None:
    base = transfer_seconds(objects, nbytes, Link(speed, rtt), streams=streams)
    slightly = 1 - 1e-9
    assert transfer_seconds(objects, nbytes * factor, Link(speed, rtt), streams=streams) >= base * slightly
    assert transfer_seconds(objects, nbytes, Link(speed / factor, rtt), streams=streams) >= base * slightly
    assert transfer_seconds(objects, nbytes, Link(speed, rtt * factor), streams=streams) >= base * slightly
    assert base >= nbytes * 8 / speed
    assert transfer_seconds(objects, nbytes, Link(speed, rtt)) <= base


@settings(max_examples=40, deadline=None)
@given(
    params=st.floats(1e6, 2e12),
    changed=st.floats(1e-6, 0.5),
    link=st.builds(Link, st.floats(1e7, 1e11), st.floats(0.001, 0.5)),
    staleness=st.integers(0, 4),
    train=st.floats(0, 200),
    factor=more,
)
def test_plans_are_monotone(params: float, changed: float, link: Link, staleness: int, train: float, factor: float) -> None:
    fleet = FleetShape(train_seconds=train, staleness=staleness)
    prices = Prices()

    def deltawire(params: float, link: Link, fleet: FleetShape, prices: Prices, changed: float = changed) -> tuple[float, float, float]:
        found = plan(Workload.of_model(params, "fp8", changed=changed), network(link=link), fleet, prices, seed=None).method(DELTAWIRE)
        return found.step_seconds, found.dollars, found.worst.behind

    base = deltawire(params, link, fleet, prices)
    worse = [
        deltawire(params * factor, link, fleet, prices),
        deltawire(params, Link(link.rate / factor, link.rtt), fleet, prices),
        deltawire(params, Link(link.rate, link.rtt * factor), fleet, prices),
        deltawire(params, link, replace(fleet, train_seconds=train * factor), prices),
        deltawire(params, link, fleet, Prices(prices.egress * factor, prices.gpu_hour * factor)),
    ]
    for seconds, _, behind in worse:
        assert seconds >= base[0] * (1 - 1e-6)
        assert behind >= base[2] * (1 - 1e-6)
    assert worse[-1][1] >= base[1]
    assert deltawire(params, link, replace(fleet, staleness=staleness + 1), prices)[0] <= base[0] * (1 + 1e-6)


def test_a_step_takes_as_long_as_generation_if_versions_come_in_time() -> None:
    fleet = FleetShape(generate_seconds=60, train_seconds=20, staleness=1)
    region = Region("r1", LINK, 8)
    assert step_seconds(fleet, [Arrival(region, 40, 1, 1)]) == 60
    assert step_seconds(fleet, [Arrival(region, 60, 1, 1)]) == pytest.approx((60 + 20 + 60) / 2)
    assert step_seconds(replace(fleet, staleness=0), [Arrival(region, 10, 1, 1)]) == pytest.approx(90)
    assert step_seconds(fleet, []) == 60


def test_other_regions_do_the_work_of_a_region_that_is_late() -> None:
    """Half of the members get versions far too late, so the others need twice the time, and never wait for them."""
    fleet = FleetShape(generate_seconds=60, train_seconds=0, staleness=1)
    near, far = Region("near", LINK, 8), Region("far", LINK, 8)
    assert step_seconds(fleet, [Arrival(near, 1, 1, 1), Arrival(far, 1e6, 1e6, 1)]) == pytest.approx(120)


def test_without_relays_each_member_takes_its_own_copy() -> None:
    report = plan(Workload.of_model(8e9), network(regions=3, members=8), seed=None)
    one, each = report.method(DELTAWIRE), report.method(NO_RELAYS)
    assert [arrival.link_bytes for arrival in each.arriving] == [8 * arrival.link_bytes for arrival in one.arriving]
    assert each.egress_dollars == pytest.approx(8 * one.egress_dollars)
    assert one.egress_dollars == pytest.approx(3 * one.bytes_per_step / 1e9 * 0.09)
    assert not [method for method in plan(Workload.of_model(8e9), network(members=1), seed=None).methods if method.name == NO_RELAYS]


def test_cut_through_comes_near_the_slowest_stage() -> None:
    work = Workload.of_model(200e9, "bf16")
    whole = plan(work, network(cut_through=False), seed=None).method(DELTAWIRE)
    cut = plan(work, network(cut_through=True), seed=None).method(DELTAWIRE)
    slowest = max(cut.worst.link_seconds, work.state_bytes / 11.3e9)
    assert slowest <= cut.worst.behind < 1.1 * slowest < whole.worst.behind


@pytest.mark.parametrize("gpus", [1, 8])
def test_cut_through_is_assumed_however_many_processes_publish(gpus: int) -> None:
    fleet = FleetShape(trainer_gpus=gpus)
    found = plan(Workload.of_model(8e9), network(), fleet, seed=None)
    assert found.as_json()["network"]["cut_through"] is True
    without = plan(Workload.of_model(8e9), network(cut_through=False), fleet, seed=None)
    assert found.method(DELTAWIRE).worst.behind < without.method(DELTAWIRE).worst.behind


@settings(max_examples=60, deadline=None)
@given(objects=st.integers(1, 500), nbytes=st.floats(1, 1e12), speed=st.floats(1e6, 1e11), rtt=st.floats(0, 1))
def test_a_new_link_is_slower_than_one_that_is_known(objects: int, nbytes: float, speed: float, rtt: float) -> None:
    link = Link(speed, rtt)
    known, new = (transfer_seconds(objects, nbytes, link, is_new=is_new) for is_new in (False, True))
    assert known <= new
    assert new <= known + rtt + 6 * (rtt + 0.025)


def test_a_link_never_carries_more_than_its_rate() -> None:
    for method in plan(Workload.of_model(1e12, "fp8"), network(members=64), seed=None).methods:
        for limit in method.limits:
            assert limit.share <= 1 or not limit.name.startswith("link")
    full = plan(Workload.of_model(1e12, "fp8"), network(), seed=None).method(FULL)
    assert full.limits[0].name.startswith("link")


def test_a_plan_beyond_a_limit_says_so() -> None:
    """Tasks of 1.6 s for 1,024 members are more requests than the trainer can make; tasks of 60 s are not."""
    small, large = (
        plan(Workload.of_model(8e9), network(members=512), FleetShape(task_tokens=tokens), seed=None).method(DELTAWIRE)
        for tokens in (4_096, 150_000)
    )
    assert small.limits[0].name == "requests of the trainer"
    assert (small.is_reachable, large.is_reachable) == (False, True)


def test_the_fleet_in_virtual_time_sets_the_pace() -> None:
    for method in plan(Workload.of_model(70e9), network()).methods:
        assert method.step_seconds == pytest.approx(method.formula_seconds, rel=0.1)
        assert method.step_seconds != method.formula_seconds
        assert 0 < method.of_free <= 1.02


def test_tokens_and_dollars() -> None:
    fleet = FleetShape(generate_seconds=60, train_seconds=0, tokens_per_second=100, gpus_per_member=2, trainer_gpus=8)
    found = plan(Workload(1e9, 1e6, 3e6), network(), fleet, Prices(1.0, 3.0), seed=None).method(DELTAWIRE)
    assert found.step_seconds == 60
    assert found.gpu_dollars == pytest.approx(40 * 3 / 60)
    assert found.egress_dollars == pytest.approx(2 * 1e6 / 1e9)
    assert found.tokens_per_dollar == pytest.approx(16 * 100 * 60 / (2 + 0.002))
    assert found.idle_share == 0


def test_the_report_is_plain_json() -> None:
    document = json.loads(json.dumps(plan(Workload.of_model(8e9), network(), seed=None).as_json(), allow_nan=False))
    assert document["version"] == 1
    assert document.keys() == {"version", "workload", "network", "fleet", "prices", "codec", "methods"}
    assert [method["name"] for method in document["methods"]] == [FULL, "XOR + zstd-1", DELTAWIRE, NO_RELAYS]
    assert document["methods"][0].keys() == {
        "name",
        "bytes_per_step",
        "total_bytes",
        "saved",
        "behind_seconds",
        "step_seconds",
        "formula_seconds",
        "idle_share",
        "of_free",
        "dollars_per_step",
        "tokens_per_dollar",
        "regions",
        "reachable",
        "limits",
    }


def test_anchors_follow_the_rule_of_publishers() -> None:
    assert Workload(1e12, 1e8, 1e8).anchor_versions == 2000
    assert Workload(1e9, 1e7, 1e7).anchor_versions == 101
    assert Workload(1e9, 9e8, 9e8).anchor_versions == 16


def test_gpus_hold_a_model() -> None:
    assert [gpus_to_hold(size) for size in (1, 16e9, 65e9, 1e12, 1e18)] == [1, 1, 2, 16, 1 << 19]


@pytest.mark.parametrize(
    ("text", "parse", "value"),
    [
        ("8B", count, 8e9),
        ("1T", count, 1e12),
        ("70e9", count, 70e9),
        ("20.3GiB", lambda text: size(text, "x"), 20.3 * 2**30),
        ("202MB", lambda text: size(text, "x"), 202e6),
        ("1Gbit", lambda text: rate(text, "x"), 1e9),
        ("10GB/s", lambda text: rate(text, "x"), 80e9),
        ("80ms", lambda text: duration(text, "x"), 0.08),
        ("2min", lambda text: duration(text, "x"), 120),
        ("0.11%", lambda text: share(text, "x"), 0.0011),
        (".5", lambda text: share(text, "x"), 0.5),
    ],
)
def test_units(text, parse, value) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "B", "-8B", "nan", "inf", "1e99", "8 B B", "8x", "0", "1e400", "8B" * 100, "٨B"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(UnusablePlan):
        count(text)


@pytest.mark.parametrize(
    "text", ["", "/", "0/0", "1Gbit", "1Gbit/", "/80ms", "0Gbit/80ms", "1Gbit/-1ms", "1Gbit/80", "1Gbit/80ms/2", "1GHz/1s"]
)
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(UnusablePlan):
        parse_link(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, 1e30])
def test_impossible_numbers_are_refused_by_every_part(bad: float) -> None:
    for make in (
        lambda: Link(bad, 0.1),
        lambda: Workload(bad, 1, 1),
        lambda: Workload.of_model(bad),
        lambda: Workload.of_model(8e9, bits=bad),
        lambda: FleetShape(generate_seconds=bad),
        lambda: FleetShape(tokens_per_second=bad),
        lambda: Region("r1", LINK, bad),
        lambda: transfer_seconds(bad, 1, LINK),
    ):
        with pytest.raises(UnusablePlan):
            make()
    with pytest.raises(UnusablePlan):
        Workload.of_model(8e9, "fp7")
    with pytest.raises(UnusablePlan):
        Network([])
    with pytest.raises(UnusablePlan):
        Network([Region("a", LINK, 1), Region("a", LINK, 1)])
