"""Reads, writes and deletes the evidence of a gate. The first record that decides about a canary is the last one that counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..chain.log import ChainLog
from ..errors import CorruptRecord, DataMissing
from ..format.records.gate_records import ChannelPosition, GateRecord
from ..format.records.run_records import check_same_run
from ..format.records.signing import SigningKey, check_signature
from ..store import live_keys
from ..store.create_rule import create_and_look

_SWEPT_AT_ONCE = 1000


class StoredRecord(NamedTuple):
    """A record, and when it was stored, by the store's clock, in seconds."""

    record: GateRecord
    stored: float


class GateRecords:
    """The records about one canary.

    Parameters
    ----------
    log
        The chain. If its readers trust keys, records that none of them signed are refused (`SignatureInvalid`).
    canary
        The current move of the canary's channel.
    key
        The key to sign records with, if the chain is signed.
    sleep
        Waits some seconds.
    """

    def __init__(
        self, log: ChainLog, canary: ChannelPosition, *, key: SigningKey | None = None, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._log = log
        self._canary = canary
        self._key = key
        self._sleep = sleep

    def newest(self) -> StoredRecord | None:
        """Return the newest record, or None if there is none. Raises `CorruptRecord` or `SignatureInvalid`."""
        folder = live_keys.gate_folder(self._canary.channel, self._canary.move)
        last = None
        for info in self._log.store.list(folder):
            if live_keys.parse_gate_key(info.key) is not None:
                last = info
        if last is None:
            return None
        data = self._log.object(last.key)
        if data is None:
            raise DataMissing(f"{last.key} was listed in {self._log.store.url}, but cannot be read.")
        return StoredRecord(self._checked(last.key, data), last.modified.timestamp())

    def write(self, record: GateRecord) -> StoredRecord:
        """Create a record, and return the one that has its number then: this one, or that of another gate.

        Parameters
        ----------
        record
            The record. Its number is one above that of the newest one.
        """
        signed = record if self._key is None else self._key.sign(replace(record, signature=None))
        check_signature(signed, self._log.trusted_keys)
        key = live_keys.gate_key(record.canary.channel, record.canary.move, record.number)
        found = create_and_look(self._log.store, key, signed.to_bytes(), sleep=self._sleep)
        return StoredRecord(self._checked(key, found), self._log.store.head(key).modified.timestamp())

    def sweep(self, before: float) -> None:
        """Delete the records about earlier canaries of this channel that were stored before a time of the store, in seconds.

        No gate needs them: the canary that the channel names is never among them, and a decision about an earlier one can make no move.
        The records about one canary are deleted by rising number, so its decision goes last.

        Parameters
        ----------
        before
            The time.
        """
        own = live_keys.gate_folder(self._canary.channel, self._canary.move)
        old: list[str] = []
        for info in self._log.store.list(live_keys.gates_of(self._canary.channel)):
            if info.key >= own or info.modified.timestamp() >= before or len(old) == _SWEPT_AT_ONCE:
                break
            if live_keys.parse_gate_key(info.key) is not None:
                old.append(info.key)
        if old:
            self._log.store.delete(old)

    def _checked(self, key: str, data: bytes) -> GateRecord:
        record = GateRecord.parse(data)
        check_same_run(record.id, self._log.run, key)
        named = live_keys.gate_key(record.canary.channel, record.canary.move, record.number)
        if named != key or record.canary != self._canary:
            raise CorruptRecord(f"{key} in {self._log.store.url} holds {record.describe()}.")
        check_signature(record, self._log.trusted_keys)
        return record
