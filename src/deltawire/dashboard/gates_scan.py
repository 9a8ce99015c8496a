"""Reads the evidence of gates for the page: what they found about the newest canaries, and what they decided."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..chain.log import ChainLog
from ..errors import CorruptRecord, DeltawireError, StoreError, UnusableGate
from ..format.records.channel_records import ChannelMove
from ..format.records.gate_records import EvaluationResult, GateRecord, LimitFinding
from ..format.records.run_records import check_same_run
from ..format.records.signing import check_signature
from ..live.gate_rules import Limit
from ..store import live_keys
from .chain_scan import ChainScan
from .channels_scan import MOST_CHANNELS, ChannelsScan
from .plain_values import short

MOST_CANARIES = 8
"""The newest canaries of a channel whose evidence is read and shown."""
_MOST_LISTED = 1000
_LAST = 10**10 - 1
_CANARIES_EVERY = 15
"""Evidence about earlier canaries is looked for in every 15th look."""


class GatesScan:
    """Keeps the newest evidence about each canary.

    A look that finds nothing new takes one listing for each channel that a gate has watched, and one more. Now and then it takes one for
    each canary.

    Parameters
    ----------
    log
        The chain. If its readers trust keys, evidence that none of them signed is a fault.
    chain
        Knows the numbers of versions.
    channels
        Knows the moves of channels.
    """

    def __init__(self, log: ChainLog, chain: ChainScan, channels: ChannelsScan) -> None:
        self._log = log
        self._chain = chain
        self._channels = channels
        self._found: dict[tuple[str, int], dict[str, Any]] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._looks = 0

    def look(self) -> None:
        """Read what is new. Raises errors of the store, after which it can be called again."""
        canaries = {(name, move.move): move for name in self._names() for move in self._channels.promotions(name)[:MOST_CANARIES]}
        self._found = {canary: found for canary, found in self._found.items() if canary in canaries}
        self._numbers = {canary: number for canary, number in self._numbers.items() if canary in canaries}
        asked: set[str] = set()
        for (name, _), move in canaries.items():
            if name not in asked or self._looks % _CANARIES_EVERY == 0:  # the newest one comes first
                self._read(move)
            asked.add(name)
        self._looks += 1

    def plain(self) -> list[dict[str, Any]]:
        """Return the newest evidence about each canary as plain values, the newest canary of each channel first."""
        newest = sorted(self._found.items(), key=lambda item: (item[0][0], -item[0][1]))
        return [{**found, **self._versions(found)} for _, found in newest]

    def _names(self) -> list[str]:
        """Return the channels that gates have watched. Each listing begins after the last possible record of the channel before."""
        found: list[str] = []
        after: str | None = None
        for _ in range(2 * MOST_CHANNELS):  # the folder may hold other objects
            info = next(iter(self._log.store.list(live_keys.GATES, after=after)), None)
            if info is None or len(found) == MOST_CHANNELS:
                break
            parsed = live_keys.parse_gate_key(info.key)
            if parsed is not None and parsed[0] not in found:
                found.append(parsed[0])
            after = info.key if parsed is None else live_keys.gate_key(parsed[0], _LAST, _LAST)
        return found

    def _read(self, move: ChannelMove) -> None:
        """Read the newest record about a canary, if there is a new one."""
        canary = (move.channel, move.move)
        last = self._numbers.get(canary)
        after = None if last is None else live_keys.gate_key(move.channel, move.move, last)
        listed = [
            parsed[2]
            for info in islice(self._log.store.list(live_keys.gate_folder(move.channel, move.move), after=after), _MOST_LISTED)
            if (parsed := live_keys.parse_gate_key(info.key)) is not None
        ]
        if not listed:
            return
        own: dict[str, Any] = {"channel": move.channel, "move": move.move, "seq": move.target.seq, "number": listed[-1], "problem": None}
        try:
            self._found[canary] = own | self._plain(self._record(move, listed[-1]))
        except StoreError:
            raise
        except DeltawireError as error:  # it may be repaired, so it is read again
            self._found[canary] = own | {"problem": short(str(error), 300)}
            return
        self._numbers[canary] = listed[-1]

    def _record(self, move: ChannelMove, number: int) -> GateRecord:
        key = live_keys.gate_key(move.channel, move.move, number)
        data = self._log.object(key)
        if data is None:
            raise CorruptRecord(f"{key} cannot be read.")
        record = GateRecord.parse(data)
        check_same_run(record.id, self._log.run, key)
        canary = record.canary
        if (canary.channel, canary.move, record.number, canary.target) != (move.channel, move.move, number, move.target):
            raise CorruptRecord(f"{key} holds {record.describe()}, or is about another version.")
        check_signature(record, self._log.trusted_keys)
        return record

    def _plain(self, record: GateRecord) -> dict[str, Any]:
        return {
            "stable": record.stable.channel,
            "stable_seq": record.stable.target.seq,
            "outcome": record.outcome,
            "why": short(record.why, 300),
            "alpha": record.alpha,
            "answers": record.answers,
            "age": record.age / 1000,
            "time": record.time / 1000,
            "evaluation": None if record.evaluation is None else _evaluation(record.evaluation),
            "limits": [_finding(finding) for finding in record.limits],
        }

    def _versions(self, found: dict[str, Any]) -> dict[str, Any]:
        return {"version": self._chain.version_of(found["seq"]), "stable_version": self._chain.version_of(found.get("stable_seq"))}


def _evaluation(result: EvaluationResult) -> dict[str, Any]:
    scores = [[short(name, 100), value] for name, value in result.scores.items()]
    return {"passed": result.passed, "attempts": result.attempts, "why": short(result.why, 200), "scores": scores}


def _finding(finding: LimitFinding) -> dict[str, Any]:
    try:
        limit: Limit | None = Limit.parse(finding.limit, must_hold=True)
    except UnusableGate:
        limit = None
    return {
        "limit": short(finding.limit, 140),
        "must_hold": finding.must_hold,
        "canary": [finding.canary.count, finding.canary.mean],
        "stable": [finding.stable.count, finding.stable.mean],
        "blocks": finding.blocks,
        "low": finding.low,
        "high": finding.high,
        "threshold": None if limit is None else limit.offset,
        "is_upper": limit is not None and limit.is_upper,
        "verdict": finding.verdict,
    }
