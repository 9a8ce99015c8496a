"""The keys of a fleet's objects. Every key is built and parsed here (docs/protocol.md §10)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..format.records.fleet_parts import AttemptId
from ..format.records.record_parts import is_reader_name

FLEET = "fleet/"
BOARD = "fleet/board.json"
ROUNDS, TASKS, LEASES, ROLLOUTS = "fleet/round/", "fleet/tasks/", "fleet/lease/", "fleet/rollout/"
ACCEPTED, BATCHES, MEMBERS = "fleet/accepted/", "fleet/batch/", "fleet/member/"
REJECTED = "fleet/rejected/"
"""Prefixes for listings."""

FIRST_FREE_ATTEMPT = 16
"""Attempts from this number on need no lease, so that a member that claims all leases of a task cannot block it (docs/protocol.md §10)."""

_SHORT, _HASH = r"([0-9]{10})", r"([0-9a-f]{64})"
_ROUND = re.compile(rf"fleet/round/{_SHORT}\.json")
_LEASE = re.compile(rf"fleet/lease/{_SHORT}/([0-9]{{5}})/([0-9]{{3}})\.json")
_ROLLOUT = re.compile(rf"fleet/rollout/{_SHORT}/([0-9]{{5}})/([0-9]{{3}})-{_HASH}\.safetensors")
_BATCH = re.compile(rf"fleet/batch/{_SHORT}/{_SHORT}\.json")
_REJECTED = re.compile(rf"fleet/rejected/{_SHORT}/{_SHORT}/{_HASH}\.json")
_MEMBER = re.compile(r"fleet/member/(.+)\.json")


class RolloutKey(NamedTuple):
    """The parts of a result's key."""

    round: int
    task: int
    attempt: int
    blake3: str

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt that the result belongs to."""
        return AttemptId(self.round, self.task, self.attempt)


class BatchKey(NamedTuple):
    """The parts of a batch's key."""

    epoch: int
    step: int


class RejectedKey(NamedTuple):
    """The parts of a rejection's key. `blake3` is the hash of the record's bytes."""

    epoch: int
    step: int
    blake3: str


def round_key(number: int) -> str:
    return f"{ROUNDS}{_digits(number, 10)}.json"


def tasks_key(number: int, blake3: str) -> str:
    return f"{TASKS}{_digits(number, 10)}/{blake3}.json"


def accepted_key(number: int, blake3: str) -> str:
    return f"{ACCEPTED}{_digits(number, 10)}/{blake3}.json"


def lease_key(attempt: AttemptId) -> str:
    return f"{LEASES}{_attempt_digits(attempt)}.json"


def rollout_key(rollout: RolloutKey) -> str:
    return f"{ROLLOUTS}{_attempt_digits(rollout.attempt_id)}-{rollout.blake3}.safetensors"


def batch_key(epoch: int, step: int) -> str:
    return f"{BATCHES}{_digits(epoch, 10)}/{_digits(step, 10)}.json"


def rejected_key(rejected: RejectedKey) -> str:
    return f"{REJECTED}{_digits(rejected.epoch, 10)}/{_digits(rejected.step, 10)}/{rejected.blake3}.json"


def member_key(member: str) -> str:
    """Return the key of a member's heartbeat. Raises ValueError for a name that members, like readers, cannot have."""
    if not is_reader_name(member):
        raise ValueError(f"{member!r} cannot name a member: letters, digits, '.', '_', '-', at most 64, no leading dot")
    return f"{MEMBERS}{member}.json"


def first_key_of(prefix: str, number: int) -> str:
    """Return a string that sorts before all keys of this round and later ones, and after all keys of earlier rounds, in a folder ordered by
    round.

    It is not the name of a folder, because some servers (SeaweedFS) list nothing of the folder that a listing starts after.
    """
    return f"{prefix}{_digits(number - 1, 10)}0" if number else f"{prefix}-"


def keys_of_round(prefix: str, number: int) -> str:
    """Return the prefix of all keys of this round in a folder that is ordered by round."""
    return f"{prefix}{_digits(number, 10)}/"


def parse_round_key(key: str) -> int | None:
    """Return the number in a round's key, or None for any other key. The other `parse_` functions work alike."""
    found = _ROUND.fullmatch(key)
    return int(found[1]) if found else None


def parse_lease_key(key: str) -> AttemptId | None:
    found = _LEASE.fullmatch(key)
    return AttemptId(int(found[1]), int(found[2]), int(found[3])) if found else None


def parse_rollout_key(key: str) -> RolloutKey | None:
    found = _ROLLOUT.fullmatch(key)
    return RolloutKey(int(found[1]), int(found[2]), int(found[3]), found[4]) if found else None


def parse_batch_key(key: str) -> BatchKey | None:
    found = _BATCH.fullmatch(key)
    return BatchKey(int(found[1]), int(found[2])) if found else None


def parse_rejected_key(key: str) -> RejectedKey | None:
    found = _REJECTED.fullmatch(key)
    return RejectedKey(int(found[1]), int(found[2]), found[3]) if found else None


def parse_member_key(key: str) -> str | None:
    found = _MEMBER.fullmatch(key)
    return found[1] if found and is_reader_name(found[1]) else None


def _attempt_digits(attempt: AttemptId) -> str:
    return f"{_digits(attempt.round, 10)}/{_digits(attempt.task, 5)}/{_digits(attempt.attempt, 3)}"


def _digits(number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise ValueError(f"{number} cannot stand in a key")
    return f"{number:0{width}}"
