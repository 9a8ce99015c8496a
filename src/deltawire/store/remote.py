"""Stores that are reached through obstore: S3, GCS, Azure.

This module imports obstore, so it is imported only when such a store is opened. The library sends every request once, and `retry` repeats
it here, so that one module decides what may be repeated. Pieces of multipart uploads are the exception, because only the library can repeat
them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import NotModifiedError

from ..errors import DataDamaged, DeltawireError, LimitExceeded, StoreError, StoreUnavailable
from ..events import OnEvent
from ..format.content_hash import content_hash
from .base import (
    MAX_CREATE_BYTES,
    MULTIPART_STREAMS,
    Buffer,
    ObjectInfo,
    Progress,
    Store,
    StoreOptions,
    as_pieces,
    check_create,
    check_key,
    check_prefix,
    failure,
    is_key,
)
from .remote_errors import CLIENT_ERRORS, bucket_missing, creation_failed, translated
from .retry import Retry
from .streams.known_links import KNOWN
from .streams.link_estimate import LinkEstimate
from .streams.rate_limit import RateLimit
from .streams.stream_limit import FIRST_STREAMS, StreamLimit, Transfer

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_PAGE = 1000  # S3's largest page of a listing, and largest batch of a deletion
_PIECE = 1  # the fewest bytes that the client library hands over at once; with more, it loses some at a cut
_FIRST_REPORT, _REPORT = 32 * 1024, 256 * 1024  # bytes that are reported at a time: few at first, since a new connection is slow
_REPORT_SECONDS = 1.0  # fewer are reported if that many take longer, so that a slow transfer shows that it continues
_MOST_SKIPPED = 1_000_000  # objects in a row that a listing may show although nobody asked for them
_SMALLEST_RANGE = 256 * 1024  # objects are not cut into smaller ranges, since every request costs time and money
_SMALL = MAX_CREATE_BYTES  # transfers up to this size do not wait for others, since records must not be late
_LONGEST_TAG = 1024  # characters of an ETag that is sent back to the service
_MOST_PARTS = 9_000  # S3 and GCS allow 10,000


@dataclass(frozen=True, slots=True)
class Clients:
    """Four clients of one bucket with different time-outs (see `providers`). The time-out of a request is a property of its client."""

    small: ObjectStore
    """For records, listings and deletions. The time of a whole request is limited. It repeats nothing by itself."""
    download: ObjectStore
    """For objects. The time without progress is limited, the total time is not. It repeats nothing by itself."""
    upload: ObjectStore
    """For objects that fit one request. The time is limited by the size. It repeats nothing by itself."""
    multipart: ObjectStore
    """For multipart uploads. The time of each piece is limited by its size. It repeats pieces by itself."""


class RemoteStore(Store):
    """Stores objects under a prefix of a bucket."""

    def __init__(
        self,
        clients: Clients,
        *,
        url: str,
        prefix: str,
        options: StoreOptions,
        retry: Retry | None = None,
        endpoint: str = "",
        rate: RateLimit | None = None,
    ) -> None:
        self.url = url
        self._endpoint = endpoint
        self._clients = clients
        self._root = f"{prefix}/" if prefix else ""
        self._options = options
        self._retry = retry or Retry(options.retries)
        self._rate = rate or RateLimit(options.max_rate, options.max_requests)
        self._link_name = f"{endpoint} {url.removesuffix(prefix)}"  # the bucket, because all its prefixes are behind the same link
        self._down = StreamLimit(first=KNOWN.width(f"{self._link_name} down", FIRST_STREAMS), most=options.streams)
        self._up = StreamLimit(first=KNOWN.width(f"{self._link_name} up", FIRST_STREAMS), most=options.streams)
        self._pool = ThreadPoolExecutor(options.streams, thread_name_prefix="deltawire-read")  # starts no thread before the first use

    @property
    def streams(self) -> int:
        return max(self._down.room, self._up.room)

    @property
    def link(self) -> LinkEstimate:
        """The measured link: that of downloads, or of uploads if nothing was downloaded yet."""
        down = self._down.estimate()
        return self._up.estimate() if down.goodput is None and down.failures == 0 else down

    def listen(self, on_event: OnEvent | None) -> None:
        """Report every request that is about to be repeated, as an event "retrying"."""
        self._retry = replace(self._retry, on_event=on_event)

    def get(self, key: str, *, limit: int) -> bytes:
        found = self._get(key, limit, None)
        assert found is not None
        return found[0]

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        found = self._get(key, limit, tag)
        if found is None:
            return None
        data, etag = found
        new = etag if etag and len(etag) <= _LONGEST_TAG else content_hash(data)  # some proxies remove ETags
        return None if new == tag else (data, new)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)

        def attempt() -> ObjectInfo:
            self._rate.request()
            with self._translating("head", key):
                found = obstore.head(self._clients.small, path)
                return ObjectInfo(key, found["size"], found["last_modified"])

        return self._retry.call(attempt)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        target = buffer.cast("B")
        if not target:
            self.head(key)  # services do not support empty ranges
            return
        step = self._range_bytes(len(target))
        parts = [(offset + start, target[start : start + step]) for start in range(0, len(target), step)]
        if len(parts) == 1:
            self._read_part(key, *parts[0], progress)
            return
        futures = [self._pool.submit(self._read_part, key, start, part, progress) for start, part in parts]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # running requests still write to the caller's buffer

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_create(key, data)
        path = self._path(key)

        def attempt() -> None:
            self._rate.request()
            self._rate.transfer(len(data))
            try:
                obstore.put(self._clients.small, path, data, mode="create", use_multipart=False)
            except CLIENT_ERRORS as error:
                raise creation_failed(error, key, self.url, self._endpoint) from None

        self._retry.call(attempt)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        check_key(key)
        whole, pieces = as_pieces(data)
        if whole is None:
            head = _take(pieces, self._options.multipart_bytes + 1)
            if sum(map(len, head)) > self._options.multipart_bytes:
                self._put_parts(key, _counted(itertools.chain(head, pieces), size, key, self.url, progress), size)
                return
            whole = memoryview(b"".join(head))
        if size is not None and len(whole) != size:
            raise StoreError(failure("put", key, self.url, f"{size} bytes were announced, {len(whole)} came."))
        self._put_whole(key, whole, progress)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._pages(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := [check_key(key) for key in itertools.islice(remaining, _PAGE)]:
            self._retry.call(functools.partial(self._delete_batch, batch))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for way, limit in {"down": self._down, "up": self._up}.items():
            if limit.is_measured:
                KNOWN.note(f"{self._link_name} {way}", limit.width)

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _get(self, key: str, limit: int, unless: str | None) -> tuple[bytes, str | None] | None:
        """Return an object and its ETag, or None if its ETag is `unless`. The time for a small object is limited."""
        path = self._path(key)
        client = self._clients.small if limit <= _SMALL else self._clients.download

        def attempt() -> tuple[bytes, str | None] | None:
            self._rate.request()
            began = time.monotonic()
            with self._translating("get", key):
                try:
                    result = obstore.get(client, path, options={} if unless is None else {"if_none_match": unless})
                except NotModifiedError:
                    if unless is None:
                        raise
                    self._heard(time.monotonic() - began)
                    return None
                self._heard(time.monotonic() - began)
                size = result.meta["size"]
                if size > limit:
                    raise LimitExceeded(failure("get", key, self.url, f"it has {size} bytes, more than the {limit} allowed."))
                data = bytes(result.bytes())
                self._rate.transfer(len(data))
                return data, result.meta["e_tag"]

        return self._retry.call(attempt)

    def _heard(self, seconds: float) -> None:
        for limit in (self._down, self._up):
            limit.heard(seconds)

    @contextlib.contextmanager
    def _translating(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except CLIENT_ERRORS as error:
            # The cause is left out because its text holds addresses, which may hold signatures.
            raise translated(error, operation, key, self.url, self._endpoint) from None

    def _range_bytes(self, size: int) -> int:
        """Return the size of ranges for an object: small enough to use all free streams, but not so small that requests cost more."""
        return min(max(-(-size // max(1, self._down.free)), _SMALLEST_RANGE), self._options.multipart_bytes)

    def _read_part(self, key: str, start: int, part: memoryview, progress: Progress | None) -> None:
        """Read a range. After a cut, continue at the first byte that is missing."""
        path = self._path(key)
        filled = reported = 0
        enough = _FIRST_REPORT
        told = time.monotonic()

        def attempt() -> None:
            nonlocal filled, reported, enough, told
            if filled == len(part):  # the connection was cut after the last byte
                return
            self._rate.request()
            with self._streaming(self._down, len(part)) as transfer, self._translating("read", key):
                options = {"range": (start + filled, start + len(part))}
                answer = obstore.get(self._clients.download, path, options=options)  # type: ignore[arg-type]
                transfer.first_byte()
                # Read in pieces, so that a server that sends too much does not cost memory.
                for piece in answer.stream(_PIECE):
                    if filled + len(piece) > len(part):
                        raise DataDamaged(
                            failure("read", key, self.url, f"the store sent more than the {len(part)} bytes that were asked for.")
                        )
                    part[filled : filled + len(piece)] = memoryview(piece)
                    filled += len(piece)
                    if filled - reported >= enough or filled == len(part) or time.monotonic() - told >= _REPORT_SECONDS:
                        transfer.moved(filled - reported)
                        self._rate.transfer(filled - reported)
                        if progress is not None:
                            progress(filled - reported)
                        reported, told, enough = filled, time.monotonic(), min(2 * enough, _REPORT)
            if filled < len(part):
                raise DataDamaged(failure("read", key, self.url, f"it ends at byte {start + filled}, before {start + len(part)}."))

        self._retry.call(attempt, progress=lambda: filled)

    @contextlib.contextmanager
    def _streaming(self, limit: StreamLimit, size: int) -> Iterator[Transfer]:
        """Wait until the limit lets a transfer begin, and report its failure. Small transfers do not wait, and are not measured."""
        if size <= _SMALL:
            yield Transfer(None)
            return
        with limit.transfer() as transfer:
            try:
                yield transfer
            except StoreUnavailable:
                transfer.failed()
                raise

    def _put_whole(self, key: str, whole: memoryview, progress: Progress | None) -> None:
        """Send data that are completely in memory. After a failure all of them can be sent again."""
        path = self._path(key)
        step = self._options.multipart_bytes

        def send() -> None:
            self._rate.request()
            self._rate.transfer(len(whole))
            with self._streaming(self._up, len(whole)) as transfer, self._translating("put", key):
                obstore.put(self._clients.upload, path, whole, use_multipart=False)
                transfer.moved(len(whole))

        def send_parts() -> None:
            self._put_parts(key, (whole[start : start + step] for start in range(0, len(whole), step)), len(whole))

        if len(whole) <= step:
            self._retry.call(send)
        else:
            # Repeat at most once: each piece was already repeated, so only a forgotten upload is left to repair.
            replace(self._retry, retries=min(1, self._retry.retries)).call(send_parts)
        if progress is not None:
            progress(len(whole))

    def _put_parts(self, key: str, pieces: Iterator[memoryview], size: int | None) -> None:
        multipart_bytes = max(self._options.multipart_bytes, -(-(size or 0) // _MOST_PARTS))
        with self._translating("put", key):
            obstore.put(
                self._clients.multipart,
                self._path(key),
                self._paced(pieces, multipart_bytes),
                use_multipart=True,
                chunk_size=multipart_bytes,
                max_concurrency=min(MULTIPART_STREAMS, self._options.streams),
            )

    def _paced(self, pieces: Iterator[memoryview], multipart_bytes: int) -> Iterator[memoryview]:
        """Yield the pieces of a multipart upload at the allowed rate. The upload also has a request to begin it and one to end it."""
        self._rate.request()
        self._rate.request()
        unpaid = 0
        for piece in pieces:
            for start in range(0, len(piece), multipart_bytes):
                some = piece[start : start + multipart_bytes]
                self._rate.transfer(len(some))
                unpaid += len(some)
                while unpaid > 0:
                    self._rate.request()
                    unpaid -= multipart_bytes
                yield some

    def _pages(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        folder = (self._root + prefix).rstrip("/") or None
        last = after
        stream: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal stream
            if stream is None or is_full:  # otherwise the listing is known to end, which takes no request
                self._rate.request()
            try:
                with self._translating("list", prefix):
                    if stream is None:
                        offset = None if last is None else self._root + last
                        stream = iter(obstore.list(self._clients.small, folder, offset=offset, chunk_size=_PAGE))
                    return next(stream, None)
            except DeltawireError:
                stream = None  # a failed stream has ended; the next attempt continues after the last key seen
                raise

        is_full = False
        skipped = 0
        while (page := self._retry.call(next_page)) is not None:
            is_full = len(page) == _PAGE
            for found in page:
                key = found["path"][len(self._root) :]
                if not is_key(key) or (after is not None and key <= after):
                    skipped += 1
                    if skipped > _MOST_SKIPPED:
                        raise StoreError(failure("list", prefix, self.url, "the listing does not end."))
                    continue
                skipped = 0
                if last is not None and key <= last:
                    raise StoreError(failure("list", prefix, self.url, f"{key!r} came after {last!r}, out of order."))
                last = key
                yield ObjectInfo(key, found["size"], found["last_modified"])

    def _delete_batch(self, batch: Sequence[str]) -> None:
        self._rate.request()
        try:
            obstore.delete(self._clients.small, [self._path(key) for key in batch])
        except FileNotFoundError as error:
            if bucket_missing(error):
                raise translated(error, "delete", batch[0], self.url, self._endpoint) from None
            if len(batch) > 1:  # some services stop at a missing object, so delete the others one by one
                for key in batch:
                    self._delete_batch([key])
        except CLIENT_ERRORS as error:
            raise translated(error, "delete", batch[0], self.url, self._endpoint) from None


def _take(pieces: Iterator[memoryview], size: int) -> list[memoryview]:
    """Return the first pieces, until they hold `size` bytes or end."""
    taken, total = [], 0
    for piece in pieces:
        taken.append(piece)
        total += len(piece)
        if total >= size:
            break
    return taken


def _counted(pieces: Iterator[memoryview], size: int | None, key: str, url: str, progress: Progress | None) -> Iterator[memoryview]:
    """Yield the same pieces without empty ones. Raises an error at the end, before the upload is completed, if they do not have `size`
    bytes.
    """
    total = 0
    for piece in pieces:
        if piece:
            yield piece
            total += len(piece)
            if progress is not None:
                progress(len(piece))
    if size is not None and total != size:
        raise StoreError(failure("put", key, url, f"{size} bytes were announced, {total} came."))
