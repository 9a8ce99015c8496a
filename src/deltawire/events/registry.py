"""The registry: every kind of event that the library emits."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .kinds import engines, gates, gateways, members, publishers, readers, relays, store, trainers
from .kinds.kind import EventKind

GROUPS: dict[str, tuple[EventKind, ...]] = {
    "Publishers": publishers.KINDS,
    "Warnings": publishers.WARNINGS,
    "Readers": readers.KINDS,
    "Relays": relays.KINDS,
    "Readers with several stores": relays.READER_KINDS,
    "Engines": engines.KINDS,
    "Members": members.KINDS,
    "Supervised members": members.SUPERVISED,
    "Trainers": trainers.KINDS,
    "Gates": gates.KINDS,
    "Gateways": gateways.KINDS,
    "Seen in the store": store.KINDS,
}
"""The kinds by the part of the library that emits them, as the documentation has them."""

REGISTRY: dict[str, EventKind] = {kind.name: kind for kinds in GROUPS.values() for kind in kinds}
"""Every kind by its name."""

CHECKS = os.environ.get("DELTAWIRE_CHECK_EVENTS") == "1"
"""Whether every event that is emitted is checked. It is for tests: an event that is not in the registry then raises an error."""


class UnregisteredEvent(AssertionError):
    """An event was emitted that the registry does not have, or not with these fields. This is a fault in deltawire."""


def check(name: str, fields: Mapping[str, object]) -> None:
    """Raise `UnregisteredEvent` unless the registry has this event with these fields.

    Parameters
    ----------
    name
        The name of the event.
    fields
        Its fields.
    """
    kind = REGISTRY.get(name)
    fault = "there is no such event" if kind is None else kind.fault(fields)
    if fault is not None:
        raise UnregisteredEvent(f"event {name!r}: {fault}")
