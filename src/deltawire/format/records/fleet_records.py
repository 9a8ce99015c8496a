"""The small records of a fleet, in canonical form (docs/protocol.md §10). They are read as strictly as those of the chain.

Every `parse` raises `CorruptRecord`, or `UnsupportedVersion` for a record of another version. Every `to_bytes` refuses what `parse` would
refuse. Canonical JSON has no fractions: numbers that are no integers travel as the shortest text that gives the same number back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ...errors import LimitExceeded
from .canonical import MAX_RECORD_BYTES, Fields, dump
from .record_parts import HASH, NONCE, READER, Signature, read_short, read_signature

MAX_BOARD_BYTES = 1 << 20
MAX_WORKING = 256
"""So many tasks may a heartbeat name."""

STATES = ("joining", "idle", "working", "leaving", "left")
"""What a member says of itself. One that has `left` holds no lease any more."""


_OBJECT_KEY = re.compile(r"fleet/(tasks|accepted)/([0-9]{10})/([0-9a-f]{64})\.json")
_MOST_TASKS, _MOST_ATTEMPTS = 10**5, 10**3
_SIGNABLE = (1, 2)
"""The versions of records that a trainer writes: since version 2 they can be signed, and boards are numbered."""


class AttemptId(NamedTuple):
    """Names one attempt at a task. An attempt has at most one lease, and should have one result."""

    round: int
    task: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A file of the trainer's, named by what is in it."""

    key: str
    size: int
    blake3: str

    def plain(self) -> dict[str, Any]:
        return {"key": self.key, "size": self.size, "blake3": self.blake3}

    @classmethod
    def of(cls, fields: Fields) -> ObjectRef:
        reference = cls(fields.text("key"), fields.integer("size"), fields.matching("blake3", HASH))
        fields.done()
        form = _OBJECT_KEY.fullmatch(reference.key)
        if form is None or form[3] != reference.blake3:
            fields.refuse(f"{reference.key!r} is not the key of an object with that hash")
        return reference

    def is_of(self, folder: str, number: int) -> bool:
        """Tell whether the key is in the folder "tasks" or "accepted" of this round."""
        form = _OBJECT_KEY.fullmatch(self.key)
        return form is not None and (form[1], int(form[2])) == (folder, number)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the completions of a round are to be drawn: `samples` of each prompt, of at most `max_tokens` tokens of the policy's own."""

    samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        exact = {"temperature": repr(float(self.temperature)), "top_p": repr(float(self.top_p))}
        return {"samples": self.samples, "max_tokens": self.max_tokens, "seed": self.seed, **exact}

    @classmethod
    def of(cls, fields: Fields) -> Sampling:
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
    """`tasks` pieces of rollout work for training step `for_step`, to be done by versions of step `oldest_step` or later."""

    id: str
    round: int
    epoch: int
    nonce: str
    for_step: int
    oldest_step: int
    tasks: int
    rows: ObjectRef
    lease_seconds: int
    sampling: Sampling
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Names the record in error messages."""
        return f"round {self.round}"

    @property
    def samples(self) -> int:
        """Completions of each prompt."""
        return self.sampling.samples

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "round", "epoch", "nonce", "for_step", "oldest_step", "tasks", "time")}
        rest = {"rows": self.rows.plain(), "lease_seconds": self.lease_seconds, "sampling": self.sampling.plain()}
        return _checked(Round, {"deltawire": "round", "version": 2, **own, **rest, **_signature(self.signature)})

    @classmethod
    def parse(cls, data: bytes) -> Round:
        """The record with these bytes."""
        fields = Fields.parse(data, "round", versions=_SIGNABLE)
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
            signature=_read_signature(fields),
        )
        fields.done()
        if not 1 <= found.tasks <= _MOST_TASKS:
            fields.refuse(f"a round has 1 to {_MOST_TASKS:,} tasks")
        if not 1 <= found.lease_seconds <= 10**9 or found.oldest_step >= found.for_step:
            fields.refuse("it leases for no time, or asks for versions that cannot be there before its step")
        if not found.rows.is_of("tasks", found.round):
            fields.refuse("its rows are another round's")
        return found


@dataclass(frozen=True, slots=True)
class Lease:
    """A member's claim to one attempt at a task. `seq` is the version that it had when it claimed it."""

    id: str
    round: int
    task: int
    attempt: int
    member: str
    nonce: str
    seq: int
    time: int

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "round", "task", "attempt", "member", "nonce", "seq", "time")}
        return _checked(Lease, {"deltawire": "lease", "version": 1, **own})

    @classmethod
    def parse(cls, data: bytes) -> Lease:
        """The record with these bytes."""
        fields = Fields.parse(data, "lease")
        attempt = read_attempt(fields)
        lease = cls(
            fields.matching("id", NONCE),
            *attempt,
            member=fields.matching("member", READER),
            nonce=fields.matching("nonce", NONCE),
            seq=fields.integer("seq"),
            time=fields.integer("time"),
        )
        fields.done()
        return lease


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The acknowledgement: training step `step` of this epoch trains on exactly the results that `accepted` lists, all of one round."""

    id: str
    epoch: int
    step: int
    round: int
    nonce: str
    accepted: ObjectRef
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Names the record in error messages."""
        return f"the batch of training step {self.step}"

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "epoch", "step", "round", "nonce", "time")}
        rest = {"accepted": self.accepted.plain(), **_signature(self.signature)}
        return _checked(BatchRecord, {"deltawire": "batch", "version": 2, **own, **rest})

    @classmethod
    def parse(cls, data: bytes) -> BatchRecord:
        """The record with these bytes."""
        fields = Fields.parse(data, "batch", versions=_SIGNABLE)
        batch = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            step=read_short(fields, "step"),
            round=read_short(fields, "round"),
            nonce=fields.matching("nonce", NONCE),
            accepted=ObjectRef.of(fields.object("accepted")),
            time=fields.integer("time"),
            signature=_read_signature(fields),
        )
        fields.done()
        if not batch.accepted.is_of("accepted", batch.round):
            fields.refuse("what it accepts is another round's")
        return batch


