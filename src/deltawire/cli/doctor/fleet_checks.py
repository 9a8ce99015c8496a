"""Checks of a fleet: members that are silent, lag or have left with an error, and the clocks of members and of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from ...chain.log import ChainLog
from ...errors import ObjectMissing
from ...fleet.overview import FleetReader, SeenFleet, SeenMember
from ...store import keys
from ..output import figures
from ..output.fleet_table import is_silent
from .chain_checks import ChainState
from .findings import Examination, count_of, names_of

HIGH_LAG = 8
"""A reader that is this many versions behind is reported."""
_SKEW = 5.0
"""A clock that is this many seconds ahead of the store's is reported."""
_SKEW_BEHIND = 60.0
"""A clock that is this many seconds behind is reported. Less may be the time that a write took."""
_LONG_SILENCE = 600.0
"""A trainer whose members work publishes within this many seconds, or within 20 times the usual interval."""
_NTP = "Let the machines set their clocks by NTP."


def check_fleet(found: Examination, log: ChainLog, chain: ChainState, *, now: float) -> SeenFleet | None:
    """Check the members of a run, and return them. Returns None if they could not be read.

    Parameters
    ----------
    found
        Gets the findings.
    log
        The chain.
    chain
        What is known of the chain.
    now
        The time of the store, in seconds since 1970.
    """
    _check_publisher_clock(found, log, chain)
    with found.checking("members"), FleetReader(log.store, log.run.id, trusted_keys=log.trusted_keys) as reader:
        fleet = reader.fleet(0)
        if fleet.members:
            _judge_members(found, fleet, now)
            _judge_trainer(found, fleet, chain, now)
        return fleet
    return None


def _judge_members(found: Examination, fleet: SeenFleet, now: float) -> None:
    here = [one for one in fleet.members if one.beat.state != "left"]
    silent = [one for one in here if is_silent(one, fleet, now)]
    failed = [one for one in fleet.members if one.beat.reason is not None]
    late = [one for one in here if one.beat.lag >= HIGH_LAG and one not in silent]
    for one in failed[:3]:
        what = f"{one.beat.member} left because of an error: {figures.printable(one.beat.reason or '')}"
        found.add("members", "warning", what, "Correct the cause, and start the member again.")
    if silent:
        longest = figures.duration(max(now - one.modified for one in silent))
        found.add(
            "members",
            "warning",
            f"{count_of(len(silent), 'member')} silent for up to {longest}: {names_of(_names(silent))}",
            "Check their machines and logs. Other members do their tasks; `deltawire fleet` restarts members that die.",
        )
    if late:
        most = max(one.beat.lag for one in late)
        found.add(
            "members",
            "warning",
            f"{count_of(len(late), 'member')} up to {most:,} versions behind: {names_of(_names(late))}",
            "Compare their links in `deltawire members URL`. A relay near them, or fewer versions, lets them keep up.",
        )
    skewed = [one for one in here if _is_skewed(one)]
    if skewed:
        what = f"the clocks of {names_of(_names(skewed))} are not those of the store"
        found.add("clock", "warning", f"{what}, so times that they report are wrong", _NTP)
    if not (silent or late or failed):
        found.add("members", "ok", f"{count_of(len(here), 'member')}: none is silent, and none lags")


def _judge_trainer(found: Examination, fleet: SeenFleet, chain: ChainState, now: float) -> None:
    """Report a trainer that publishes nothing although members wait for it."""
    if fleet.board is None or fleet.board.stop:
        return
    age = now - chain.newest.time / 1000
    usual = chain.interval
    if any(not is_silent(one, fleet, now) for one in fleet.members) and age > max(_LONG_SILENCE, 20 * (usual or 0.0)):
        often = "" if usual is None else f", and versions came every {figures.duration(usual)}"
        found.add("trainer", "warning", f"nothing was published for {figures.duration(age)}{often}", "Check that the trainer is running.")


def _check_publisher_clock(found: Examination, log: ChainLog, chain: ChainState) -> None:
    """Report a publisher whose clock is ahead. One that is behind cannot be told from a chain that was copied later."""
    with found.checking("clock"):
        try:
            written = log.store.head(keys.commit_key(chain.newest.seq)).modified.timestamp()
        except ObjectMissing:  # the checks of the chain have read it, so it has just gone
            return
        ahead = chain.newest.time / 1000 - written
        if ahead > _SKEW:
            what = f"the publisher's clock was {figures.duration(ahead)} ahead of the store's at its newest version"
            found.add("clock", "warning", f"{what}, so the ages of versions are wrong", _NTP)


def _is_skewed(one: SeenMember) -> bool:
    ahead = one.beat.time / 1000 - one.modified
    return one.beat.time > 0 and (ahead > _SKEW or ahead < -_SKEW_BEHIND)


def _names(members: Sequence[SeenMember]) -> list[str]:
    return sorted(one.beat.member for one in members)
