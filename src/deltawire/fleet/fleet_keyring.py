"""Signatures of the records that a trainer writes for its fleet: boards, rounds, batches and rejections (docs/protocol.md §7, §10)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from ..errors import SignatureInvalid
from ..format.records.signing import Signable, SigningKey, check_signature

_Record = TypeVar("_Record", bound=Signable)


class FleetKeyring:
    """Signs records and checks signatures. Without keys nothing is signed, and everything is trusted.

    Parameters
    ----------
    signing_key
        The trainer's key. Its public key is trusted, too.
    trusted_keys
        Further public keys that are trusted.
    """

    def __init__(self, signing_key: SigningKey | None = None, trusted_keys: Collection[str] = ()) -> None:
        self._key = signing_key
        self.trusted = frozenset(trusted_keys) if signing_key is None else frozenset({signing_key.public, *trusted_keys})

    @property
    def signs(self) -> bool:
        """True if there is a key to sign with."""
        return self._key is not None

    def sign(self, record: _Record) -> _Record:
        """Return the record with a signature. Without a key to sign with, return it unchanged."""
        return record if self._key is None else self._key.sign(record)

    def trusts(self, record: Signable) -> bool:
        """Return whether one of the trusted keys signed the record. Without trusted keys every record is trusted."""
        try:
            check_signature(record, self.trusted)
        except SignatureInvalid:
            return False
        return True