RejectedResult: TypeAlias = tuple[int, int, str]
"""(task, attempt, blake3 of the result's bytes)."""

MAX_REJECTED = 500
MAX_WHY = 500
"""A rejection names at most this many results, and gives a reason of at most this many characters."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Results of `round` that the trainer of `epoch` leaves out of training step `step`, although it had acknowledged them, and why."""

    id: str
    epoch: int
    step: int
    round: int
    results: tuple[RejectedResult, ...]
    why: str
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Names the record in error messages."""
        return f"a rejection for training step {self.step}"

    def to_bytes(self) -> bytes:
        own = {name: getattr(self, name) for name in ("id", "epoch", "step", "round", "why", "time")}
        rest = {"results": [list(one) for one in self.results], **_signature(self.signature)}
        return _checked(Rejection, {"deltawire": "rejected", "version": 2, **own, **rest})

    @classmethod
    def parse(cls, data: bytes) -> Rejection:
        """The record with these bytes."""
        fields = Fields.parse(data, "rejected", versions=_SIGNABLE)
        rejection = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            step=read_short(fields, "step"),
            round=read_short(fields, "round"),
            results=tuple(_rejected_result(fields, value) for value in fields.items("results")),
            why=fields.text("why"),
            time=fields.integer("time"),
            signature=_read_signature(fields),
        )
        fields.done()
        if not 1 <= len(rejection.results) <= MAX_REJECTED or len(rejection.why) > MAX_WHY:
            fields.refuse(f"it names 1 to {MAX_REJECTED} results, and its reason has at most {MAX_WHY} characters")
        return rejection


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a member says of itself. That it was written is what counts; the rest is for offers and for people.

    `session` is drawn when the process starts. `seq` and `step` are of the version that it has, null while it has none; `lag` counts the
    versions that it is behind. `tokens` and `busy_ms` sum up what it generated in this session, and how long that took. `working` are the
    leases that it still holds, and with them keeps alive. `reason` says which error it leaves because of, if any: with one the record is
    of version 2, without of version 1.
    """

    id: str
    member: str
    session: str
    state: str
    seq: int | None
    step: int | None
    lag: int
    tokens: int
    busy_ms: int
    working: tuple[AttemptId, ...]
    time: int
    reason: str | None = None

    def to_bytes(self) -> bytes:
        own = {
            name: getattr(self, name) for name in ("id", "member", "session", "state", "seq", "step", "lag", "tokens", "busy_ms", "time")
        }
        added: dict[str, Any] = {"version": 1} if self.reason is None else {"version": 2, "reason": self.reason}
        return _checked(Heartbeat, {"deltawire": "member", **own, **added, "working": [list(attempt) for attempt in self.working]})

    @classmethod
    def parse(cls, data: bytes) -> Heartbeat:
        """The record with these bytes."""
        fields = Fields.parse(data, "member", versions=(1, 2))
        beat = cls(
            id=fields.matching("id", NONCE),
            member=fields.matching("member", READER),
            session=fields.matching("session", NONCE),
            state=fields.text("state"),
            seq=fields.nullable("seq", fields.integer),
            step=fields.nullable("step", fields.integer),
            lag=fields.integer("lag"),
            tokens=fields.integer("tokens"),
            busy_ms=fields.integer("busy_ms"),
            working=_attempts(fields, "working", fields.items("working")),
            time=fields.integer("time"),
            reason=fields.text("reason") if fields.version == 2 else None,
        )
        fields.done()
        if beat.reason is not None and not 1 <= len(beat.reason) <= MAX_WHY:
            fields.refuse(f"its reason must have 1 to {MAX_WHY} characters")
        if beat.state not in STATES:
            fields.refuse(f"it has the unknown state {beat.state!r}")
        if (beat.seq is None) != (beat.step is None):
            fields.refuse("it has a version, or none")
        if len(beat.working) > MAX_WORKING:
            fields.refuse(f"it works on {len(beat.working)} tasks")
        return beat


