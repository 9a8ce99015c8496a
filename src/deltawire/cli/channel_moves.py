"""Move a channel from the command line, for `promote` and `rollback`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .options.chain import load_signing_key, reader_options
from .options.channels import parts_per_million
from .output.channel_table import ShownMove, move_as_json, print_move
from .output.event_notices import print_if_verbose
from .output.terminal import print_json
from .process.exit_codes import exit_codes
from .stores.opened import opened

if TYPE_CHECKING:
    from ..chain.log import ChainLog
    from ..format.records.channel_records import ChannelMove
    from ..publish.channels import ChannelWriter, Reason


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """The part of a move that all moves of channels have, as the methods of `ChannelWriter` take it.

    Parameters
    ----------
    share
        The share of the users in parts per million. None keeps the present share.
    reason
        Why the channel is moved, and by whom.
    expect
        The number that the newest move must have. None accepts any.
    """

    share: int | None
    reason: Reason
    expect: int | None


Decide = Callable[["ChannelWriter", "ChainLog", MoveTerms], "ChannelMove"]


def shown(chain: ChainLog, move: ChannelMove) -> ShownMove:
    """Return a move with the number and step of its version. Raises `ChainBroken` or `DataMissing` if the chain has no such version."""
    from ..chain.channels import target_of
    from ..chain.find import newest_version

    version = target_of(chain, move, newest_version(chain))
    return ShownMove(move, version.updates, version.step)


def make_move(
    url: str,
    channel: str,
    decide: Decide,
    *,
    share: str | None,
    why: str,
    by: str | None,
    expect: int | None,
    sign: Path | None,
    run: str | None,
    trust: list[str] | None,
    verbose: bool,
    json: bool,
) -> None:
    """Open the chain, let `decide` move the channel, and print the move. Without keys to trust, those of the first commit are trusted."""
    with exit_codes(json):
        from ..publish.channels import ChannelWriter, Reason

        terms = MoveTerms(parts_per_million(share), Reason(why, by), expect)
        key = None if sign is None else load_signing_key(sign)
        with opened(url, verbose=verbose) as store:
            chain = reader_options(run, trust).open_log(store)
            chain.trust_first_key()
            writer = ChannelWriter(chain, channel, key=key, on_event=lambda event: print_if_verbose(event, verbose))
            made = shown(chain, decide(writer, chain, terms))
        if json:
            print_json(move_as_json(made))
        else:
            print_move(made)
