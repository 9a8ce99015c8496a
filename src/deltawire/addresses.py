"""Addresses on which our servers listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import AddressUnavailable, DeltawireError


@contextmanager
def naming_address(what: str, host: str, port: int, error: type[DeltawireError] = AddressUnavailable) -> Iterator[None]:
    """Turn an error of the system about an address into ours, which names the address. The body makes a server listen.

    Parameters
    ----------
    what
        The thing that is to be served, for the message.
    host
        The address to listen on.
    port
        The port; 0 takes a free one.
    error
        The class of the error.
    """
    try:
        yield
    except (OSError, OverflowError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{what} cannot be served on {host}, port {port}: {reason}.", hint=AddressUnavailable.hint) from failure


def listening_socket(what: str, host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address. It refuses connections until somebody calls `listen`. Raises `AddressUnavailable`.

    Parameters
    ----------
    what
        The thing that is to be served, for the message.
    host
        The address to listen on.
    port
        The port; 0 takes a free one.
    """
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it, answers wait 40 ms for an acknowledgement.
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with naming_address(what, host, port):
            listening.bind((host, port))
    except BaseException:
        listening.close()
        raise
    return listening
