"""Translate errors of the client library.

The library reports most facts only as text, so this module parses the text: the HTTP status, the service's own code, and whether a
connection was made. `tests/unit/store/test_remote_errors.py` checks these texts with a server that fails on purpose.
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError

from ..errors import (
    DataDamaged,
    DeltawireError,
    ObjectExists,
    ObjectMissing,
    OutcomeUnknown,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from .base import failure

CLIENT_ERRORS = (BaseError, FileNotFoundError)

_STATUS = re.compile(r"status code: (\d{3})([^\n]*)")
_SERVICE_CODE = re.compile(r"<Code>([^<]{1,64})</Code>")
_CONNECTION = re.compile(r"HttpError \{\s*kind: (\w+)")
_PAST_THE_END = re.compile(r"Wanted range starting at \d+, but object was only \d+ bytes long")
_OTHER_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_ADDRESS = re.compile(r"https?://\S+")  # may hold a signature
_METADATA_SERVICE = "169.254."  # machines ask here for their role's credentials; if it does not answer, there are none

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_QUOTA = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge"}


def bucket_missing(error: Exception) -> bool:
    """Tell whether a 404 means that the bucket is missing, not just an object in it."""
    return _read(error)[1] in _NO_BUCKET


def translated(error: Exception, operation: str, key: str, url: str, endpoint: str = "") -> DeltawireError:
    """Return the error to raise for a read, or for a write that may be repeated. `endpoint` is the server's address, if known."""
    status, code, why = _read(error, endpoint)
    kind: type[DeltawireError]
    if status == 404 or isinstance(error, FileNotFoundError):
        if code in _NO_BUCKET:
            kind, why = StoreError, "the bucket does not exist."
        elif operation in {"get", "head", "read"}:
            kind, why = ObjectMissing, "there is no such object."
        else:
            # Listing or deleting nothing succeeds, so the bucket is missing, or the upload was completed by an earlier attempt.
            kind = StoreUnavailable if code == "NoSuchUpload" else StoreError
    elif status == 416 or _PAST_THE_END.search(str(error)):
        kind, why = DataDamaged, "it ends before the range that was asked for."
    elif status is None and _OTHER_RANGE.search(str(error)):
        kind, why = DataDamaged, "the service sent another range than was asked for."
    else:
        kind = _kind(error, status, code)
    return kind(failure(operation, key, url, why))


def creation_failed(error: Exception, key: str, url: str, endpoint: str = "") -> StoreError:
    """Return the error to raise for create-if-absent. It is `StoreUnavailable` only if the service did nothing for sure, so that it may be
    repeated.
    """
    status, code, why = _read(error, endpoint)
    kind: type[StoreError]
    if status == 412 or code == "BlobAlreadyExists" or (status is None and type(error).__name__ == "AlreadyExistsError"):
        kind, why = ObjectExists, "an object of this name exists."
    elif status == 404:
        kind, why = StoreError, "the bucket does not exist."
    elif status in {409, 408} or (status is not None and status >= 500 and status not in {501, 507}):
        kind = OutcomeUnknown  # 409: S3 met another writer of the same key, and does not say which one succeeded
    elif status is None and _connection(error) != "Connect":
        kind = OutcomeUnknown
    elif status == 501:
        kind = StoreUnsuitable
    else:
        kind = _kind(error, status, code)
    return kind(failure("create", key, url, why))


def _kind(error: Exception, status: int | None, code: str | None) -> type[StoreError]:
    if code in _QUOTA or status == 507:
        return StoreFull
    if status in {401, 403}:
        return StoreDenied
    if status is None and _METADATA_SERVICE in str(error):
        return StoreDenied
    if status in {408, 409, 425, 429} or (status is not None and status >= 500 and status != 501):
        return StoreUnavailable
    if status is None and _connection(error) is not None:
        return StoreUnavailable
    return StoreError


def _read(error: Exception, endpoint: str = "") -> tuple[int | None, str | None, str]:
    """Return the HTTP status, the service's own code, and a sentence without any address except `endpoint`."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    service = _SERVICE_CODE.search(text)
    code = service.group(1) if service else None
    if status is None and _METADATA_SERVICE in text:
        return None, None, "no credentials were found."
    if found:
        reason = found.group(2).split(":", 1)[0].strip()
        return status, code, f"the service answered {status} {reason}{f' ({code})' if code else ''}."
    connection = _connection(error)
    if connection == "Connect":
        server = f"the server at {endpoint}" if endpoint else "the service"
        check = "Check that this address is right (for S3: AWS_ENDPOINT_URL), and that a server runs there." if endpoint else ""
        return None, None, f"no connection to {server} could be made. {check}".rstrip()
    if connection is not None:
        return None, None, f"the connection{f' to {endpoint}' if endpoint else ''} failed ({connection})."
    return None, None, first_sentence(error)


def first_sentence(error: Exception) -> str:
    """Return the library's own message without addresses and without details for its developers."""
    return _ADDRESS.sub("…", str(error).split("\n", 1)[0])[:300].rstrip(".") + "."


def _connection(error: Exception) -> str | None:
    """Return how the connection failed (Connect, Timeout, Request, Interrupted…), or None. After "Connect" nothing was sent."""
    found = _CONNECTION.search(str(error))
    return found.group(1) if found else None
