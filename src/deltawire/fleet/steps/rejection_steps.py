"""Rejecting results after they were acknowledged, as steps (docs/protocol.md §10, "Rejection")."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from ...format.records.chain_records import MAX_RECORD_BYTES
from ...format.records.fleet_parts import MAX_WHY
from ...format.records.trainer_records import MAX_REJECTED, RejectedResult, Rejection
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.fleet_keys import RejectedKey, RolloutKey
from ...store.requests import Get, List, Put
from ..fleet_keyring import FleetKeyring
from .requests import MOST_TOGETHER, Steps, Together
from .resume_steps import parsed_answer


def write_rejections(
    run: str, epoch: int, step: int, round_number: int, results: Sequence[RejectedResult], why: str, time: int, keyring: FleetKeyring
) -> Steps[None]:
    """Record that the trainer of `epoch` leaves these results out of training step `step`. May be repeated after any error.

    Records are named by their bytes, so nothing is ever overwritten, and a write whose outcome is unknown is simply made again.
    """
    text = why.encode(errors="replace").decode()[:MAX_WHY]
    for start in range(0, len(results), MAX_REJECTED):
        part = tuple(sorted(results[start : start + MAX_REJECTED]))
        data = keyring.sign(Rejection(run, epoch, step, round_number, part, text, time)).to_bytes()
        yield Put(fleet_keys.rejected_key(RejectedKey(epoch, step, blake3(data).hexdigest())), data)


def read_rejections(run: str, epoch: int, after: int, keyring: FleetKeyring) -> Steps[dict[RolloutKey, str]]:
    """Return all results that trainers up to `epoch` rejected for training steps above `after`, and why."""
    listed: list[ObjectInfo] = yield List(fleet_keys.REJECTED)
    places = [place for info in listed if (place := fleet_keys.parse_rejected_key(info.key)) is not None]
    wanted = [place for place in places if place.step > after and place.epoch <= epoch]
    found: dict[RolloutKey, str] = {}
    for start in range(0, len(wanted), MOST_TOGETHER):
        part = wanted[start : start + MOST_TOGETHER]
        answers = yield Together(tuple(Get(fleet_keys.rejected_key(place), MAX_RECORD_BYTES) for place in part))
        for place, answer in zip(part, answers, strict=True):
            record = parsed_answer(Rejection.parse, answer)
            if record is None or record.id != run or not keyring.trusts(record):
                continue
            if (record.epoch, record.step) == (place.epoch, place.step):
                found |= {RolloutKey(record.round, *result): record.why for result in record.results}
    return found
