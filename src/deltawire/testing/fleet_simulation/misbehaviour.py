"""Members that break the rules: what they send to the store instead of what the real steps of a member ask them to send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from blake3 import blake3

from ...format.digest import Digest
from ...format.records.fleet_parts import MOST_ATTEMPTS, AttemptId
from ...format.records.member_records import Heartbeat, Lease, LinkReport
from ...format.rollouts import ClaimedVersion, Rollouts, TokenSpan
from ...store import fleet_keys
from ...store.fleet_keys import RolloutKey
from ...store.requests import Create, Put
from .chain_model import ChainModel
from .store_model import Objects, PutWithTime

Sent = list[Any]
"""The first request replaces the member's own request, and its answer goes to the member. Answers to the others are ignored."""


class Misbehaviour:
    """One kind of misbehaviour, which a member shows most of the time.

    Parameters
    ----------
    kind
        One of `KINDS`.
    random
        Draws when and how the member misbehaves.
    chain
        The chain, whose versions the member misuses.
    objects
        The content of the store.
    """

    def __init__(self, kind: str, random: Random, chain: ChainModel, objects: Objects) -> None:
        self.kind = kind
        self._random = random
        self._chain = chain
        self._objects = objects
        self._squatted: set[int] = set()
        self._changes: dict[str, Callable[[Rollouts, RolloutKey], Sent]] = {
            "duplicate": self._duplicate,
            "forge": self._forge,
            "future": self._future,
            "foreign": self._foreign,
            "garble": self._garble,
            "thief": self._steal,
        }

    def sends(self, request: Any) -> Sent:
        """Return the requests that the member sends instead of this one."""
        if not isinstance(request, Put) or self._random.random() < 0.3:
            return [request]
        if self.kind == "misdated":
            return [PutWithTime(request, self._random.choice([3600.0, 3e7, 3e9, -3600.0, -3e7]))]
        result = fleet_keys.parse_rollout_key(request.key)
        if result is not None and self.kind in self._changes:
            return self._changes[self.kind](Rollouts.parse(request.data), result)
        if self.kind == "boast" and request.key.startswith(fleet_keys.MEMBERS):
            link = LinkReport(10**15, 0, 0)
            boast = replace(Heartbeat.parse(request.data), tokens=10**15, busy_ms=1, lag=0, link=link, behind_ms=0)
            return [Put(request.key, boast.to_bytes())]
        if self.kind == "sybil" and request.key.startswith(fleet_keys.MEMBERS):
            beat = Heartbeat.parse(request.data)
            names = [f"{beat.member}-{self._random.randrange(30)}" for _ in range(30)]
            return [request, *(Put(fleet_keys.member_key(name), replace(beat, member=name, working=()).to_bytes()) for name in names)]
        if self.kind == "squatter" and request.key.startswith(fleet_keys.MEMBERS):
            return [request, *self._squat(Heartbeat.parse(request.data))]
        return [request]

    def _squat(self, beat: Heartbeat) -> Sent:
        """Take every lease of the newest rounds before it is offered: in its own name, in that of another member, or with garbage."""
        names = [key.removeprefix(fleet_keys.MEMBERS).removesuffix(".json") for key in self._objects.keys(fleet_keys.MEMBERS)]
        sent: Sent = []
        for key in self._objects.keys(fleet_keys.ROUNDS)[-4:]:
            number = fleet_keys.parse_round_key(key)
            if number is None or number in self._squatted:
                continue
            self._squatted.add(number)
            for attempt_id in (AttemptId(number, task, attempt) for task in range(5) for attempt in range(18)):
                member = self._random.choice([beat.member, *names])
                lease = Lease(beat.id, *attempt_id, member, f"{self._random.getrandbits(128):032x}", 0, 0).to_bytes()
                sent.append(Create(fleet_keys.lease_key(attempt_id), lease if self._random.random() < 0.7 else b"{}"))
        return sent

    def _duplicate(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Send the result twice, a changed one for the same lease, and the first one again as a result of the next attempt."""
        changed = tuple(replace(one, tokens=(one.tokens + 1) % np.int32(2**31 - 1)) for one in rollouts.completions)
        later = (key.attempt + 1) % MOST_ATTEMPTS
        elsewhere = rollouts.to_bytes()
        later_key = fleet_keys.rollout_key(RolloutKey(key.round, key.task, later, blake3(elsewhere).hexdigest()))
        return [
            _put(rollouts),
            _put(rollouts),
            _put(replace(rollouts, completions=changed)),
            _put(replace(rollouts, attempt=later)),
            Put(later_key, elsewhere),
        ]

    def _forge(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Name a version, but with the digest of other weights."""
        wrong = Digest.from_hex(f"{self._random.getrandbits(128):032x}")
        return [_put(replace(rollouts, versions={seq: ClaimedVersion(ref.step, wrong) for seq, ref in rollouts.versions.items()}))]

    def _future(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Name a version that does not exist yet, or any version that ever existed."""
        every = self._chain.every()
        if self._random.random() < 0.5:
            version = self._random.choice(every)
            return [_put(_relabelled(rollouts, version.seq, ClaimedVersion(version.step, version.digest)))]
        unknown = ClaimedVersion(every[-1].step + 1, Digest.from_hex(f"{self._random.getrandbits(128):032x}"))
        return [_put(_relabelled(rollouts, every[-1].seq + 1 + self._random.randrange(3), unknown))]

    def _foreign(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Name another run."""
        return [_put(replace(rollouts, run="f" * 32))]

    def _garble(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Send bytes that are not rollouts, under their own hash or another one."""
        data = bytearray(rollouts.to_bytes())
        for _ in range(3):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        garbled = bytes(data[: self._random.randrange(1, len(data) + 1)])
        shown = blake3(garbled if self._random.random() < 0.5 else bytes(data)).hexdigest()
        return [Put(fleet_keys.rollout_key(key._replace(blake3=shown)), garbled)]

    def _steal(self, rollouts: Rollouts, key: RolloutKey) -> Sent:
        """Send the result for leases of other members too, and for attempts that no member has leased."""
        sent = [_put(rollouts)]
        for name in self._objects.keys(fleet_keys.LEASES)[-4:]:
            lease = fleet_keys.parse_lease_key(name)
            assert lease is not None
            attempt = (lease.attempt + (self._random.random() < 0.3)) % MOST_ATTEMPTS
            sent.append(_put(replace(rollouts, round=lease.round, task=lease.task, attempt=attempt)))
        return sent


KINDS = ("duplicate", "forge", "future", "foreign", "garble", "thief", "boast", "pinned", "hog", "misdated", "squatter", "sybil")
"""All kinds. "pinned" is an engine that lies about its version, and "hog" a member that leases and never delivers; others are here."""


def _put(rollouts: Rollouts) -> Put:
    data = rollouts.to_bytes()
    key = RolloutKey(rollouts.round, rollouts.task, rollouts.attempt, blake3(data).hexdigest())
    return Put(fleet_keys.rollout_key(key), data)


def _relabelled(rollouts: Rollouts, seq: int, version: ClaimedVersion) -> Rollouts:
    completions = tuple(replace(one, spans=(TokenSpan(0, len(one.tokens), seq),)) for one in rollouts.completions)
    return replace(rollouts, completions=completions, versions={seq: version})
