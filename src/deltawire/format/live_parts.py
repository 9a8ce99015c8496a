"""The parts that records of live traffic share: ids, names of gateways, tags (docs/protocol.md §13)."""

from __future__ import annotations

import os
import re
import uuid

from .records.canonical import Fields

INFERENCE_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""The id of an interaction: a UUID of version 7, in lower case."""
ANY_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""The id of an episode or of feedback: a UUID of any version, in lower case."""
GATEWAY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
GATEWAY_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}\.[0-9a-f]{16}")
"""One run of a gateway: its name, a dot, and 16 hexadecimal digits that were drawn at random when it started."""
MAX_NUMBER = 10**20 - 1
MAX_TAGS, MAX_TAG_NAME, MAX_TAG_VALUE = 16, 64, 256
MAX_MILLISECONDS = 1 << 48
"""One more than the latest time that a UUID of version 7 can hold, in milliseconds since 1970."""


def new_inference_id(milliseconds: int) -> str:
    """Return a new id for an interaction: a UUID of version 7 with 74 random bits.

    Parameters
    ----------
    milliseconds
        The gateway's clock, in milliseconds since 1970. Nothing depends on it, except the order of ids.
    """
    if not 0 <= milliseconds < MAX_MILLISECONDS:
        raise ValueError(f"{milliseconds} ms cannot be a part of an id")
    random = int.from_bytes(os.urandom(10), "big")
    number = milliseconds << 80 | 7 << 76 | (random >> 62 & 0xFFF) << 64 | 2 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=number))


def id_time(inference_id: str) -> int:
    """Return the milliseconds since 1970 that the id of an interaction holds: when the gateway got the request, by its clock.

    Parameters
    ----------
    inference_id
        The id.
    """
    return uuid.UUID(inference_id).int >> 80


def new_session(name: str) -> str:
    """Return the name of a new session of a gateway. Raises ValueError for a name that gateways cannot have.

    Parameters
    ----------
    name
        The gateway's name: 1 to 40 letters, digits, '_' and '-', the first a letter or a digit.
    """
    if GATEWAY_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} cannot name a gateway: 1 to 40 letters, digits, '_' and '-', the first a letter or a digit")
    return f"{name}.{os.urandom(8).hex()}"


def is_session(text: str) -> bool:
    """Tell whether a text names a session of a gateway."""
    return GATEWAY_SESSION.fullmatch(text) is not None


def read_bounded(fields: Fields, name: str, most: int, least: int = 1) -> str:
    """Return a printable text of `least` to `most` characters."""
    text = fields.text(name)
    if not least <= len(text) <= most or not text.isprintable():
        fields.refuse(f"{name} must have {least} to {most} characters, all printable")
    return text


def read_tags(fields: Fields) -> dict[str, str]:
    """Return the tags: a few short texts by short names."""
    tags = fields.strings("tags")
    fits = len(tags) <= MAX_TAGS and all(1 <= len(name) <= MAX_TAG_NAME and len(value) <= MAX_TAG_VALUE for name, value in tags.items())
    if not fits or not all((name + value).isprintable() for name, value in tags.items()):
        fields.refuse(f"tags are at most {MAX_TAGS} printable texts, of {MAX_TAG_NAME} and {MAX_TAG_VALUE} characters at most")
    return tags


def read_flag(fields: Fields, name: str) -> bool:
    """Return a field that is 0 or 1."""
    flag = fields.integer(name)
    if flag > 1:
        fields.refuse(f"{name} is 0 or 1")
    return bool(flag)


def read_time(fields: Fields, name: str = "time") -> int:
    """Return a time in milliseconds since 1970, by the clock of the process that wrote it."""
    time = fields.integer(name)
    if time >= MAX_MILLISECONDS:
        fields.refuse(f"{name} is too far in the future")
    return time
