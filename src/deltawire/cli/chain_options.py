"""What the commands that work on a chain share: its URL, the keys to trust, and the store that is opened for as long as they run."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from .output.terminal import print_notice, print_trace

if TYPE_CHECKING:
    from ..chain.log import ChainLog
    from ..events import Event
    from ..format.records.signing import SigningKey
    from ..store import Store

KEYS_METAVAR = "PUBKEY|FILE"
_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_KEYS_BYTES = 1 << 20
_SAME_FAILURE = 5.0
"""Seconds within which requests that are repeated for the same time are taken to have failed for the same reason."""


def check_url(url: str) -> str:
    """Return the URL itself. What names no store is wrong usage, and found before anything else is done."""
    from ..errors import BadUrl
    from ..store.urls import check_url as check

    try:
        check(url)
    except BadUrl as error:
        raise typer.BadParameter(error.message if "For a directory" in error.message else str(error)) from None
    if url.lower().startswith("memory:"):
        raise typer.BadParameter("a memory:// store lives within one process, so there is never anything in it here. Use a directory.")
    return url


def read_keys(given: list[str] | None) -> list[str]:
    """The public keys that are given, as they are or in files of one key per line. What is neither is wrong usage."""
    keys: list[str] = []
    for each in given or []:
        keys += [each] if _PUBLIC_KEY.fullmatch(each) else _keys_in_file(each)
    return list(dict.fromkeys(keys))


def _keys_in_file(name: str) -> list[str]:
    """The keys in a file; empty lines, and what follows a # sign, are passed over."""
    try:
        with open(name, "rb") as file:
            text = file.read(_MAX_KEYS_BYTES).decode("ascii", "replace")
    except OSError as error:
        what = "there is no file of that name" if isinstance(error, FileNotFoundError) else error.strerror
        raise typer.BadParameter(f"{name!r} is no public key, which has 64 hexadecimal digits; and as a file: {what}.") from None
    if "signing key" in text.partition("\n")[0]:
        raise typer.BadParameter(
            f"{name} holds a secret key, which readers must not have. `deltawire keygen --public {name}` prints the public one."
        )
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    keys = [line for line in lines if line]
    for key in keys:
        if not _PUBLIC_KEY.fullmatch(key):
            raise typer.BadParameter(f"{name} holds a line that is no public key. Put one key of 64 hexadecimal digits on each line.")
    if not keys:
        raise typer.BadParameter(f"{name} holds no public key. Put one key of 64 hexadecimal digits on each line.")
    return keys


UrlArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Where the chain is: a directory, s3://BUCKET/PREFIX, gs://..., az://..., or hf://buckets/OWNER/NAME.",
        show_default=False,
        callback=check_url,
    ),
]
TrustOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar=KEYS_METAVAR,
        help="Accept only what this key, or one in this file, has signed; may be given several times.",
        show_default=False,
        callback=read_keys,
    ),
]
StepOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--step", min=0, metavar="N", help="The newest version that was published with this step.", show_default=False),
]
RunOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="The run that must live there. With --trust it is the last part of the URL by default.",
        show_default=False,
    ),
]
PinOption: TypeAlias = Annotated[
    bool,
    typer.Option("--pin/--no-pin", help="Ask collection to wait for this reader. Without, credentials that may only read are enough."),
]


VerboseOption: TypeAlias = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say on stderr what happens: every event, and every request to the store.")
]


@contextmanager
def opened(url: str, *, verbose: bool = False) -> Iterator[Store]:
    """The store at a URL, closed at the end. A request that is repeated is reported on stderr; with `verbose` every request is."""
    from ..store import open_store

    with open_store(url, on_event=RetryNotices(verbose=verbose)) as store:
        if verbose:
            from .traced_store import TracedStore

            store = TracedStore(store)
        yield store


class RetryNotices:
    """Listens to a store, and says on stderr that it does not answer and that the request is sent again.

    Requests that fail side by side give one line for each try, not one for each request. With `verbose` the reason is printed, too.
    """

    def __init__(self, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._verbose = verbose
        self._clock = clock
        self._told: dict[int, float] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        tell_if_verbose(event, self._verbose)
        attempt, now = int(event.fields["attempt"] or 0), self._clock()
        with self._lock:
            is_new = now - self._told.get(attempt, -math.inf) >= _SAME_FAILURE
            if is_new:
                self._told[attempt] = now
        if is_new:
            print_notice(f"the store did not answer; trying again ({attempt} of {event.fields['attempts']})")


def tell_if_verbose(event: Event, verbose: bool) -> None:
    """Report an event on stderr, with all its fields."""
    if verbose:
        print_trace(" ".join([event.name, *(f"{name}={value}" for name, value in event.fields.items())]))


def refuse_several(**options: object) -> None:
    """More than one way to say which version is wrong usage."""
    given = [name if name.isupper() else f"--{name}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give {' or '.join(given)}, not both: each names one version.")


def find_seq(log: ChainLog, version: int | None, step: int | None) -> int | None:
    """The place in the chain of a version that is named by its number or its step; None if neither is given."""
    from ..chain.find import find_step, find_version

    if version is not None:
        return find_version(log, version).seq
    return None if step is None else find_step(log, step).seq


def tell_of_waiting(event: Event, told: set[str]) -> None:
    """Say why nothing moves, once for each object that is waited for."""
    if event.name == "retrying" and event.fields.get("reason") == "missing":
        key = str(event.fields["key"])
        if key not in told:
            told.add(key)
            print_notice(f"waiting for {key}, which is not in the store yet")


def load_signing_key(path: Path, *, option: str = "--sign") -> SigningKey:
    """The key in a file; one that is none, or that others may read, is wrong usage."""
    from ..format.records.signing import SigningKey

    try:
        return SigningKey.load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
