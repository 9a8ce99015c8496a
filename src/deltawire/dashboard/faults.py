"""Lists what is wrong with a run, the worst first. Pure functions over the sections of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_FAULTS = 200
_LEVELS = ("bad", "warning", "note")
_HIGH_LAG = 8
"""A member that is this many versions behind the newest one is listed."""


def find_faults(
    chain: Mapping[str, Any],
    channels: Sequence[Mapping[str, Any]],
    traffic: Mapping[str, Any],
    gates: Sequence[Mapping[str, Any]],
    members: Sequence[Mapping[str, Any]],
    readers: Mapping[str, Any],
    rejections: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the faults of a run, each with a level, its time if it has one, and a text.

    Parameters
    ----------
    chain
        The section of the chain.
    channels
        The section of the channels.
    traffic
        The section of live traffic.
    gates
        The section of the gates.
    members
        The members that are shown.
    readers
        The section of pins, reports and relays.
    rejections
        Results that the trainer left out, each with a step, a number of results and a reason.
    """
    found = [*_chain_faults(chain), *_channel_faults(channels), *_live_faults(traffic, gates)]
    found += [*_reader_faults(readers), *_member_faults(members), *_rejected(rejections)]
    found.sort(key=lambda fault: (_LEVELS.index(fault["level"]), -(fault["time"] or 0.0)))
    return found[:MOST_FAULTS]


def _fault(level: str, text: str, time: float | None = None) -> dict[str, Any]:
    return {"level": level, "time": time, "text": text}


def _chain_faults(chain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if chain["set_back"]:
        yield _fault("bad", "The store was set back: the newest commit that was seen is no longer there.")
    for entry in chain["entries"]:
        if entry["problem"] is not None:
            name = f"Version {entry['version']}" if "version" in entry else f"Commit {entry['seq']}"
            yield _fault("bad", f"{name} cannot be used: {entry['problem']}", entry.get("time"))
        elif "void" in entry["flags"]:
            yield _fault("note", f"Commit {entry['seq']} is void: a newer publisher had taken over.", entry["time"])
        elif entry["kind"] == "rewind":
            yield _fault("warning", f"Publisher {entry['epoch']} went back to commit {entry['base']}.", entry["time"])
        elif entry["kind"] == "fence" and entry["seq"]:
            yield _fault("note", f"Publisher {entry['epoch']} took over.", entry["time"])


def _channel_faults(channels: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for channel in channels:
        if channel["problem"] is not None:
            yield _fault("bad", f"The channel {channel['name']} cannot be followed: {channel['problem']}")
        newest = channel["moves"][0] if channel["moves"] else None
        if newest is not None and newest["kind"] == "rollback":
            where = f"commit {newest['seq']}" if newest["version"] is None else f"version {newest['version']}"
            why = f": {newest['why']}" if newest["why"] else "."
            yield _fault("warning", f"The channel {channel['name']} was rolled back to {where}{why}", newest["time"])


def _live_faults(traffic: Mapping[str, Any], gates: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    if traffic["damaged"]:
        files = f"{traffic['damaged']} file{'s' if traffic['damaged'] != 1 else ''} of live traffic"
        yield _fault("warning", f"{files} {'was' if traffic['damaged'] == 1 else 'were'} not counted; the last one: {traffic['problem']}")
    for gate in gates:
        if gate["problem"] is not None:
            yield _fault(
                "bad", f"The evidence about move {gate['move']} of the channel {gate['channel']} cannot be used: {gate['problem']}"
            )


def _reader_faults(readers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for report in readers["reports"]:
        why = f": {report['error']}" if report["error"] else "."
        if report["state"] == "quarantined":
            yield _fault("bad", f"The engine {report['reader']} serves nothing, because an update failed half-way{why}", report["time"])
        elif report["state"] == "lost":
            yield _fault("bad", f"The engine {report['reader']} serves nothing, because its server does not answer{why}", report["time"])
        elif report["state"] == "refused":
            yield _fault("warning", f"The engine {report['reader']} could not take a newer version{why}", report["time"])


def _member_faults(members: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for member in members:
        if member["reason"]:
            yield _fault("bad", f"Member {member['name']} left: {member['reason']}", member["heard"])
        elif member["state"] == "silent":
            yield _fault("warning", f"Member {member['name']} has been silent for longer than a lease lasts.", member["heard"])
        elif member["lag"] >= _HIGH_LAG and member["state"] != "left":
            yield _fault("warning", f"Member {member['name']} is {member['lag']} versions behind.", member["heard"])
        if member["failures"]:
            yield _fault("note", f"Member {member['name']} counted {member['failures']} failed transfers.", member["heard"])


def _rejected(rejections: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in rejections:
        count = f"{one['results']} result{'s' if one['results'] != 1 else ''}"
        yield _fault("warning", f"Step {one['step']}: the trainer left out {count}: {one['why']}", one["time"])
