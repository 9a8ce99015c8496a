"""The records that a trainer writes for its fleet, in canonical form (docs/protocol.md §10).

Every `parse` raises `CorruptRecord`, or `UnsupportedVersion` for a record of another version. Every `to_bytes` refuses what `parse` would
refuse. Canonical JSON has no fractions: a number that is not an integer is written as the shortest text that gives the same number back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .canonical import Fields, checked_bytes
from .fleet_parts import (
    MAX_WHY,
    MOST_ATTEMPTS,
    MOST_TASKS,
    SIGNABLE,
    AttemptId,
    ObjectRef,
    plain_signature,
    read_attempts,
    read_later_signature,
    read_number,
)
from .record_parts import HASH, NONCE, READER, Signature, read_short

MAX_BOARD_BYTES = 1 << 20
MAX_REJECTED = 500
"""A rejection names at most this many results."""

RejectedResult: TypeAlias = tuple[int, int, str]
"""(task, attempt, blake3 of the result's bytes)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How members draw the completions of a round."""

    samples: int
    """The number of completions of each prompt that are wanted."""
    max_tokens: int
    """The most tokens that the policy may draw for one completion."""
    temperature: float = 1.0
    """The sampling temperature; 0 always takes the most probable token."""
    top_p: float = 1.0
    """Draw only from the most probable tokens whose probabilities sum to this."""
    seed: int = 0
    """The seed of the round. Members derive the seed of each attempt from it."""

    def plain(self) -> dict[str, Any]:
        exact = {"temperature": repr(float(self.temperature)), "top_p": repr(float(self.top_p))}
        return {"samples": self.samples, "max_tokens": self.max_tokens, "seed": self.seed, **exact}

    @classmethod
    def of(cls, fields: Fields) -> Sampling:
        """Return the sampling that a record describes.

        Parameters
        ----------
        fields
            The fields of the record's object `sampling`.
        """
        sampling = cls(
            samples=fields.integer("samples"),
            max_tokens=fields.integer("max_tokens"),
            temperature=read_number(fields, "temperature"),
            top_p=read_number(fields, "top_p"),
            seed=fields.integer("seed"),
        )
        fields.done()
        if not sampling.samples or not sampling.max_tokens or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            fields.refuse("samples and max_tokens are at least 1, temperature at least 0, top_p in (0, 1]")
        return sampling


@dataclass(frozen=True, slots=True)
class Round:
    """The record of a round: rollout work for one training step."""

    id: str
    """The id of the run."""
    round: int
    """The number of the round, counted from 0 for the whole run."""
    epoch: int
    """The epoch of the trainer that opened it."""
    nonce: str
    """Drawn at random, so that a trainer recognises its own record."""
    for_step: int
    """The training step that uses the results."""
    oldest_step: int
    """The step of the oldest version that may make tokens."""
    tasks: int
    """The number of tasks."""
    rows: ObjectRef
    """The object that holds the rows of all tasks."""
    lease_seconds: int
    """How long a lease holds after the last sign of life of its member."""
    sampling: Sampling
    """How completions are drawn."""
    time: int
    """The trainer's clock in milliseconds, for people."""
    signature: Signature | None = None
    """The trainer's signature; None on a chain that is not signed."""

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"round {self.round}"

    @property
    def samples(self) -> int:
        """The number of completions of each prompt that are wanted."""
        return self.sampling.samples

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "round", "epoch", "nonce", "for_step", "oldest_step", "tasks", "time")}
        rest = {"rows": self.rows.plain(), "lease_seconds": self.lease_seconds, "sampling": self.sampling.plain()}
        return checked_bytes(Round, {"deltawire": "round", "version": 2, **own, **rest, **plain_signature(self.signature)})

    @classmethod
    def parse(cls, data: bytes) -> Round:
        """Return the record with these bytes.

        Parameters
        ----------
        data
            The bytes of the object.
        """
        fields = Fields.parse(data, "round", versions=SIGNABLE)
        found = cls(
            id=fields.matching("id", NONCE),
            round=read_short(fields, "round"),
            epoch=read_short(fields, "epoch"),
            nonce=fields.matching("nonce", NONCE),
            for_step=read_short(fields, "for_step"),
            oldest_step=read_short(fields, "oldest_step"),
            tasks=fields.integer("tasks"),
            rows=ObjectRef.of(fields.object("rows")),
            lease_seconds=fields.integer("lease_seconds"),
            sampling=Sampling.of(fields.object("sampling")),
            time=fields.integer("time"),
            signature=read_later_signature(fields),
        )
        fields.done()
        if not 1 <= found.tasks <= MOST_TASKS:
            fields.refuse(f"a round has 1 to {MOST_TASKS:,} tasks")
        if not 1 <= found.lease_seconds <= 10**9 or found.oldest_step >= found.for_step:
            fields.refuse("its leases last for no time, or it asks for versions that cannot exist before its step")
        if not found.rows.is_of("tasks", found.round):
            fields.refuse("its rows are another round's")
        return found


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Acknowledges results: training step `step` of this epoch uses exactly the results that `accepted` lists, all from one round."""

    id: str
    epoch: int
    step: int
    round: int
    nonce: str
    accepted: ObjectRef
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the batch of training step {self.step}"

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "epoch", "step", "round", "nonce", "time")}
        rest = {"accepted": self.accepted.plain(), **plain_signature(self.signature)}
        return checked_bytes(BatchRecord, {"deltawire": "batch", "version": 2, **own, **rest})

    @classmethod
    def parse(cls, data: bytes) -> BatchRecord:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "batch", versions=SIGNABLE)
        batch = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            step=read_short(fields, "step"),
            round=read_short(fields, "round"),
            nonce=fields.matching("nonce", NONCE),
            accepted=ObjectRef.of(fields.object("accepted")),
            time=fields.integer("time"),
            signature=read_later_signature(fields),
        )
        fields.done()
        if not batch.accepted.is_of("accepted", batch.round):
            fields.refuse("what it accepts is another round's")
        return batch


@dataclass(frozen=True, slots=True)
class Rejection:
    """Results of `round` that the trainer of `epoch` leaves out of training step `step` although it had acknowledged them, and the
    reason.
    """

    id: str
    epoch: int
    step: int
    round: int
    results: tuple[RejectedResult, ...]
    why: str
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"a rejection for training step {self.step}"

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "epoch", "step", "round", "why", "time")}
        rest = {"results": [list(one) for one in self.results], **plain_signature(self.signature)}
        return checked_bytes(Rejection, {"deltawire": "rejected", "version": 2, **own, **rest})

    @classmethod
    def parse(cls, data: bytes) -> Rejection:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "rejected", versions=SIGNABLE)
        rejection = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            step=read_short(fields, "step"),
            round=read_short(fields, "round"),
            results=tuple(_rejected_result(fields, value) for value in fields.items("results")),
            why=fields.text("why"),
            time=fields.integer("time"),
            signature=read_later_signature(fields),
        )
        fields.done()
        if not 1 <= len(rejection.results) <= MAX_REJECTED or len(rejection.why) > MAX_WHY:
            fields.refuse(f"it names 1 to {MAX_REJECTED} results, and its reason has at most {MAX_WHY} characters")
        return rejection


@dataclass(frozen=True, slots=True)
class Board:
    """The trainer's list of offered tasks, and whether members should stop.

    `seq` and `step` describe the newest version. Offers are in the order in which members should take them. `number` rises with every board
    that a trainer writes, so that an old board cannot be passed off as a new one.
    """

    id: str
    epoch: int
    seq: int
    step: int
    lease_seconds: int
    offers: Mapping[str, tuple[AttemptId, ...]]
    stop: bool
    number: int = 0
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the board of epoch {self.epoch}"

    def to_bytes(self) -> bytes:
        own: dict[str, Any] = {name: getattr(self, name) for name in ("id", "epoch", "seq", "step", "lease_seconds", "number")}
        offers = {member: [list(attempt) for attempt in attempts] for member, attempts in self.offers.items()}
        rest = {"offers": offers, "stop": int(self.stop), **plain_signature(self.signature)}
        return checked_bytes(Board, {"deltawire": "board", "version": 2, **own, **rest}, MAX_BOARD_BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Board:
        """Return the record with these bytes."""
        fields = Fields.parse(data, "board", limit=MAX_BOARD_BYTES, versions=SIGNABLE)
        offers = fields.mapping("offers")
        board = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            seq=fields.integer("seq"),
            step=read_short(fields, "step"),
            lease_seconds=fields.integer("lease_seconds"),
            offers={member: read_attempts(fields, "offers", attempts) for member, attempts in offers.items()},
            stop=bool(stop := fields.integer("stop")),
            number=0 if fields.version == 1 else fields.integer("number"),
            signature=read_later_signature(fields),
        )
        fields.done()
        if stop > 1 or not 1 <= board.lease_seconds <= 10**9 or any(READER.fullmatch(member) is None for member in board.offers):
            fields.refuse("stop is 0 or 1, leases last for at least a second, and offers are made to members")
        return board


def _rejected_result(fields: Fields, value: Any) -> RejectedResult:
    if not isinstance(value, list) or [type(part) for part in value] != [int, int, str] or not HASH.fullmatch(value[2]):
        fields.refuse("a rejected result is [task, attempt, blake3]")
    task, attempt, digest = value
    if not (0 <= task < MOST_TASKS and 0 <= attempt < MOST_ATTEMPTS):
        fields.refuse(f"task {task}, attempt {attempt} has no key")
    return task, attempt, digest
