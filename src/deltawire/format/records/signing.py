"""Ed25519 signatures of records (docs/protocol.md §7). Signing and checking need the extra `sign`.

Any record type can be signed if it is a dataclass with the fields and methods of `Signable`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ...errors import SignatureInvalid
from .record_parts import Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_CONTEXT = b"deltawire-record-v1\n"
_HEADER = "deltawire ed25519 signing key v1"
_MOST_KEY_FILE = 1024
_PUBLIC_KEY = re.compile("[0-9a-f]{64}")


class Signable(Protocol):
    """A record that can be signed: a dataclass whose canonical form has the field `signature`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def signature(self) -> Signature | None:
        """The signature, or None if the record is not signed."""

    def describe(self) -> str:
        """Return the name of the record for error messages."""

    def to_bytes(self) -> bytes:
        """Return the canonical form. It MUST contain the record's type, so that a signature of one type is not valid for another."""


_Signed = TypeVar("_Signed", bound=Signable)


class SigningKey:
    """The secret key that a publisher signs versions with. Give `public` to readers. Needs the extra `sign`.

    >>> key = SigningKey.load("trainer.key")  # made by `deltawire keygen trainer.key`, or by SigningKey.generate().save("trainer.key")
    >>> publisher = Publisher("s3://bucket/run-7", options=WriterOptions(signing_key=key))
    >>> subscriber = Subscriber("s3://bucket/run-7", options=ReaderOptions(trusted_keys=[key.public]))

    Parameters
    ----------
    private
        The private key of the library `cryptography`. Use `load` or `generate` instead.
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key."""
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path | str) -> SigningKey:
        """Return the key that `save` wrote. Raises ValueError if the file holds no key, or if other users may read it.

        Parameters
        ----------
        path
            The file.
        """
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = Path(path)
        with path.open(encoding="ascii", errors="replace") as file:
            lines = file.read(_MOST_KEY_FILE).splitlines()
        if len(lines) != 2 or lines[0] != _HEADER or not re.fullmatch("[0-9a-f]{64}", lines[1]):
            raise ValueError(f"{path} is not a deltawire signing key. Make one with `deltawire keygen FILE`.")
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise ValueError(f"{path} may be read by others than its owner. Run chmod 600 on it, and think about who has read it.")
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(lines[1])))

    def save(self, path: Path | str) -> None:
        """Write the key to a new file that only its owner may read. Raises FileExistsError if the file exists.

        Parameters
        ----------
        path
            The file, which must not exist yet.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{_HEADER}\n{self._private.private_bytes_raw().hex()}\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits, which readers trust."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, record: _Signed) -> _Signed:
        """Return the same record with this key's signature, which replaces a previous one.

        Parameters
        ----------
        record
            The record.
        """
        signature = self._private.sign(_signed_bytes(record))
        return dataclasses.replace(record, signature=Signature(self.public, signature.hex()))

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"


def public_keys(trusted_keys: Iterable[str]) -> frozenset[str]:
    """Return these public keys as a set, so that an iterator is read once and for all.

    Raises TypeError or ValueError unless they are public keys, for example because a file's name was given instead.
    """
    if isinstance(trusted_keys, str):
        raise TypeError("trusted_keys is a list of keys: pass [key] instead of key")
    keys = frozenset(trusted_keys)
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"trusted_keys holds a {type(key).__name__}: pass public keys as text, for example SigningKey.public")
        if not _PUBLIC_KEY.fullmatch(key):
            raise ValueError(
                f"trusted_keys holds {key[:80]!r}, which is not a public key: that has 64 hexadecimal digits (0-9, a-f). "
                "`deltawire keygen --public FILE` prints the one of a key file"
            )
    return keys


def check_signature(record: Signable, trusted: Collection[str]) -> None:
    """Raise `SignatureInvalid` unless one of the trusted keys signed the record. Checks nothing if there are no trusted keys."""
    if not trusted:
        return
    signature = record.signature
    if signature is None:
        raise SignatureInvalid(f"{record.describe()} is not signed.")
    if signature.key not in trusted:
        raise SignatureInvalid(f"{record.describe()} is signed by {signature.key}, which is not trusted.")
    _require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(bytes.fromhex(signature.ed25519), _signed_bytes(record))
    except (InvalidSignature, ValueError):
        raise SignatureInvalid(f"the signature of {record.describe()} is wrong.") from None


def _signed_bytes(record: Signable) -> bytes:
    return _CONTEXT + dataclasses.replace(record, signature=None).to_bytes()


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "signatures need the package cryptography, which deltawire's extra `sign` installs. Run `pip install cryptography`"
        ) from error
