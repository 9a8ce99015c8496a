"""The records that trainers leave in the store: rounds, acknowledgements and rejections are read, written and deleted here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from ...errors import CorruptRecord, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.fleet_files import MAX_ACCEPTED_BYTES, Accepted
from ...format.records.fleet_parts import MAX_WHY
from ...format.records.trainer_records import MAX_REJECTED, BatchRecord, RejectedResult, Rejection, Round
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.fleet_keys import RejectedKey, RolloutKey
from ...store.requests import Delete, Get, List, Put
from ..fleet_keyring import FleetKeyring
from .requests import MOST_TOGETHER, Steps, Together

T = TypeVar("T")

_BY_ROUND = (fleet_keys.ROLLOUTS, fleet_keys.LEASES, fleet_keys.ACCEPTED, fleet_keys.TASKS, fleet_keys.ROUNDS)
"""Deleted in this order. The record of a round goes last, so that an interrupted deletion finds the round again."""

_DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class FoundRounds:
    """The rounds of a run by number, and the first number that no trainer has used."""

    rounds: dict[int, Round]
    next_number: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The record of an acknowledgement, its bytes, and the results that it lists."""

    record: BatchRecord
    data: bytes
    accepted: Accepted


def read_rounds(run: str, keyring: FleetKeyring) -> Steps[FoundRounds]:
    """Return all rounds of the run. An object that is not a trusted round of this run counts only as a used number."""
    listed: list[ObjectInfo] = yield List(fleet_keys.ROUNDS)
    numbers = [number for info in listed if (number := fleet_keys.parse_round_key(info.key)) is not None]
    rounds: dict[int, Round] = {}
    for start in range(0, len(numbers), MOST_TOGETHER):
        group = numbers[start : start + MOST_TOGETHER]
        answers = yield Together(tuple(Get(fleet_keys.round_key(number), MAX_RECORD_BYTES) for number in group))
        for number, answer in zip(group, answers, strict=True):
            record = parsed_answer(Round.parse, answer)
            if record is not None and record.id == run and record.round == number and keyring.trusts(record):
                rounds[number] = record
    return FoundRounds(rounds, max(numbers, default=-1) + 1)


def read_acknowledged(run: str, epoch: int, after: int, keyring: FleetKeyring) -> Steps[dict[int, Acknowledged]]:
    """Return, for each training step above `after`, what the latest trainer up to `epoch` acknowledged for it.

    Acknowledgements that cannot be read or trusted are ignored.
    """
    listed: list[ObjectInfo] = yield List(fleet_keys.BATCHES)
    found: dict[int, Acknowledged] = {}
    batches = [key for info in listed if (key := fleet_keys.parse_batch_key(info.key)) is not None]
    for key in sorted(batches):  # by rising epoch, so that the latest one remains
        if key.step <= after or key.epoch > epoch:
            continue
        data = yield from _get(fleet_keys.batch_key(*key), MAX_RECORD_BYTES)
        record = parsed_answer(BatchRecord.parse, data)
        if data is None or record is None or record.id != run or (record.epoch, record.step) != tuple(key) or not keyring.trusts(record):
            continue
        manifest = yield from _get(record.accepted.key, min(record.accepted.size, MAX_ACCEPTED_BYTES))
        if manifest is None or blake3(manifest).hexdigest() != record.accepted.blake3:
            continue
        accepted = parsed_answer(Accepted.parse, manifest)
        if accepted is not None and accepted.round == record.round:
            found[key.step] = Acknowledged(record, data, accepted)
    return found


def write_rejections(
    run: str, epoch: int, step: int, round_number: int, results: Sequence[RejectedResult], why: str, time: int, keyring: FleetKeyring
) -> Steps[None]:
    """Record that the trainer of `epoch` leaves these results out of training step `step` (docs/protocol.md §10, "Rejection").

    The call may be repeated after any error: records are named by the hash of their bytes, so a repeated write overwrites nothing else.
    """
    text = why.encode(errors="replace").decode()[:MAX_WHY]
    for start in range(0, len(results), MAX_REJECTED):
        group = tuple(sorted(results[start : start + MAX_REJECTED]))
        data = keyring.sign(Rejection(run, epoch, step, round_number, group, text, time)).to_bytes()
        yield Put(fleet_keys.rejected_key(RejectedKey(epoch, step, blake3(data).hexdigest())), data)


