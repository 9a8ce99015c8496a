"""Simulate fleets whose members live in regions, and break links, relays, readers and the scheduler on purpose.

Run more seeds with:

    python -m deltawire.testing.fleet_simulation --seeds 10000 --regions
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
from broken_rules import assert_found

from deltawire.fleet.rules.roster import Roster
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.testing.fleet_simulation import Outcome, scenario, simulate
from deltawire.testing.fleet_simulation import __main__ as command
from deltawire.testing.fleet_simulation.many_seeds import Fleet
from deltawire.testing.fleet_simulation.region_model import Region, RelayModel


def test_regions_keep_all_rules_despite_faults_of_links_and_relays() -> None:
    outcomes = [simulate(seed, regions=True) for seed in range(60)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation is not None] == []
    assert sum(one.copied for one in outcomes) > 300
    assert sum(one.direct for one in outcomes) > 30  # otherwise the simulation has stopped failing relays


@pytest.mark.parametrize("seed", [309, 445, 3662, 6325, 9941])
def test_seeds_that_once_failed_hold(seed: int) -> None:
    """docs/simulation.md says what each of them showed."""
    assert simulate(seed, regions=True).violation is None


def wait_for_silent_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tasks to members of an isolated region, and offer them to no other member for half an hour."""
    honest = Roster.is_lease_alive
    monkeypatch.setattr(Roster, "is_lease_alive", lambda self, lease, since, now, seconds: honest(self, lease, since, now, 1800))
    monkeypatch.setattr(Scheduler, "is_straggler", lambda *arguments, **options: False)
    monkeypatch.setattr(Scheduler, "is_worth_a_copy", lambda *arguments: False)
    monkeypatch.setattr(Scheduler, "is_long", lambda *arguments: False)


def wait_for_slow_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the results of members that are alive, however long their links take."""
    monkeypatch.setattr(Scheduler, "is_straggler", lambda *arguments, **options: False)
    monkeypatch.setattr(Scheduler, "is_worth_a_copy", lambda *arguments: False)
    monkeypatch.setattr(Scheduler, "is_long", lambda *arguments: False)


def show_commits_before_data(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RelayModel.copy_steps

    def copy(self: RelayModel, seq: int) -> Generator[Any, Any, None]:
        self.shown = seq
        yield from honest(self, seq)

    monkeypatch.setattr(RelayModel, "copy_steps", copy)


def begin_a_copy_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was copied before the relay died."""
    honest = RelayModel.copy_steps

    def copy(self: RelayModel, seq: int) -> Generator[Any, Any, None]:
        self.held[seq] = 0
        yield from honest(self, seq)

    monkeypatch.setattr(RelayModel, "copy_steps", copy)


def pass_the_relay_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "uses_relay", lambda self: False)


def trust_any_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "uses_relay", lambda self: self.relay is not None and self.relay.is_up)


@pytest.mark.parametrize(
    ("break_it", "violation", "seed"),
    [
        pytest.param(wait_for_silent_members, "s after the one before", 36, id="waiting for an isolated region"),
        pytest.param(wait_for_slow_members, "s after the one before", 77, id="waiting for a slow region"),
        pytest.param(show_commits_before_data, "does not have the data", 0, id="commits before data"),
        pytest.param(begin_a_copy_anew, "crossed the link", 22, id="a copy begun anew"),
        pytest.param(pass_the_relay_by, "although (the|its) relay work", 0, id="readers past the relay"),
        pytest.param(trust_any_relay, "does not catch up", 13, id="an old relay trusted for ever"),
    ],
)
def test_the_simulation_finds_every_broken_rule(
    break_it: Callable[[pytest.MonkeyPatch], None], violation: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "_PATIENCE", 1800.0)
    break_it(monkeypatch)
    assert_found(violation, seed, 300, regions=True)


def test_a_failing_seed_with_regions_is_printed_with_its_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seeds: range, fleet: Fleet, jobs: int) -> list[Outcome]:
        return [replace(simulate(seed, regions=fleet.regions), violation="it broke") for seed in seeds]

    monkeypatch.setattr(command, "simulate_many", fail)
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", "1", "--first", "5", "--regions"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "versions crossed links once for a relay" in printed
    assert "python -m deltawire.testing.fleet_simulation --first 5 --seeds 1 --trace --regions" in printed
