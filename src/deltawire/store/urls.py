"""Turn a URL into a store."""

from __future__ import annotations

import dataclasses
import re
import threading
import unicodedata
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import BadUrl
from ..events import OnEvent
from .base import Store, StoreOptions, is_key
from .local import LocalStore
from .memory import MemoryStore

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
_MAX_RUN_NAME = 200

_SCHEMES = ("s3", "gs", "az", "hf", "file", "memory")
_OTHER_NAMES = {
    **dict.fromkeys(("s3a", "s3n"), "s3"),
    **dict.fromkeys(("gcs", "gc"), "gs"),
    **dict.fromkeys(("azure", "abfs", "abfss", "wasb", "wasbs", "adl"), "az"),
    "huggingface": "hf",
}
"""Names that other programs use for these schemes."""

_COLON = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?!//)(.*)", re.S)
_NEAR_SCHEME = re.compile(rf"({'|'.join((*_SCHEMES, *_OTHER_NAMES, 'https?'))})(?://|[^\w/]\W*/|[^\w\s/.-]+)/*(.*)", re.S | re.I)
"""Matches a scheme followed by something other than "://", such as `s3//b`, `s3;//b`, `s3./b` or `s3,b`."""
_SLASHES = re.compile(r"([^/~.][^/]*)//(.*)", re.S)
"""Matches a relative path whose first part is followed by two slashes, as in a URL."""
_HOST = re.compile(r"((?:\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5})(?:/.*)?", re.S)


def open_store(url: str | Path | Store, *, options: StoreOptions | None = None, on_event: OnEvent | None = None) -> Store:
    """Open the store that a URL or path names. An open store is returned unchanged. Sends no request yet: see `probe`.

    - a path, or `file:///path`: a directory, which the first write creates
    - `memory://NAME`: one store per name and process
    - `s3://BUCKET[/PREFIX]`: credentials, region and endpoint from AWS_* variables such as AWS_ENDPOINT_URL, or from the machine's role
    - `s3://BUCKET[/PREFIX]?endpoint=https://HOST&region=NAME`: the same with another server or region, or with one of the two
    - `gs://BUCKET[/PREFIX]`: GOOGLE_* variables or application-default credentials
    - `az://CONTAINER[/PREFIX]`: AZURE_* variables
    - `hf://buckets/OWNER/NAME[/PREFIX]`: a Hugging Face bucket, through its S3 gateway; see `providers.hugging_face_store`

    Raises `BadUrl` for anything else, even for something similar to a URL such as `s3:/bucket`, because it would otherwise become a
    directory. Credentials in a URL are refused because URLs end up in logs.

    Parameters
    ----------
    url
        The URL, path or open store.
    options
        How to reach a remote store.
    on_event
        Called with an event "retrying" before a request to a remote store is repeated. A store that is already open keeps its own listener.
    """
    if isinstance(url, Store):
        return url
    check_url(url)
    text = str(url)
    if isinstance(url, Path) or "://" not in text:
        return LocalStore(Path(text).expanduser())
    return _open_url(text, options or StoreOptions(), on_event)


