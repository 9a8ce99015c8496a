"""Options of commands that work on a chain: its URL, the version, and the keys to trust."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from ...chain.log import ChainLog
    from ...chain.reader_options import ReaderOptions
    from ...format.records.signing import SigningKey
    from ...store import StoreOptions

KEYS_METAVAR = "PUBKEY|FILE"
URL_HELP = "The chain's location: a directory, s3://BUCKET/PREFIX, gs://..., az://..., or hf://buckets/OWNER/NAME."
_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_KEYS_BYTES = 1 << 20


def check_url(url: str) -> str:
    """Return the URL. Raise an error about wrong usage, before anything else is done, if it does not name a store."""
    from ...errors import BadUrl
    from ...store.urls import check_url as check

    try:
        check(url)
    except BadUrl as error:
        raise typer.BadParameter(error.message if "For a directory" in error.message else str(error)) from None
    if url.lower().startswith("memory:"):
        raise typer.BadParameter("a memory:// store belongs to one process, so it is always empty here. Use a directory.")
    return url


def read_keys(given: list[str] | None) -> list[str]:
    """Return the public keys that are given directly, or in files with one key per line. Anything else is wrong usage."""
    keys: list[str] = []
    for each in given or []:
        keys += [each] if _PUBLIC_KEY.fullmatch(each) else _keys_in_file(each)
    return list(dict.fromkeys(keys))


def _keys_in_file(name: str) -> list[str]:
    """Return the keys in a file. Empty lines, and text after a # sign, are ignored."""
    try:
        with open(name, "rb") as file:
            text = file.read(_MAX_KEYS_BYTES).decode("ascii", "replace")
    except OSError as error:
        why = "no file has that name" if isinstance(error, FileNotFoundError) else f"the file cannot be read ({error.strerror})"
        raise typer.BadParameter(f"{name!r} is not a public key, which has 64 hexadecimal digits, and {why}.") from None
    if "signing key" in text.partition("\n")[0]:
        raise typer.BadParameter(
            f"{name} holds a secret key, which readers must not have. `deltawire keygen --public {name}` prints the public one."
        )
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    keys = [line for line in lines if line]
    for key in keys:
        if not _PUBLIC_KEY.fullmatch(key):
            raise typer.BadParameter(f"{name} holds a line that is not a public key. Put one key of 64 hexadecimal digits on each line.")
    if not keys:
        raise typer.BadParameter(f"{name} holds no public key. Put one key of 64 hexadecimal digits on each line.")
    return keys


UrlArgument: TypeAlias = Annotated[str, typer.Argument(metavar="URL", help=URL_HELP, show_default=False, callback=check_url)]


def check_urls(urls: list[str] | None) -> list[str]:
    """Return the URLs of stores. Raise an error about wrong usage if one does not name a store."""
    return [check_url(url) for url in urls or ()]


FromOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="URL",
        help="Read from this copy of the chain, which a relay keeps, if it is nearer. May be repeated.",
        show_default=False,
        callback=check_urls,
    ),
]
RelaysOption: TypeAlias = Annotated[
    bool,
    typer.Option("--relays", help="Read also from copies that relays have published in the run, if one is nearer."),
]
TrustOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar=KEYS_METAVAR,
        help="Accept only records that this public key, or one in this file, has signed. May be repeated.",
        show_default=False,
        callback=read_keys,
    ),
]
StepOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help="Take the version that was published with this training step; the newest if there are several.",
        show_default=False,
    ),
]
RunOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="Refuse a chain whose run has another name. With --trust the default is the last part of the URL.",
        show_default=False,
    ),
]
PinOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--pin/--no-pin",
        help="Write a pin, which keeps garbage collection from deleting data that this reader needs. --no-pin needs no right to write.",
    ),
]


def check_host_cache(text: str | None) -> str | None:
    """Refuse a value of --host-cache that names no directory."""
    if text is None or text in ("auto", "off"):
        return text
    if text in ("", "on") or (os.path.lexists(text) and not os.path.isdir(text)):
        raise typer.BadParameter(f"{text!r} is not a directory. Name a directory, which may be a new one, or write auto or off.")
    return text


HostCacheOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--host-cache",
        callback=check_host_cache,
        metavar="DIR|auto|off",
        help="Fetch each file once for all readers of this machine, which share this directory, or the usual ones (auto).",
    ),
]


def host_cache_of(text: str) -> str | None:
    """Return the value of `ReaderOptions.host_cache` for a value of --host-cache."""
    return None if text == "off" else text


def reader_options(
    run: str | None,
    trust: list[str] | None,
    *,
    max_silence: float | None = None,
    reader: str | None = None,
    pin: bool = True,
    store: StoreOptions | None = None,
    host_cache: str = "off",
    relays: bool = False,
    channel: str | None = None,
) -> ReaderOptions:
    """Return the options of a reader from those of a command.

    Parameters
    ----------
    run
        The value of --run.
    trust
        The keys of --trust.
    max_silence, reader, pin, store
        As in `ReaderOptions`.
    host_cache
        The value of --host-cache.
    relays
        Whether --relays is given.
    channel
        The value of --channel.
    """
    from ...chain.reader_options import ReaderOptions

    return ReaderOptions(
        run=run,
        trusted_keys=trust or (),
        max_silence=max_silence,
        reader=reader,
        pin=pin,
        store=store,
        host_cache=host_cache_of(host_cache),
        find_relays=relays,
        channel=channel,
    )


def refuse_several(**options: object) -> None:
    """Raise an error about wrong usage if more than one option names a version."""
    given = [name if name.isupper() else f"--{name}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give {' or '.join(given)}, not both: each names one version.")


def find_seq(log: ChainLog, version: int | None, step: int | None) -> int | None:
    """Return the seq of the version with this number or this step; None if neither is given."""
    from ...chain.find import find_step, find_version

    if version is not None:
        return find_version(log, version).seq
    return None if step is None else find_step(log, step).seq


def load_signing_key(path: Path, *, option: str = "--sign") -> SigningKey:
    """Return the key in a file. A file without a key, or that other users may read, is wrong usage of `option`."""
    from ...format.records.signing import SigningKey

    try:
        return SigningKey.load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
