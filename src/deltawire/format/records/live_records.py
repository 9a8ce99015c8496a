"""The declaration of metrics: what feedback means, how long it is awaited, and how it becomes a reward (docs/protocol.md §13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..live_parts import read_bounded, read_time
from .canonical import CanonicalRecord, Fields
from .fleet_parts import read_number
from .record_parts import NONCE, Signature, read_short, read_signature

LEVELS, TYPES = ("inference", "episode"), ("boolean", "float")
MAX_METRICS, MAX_METRIC_NAME = 64, 100
MAX_WINDOW = 366 * 86400
MAX_METRIC = 1e9


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is declared. Feedback for metrics that are not declared is stored, and never trained on.

    Parameters
    ----------
    name
        The name of the metric, 1 to 100 characters.
    level
        "inference": feedback is about one interaction. "episode": it is about all interactions of an episode.
    type
        "boolean" (False counts as 0, True as 1) or "float".
    window
        Seconds after an interaction was stored during which feedback counts, by the store's clock. Each interaction of an episode has its
        own window.
    settle
        A value is final this many seconds after its feedback was stored, by the store's clock, unless the window ends earlier. None: it is
        final when the window ends.
    default
        The value of an interaction without feedback when the window ends. None: the metric gives it no reward.
    weight
        The reward of an interaction is the sum of its values, each times the weight of its metric. A metric of weight 0 is not waited for.
    low
        The lowest value of a "float". None: −10^9.
    high
        The highest value of a "float". None: 10^9.
    """

    name: str
    level: str = "inference"
    type: str = "boolean"
    window: int = 3600
    settle: int | None = None
    default: float | None = None
    weight: float = 1.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MAX_METRIC_NAME or not self.name.isprintable():
            raise ValueError(f"the name of a metric has 1 to {MAX_METRIC_NAME} printable characters")
        if self.level not in LEVELS or self.type not in TYPES:
            raise ValueError(f"metric {self.name!r}: level is one of {LEVELS}, type one of {TYPES}")
        if not 0 <= self.window <= MAX_WINDOW or not 0 <= (self.settle or 0) <= self.window:
            raise ValueError(f"metric {self.name!r}: window is 0 to {MAX_WINDOW:,} seconds, and settle at most the window")
        numbers = (self.default, self.weight, self.low, self.high)
        if any(number is not None and not abs(number) <= MAX_METRIC for number in numbers):  # NaN compares false
            raise ValueError(f"metric {self.name!r}: numbers are from {-MAX_METRIC:.0f} to {MAX_METRIC:.0f}")
        if self.type == "boolean" and (self.low, self.high) != (None, None):
            raise ValueError(f"metric {self.name!r}: a boolean has no low and high")
        if self.lowest > self.highest or (self.default is not None and not self.lowest <= self.default <= self.highest):
            raise ValueError(f"metric {self.name!r}: low is at most high, and the default lies between them")

    @property
    def lowest(self) -> float:
        """The lowest value that is accepted."""
        return 0.0 if self.type == "boolean" else -MAX_METRIC if self.low is None else self.low

    @property
    def highest(self) -> float:
        """The highest value that is accepted."""
        return 1.0 if self.type == "boolean" else MAX_METRIC if self.high is None else self.high

    def number(self, value: bool | float | str) -> float | None:
        """Return a value of this metric as a number, or None if the metric cannot have it.

        Parameters
        ----------
        value
            The value that feedback gives.
        """
        if isinstance(value, str) or isinstance(value, bool) != (self.type == "boolean") or not self.lowest <= value <= self.highest:
            return None
        return float(value)

    def plain(self) -> dict[str, Any]:
        """Return the metric as JSON values."""
        own = {name: getattr(self, name) for name in ("name", "level", "type", "window", "settle")}
        numbers = {name: getattr(self, name) for name in ("default", "low", "high")}
        texts = {name: None if number is None else repr(float(number)) for name, number in numbers.items()}
        return {**own, **texts, "weight": repr(float(self.weight))}

    @classmethod
    def of(cls, fields: Fields) -> Metric:
        """Return the metric that an object in a record describes.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        values: dict[str, Any] = {
            "name": read_bounded(fields, "name", MAX_METRIC_NAME),
            "level": fields.text("level"),
            "type": fields.text("type"),
            "window": fields.integer("window"),
            "settle": fields.nullable("settle", fields.integer),
            "weight": read_number(fields, "weight"),
        }
        for name in ("default", "low", "high"):
            values[name] = fields.nullable(name, lambda name: read_number(fields, name))
        fields.done()
        try:
            return cls(**values)
        except ValueError as error:
            fields.refuse(str(error))


@dataclass(frozen=True, slots=True)
class Metrics(CanonicalRecord):
    """The metrics of a run. The declaration with the highest number is in force.

    Parameters
    ----------
    id
        The id of the run.
    number
        The number of the declaration, counted from 0.
    nonce
        Drawn at random, so that a writer recognises its own record.
    metrics
        The metrics, each with another name.
    time
        The writer's clock in milliseconds, for people.
    signature
        The trainer's signature; None on a chain that is not signed.
    """

    id: str
    number: int
    nonce: str
    metrics: tuple[Metric, ...]
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"declaration {self.number} of metrics"

    def plain(self) -> dict[str, Any]:
        own = {"id": self.id, "number": self.number, "nonce": self.nonce, "time": self.time}
        metrics = [metric.plain() for metric in self.metrics]
        return {"deltawire": "metrics", "version": 1, **own, "metrics": metrics, "signature": self.signature and self.signature.plain()}

    @classmethod
    def parse(cls, data: bytes) -> Metrics:
        """Return the record with these bytes. Raises `CorruptRecord` or `UnsupportedVersion`.

        Parameters
        ----------
        data
            The bytes of the object.
        """
        fields = Fields.parse(data, "metrics")
        found = cls(
            id=fields.matching("id", NONCE),
            number=read_short(fields, "number"),
            nonce=fields.matching("nonce", NONCE),
            metrics=tuple(Metric.of(inner) for inner in fields.objects("metrics")),
            time=read_time(fields),
            signature=read_signature(fields),
        )
        fields.done()
        if len(found.metrics) > MAX_METRICS or len({metric.name for metric in found.metrics}) != len(found.metrics):
            fields.refuse(f"it declares a metric twice, or more than {MAX_METRICS}")
        return found
