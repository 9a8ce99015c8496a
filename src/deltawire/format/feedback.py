"""A file of feedback: what became of answers, as one gateway learnt it (docs/protocol.md §13).

    live/feedback/{gateway session}/{number:020}-{blake3}.json

The file is a canonical record that lists feedback. Each one gives a metric of an interaction or of an episode a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import CorruptFeedback, CorruptRecord, LimitExceeded
from .live_parts import ANY_ID, GATEWAY_SESSION, INFERENCE_ID, read_bounded, read_tags, read_time
from .records.canonical import Fields, dump
from .records.fleet_parts import read_number
from .records.record_parts import NONCE, READER

MAX_FEEDBACK_BYTES = 1 << 20
"""The size of the largest file of feedback."""
MAX_FEEDBACK = 4096
"""The most feedback in one file."""
MAX_METRIC_NAME = 100
MAX_TEXT_VALUE = 4096
MAX_FLOAT = 1e9
MAX_REVISION = 10**9

Value: TypeAlias = bool | float | str
"""The value of a metric. A text is a comment, which is stored and never trained on."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """One value for one metric of an interaction or an episode.

    Parameters
    ----------
    id
        The id of this feedback, a UUID. Feedback with an id that its caller used before counts once.
    metric
        The name of the metric.
    value
        True or False, a number, or a text.
    inference
        The id of the interaction; None if the feedback is about an episode.
    episode
        The id of the episode; None if the feedback is about an interaction.
    revision
        The highest revision of a metric's feedback counts.
    time
        The gateway's clock in milliseconds. It only decides between feedback of the same revision.
    tags
        Short texts by short names.
    caller
        The feedback counts only for interactions of this caller. None if it counts for those of all callers.
    """

    id: str
    metric: str
    value: Value
    inference: str | None = None
    episode: str | None = None
    revision: int = 0
    time: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)
    caller: str | None = None

    @property
    def target(self) -> tuple[str, str]:
        """("inference" or "episode", id)."""
        return ("inference", self.inference) if self.inference is not None else ("episode", str(self.episode))

    def plain(self) -> dict[str, Any]:
        """Return the feedback as JSON values."""
        value = self.value if isinstance(self.value, (bool, str)) else {"float": repr(float(self.value))}
        kind, target = self.target
        own = {"feedback": self.id, kind: target, "metric": self.metric, "value": value, "tags": dict(self.tags)}
        return own | {"revision": self.revision, "time": self.time, "caller": self.caller}

    @classmethod
    def of(cls, fields: Fields) -> Feedback:
        """Return the feedback that an object in a record describes.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        about = [name for name in ("inference", "episode") if fields.has(name)]
        if len(about) != 1:
            fields.refuse("feedback is about an inference or an episode, and not both")
        found = cls(
            id=fields.matching("feedback", ANY_ID),
            metric=read_bounded(fields, "metric", MAX_METRIC_NAME),
            value=_read_value(fields),
            inference=fields.matching("inference", INFERENCE_ID) if about == ["inference"] else None,
            episode=fields.matching("episode", ANY_ID) if about == ["episode"] else None,
            revision=fields.integer("revision"),
            time=read_time(fields),
            tags=read_tags(fields),
            caller=fields.nullable("caller", lambda name: fields.matching(name, READER)),
        )
        fields.done()
        if found.revision > MAX_REVISION:
            fields.refuse(f"its revision is above {MAX_REVISION:,}")
        return found


@dataclass(frozen=True, slots=True)
class FeedbackFile:
    """Some feedback that one session of a gateway received.

    Parameters
    ----------
    run
        The id of the run.
    gateway
        The session of the gateway: its name, a dot, and 16 hexadecimal digits.
    number
        The number of the file. The files of a session are numbered from 0 without gaps.
    feedback
        The feedback, at least one, each with another id.
    """

    run: str
    gateway: str
    number: int
    feedback: tuple[Feedback, ...]

    def to_bytes(self) -> bytes:
        """Return the file. Raises `CorruptFeedback` if `parse` would refuse it, or `LimitExceeded`."""
        own = {"run": self.run, "gateway": self.gateway, "number": self.number}
        try:
            data = dump({"deltawire": "feedback", "version": 1, **own, "feedback": [one.plain() for one in self.feedback]})
        except (TypeError, ValueError) as error:
            raise CorruptFeedback(f"this feedback cannot be written ({error}).") from None
        if len(data) > MAX_FEEDBACK_BYTES:
            raise LimitExceeded(f"a file of feedback has {len(data):,} bytes; {MAX_FEEDBACK_BYTES:,} are allowed.")
        self.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes) -> FeedbackFile:
        """Return the feedback in a file. Raises `CorruptFeedback`, or `UnsupportedVersion` for a later format.

        Parameters
        ----------
        data
            The bytes of the file.
        """
        try:
            return cls._parse(data)
        except CorruptRecord as error:
            raise CorruptFeedback(f"a file of feedback cannot be read: {error.message}") from None

    @classmethod
    def _parse(cls, data: bytes) -> FeedbackFile:
        fields = Fields.parse(data, "feedback", limit=MAX_FEEDBACK_BYTES)
        run, gateway, number = fields.matching("run", NONCE), fields.matching("gateway", GATEWAY_SESSION), fields.integer("number")
        listed = fields.objects("feedback")
        if not 1 <= len(listed) <= MAX_FEEDBACK:
            fields.refuse(f"it lists {len(listed):,} pieces of feedback instead of 1 to {MAX_FEEDBACK:,}")
        found = tuple(Feedback.of(inner) for inner in listed)
        fields.done()
        if len({one.id for one in found}) != len(found):
            fields.refuse("an id occurs twice")
        return cls(run, gateway, number, found)


def check_float(value: float) -> bool:
    """Tell whether a number can be the value of a metric: it is finite, and from −10^9 to 10^9."""
    return math.isfinite(value) and abs(value) <= MAX_FLOAT


def _read_value(fields: Fields) -> Value:
    value = fields.any("value")
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not 1 <= len(value) <= MAX_TEXT_VALUE or any(0xD800 <= ord(character) < 0xE000 for character in value):
            fields.refuse(f"a text has 1 to {MAX_TEXT_VALUE:,} characters")
        return value
    if not isinstance(value, dict):
        fields.refuse('a value is true, false, {"float": number} or a text')
    inner = Fields(value, "feedback.value")
    number = read_number(inner, "float")
    inner.done()
    if not check_float(number):
        fields.refuse(f"a number is from {-MAX_FLOAT:.0f} to {MAX_FLOAT:.0f}")
    return number
