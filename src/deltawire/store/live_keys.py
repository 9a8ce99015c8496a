"""The keys of live traffic. Every key is built and parsed here (docs/protocol.md §13)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..format.live_parts import MAX_NUMBER, is_session
from ..format.records.record_parts import is_reader_name

LIVE = "live/"
INTERACTIONS, FEEDBACK, METRICS = "live/interactions/", "live/feedback/", "live/metrics/"
USED, USED_LISTS = "live/used/", "live/used-lists/"
GATES = "live/gate/"
"""Prefixes for listings."""

CLOCK = "live/clock.json"
"""A hint that trainers write again and again, to learn the store's time."""

_AFTER_ALL = "z"
"""A suffix that sorts after every key of a file."""

_HASH = r"([0-9a-f]{64})"
_INTERACTIONS = re.compile(rf"live/interactions/([^/]+)/([0-9]{{20}})-{_HASH}\.bin")
_FEEDBACK = re.compile(rf"live/feedback/([^/]+)/([0-9]{{20}})-{_HASH}\.json")
_METRICS = re.compile(r"live/metrics/([0-9]{10})\.json")
_USED = re.compile(r"live/used/([0-9]{10})\.json")
_USED_LIST = re.compile(rf"live/used-lists/([0-9]{{10}})/{_HASH}\.json")
_GATE = re.compile(r"live/gate/([^/]+)/([0-9]{10})/([0-9]{10})\.json")


class LiveKey(NamedTuple):
    """The parts of the key of a file of interactions or of feedback."""

    gateway: str
    """The session of the gateway."""
    number: int
    """The number of the file among those of the session."""
    blake3: str
    """The hash of its bytes."""


def interactions_key(key: LiveKey) -> str:
    """Return the key of a file of interactions."""
    return f"{session_folder(INTERACTIONS, key.gateway)}{_digits(key.number, 20)}-{key.blake3}.bin"


def feedback_key(key: LiveKey) -> str:
    """Return the key of a file of feedback."""
    return f"{session_folder(FEEDBACK, key.gateway)}{_digits(key.number, 20)}-{key.blake3}.json"


def session_folder(prefix: str, gateway: str) -> str:
    """Return the prefix of a session's files below `INTERACTIONS` or `FEEDBACK`. Raises ValueError for a name that sessions cannot have."""
    return f"{prefix}{_session(gateway)}/"


def start_of_file(prefix: str, gateway: str, number: int) -> str:
    """Return a text that sorts before the key of a session's file with this number, and after the keys of the files before it.

    Listings begin or end there. The text sorts after every file of the session if no key can have this number.
    """
    return session_folder(prefix, gateway) + (_digits(number, 20) if number <= MAX_NUMBER else _AFTER_ALL)


def metrics_key(number: int) -> str:
    """Return the key of a declaration of metrics."""
    return f"{METRICS}{_digits(number, 10)}.json"


def used_key(round_number: int) -> str:
    """Return the key of the record that says which interactions were used up to a round."""
    return f"{USED}{_digits(round_number, 10)}.json"


def used_list_key(round_number: int, blake3: str) -> str:
    """Return the key of the list that a `used` record refers to."""
    return f"{USED_LISTS}{_digits(round_number, 10)}/{blake3}.json"


def gates_of(channel: str) -> str:
    """Return the prefix of all records of gates about a channel. Raises ValueError for a name that channels cannot have."""
    if not is_reader_name(channel):
        raise ValueError(f"{channel!r} cannot name a channel")
    return f"{GATES}{channel}/"


def gate_folder(channel: str, move: int) -> str:
    """Return the prefix of a gate's records about a move of a channel."""
    return f"{gates_of(channel)}{_digits(move, 10)}/"


def gate_key(channel: str, move: int, number: int) -> str:
    """Return the key of a gate's record about a move of a channel."""
    return f"{gate_folder(channel, move)}{_digits(number, 10)}.json"


def parse_interactions_key(key: str) -> LiveKey | None:
    """Return the parts of the key of a file of interactions, or None for any other key. The other `parse_` functions work alike."""
    return _live_key(_INTERACTIONS, key)


def parse_feedback_key(key: str) -> LiveKey | None:
    return _live_key(_FEEDBACK, key)


def parse_metrics_key(key: str) -> int | None:
    found = _METRICS.fullmatch(key)
    return int(found[1]) if found else None


def parse_used_key(key: str) -> int | None:
    found = _USED.fullmatch(key)
    return int(found[1]) if found else None


def parse_used_list_key(key: str) -> tuple[int, str] | None:
    """Return (round, blake3)."""
    found = _USED_LIST.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def parse_gate_key(key: str) -> tuple[str, int, int] | None:
    """Return (channel, move, number)."""
    found = _GATE.fullmatch(key)
    return (found[1], int(found[2]), int(found[3])) if found and is_reader_name(found[1]) else None


def _live_key(pattern: re.Pattern[str], key: str) -> LiveKey | None:
    found = pattern.fullmatch(key)
    return LiveKey(found[1], int(found[2]), found[3]) if found and is_session(found[1]) else None


def _session(gateway: str) -> str:
    if not is_session(gateway):
        raise ValueError(f"{gateway!r} is not the session of a gateway: a name, a dot, and 16 hexadecimal digits")
    return gateway


def _digits(number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise ValueError(f"{number} cannot stand in a key")
    return f"{number:0{width}}"
