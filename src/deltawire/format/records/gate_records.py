"""The evidence of a gate: what it found about a canary, and what it decided (docs/protocol.md §14)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..live_parts import read_bounded, read_flag
from .canonical import CanonicalRecord, Fields
from .fleet_parts import read_number
from .record_parts import HASH, NONCE, READER, CommitRef, Signature, read_short, read_signature

VERDICTS = ("holds", "broken", "open")
OUTCOMES = ("promote", "rollback", "continue")
MOST_LIMITS, MOST_LIMIT_TEXT, MOST_SCORES, MOST_SCORE_NAME, MOST_TEXT = 32, 140, 64, 100, 1500


@dataclass(frozen=True, slots=True)
class GroupMean:
    """Some answers, and the mean of their values.

    Parameters
    ----------
    count
        The number of answers.
    mean
        The mean of their values, or 0 if there are none.
    """

    count: int
    mean: float

    def plain(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        return {"count": self.count, "mean": repr(float(self.mean))}

    @classmethod
    def of(cls, fields: Fields) -> GroupMean:
        """Read and check the values of a record.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        group = cls(fields.integer("count"), read_number(fields, "mean"))
        fields.done()
        return group


@dataclass(frozen=True, slots=True)
class LimitFinding:
    """The state of one limit.

    Parameters
    ----------
    limit
        The limit as people write it, such as "length:+20%".
    must_hold
        Whether the limit must be proved before a promotion.
    canary
        The answers of the canary.
    stable
        The answers of the other channel.
    blocks
        The number of blocks that were compared.
    low
        The lowest difference that is not refuted: the mean of the canary minus the factor of the limit times the mean of stable.
    high
        The highest difference that is not refuted.
    verdict
        "holds" if the limit is proved, "broken" if the opposite is proved, "open" otherwise.
    """

    limit: str
    must_hold: bool
    canary: GroupMean
    stable: GroupMean
    blocks: int
    low: float
    high: float
    verdict: str

    def plain(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        groups = {"canary": self.canary.plain(), "stable": self.stable.plain(), "blocks": self.blocks}
        bounds = {"low": repr(float(self.low)), "high": repr(float(self.high))}
        return {"limit": self.limit, "must_hold": int(self.must_hold), **groups, **bounds, "verdict": self.verdict}

    @classmethod
    def of(cls, fields: Fields) -> LimitFinding:
        """Read and check the values of a record.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        found = cls(
            limit=read_bounded(fields, "limit", MOST_LIMIT_TEXT),
            must_hold=read_flag(fields, "must_hold"),
            canary=GroupMean.of(fields.object("canary")),
            stable=GroupMean.of(fields.object("stable")),
            blocks=fields.integer("blocks"),
            low=read_number(fields, "low"),
            high=read_number(fields, "high"),
            verdict=fields.text("verdict"),
        )
        fields.done()
        if found.verdict not in VERDICTS:
            fields.refuse(f"its verdict is {found.verdict!r}")
        return found


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of the evaluation command.

    Parameters
    ----------
    passed
        Whether the command exited with 0 and no score is too low. None if the command did not finish.
    attempts
        The number of times that the command was started.
    why
        What happened, for people.
    scores
        The scores that the command printed, by name.
    terms
        The hash of the command and of the least scores. A gate with other terms evaluates anew. None in the records of older gates.
    """

    passed: bool | None
    attempts: int
    why: str
    scores: Mapping[str, float] = field(default_factory=dict)
    terms: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        scores = [{"name": name, "value": repr(float(value))} for name, value in sorted(self.scores.items())]
        passed, terms = None if self.passed is None else int(self.passed), {} if self.terms is None else {"terms": self.terms}
        return {"passed": passed, "attempts": self.attempts, "why": self.why, "scores": scores, **terms}

    @classmethod
    def of(cls, fields: Fields) -> EvaluationResult:
        """Read and check the values of a record.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        passed = fields.nullable("passed", lambda name: read_flag(fields, name))
        attempts, why = fields.integer("attempts"), read_bounded(fields, "why", MOST_TEXT, 0)
        scores = [_score(inner) for inner in fields.objects("scores")]
        terms = fields.matching("terms", HASH) if fields.has("terms") else None
        fields.done()
        names = [name for name, _ in scores]
        if len(names) > MOST_SCORES or names != sorted(set(names)):
            fields.refuse(f"its scores are more than {MOST_SCORES}, or not ordered by name")
        return cls(passed, attempts, why, dict(scores), terms)


@dataclass(frozen=True, slots=True)
class ChannelPosition:
    """The current move of a channel, and its target.

    Parameters
    ----------
    channel
        The name of the channel.
    move
        The number of the move that named this version. Later moves, if any, changed only the share of users.
    target
        The version that the channel names.
    """

    channel: str
    move: int
    target: CommitRef

    def plain(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"channel": self.channel, "move": self.move, "target": self.target.plain()}

    @classmethod
    def of(cls, fields: Fields) -> ChannelPosition:
        """Read and check the values of a record.

        Parameters
        ----------
        fields
            The fields of the object.
        """
        position = cls(fields.matching("channel", READER), read_short(fields, "move"), CommitRef.of(fields.object("target")))
        fields.done()
        if position.target.digest is None:
            fields.refuse("its target has no digest")
        return position


@dataclass(frozen=True, slots=True)
class GateRecord(CanonicalRecord):
    """The findings of a gate about a canary, and its decision. The first record of a canary that decides is the one that counts.

    Parameters
    ----------
    id
        The id of the run.
    number
        The number of the record among those of the canary, from 0 without gaps.
    canary
        The current move of the canary's channel.
    stable
        The current move of the other channel.
    outcome
        "promote", "rollback" or "continue".
    why
        The reason, for people.
    alpha
        The largest allowed probability of a wrong decision.
    answers
        The number of answers of the canary.
    age
        Milliseconds since the canary began.
    evaluation
        The result of the evaluation command, or None.
    limits
        The states of all limits.
    time
        The clock of the gate in milliseconds since 1970, for people.
    nonce
        Makes the record unique, so that its writer recognises it.
    signature
        The signature of the gate, if the chain is signed.
    """

    id: str
    number: int
    canary: ChannelPosition
    stable: ChannelPosition
    outcome: str
    why: str
    alpha: float
    answers: int
    age: int
    evaluation: EvaluationResult | None
    limits: tuple[LimitFinding, ...]
    time: int
    nonce: str
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"record {self.number} of the gate about move {self.canary.move} of the channel {self.canary.channel}"

    def plain(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("id", "number", "outcome", "why", "answers", "age", "time", "nonce")}
        return {
            "deltawire": "gate",
            "version": 1,
            **own,
            "canary": self.canary.plain(),
            "stable": self.stable.plain(),
            "alpha": repr(float(self.alpha)),
            "evaluation": self.evaluation and self.evaluation.plain(),
            "limits": [each.plain() for each in self.limits],
            "signature": self.signature and self.signature.plain(),
        }

    @classmethod
    def parse(cls, data: bytes) -> GateRecord:
        """Return the record with these bytes. Raises `CorruptRecord` or `UnsupportedVersion`.

        Parameters
        ----------
        data
            The bytes of the object.
        """
        fields = Fields.parse(data, "gate")
        found = cls(
            id=fields.matching("id", NONCE),
            number=read_short(fields, "number"),
            canary=ChannelPosition.of(fields.object("canary")),
            stable=ChannelPosition.of(fields.object("stable")),
            outcome=fields.text("outcome"),
            why=read_bounded(fields, "why", MOST_TEXT, 0),
            alpha=read_number(fields, "alpha"),
            answers=fields.integer("answers"),
            age=fields.integer("age"),
            evaluation=fields.nullable("evaluation", lambda name: EvaluationResult.of(fields.object(name))),
            limits=tuple(LimitFinding.of(inner) for inner in fields.objects("limits")),
            time=fields.integer("time"),
            nonce=fields.matching("nonce", NONCE),
            signature=read_signature(fields),
        )
        fields.done()
        if found.outcome not in OUTCOMES:
            fields.refuse(f"its outcome is {found.outcome!r}")
        if found.canary.channel == found.stable.channel:
            fields.refuse("it compares a channel with itself")
        if not 0.0 < found.alpha < 1.0:
            fields.refuse("alpha lies between 0 and 1")
        if len(found.limits) > MOST_LIMITS:
            fields.refuse(f"it has more than {MOST_LIMITS} limits")
        return found


def _score(fields: Fields) -> tuple[str, float]:
    score = read_bounded(fields, "name", MOST_SCORE_NAME), read_number(fields, "value")
    fields.done()
    return score