@dataclass(frozen=True, slots=True)
class Board:
    """The trainer's hint to the members: what each is offered, and whether to stop.

    `seq` and `step` are of the newest version. Offers stand in the order in which they should be taken. `number` rises with every board
    that a trainer writes, so that nobody can pass an old one for new.
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
        """Names the record in error messages."""
        return f"the board of epoch {self.epoch}"

    def to_bytes(self) -> bytes:
        own: dict[str, Any] = {name: getattr(self, name) for name in ("id", "epoch", "seq", "step", "lease_seconds", "number")}
        offers = {member: [list(attempt) for attempt in attempts] for member, attempts in self.offers.items()}
        rest = {"offers": offers, "stop": int(self.stop), **_signature(self.signature)}
        return _checked(Board, {"deltawire": "board", "version": 2, **own, **rest}, MAX_BOARD_BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Board:
        """The record with these bytes."""
        fields = Fields.parse(data, "board", limit=MAX_BOARD_BYTES, versions=_SIGNABLE)
        offers = fields.mapping("offers")
        board = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            seq=fields.integer("seq"),
            step=read_short(fields, "step"),
            lease_seconds=fields.integer("lease_seconds"),
            offers={member: _attempts(fields, "offers", attempts) for member, attempts in offers.items()},
            stop=bool(stop := fields.integer("stop")),
            number=0 if fields.version == 1 else fields.integer("number"),
            signature=_read_signature(fields),
        )
        fields.done()
        if stop > 1 or not 1 <= board.lease_seconds <= 10**9 or any(READER.fullmatch(member) is None for member in board.offers):
            fields.refuse("stop is 0 or 1, leases last for at least a second, and offers are made to members")
        return board


def _signature(signature: Signature | None) -> dict[str, Any]:
    return {"signature": None if signature is None else signature.plain()}


def _read_signature(fields: Fields) -> Signature | None:
    """The signature that a record has since its version 2."""
    return None if fields.version == 1 else read_signature(fields)


def read_number(fields: Fields, name: str) -> float:
    """A finite number that travels as text."""
    text = fields.text(name)
    try:
        number = float(text)
    except ValueError:
        fields.refuse(f"{name} is no number")
    if not math.isfinite(number) or repr(number) != text:
        fields.refuse(f"{name} is not the shortest text of a finite number")
    return number


def read_attempt(fields: Fields) -> AttemptId:
    """Return what the fields round, task and attempt say."""
    attempt = AttemptId(fields.integer("round"), fields.integer("task"), fields.integer("attempt"))
    _check_attempt(fields, attempt)
    return attempt


def _attempts(fields: Fields, name: str, values: Any) -> tuple[AttemptId, ...]:
    if not isinstance(values, list):
        fields.refuse(f"{name} must be a list of attempts")
    attempts = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or any(type(number) is not int or number < 0 for number in value):
            fields.refuse(f"{name} must hold [round, task, attempt]")
        attempt = AttemptId(*value)
        _check_attempt(fields, attempt)
        attempts.append(attempt)
    return tuple(attempts)


def _rejected_result(fields: Fields, value: Any) -> RejectedResult:
    if not isinstance(value, list) or [type(part) for part in value] != [int, int, str] or not HASH.fullmatch(value[2]):
        fields.refuse("a rejected result is [task, attempt, blake3]")
    task, attempt, digest = value
    if not (0 <= task < _MOST_TASKS and 0 <= attempt < _MOST_ATTEMPTS):
        fields.refuse(f"task {task}, attempt {attempt} has no key")
    return task, attempt, digest


def _check_attempt(fields: Fields, attempt: AttemptId) -> None:
    if attempt.round >= 10**10 - 1 or attempt.task >= _MOST_TASKS or attempt.attempt >= _MOST_ATTEMPTS:
        fields.refuse(f"attempt {attempt.attempt} at task {attempt.task} of round {attempt.round} has no key")


def _checked(
    kind: type[Round] | type[Lease] | type[BatchRecord] | type[Rejection] | type[Heartbeat] | type[Board],
    plain: dict[str, Any],
    limit: int = MAX_RECORD_BYTES,
) -> bytes:
    data = dump(plain)
    if len(data) > limit:
        raise LimitExceeded(f"the record has {len(data):,} bytes; {limit:,} are allowed.")
    kind.parse(data)
    return data
