"""Options of commands that name or move a channel."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%")


def check_channel(name: str | None) -> str | None:
    """Return the name of a channel. A name that channels cannot have is wrong usage."""
    from ...store import keys

    try:
        if name is not None:
            keys.channel_key(name, 0)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    return name


def check_share(share: str | None) -> str | None:
    """Refuse a share that is not a percentage."""
    found = None if share is None else _PERCENT.fullmatch(share)
    if share is not None and (found is None or Decimal(found[1]) > 100):
        raise typer.BadParameter(f"{share!r} is not a share of users. Write a percentage from 0% to 100%, such as 5% or 0.25%.")
    return share


def parts_per_million(share: str | None) -> int | None:
    """Return a share of users that `check_share` has checked, in parts per million."""
    return None if share is None else int(Decimal(share.removesuffix("%")) * 10_000)


ChannelArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CHANNEL", help="The name of the channel, such as stable or canary.", show_default=False, callback=check_channel
    ),
]
ChannelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--channel",
        metavar="NAME",
        help="Follow this channel instead of the newest version: take the version that `promote` and `rollback` have moved it to.",
        show_default=False,
        callback=check_channel,
    ),
]
ShareOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--share",
        metavar="PERCENT",
        help="Give the channel to this share of the users, such as 5%. The default is the present share.",
        show_default=False,
        callback=check_share,
    ),
]
WhyOption: TypeAlias = Annotated[
    str, typer.Option("--why", metavar="TEXT", help="Say why, in one line. `deltawire channels` shows it.", show_default=False)
]
ByOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--by", metavar="TEXT", help="Say who moves the channel. The default is this user and host.", show_default=False),
]
ExpectOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--expect",
        min=-1,
        metavar="MOVE",
        help="Move the channel only if its newest move has this number; -1 means that there is no channel yet.",
        show_default=False,
    ),
]
SignMoveOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--sign", metavar="KEYFILE", help="Sign the move with this key, which `keygen` made. A signed chain needs it.", show_default=False
    ),
]
