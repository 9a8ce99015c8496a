"""The interface of every store: a flat map from keys to immutable bytes, with create-if-absent.

`deltawire.testing.StoreConformance` tests each promise. Nothing in this module knows about chains.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from ..errors import StoreError
from ..format.content_hash import content_hash
from .streams.link_estimate import LinkEstimate

Buffer: TypeAlias = bytes | bytearray | memoryview
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes moved since its last call, possibly from several threads at once."""

MAX_CREATE_BYTES = 64 * 1024
"""The largest object that `put_if_absent` accepts. Records are small, so one request always holds a whole record."""

# No part of a key begins with a dot: hidden names belong to the local store, and this also excludes '.' and '..'. No store, proxy or
# file system escapes or folds these characters. The lengths fit S3 (1024 with the prefix) and file systems (255 for each part).
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*")
MAX_KEY = 512

MULTIPART_STREAMS = 16
"""The most pieces of one multipart upload that are sent at the same time."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Describes an object in a store.

    Parameters
    ----------
    key
        The object's key.
    size
        Its size in bytes.
    modified
        When it was last written, by the store's clock, with a time zone.
    """

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Say how to reach a store. The defaults suit a data centre and also work over a slow line.

    An upload in pieces holds at most 16 times `multipart_bytes` in memory, in addition to the caller's own buffers.

    Parameters
    ----------
    timeout
        Seconds that a small request may take, and that a large one may stay without progress. Uploads get more time, by their size.
    retries
        How many times a failed request is repeated, with growing random pauses.
    streams
        The most transfers of objects, or of pieces of them, that run at the same time in each direction. Four run at first. The number
        follows the measured link: it grows while goodput grows, and shrinks when goodput falls or transfers fail.
    multipart_bytes
        The size of pieces, in bytes. At least 5 MiB, the smallest that S3 accepts for uploads. Downloads may use smaller ones.
    endpoint
        The address of the service. None uses AWS_ENDPOINT_URL and similar variables, then the provider's own address.
    region
        The region of an S3 bucket.
    virtual_hosted
        Whether S3 requests name the bucket in the host name. None chooses by the endpoint.
    allow_http
        Whether to accept a plain http:// endpoint that is not a loopback address.
    max_rate
        The most bytes per second that are sent and received together. None means no limit. Stores in directories and in memory ignore it.
    max_requests
        The most requests per second. None means no limit. Stores in directories and in memory ignore it.
    """

    timeout: float = 30.0
    retries: int = 6
    streams: int = 64
    multipart_bytes: int = 8 * 1024 * 1024
    endpoint: str | None = None
    region: str | None = None
    virtual_hosted: bool | None = None
    allow_http: bool = False
    max_rate: float | None = None
    max_requests: float | None = None

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.retries < 0 or self.streams < 1:
            raise ValueError("timeout must be positive, retries at least 0 and streams at least 1")
        if self.multipart_bytes < 5 * 1024 * 1024:
            raise ValueError("multipart_bytes must be at least 5 MiB, the smallest piece that S3 accepts")
        if not all(rate is None or 0 < rate < math.inf for rate in (self.max_rate, self.max_requests)):
            raise ValueError("max_rate and max_requests must be above 0 and finite; None means no limit")


class Store(ABC):
    """Keeps objects under keys. Every method may be called from any thread.

    Keys are relative to the store's root (see `check_key`). No reader ever sees an object that is only partly written. A key is never also
    the folder of another key. Errors are those of `deltawire.errors`; their messages name the operation, the key and the store.
    """

    url: str
    """The location of the store for messages, without credentials."""

    @abstractmethod
    def get(self, key: str, *, limit: int) -> bytes:
        """Return the whole object. Raises `ObjectMissing`, or `LimitExceeded` if the object is larger than `limit`.

        Parameters
        ----------
        key
            The object's key.
        limit
            The largest size to accept, in bytes. At most this many bytes are read.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and time of an object. Raises `ObjectMissing`.

        Parameters
        ----------
        key
            The object's key.
        """

    @abstractmethod
    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        """Fill a buffer with bytes of an object, in parallel ranges where that is faster.

        Raises `ObjectMissing`, or `DataDamaged` if the object ends before the buffer is full. After an error the content of the buffer is
        undefined.

        Parameters
        ----------
        key
            The object's key.
        buffer
            A writable, contiguous buffer.
        offset
            The position of the first byte to read.
        progress
            Called with the number of bytes read. Bytes that are read again after a failure are reported once.
        """

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object of at most 64 KiB unless its key is taken. If several callers race, exactly one succeeds.

        Raises `ObjectExists` if the key is taken, perhaps by this caller's own object after a retry: read it back to find out. Raises
        `OutcomeUnknown` if the object may or may not exist. After such an error the store does not try again, because only the caller can
        recognise its own object.

        Parameters
        ----------
        key
            The object's key.
        data
            The bytes of the object.
        """

    @abstractmethod
    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        """Write an object of any size, and replace an existing one. Failed requests are repeated; large data are sent in parallel pieces.

        After an error the store holds the old object or the complete new one.

        Parameters
        ----------
        key
            The object's key.
        data
            The bytes, or an iterable of buffers. An iterable is read once, possibly from another thread and a few pieces ahead. Its buffers
            must not change after they were yielded.
        size
            The size of the data, if known. If the data have another size, `StoreError` is raised and no object appears.
        progress
            Called with the number of bytes sent.
        durable
            Whether the object must survive a power failure. Set it to False for hints, so that a local store does not wait for the disk.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects in a folder and below it, ascending by key.

        Pages are fetched as the iterator advances. Objects that are written or deleted meanwhile may or may not appear. Names that are not
        valid keys belong to other programs and are skipped. Stores disagree about the order of a folder "x/" and its siblings "x-…" and
        "x.…", so deltawire never uses such names together.

        Parameters
        ----------
        prefix
            The folder: "" or a path that ends in "/".
        after
            Yield only keys above this one, which need not exist.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Missing objects are no error. After an error some of them are deleted.

        Parameters
        ----------
        keys
            The keys of the objects.
        """

    @property
    def streams(self) -> int:
        """The number of transfers of whole objects that callers should run at the same time."""
        return 4

    @property
    def link(self) -> LinkEstimate | None:
        """The measured link to the store. None if the store does not measure it."""
        return None

    @property
    def can_wait(self) -> bool:
        """True if `wait_for_change` waits. Otherwise it looks once and returns at once."""
        return False

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        """Return the object and its tag, or None if the object still has the tag `tag`. Raises the errors of `get`.

        Two contents of one object never have the same tag. A tag means nothing to other stores, or for other keys. By default the tag is
        the hash of the content, and the object is read every time.

        Parameters
        ----------
        key
            The object's key.
        limit
            The largest size to accept, in bytes.
        tag
            The tag that an earlier call returned. None returns the object in any case.
        """
        data = self.get(key, limit=limit)
        found = content_hash(data)
        return None if found == tag else (data, found)

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        """Wait until the object has another tag than `tag`, and return it as `get_if_changed` does. Returns None if it has not changed.

        Raises `ObjectMissing` if the object does not exist in the end, and other errors of `get` at once. Stores that cannot wait look
        once and return at once, which is the default. So a caller that waits in a loop must pause between calls that return early.

        Parameters
        ----------
        key
            The object's key.
        limit
            The largest size to accept, in bytes.
        tag
            The tag that an earlier call returned. None waits only while the object is missing.
        timeout
            The longest time to wait, in seconds.
        """
        return self.get_if_changed(key, limit=limit, tag=tag)

    def doubt(self, key: str) -> None:
        """Note that the bytes read from this key were wrong. A store with several sources reads them from another one next.

        The default does nothing.

        Parameters
        ----------
        key
            The object's key.
        """
        check_key(key)

    def distrust(self, reason: str, *, may_come: bool) -> bool:
        """Note that what was read does not lead to a version. A store with several sources reads from its origin for a while.

        Returns whether reading again may give something else. The default does nothing and returns False.

        Parameters
        ----------
        reason
            What is wrong, for an event.
        may_come
            Whether only data are missing, which a source may still get.
        """
        return False

    def origin_alone(self) -> AbstractContextManager[None]:
        """Return a context in which a store with several sources reads records and listings from its origin only."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. May be called twice; no other method may be called afterwards."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_key(key: str) -> bool:
    """Tell whether a string can name an object: parts of letters, digits, '.', '_' and '-' that do not begin with a dot, joined by '/'."""
    return len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return the key, or raise `StoreError` if it cannot name an object. Every store calls this first, so no key leaves its root.

    Parameters
    ----------
    key
        The key to check.
    """
    if not is_key(key):
        raise StoreError(
            f"{key!r} cannot name an object: use letters, digits, '.', '_' and '-' in parts joined by '/', none hidden or empty."
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix, or raise `StoreError` unless it is "" or a folder with its closing slash. Stores disagree about other prefixes."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise StoreError(f"{prefix!r} cannot be listed: a prefix is empty, or a folder that ends in '/'.")
    return prefix


def check_create(key: str, data: bytes) -> None:
    """Raise `StoreError` unless `put_if_absent` accepts this key and these bytes."""
    check_key(key)
    if len(data) > MAX_CREATE_BYTES:
        raise StoreError(f"create of {key!r} was given {len(data)} bytes; at most {MAX_CREATE_BYTES} can be created if absent.")


def as_pieces(data: Buffer | Iterable[Buffer]) -> tuple[memoryview | None, Iterator[memoryview]]:
    """Return a flat view of the data if they are one buffer, which can be sent again, and an iterator over flat views of all pieces."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(data).cast("B")
        return view, iter([view])
    return None, (memoryview(piece).cast("B") for piece in data)


_VERBS = {
    "get": "reading",
    "read": "reading",
    "head": "looking up",
    "put": "writing",
    "create": "creating",
    "delete": "deleting",
    "list": "listing",
}
"""How error messages name the operations of a store."""


def failure(operation: str, key: str, url: str, why: str) -> str:
    """Return the text of a store's error message. All stores use this form."""
    return f"{_VERBS.get(operation, operation)} {key!r} in {url} failed: {why}"
