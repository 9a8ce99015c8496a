"""Options of commands that listen on a port."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, TypeAlias

import typer

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def check_address(host: str) -> str:
    """Return the address to listen on. One that is not in numbers is wrong usage."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise typer.BadParameter(f"{host!r} is not an address. Give one in numbers, such as 127.0.0.1 or 0.0.0.0.") from None
    return host


def check_packages(what: str, packages: Sequence[str], install: str) -> None:
    """Raise an error that says what to install, if a package is missing. Nothing is imported.

    Parameters
    ----------
    what
        The thing that needs the packages.
    packages
        The packages.
    install
        What pip should install, with packages that are useful and not needed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f"{what} needs {' and '.join(missing)}. Run `pip install {install}`")


def check_names(names: list[str] | None) -> list[str] | None:
    """Return the names. A name that no client can send, such as one with a port, is wrong usage."""
    for name in names or ():
        if not _NAME.fullmatch(name):
            raise typer.BadParameter(
                f"--name is {name!r}, which is not the name of a host. Give it without scheme and port, such as gpu-7."
            )
    return names


NamesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="HOST",
        help="Also answer clients that reach this machine by this name. May be repeated.",
        show_default=False,
        callback=check_names,
    ),
]
PortOption: TypeAlias = Annotated[
    int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="Serve at this port; 0 takes a free one.")
]
HostOption: TypeAlias = Annotated[
    str,
    typer.Option("--host", metavar="ADDRESS", help="Listen on this address. Everybody who reaches it can use it.", callback=check_address),
]
