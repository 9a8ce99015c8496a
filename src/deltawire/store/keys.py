"""The keys of a chain's objects. Every key is built and parsed here (docs/protocol.md §1)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import CorruptRecord
from ..format.records.record_parts import is_data_key, is_reader_name

RUN = "run.json"
HEAD = "HEAD"
COMING = "coming.json"
"""The announcement of files of the next version."""
COPY = "copy.json"
"""Says that relays write here, and no publisher."""
EPOCHS, COMMITS, ANCHORS, SKIPS, DATA, MARKS, PINS, PROBES = "epoch/", "commit/", "anchor/", "skip/", "data/", "gc/", "pin/", "probe/"
REPORTS = "report/"
RELAYS = "relay/"
"""Prefixes for listings."""
CANARIES = "canary/"
CHANNELS = "channel/"

_SHORT, _LONG = r"([0-9]{10})", r"([0-9]{20})"
_EPOCH = re.compile(rf"epoch/{_SHORT}\.json")
_COMMIT = re.compile(rf"commit/{_LONG}\.json")
_ANCHOR = re.compile(rf"anchor/{_LONG}\.json")
_SKIP = re.compile(rf"skip/{_LONG}-{_LONG}\.json")
_MARK = re.compile(rf"gc/{_SHORT}\.json")
_DATA = re.compile(rf"data/{_SHORT}/{_LONG}/([0-9a-f]{{64}})\.(safetensors|file)")
_PIN = re.compile(r"pin/(.+)\.json")
_REPORT = re.compile(r"report/(.+)\.json")
_RELAY = re.compile(r"relay/(.+)\.json")
_CHANNEL = re.compile(rf"channel/([^/]+)/{_SHORT}\.json")


class DataKey(NamedTuple):
    """The parts of a data object's key."""

    epoch: int
    seq: int
    blake3: str
    suffix: str


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{_digits(epoch, 10)}.json"


def commit_key(seq: int) -> str:
    return f"{COMMITS}{_digits(seq, 20)}.json"


def anchor_key(seq: int) -> str:
    return f"{ANCHORS}{_digits(seq, 20)}.json"


def skip_key(seq: int, base: int) -> str:
    return f"{SKIPS}{_digits(seq, 20)}-{_digits(base, 20)}.json"


def canary_key(seq: int) -> str:
    return f"{CANARIES}{_digits(seq, 20)}.json"


def mark_key(mark: int) -> str:
    return f"{MARKS}{_digits(mark, 10)}.json"


def pin_key(reader: str) -> str:
    """Return the key of a reader's pin. Raises ValueError for a name that readers cannot have."""
    return f"{PINS}{_reader(reader)}.json"


def report_key(reader: str) -> str:
    """Return the key of a reader's report. Raises ValueError for a name that readers cannot have."""
    return f"{REPORTS}{_reader(reader)}.json"


def relay_key(name: str) -> str:
    """Return the key of a published relay. Its name has the form of readers' names; raises ValueError for any other."""
    return f"{RELAYS}{_reader(name)}.json"


def channel_key(channel: str, move: int) -> str:
    """Return the key of a move of a channel. Its name has the form of readers' names; raises ValueError for any other."""
    return f"{CHANNELS}{_reader(channel, 'channel')}/{_digits(move, 10)}.json"


def probe_key(nonce: str) -> str:
    return f"{PROBES}{nonce}"


def data_key(epoch: int, seq: int, blake3: str, suffix: str) -> str:
    """Return the key under which a writer of `epoch` stores an object for commit `seq`. `suffix` is "safetensors" or "file"."""
    return check_data_key(f"{DATA}{_digits(epoch, 10)}/{_digits(seq, 20)}/{blake3}.{suffix}")


def parse_epoch_key(key: str) -> int | None:
    """Return the number in an epoch's key, or None for any other key. The other `parse_` functions work alike."""
    return _number(_EPOCH, key)


def parse_commit_key(key: str) -> int | None:
    return _number(_COMMIT, key)


def parse_anchor_key(key: str) -> int | None:
    return _number(_ANCHOR, key)


def parse_mark_key(key: str) -> int | None:
    return _number(_MARK, key)


def parse_skip_key(key: str) -> tuple[int, int] | None:
    """Return (seq, base). Also returns None if the base is not below seq: no writer makes such a key, and readers cannot use it."""
    found = _SKIP.fullmatch(key)
    return (int(found[1]), int(found[2])) if found and found[2] < found[1] else None


def parse_pin_key(key: str) -> str | None:
    found = _PIN.fullmatch(key)
    return found[1] if found and is_reader_name(found[1]) else None


def parse_report_key(key: str) -> str | None:
    found = _REPORT.fullmatch(key)
    return found[1] if found and is_reader_name(found[1]) else None


def parse_relay_key(key: str) -> str | None:
    found = _RELAY.fullmatch(key)
    return found[1] if found and is_reader_name(found[1]) else None


def parse_channel_key(key: str) -> tuple[str, int] | None:
    """Return the name of the channel and the number of the move."""
    found = _CHANNEL.fullmatch(key)
    return (found[1], int(found[2])) if found and is_reader_name(found[1]) else None


def parse_data_key(key: str) -> DataKey | None:
    found = _DATA.fullmatch(key)
    return DataKey(int(found[1]), int(found[2]), found[3], found[4]) if found else None


def check_data_key(key: str) -> str:
    """Return the key of a data object, or raise `CorruptRecord`. Objects that a record names are read and deleted only after this check."""
    if not is_data_key(key):
        raise CorruptRecord(f"{key!r} is not the key of a data object.")
    return key


def find_data_key(text: str) -> str | None:
    """Return the first key of a data object that a text, such as an error message, mentions. None if there is none."""
    found = _DATA.search(text)
    return found[0] if found else None


def _reader(name: str, what: str = "reader") -> str:
    if not is_reader_name(name):
        raise ValueError(f"{name!r} cannot name a {what}: letters, digits, '.', '_', '-', at most 64, no leading dot")
    return name


def _number(pattern: re.Pattern[str], key: str) -> int | None:
    found = pattern.fullmatch(key)
    return int(found[1]) if found else None


def _digits(number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise ValueError(f"{number} cannot stand in a key")
    return f"{number:0{width}}"
