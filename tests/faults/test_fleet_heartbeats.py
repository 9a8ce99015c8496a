"""Heartbeats that lie about everything hold up no step, and get nobody else's work refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from small_fleet import LEASE, Fleet, assert_one_line_of_training

from deltawire.format.records.fleet_parts import AttemptId
from deltawire.format.records.member_records import MAX_FAILURES, MAX_GOODPUT, MAX_MILLISECONDS, STATES, Heartbeat, LinkReport
from deltawire.store import fleet_keys

LAST = 3
NUMBERS = (0, 1, 2, 5, 2**31, 2**53 - 1)


def lie(random: Random, beat: Heartbeat, leases: list[AttemptId]) -> Heartbeat:
    """Return a valid heartbeat whose fields say anything."""
    version = random.choice(NUMBERS) if random.random() < 0.9 else None
    link = LinkReport(random.choice([None, 0, MAX_GOODPUT]), random.choice([None, 0, MAX_MILLISECONDS]), random.choice([0, MAX_FAILURES]))
    return replace(
        beat,
        session=f"{random.getrandbits(128):032x}",
        state=random.choice(STATES),
        seq=version,
        step=None if version is None else random.choice(NUMBERS),
        lag=random.choice(NUMBERS),
        tokens=random.choice(NUMBERS),
        busy_ms=random.choice(NUMBERS),
        working=tuple(sorted(set(random.choices(leases, k=4)))) if leases else (),
        time=random.choice(NUMBERS),
        reason=random.choice([None, "it says so"]),
        link=random.choice([None, link]),
        behind_ms=random.choice([None, 0, 1, MAX_MILLISECONDS]),
        engine=random.choice([None, "vLLM 0.32"]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_heartbeats_that_lie_about_everything_hold_up_no_step(seed: int) -> None:
    """Three members only write heartbeats: they name versions that do not exist, leases of others, and any link and time."""
    fleet, random = Fleet(), Random(seed)
    honest = fleet.join("honest")[0]
    moves = []

    def meanwhile() -> None:
        moves.append(1)
        assert len(moves) < 2000
        keys = [fleet_keys.parse_lease_key(info.key) for info in fleet.inner.list(fleet_keys.LEASES)]
        leases = [AttemptId(*key) for key in keys if key is not None]
        for number in range(3):
            beat = replace(honest.state.heartbeat(), member=f"liar-{number}", working=())
            fleet.store.put(fleet_keys.member_key(beat.member), lie(random, beat, leases).to_bytes())
        if len(moves) % 20 == 0:
            fleet.time += LEASE  # nothing more happens until an offer ends

    fleet.meanwhile = meanwhile
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)
    assert not fleet.reasons()
