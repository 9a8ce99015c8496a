"""Options of commands that keep a vLLM server up to date."""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import typer


def check_engine_url(url: str | None) -> str | None:
    """Return the URL of a server, if one is given. Anything else than the address of a server is wrong usage."""
    from ...engines.http_session import check_server_url

    try:
        return None if url is None else check_server_url(url)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


class Cache(str, enum.Enum):
    drop = "drop"
    keep = "keep"
    mark = "mark"


class Canary(str, enum.Enum):
    off = "off"
    self = "self"
    recorded = "recorded"


_CACHE = (
    "At a swap, drop the keys and values of the old weights, keep them, or keep them only for requests that the server has then (mark)."
)
_CANARY = (
    "After a swap, check nothing (off), or compare log-probs of a few tokens with those of prompts (self), or with recorded ones "
    "(recorded; see `deltawire canary`)."
)

CacheOption: TypeAlias = Annotated[Cache, typer.Option("--kv-cache", help=_CACHE)]
CanaryOption: TypeAlias = Annotated[Canary, typer.Option("--canary", metavar="CHECK", help=_CANARY)]
MemberCacheOption: TypeAlias = Annotated[Cache, typer.Option("--kv-cache", help=f"With vLLM: {_CACHE[0].lower()}{_CACHE[1:]}")]
MemberCanaryOption: TypeAlias = Annotated[
    Canary, typer.Option("--canary", metavar="CHECK", help=f"With vLLM: {_CANARY[0].lower()}{_CANARY[1:]}")
]
RoutingOption: TypeAlias = Annotated[
    bool,
    typer.Option("--routing", help="Record which experts of an MoE model process which token, for a trainer that replays them."),
]
