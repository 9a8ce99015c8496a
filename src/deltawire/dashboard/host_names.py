"""Checks the header `Host`. A hostile website could otherwise point its own name at this machine and use its servers (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def accepts_host(header: str | None, names: Collection[str]) -> bool:
    """Return whether a `Host` header is a server's own: an address in numbers, or one of its names.

    Parameters
    ----------
    header
        The header.
    names
        The names of the server, in lower case.
    """
    try:
        name = urlsplit(f"//{header}").hostname
    except ValueError:
        return False
    if not name:
        return False
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
