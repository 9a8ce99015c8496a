"""What earlier trainers left in the store, read back as steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from ...errors import CorruptRecord, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...format.records.chain_records import MAX_RECORD_BYTES
from ...format.records.fleet_files import MAX_ACCEPTED_BYTES, Accepted
from ...format.records.trainer_records import BatchRecord, Round
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.requests import Get, List
from ..fleet_keyring import FleetKeyring
from .requests import MOST_TOGETHER, Steps, Together

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """The rounds of this run by number, and the first number that nobody has used."""

    rounds: dict[int, Round]
    next_round: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An acknowledgement, the bytes of its record, and what it lists."""

    record: BatchRecord
    data: bytes
    accepted: Accepted


def read_rounds(run: str, keyring: FleetKeyring) -> Steps[Found]:
    """All rounds that are listed. What is no round of this run, or not signed as it should be, takes up its number and is nothing else."""
    listed: list[ObjectInfo] = yield List(fleet_keys.ROUNDS)
    numbers = [number for info in listed if (number := fleet_keys.parse_round_key(info.key)) is not None]
    rounds: dict[int, Round] = {}
    for start in range(0, len(numbers), MOST_TOGETHER):
        part = numbers[start : start + MOST_TOGETHER]
        answers = yield Together(tuple(Get(fleet_keys.round_key(number), MAX_RECORD_BYTES) for number in part))
        for number, answer in zip(part, answers, strict=True):
            record = parsed_answer(Round.parse, answer)
            if record is not None and record.id == run and record.round == number and keyring.trusts(record):
                rounds[number] = record
    return Found(rounds, max(numbers, default=-1) + 1)


def read_acknowledged(run: str, epoch: int, after: int, keyring: FleetKeyring) -> Steps[dict[int, Acknowledged]]:
    """For each training step above `after`, what the latest trainer up to `epoch` acknowledged for it, if that can be read and trusted."""
    listed: list[ObjectInfo] = yield List(fleet_keys.BATCHES)
    found: dict[int, Acknowledged] = {}
    places = [place for info in listed if (place := fleet_keys.parse_batch_key(info.key)) is not None]
    for place in sorted(places):  # by rising epoch, so that the latest stays
        if place.step <= after or place.epoch > epoch:
            continue
        data = yield from _get(fleet_keys.batch_key(*place), MAX_RECORD_BYTES)
        record = parsed_answer(BatchRecord.parse, data)
        if data is None or record is None or record.id != run or (record.epoch, record.step) != tuple(place) or not keyring.trusts(record):
            continue
        manifest = yield from _get(record.accepted.key, min(record.accepted.size, MAX_ACCEPTED_BYTES))
        if manifest is None or blake3(manifest).hexdigest() != record.accepted.blake3:
            continue
        accepted = parsed_answer(Accepted.parse, manifest)
        if accepted is not None and accepted.round == record.round:
            found[place.step] = Acknowledged(record, data, accepted)
    return found


def parsed_answer(parse: Callable[[bytes], T], answer: bytes | DeltawireError | None) -> T | None:
    """What was read, or None if it is missing, or not what it should be. Other errors are raised: nothing is concluded from them."""
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
