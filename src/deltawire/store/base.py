"""What every store promises: a flat map from keys to immutable bytes, with create-if-absent.

`deltawire.testing.StoreConformance` holds each promise as a test. Nothing here knows about chains.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from ..errors import StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes moved since the call before; from several threads at once."""

MAX_CREATE_BYTES = 64 * 1024
"""The largest object that `put_if_absent` takes. Records are small, so one request always holds a whole one."""

# A part begins with no dot: hidden names belong to the local store itself, and '.' and '..' are excluded with them. The alphabet is one
# that no store, proxy or file system escapes or folds. Lengths are what S3 (1024 with the prefix) and file systems (255 a part) carry.
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*")
MAX_KEY = 512


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as the store describes it; `modified` is aware and by the store's clock, never this machine's."""

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Say how to reach a store. The defaults suit a data centre and also work over a slow line.

    A transfer holds at most `streams` times `multipart_bytes` in memory, in addition to the caller's own buffers.

    Parameters
    ----------
    timeout
        Seconds that a small request may take, and that a large one may stay without progress. Uploads get more time, by their size.
    retries
        How many times a failed request is repeated, with growing random pauses.
    streams
        How many pieces of one large transfer are sent or fetched at the same time.
    multipart_bytes
        The size of these pieces, in bytes. At least 5 MiB, the smallest that S3 accepts.
    endpoint
        The address of the service. None uses AWS_ENDPOINT_URL and similar variables, then the provider's own address.
    region
        The region of an S3 bucket.
    virtual_hosted
        Whether S3 requests name the bucket in the host name. None chooses by the endpoint.
    allow_http
        Whether to accept a plain http:// endpoint that is not a loopback address.
    """

    timeout: float = 30.0
    retries: int = 6
    streams: int = 16
    multipart_bytes: int = 8 * 1024 * 1024
    endpoint: str | None = None
    region: str | None = None
    virtual_hosted: bool | None = None
    allow_http: bool = False

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.retries < 0 or self.streams < 1:
            raise ValueError("timeout must be positive, retries at least 0 and streams at least 1")
        if self.multipart_bytes < 5 * 1024 * 1024:
            raise ValueError("multipart_bytes must be at least 5 MiB, the smallest piece that S3 accepts")


class Store(ABC):
    """A place that keeps objects. Every method may be called from any thread.

    Keys are relative to the store's root (see `check_key`). No object is ever seen half written: it appears whole or not at all. A key is
    never also the folder of another. Errors are those of `deltawire.errors`; their messages name operation, key and store.
    """

    url: str
    """Where this is, for messages: without credentials."""

    @abstractmethod
    def get(self, key: str, *, limit: int) -> bytes:
        """The whole object. `ObjectMissing`; `LimitExceeded` if it is larger than `limit` bytes, of which no more than that are read."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object. `ObjectMissing`."""

    @abstractmethod
    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        """Fill a writable, contiguous buffer with the bytes from `offset` on, in parallel ranges where that helps.

        `ObjectMissing`; `DataDamaged` if the object ends before the buffer is full. After an error the buffer's content is undefined. A
        part that is repeated is not reported to `progress` twice.
        """

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object of at most 64 KiB, unless there is one: of any number of racing callers exactly one succeeds.

        `ObjectExists`: somebody's object is there, perhaps our own after a retry on the way: read it back and look. `OutcomeUnknown`: it
        may or may not be there. Never repeated in here after such a failure: only the caller can tell its own object from another's.
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
        """Write an object of any size, replacing one that is there. Repeats what fails; large data go in parallel parts.

        An iterable is read once, from another thread perhaps, and only a few parts ahead; its pieces must not change after they were
        given. If `size` is given and the data are of another, `StoreError`, and no object appears. After an error the object is the old
        one, or the new one, whole. Without `durable` a power failure soon after may lose the object or leave any bytes in its place: for
        hints, where a store that would have to wait for a disk need not.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects in the folder `prefix` ("" or ending in "/") and below, ascending by key; only keys above `after`, which need not exist.

        Fetched page by page as the iterator is driven. Stores disagree about the order of a folder "x/" and its siblings "x-…" and "x.…",
        so no such names are used together. What is written or deleted meanwhile may or may not be seen. Names that are no keys are
        skipped: they are somebody else's.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; that one is missing is fine. After an error some are deleted."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and connections. May be called twice; nothing else may be called after."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_key(key: str) -> bool:
    """Whether a string can name an object: parts of letters, digits, '.', '_' and '-' that do not begin with a dot, joined by '/'."""
    return len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """The key itself, or `StoreError` if it cannot name an object. Every store calls this first, so no key escapes its root."""
    if not is_key(key):
        raise StoreError(
            f"{key!r} cannot name an object: use letters, digits, '.', '_' and '-' in parts joined by '/', none hidden or empty."
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself, or `StoreError` if it is neither "" nor a folder with its closing slash (stores disagree about anything else)."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise StoreError(f"{prefix!r} cannot be listed: a prefix is empty, or a folder that ends in '/'.")
    return prefix


def check_create(key: str, data: bytes) -> None:
    """`StoreError` unless these may be given to `put_if_absent`."""
    check_key(key)
    if len(data) > MAX_CREATE_BYTES:
        raise StoreError(f"create of {key!r} was given {len(data)} bytes; at most {MAX_CREATE_BYTES} can be created if absent.")


def as_pieces(data: Buffer | Iterable[Buffer]) -> tuple[memoryview | None, Iterator[memoryview]]:
    """Flat views of the data, piece by piece; and the one view, if the data are a single buffer and can therefore be sent again."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(data).cast("B")
        return view, iter([view])
    return None, (memoryview(piece).cast("B") for piece in data)


def failure(operation: str, key: str, url: str, why: str) -> str:
    """The one form of a store's error message."""
    return f"{operation} of {key!r} in {url} failed: {why}"