def check_url(url: str | Path) -> None:
    """Raise `BadUrl` unless `open_store` can open this URL or path. The message suggests what was probably meant. Sends no request."""
    if not isinstance(url, (str, Path)):  # often an environment variable that is not set
        raise BadUrl(f"a store is named by a URL or a path, not by {url!r:.80}. If it came from the environment, is the variable set?")
    text = str(url)
    if not text:
        raise BadUrl("an empty string names no store.")
    if text != text.strip() or any(not character.isprintable() for character in text):
        raise BadUrl("a URL neither begins nor ends with spaces, and contains no control characters.")
    if isinstance(url, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise BadUrl(
            f"pathlib.Path changed a URL to {text!r}. Pass the URL as a string. For a directory of that name pass its absolute path."
        )
    if isinstance(url, Path):
        return
    if "://" in text:
        _parse(text)
        return
    usual = unicodedata.normalize("NFKC", text)  # a colon of full width looks like one
    if host := _HOST.fullmatch(usual):
        raise BadUrl(
            f"{text!r} begins with the address of a server, not of a bucket. For an S3 server, set AWS_ENDPOINT_URL=http://{host[1]} "
            f"and use s3://BUCKET/PREFIX. For a directory of that name write ./{text}."
        )
    if near := _COLON.fullmatch(usual) or _NEAR_SCHEME.fullmatch(usual) or _SLASHES.fullmatch(usual):
        if "@" in text:  # what stands before it may be a secret
            raise BadUrl(f"what begins with {near[1]!r} is not a URL, since it lacks '://'; and give credentials in the environment.")
        meant = _suggestion(near[1].lower(), near[2])
        raise BadUrl(f"{text!r} is not a URL, since it lacks '://'.{meant} For a directory of that name write ./{text}.")


def default_run_name(url: str) -> str:
    """Return the name of a run that is begun at this URL without a name: the last part of the path, or the bucket.

    Readers that trust keys expect this name unless they are given another. It is "main" if the URL has no usable part.
    """
    parts = urlsplit(url)
    path = unquote(parts.path) if parts.scheme == "file" else parts.path
    name = path.rstrip("/").rpartition("/")[2] or parts.netloc
    return name[:_MAX_RUN_NAME] if name and name.isprintable() else "main"


def _parse(url: str) -> tuple[str, SplitResult]:
    """Return the scheme and the parts of a URL. Messages contain the URL only after it is known to hold no credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadUrl(f"what follows {url.split('://')[0]}:// cannot be read.") from None
    scheme = parts.scheme.lower()
    if "@" in parts.netloc:
        raise BadUrl(f"a {scheme}:// URL holds credentials; give them in the environment.")
    if scheme in ("http", "https"):
        raise BadUrl(
            f"{scheme}://{parts.netloc} is the address of a server, not of a bucket. "
            f"For an S3 server, set AWS_ENDPOINT_URL={scheme}://{parts.netloc} and use s3://BUCKET/PREFIX."
        )
    if parts.fragment or (parts.query and scheme != "s3"):
        raise BadUrl(f"{scheme}://{parts.netloc}{parts.path} is followed by a query or fragment, which means nothing here.")
    if parts.query:
        _server(parts)
    if scheme not in _SCHEMES:
        raise BadUrl(f"{url!r} has an unknown scheme.{_suggestion(scheme, url.split('://', 1)[1])}")
    if scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise BadUrl(f"{url!r} is not of the form file:///absolute/path.")
        if not unquote(parts.path).isprintable():
            raise BadUrl(f"{url!r} has control characters in its path.")
    elif scheme == "memory":
        if not is_key(_whole(parts)):
            raise BadUrl(f"{url!r} has no plain name.")
    elif scheme == "hf" and parts.netloc != "buckets":
        named = {"models", "datasets", "spaces"}
        rest = parts.path if parts.netloc in named else f"/{parts.netloc}{parts.path}"
        raise BadUrl(f"{url!r} is not a bucket; versions are kept in buckets only. Did you mean hf://buckets{rest}?")
    elif scheme == "hf":
        _split(parts.path, 2, url)
    else:
        _split(_whole(parts), 1, url)
    return scheme, parts


def _server(parts: SplitResult) -> dict[str, str]:
    """Return the endpoint and the region that the query of a URL names. Raises `BadUrl` for anything else, and for credentials."""
    shown = f"{parts.scheme.lower()}://{parts.netloc}{parts.path}"
    try:
        named = parse_qsl(parts.query, strict_parsing=True, max_num_fields=2)
        found = dict(named)
        endpoint = urlsplit(found.get("endpoint", "https://host"))
    except ValueError:
        named, found = [], {}
    if not found or len(found) != len(named) or not found.keys() <= {"endpoint", "region"}:
        raise BadUrl(f"what follows {shown}? must be endpoint=https://HOST or region=NAME, or both with & between them.")
    if "@" in found.get("endpoint", ""):
        raise BadUrl(f"the endpoint of {shown} holds credentials; give them in the environment.")
    if endpoint.scheme not in ("http", "https") or not endpoint.netloc or endpoint.query or endpoint.fragment:
        raise BadUrl(f"the endpoint of {shown} is not an address. Write it as https://HOST[:PORT].")
    return found


def _suggestion(scheme: str, rest: str) -> str:
    """Return a sentence that suggests the URL that was probably meant, with a leading space. Returns "" if none can be suggested."""
    known = scheme if scheme in _SCHEMES else _OTHER_NAMES.get(scheme)
    rest = rest.lstrip("/")
    if known is None or "@" in rest:
        return ""
    return f" Did you mean {known}://{'/' if known == 'file' else ''}{rest}?"


def _open_url(url: str, options: StoreOptions, on_event: OnEvent | None) -> Store:
    scheme, parts = _parse(url)
    if scheme == "file":
        return LocalStore(unquote(parts.path))
    if scheme == "memory":
        name = _whole(parts)
        with _memory_lock:
            return _memory_stores.setdefault(name, MemoryStore(name))
    from . import providers  # imported here because the client library is heavy, and local stores do not need it

    if scheme == "hf":
        owner, name, prefix = _split(parts.path, 2, url)
        store = providers.hugging_face_store(owner, name, prefix, options)
    else:
        bucket, prefix = _split(_whole(parts), 1, url)
        opener = {"s3": providers.s3_store, "gs": providers.gcs_store, "az": providers.azure_store}[scheme]
        named = _server(parts) if parts.query else {}
        endpoint, region = named.get("endpoint", options.endpoint), named.get("region", options.region)
        store = opener(bucket, prefix, dataclasses.replace(options, endpoint=endpoint, region=region))
        if parts.query:
            store.url += f"?{parts.query}"
    store.listen(on_event)
    return store


def _whole(parts: SplitResult) -> str:
    """Return the first name and the path after it as one path. Returns "" if the first name is missing, as in `s3:///bucket`."""
    return f"{parts.netloc}{parts.path}".rstrip("/") if parts.netloc else ""


def _split(path: str, names: int, url: str) -> tuple[str, ...]:
    """Return the first parts of a path, and the rest as one prefix, which may be empty."""
    trimmed = path.strip("/")
    if not is_key(trimmed) or trimmed.count("/") + 1 < names:
        scheme, rest = url.split("://", 1)
        meant = _suggestion(scheme.lower(), rest) if rest.startswith("/") and is_key(rest.strip("/")) else ""
        raise BadUrl(f"{url!r} does not name a bucket and a plain prefix.{meant}")
    *first, rest = [*trimmed.split("/", names), ""][: names + 1]
    return (*first, rest)