def read_rejections(run: str, epoch: int, after: int, keyring: FleetKeyring) -> Steps[dict[RolloutKey, str]]:
    """Return all results that trainers up to `epoch` rejected for training steps above `after`, each with the reason."""
    listed: list[ObjectInfo] = yield List(fleet_keys.REJECTED)
    rejections = [key for info in listed if (key := fleet_keys.parse_rejected_key(info.key)) is not None]
    wanted = [key for key in rejections if key.step > after and key.epoch <= epoch]
    found: dict[RolloutKey, str] = {}
    for start in range(0, len(wanted), MOST_TOGETHER):
        group = wanted[start : start + MOST_TOGETHER]
        answers = yield Together(tuple(Get(fleet_keys.rejected_key(key), MAX_RECORD_BYTES) for key in group))
        for key, answer in zip(group, answers, strict=True):
            record = parsed_answer(Rejection.parse, answer)
            if record is None or record.id != run or not keyring.trusts(record):
                continue
            if (record.epoch, record.step) == (key.epoch, key.step):
                found |= {RolloutKey(record.round, *result): record.why for result in record.results}
    return found


def sweep(first_kept: int, epoch: int, upto_step: int, members: Sequence[str]) -> Steps[None]:
    """Delete what trainers no longer need.

    Deleted are all objects of rounds below `first_kept`, the acknowledgements and rejections of training steps up to `upto_step`, and the
    heartbeats of these members. The caller must keep the newest round, whatever its age, because round numbers are never used twice.
    Acknowledgements of epochs above `epoch` stay: a trainer that wakes up after another one took over must not delete the other's records.
    """
    by_round = _BY_ROUND if first_kept > 0 else ()
    answers = yield Together(
        (
            List(fleet_keys.BATCHES),
            List(fleet_keys.REJECTED),
            *(List(prefix, before=fleet_keys.first_key_of(prefix, first_kept)) for prefix in by_round),
        )
    )
    batches, rejections, *rest = (_answer_or_raise(answer) for answer in answers)
    old = [key for info in batches if (key := fleet_keys.parse_batch_key(info.key)) is not None and key.step <= upto_step]
    unwanted = [fleet_keys.batch_key(*key) for key in old if key.epoch <= epoch]
    rejected = [one for info in rejections if (one := fleet_keys.parse_rejected_key(info.key)) is not None and one.step <= upto_step]
    unwanted += [fleet_keys.rejected_key(one) for one in rejected if one.epoch <= epoch]
    yield from _delete(unwanted)
    *contents, rounds = rest or [[]]
    yield from _delete([info.key for listed in contents for info in listed] + [fleet_keys.member_key(member) for member in members])
    yield from _delete([info.key for info in rounds])


def _answer_or_raise(answer: list[ObjectInfo] | DeltawireError) -> list[ObjectInfo]:
    if isinstance(answer, DeltawireError):
        raise answer
    return answer


def parsed_answer(parse: Callable[[bytes], T], answer: bytes | DeltawireError | None) -> T | None:
    """Return the parsed answer to a `Get`; None if the object is missing, too large or malformed. Raise any other error."""
    if isinstance(answer, DeltawireError):
        if isinstance(answer, (ObjectMissing, LimitExceeded)):
            return None
        raise answer
    try:
        return None if answer is None else parse(answer)
    except (CorruptRecord, UnsupportedVersion):
        return None


def _get(key: str, limit: int) -> Steps[bytes | None]:
    try:
        data: bytes = yield Get(key, limit)
    except (ObjectMissing, LimitExceeded):
        return None
    return data


def _delete(keys: Sequence[str]) -> Steps[None]:
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        yield Delete(tuple(keys[start : start + _DELETED_AT_ONCE]))
