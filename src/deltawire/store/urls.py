"""From a URL to a store."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import BadUrl
from .base import Store, StoreOptions, is_key
from .local import LocalStore
from .memory import MemoryStore

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(url: str | Path | Store, *, options: StoreOptions | None = None) -> Store:
    """Open the place that a URL or path names; an open store is returned as it is. Nothing is asked of it yet: see `probe`.

    - a path, or `file:///path`: a directory, created by the first write
    - `memory://NAME`: one store per name and process
    - `s3://BUCKET[/PREFIX]`: credentials, region and endpoint from the usual AWS_* variables, AWS_ENDPOINT_URL among them, or the
    machine's role
    - `gs://BUCKET[/PREFIX]`: GOOGLE_* variables or application-default credentials
    - `az://CONTAINER[/PREFIX]`: AZURE_* variables
    - `hf://buckets/OWNER/NAME[/PREFIX]`: a Hugging Face bucket, through its S3 gateway; see `providers.hugging_face_store`

    `BadUrl` if it is none of these. Credentials in a URL are refused, since URLs end up in logs.
    """
    if isinstance(url, Store):
        return url
    if isinstance(url, Path):
        return LocalStore(url.expanduser())
    if "://" not in url:
        if not url:
            raise BadUrl("an empty string names no store.")
        return LocalStore(Path(url).expanduser())
    return _open_url(url, options or StoreOptions())


def _open_url(url: str, options: StoreOptions) -> Store:
    try:
        parts = urlsplit(url)
    except ValueError:  # without the text, which may hold credentials
        raise BadUrl(f"what follows {url.split('://')[0]}:// cannot be read.") from None
    scheme = parts.scheme.lower()
    if "@" in parts.netloc:
        raise BadUrl(f"a {scheme}:// URL holds credentials; give them in the environment.")
    if parts.query or parts.fragment:
        raise BadUrl(f"{scheme}://{parts.netloc}{parts.path} is followed by a query or fragment, which means nothing here.")
    if scheme == "file":
        return _open_file(parts, url)
    if scheme == "memory":
        return _open_memory(parts, url)
    if scheme not in {"s3", "gs", "az", "hf"}:
        raise BadUrl(f"{url!r} has an unknown scheme.")
    from . import providers  # here, so that whoever uses only local stores does not pay for the client library

    if scheme == "hf":
        kind, (owner, name, prefix) = parts.netloc, _split(parts.path, 2, url)
        if kind != "buckets":
            raise BadUrl(f"{url!r} is no bucket.")
        return providers.hugging_face_store(owner, name, prefix, options)
    bucket, prefix = _split(f"{parts.netloc}{parts.path}" if parts.netloc else "", 1, url)
    opener = {"s3": providers.s3_store, "gs": providers.gcs_store, "az": providers.azure_store}[scheme]
    return opener(bucket, prefix, options)


def _open_file(parts: SplitResult, url: str) -> Store:
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise BadUrl(f"{url!r} is not of the form file:///absolute/path.")
    return LocalStore(unquote(parts.path))


def _open_memory(parts: SplitResult, url: str) -> Store:
    name = f"{parts.netloc}{parts.path}".rstrip("/")
    if not is_key(name):
        raise BadUrl(f"{url!r} has no plain name.")
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))


def _split(path: str, names: int, url: str) -> tuple[str, ...]:
    """The first parts of a path, and the rest of it as one prefix, which may be empty."""
    trimmed = path.strip("/")
    if not is_key(trimmed) or trimmed.count("/") + 1 < names:
        raise BadUrl(f"{url!r} does not name a bucket and a plain prefix.")
    *first, rest = [*trimmed.split("/", names), ""][: names + 1]
    return (*first, rest)
