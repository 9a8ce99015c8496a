"""What the commands that work on a chain share: its URL, the keys to trust, and the store that is opened for as long as they run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from .terminal import print_notice, progress_bar

if TYPE_CHECKING:
    from ..chain.log import ChainLog
    from ..events import Event
    from ..format.signing import SigningKey
    from ..store import Store

_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")


def check_url(url: str) -> str:
    """Return the URL itself. What names no store is wrong usage, and found before anything else is done."""
    from ..errors import BadUrl
    from ..store.urls import check_url as check

    try:
        check(url)
    except BadUrl as error:
        raise typer.BadParameter(str(error)) from None
    if url.lower().startswith("memory:"):
        raise typer.BadParameter("a memory:// store lives within one process, so there is never anything in it here. Use a directory.")
    return url


def check_keys(keys: list[str] | None) -> list[str]:
    """The keys themselves; what is none is wrong usage."""
    for key in keys or []:
        if not _PUBLIC_KEY.fullmatch(key):
            raise typer.BadParameter(f"{key!r} is no public key: those have 64 hexadecimal digits, as `deltawire keygen` prints them.")
    return keys or []


UrlArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Where the chain is: a directory, s3://BUCKET/PREFIX, gs://…, az://…, or hf://buckets/OWNER/NAME.",
        show_default=False,
        callback=check_url,
    ),
]
TrustOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="PUBKEY",
        help="Accept only what this key has signed; may be given several times.",
        show_default=False,
        callback=check_keys,
    ),
]
StepOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--step", min=0, max=2**63 - 1, metavar="N", help="The newest version that was published with this step.", show_default=False
    ),
]
PinOption: TypeAlias = Annotated[
    bool,
    typer.Option("--pin/--no-pin", help="Ask collection to wait for this reader. Without, credentials that may only read are enough."),
]


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store at a URL, closed at the end."""
    from ..store import open_store

    with open_store(url) as store:
        yield store


@contextmanager
def opened_with_bar(url: str, title: str, *, quiet: bool) -> Iterator[Store]:
    """The same, under a bar that shows what is transferred."""
    from .metered_store import MeteredStore

    with opened(url) as store, progress_bar(title, None, quiet=quiet) as progress:
        yield MeteredStore(store, progress)


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


def load_signing_key(path: Path) -> SigningKey:
    """The key in a file; one that is none, or that others may read, is wrong usage."""
    from ..format.signing import SigningKey

    try:
        return SigningKey.load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sign") from None
