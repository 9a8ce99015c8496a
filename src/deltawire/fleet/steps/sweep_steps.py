"""Deleting what no trainer can need any more, as steps."""

from __future__ import annotations

from collections.abc import Sequence

from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.requests import Delete, List
from .requests import Steps

_BY_ROUND = (fleet_keys.ROLLOUTS, fleet_keys.LEASES, fleet_keys.ACCEPTED, fleet_keys.TASKS, fleet_keys.ROUNDS)
"""In this order: while its record is there, a round is known to be swept, and the rest of it is found."""

_AT_ONCE = 500


def sweep(first_kept: int, epoch: int, upto_step: int, members: Sequence[str]) -> Steps[None]:
    """Delete everything of rounds below `first_kept`, acknowledgements and rejections of training steps up to `upto_step`, and these
    members' heartbeats.

    The record of the newest round must be kept, whatever its age: numbers are never used again. Acknowledgements of epochs above `epoch`
    are left alone: a trainer that wakes up after another took over must not delete what that one wrote.
    """
    listed: list[ObjectInfo] = yield List(fleet_keys.BATCHES)
    places = [(info.key, place) for info in listed if (place := fleet_keys.parse_batch_key(info.key)) is not None]
    yield from _delete([key for key, place in places if place.step <= upto_step and place.epoch <= epoch])
    listed = yield List(fleet_keys.REJECTED)
    rejections = [(info.key, key) for info in listed if (key := fleet_keys.parse_rejected_key(info.key)) is not None]
    yield from _delete([name for name, key in rejections if key.step <= upto_step and key.epoch <= epoch])
    if first_kept > 0:
        for prefix in _BY_ROUND:
            listed = yield List(prefix, before=fleet_keys.first_key_of(prefix, first_kept))
            yield from _delete([info.key for info in listed])
    yield from _delete([fleet_keys.member_key(member) for member in members])


def _delete(keys: Sequence[str]) -> Steps[None]:
    for start in range(0, len(keys), _AT_ONCE):
        yield Delete(tuple(keys[start : start + _AT_ONCE]))
