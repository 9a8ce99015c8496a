"""`deltawire channels URL`."""

from __future__ import annotations

import itertools
import time
from typing import Annotated

import typer

from ..channel_moves import shown
from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.channels import check_channel
from ..options.common import JsonOption, VerboseOption
from ..output.channel_table import move_as_json, print_moves
from ..output.terminal import print_json
from ..process.exit_codes import exit_codes
from ..stores.opened import opened


def channels(
    url: UrlArgument,
    channel: Annotated[
        str | None,
        typer.Argument(metavar="CHANNEL", help="Show the moves of this channel, newest first.", show_default=False, callback=check_channel),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, metavar="N", help="Show this many moves of CHANNEL.")] = 20,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """List the channels of a chain and the versions that they name, or the moves of one channel.

    "share" is the share of the users that belong to a channel. On a signed chain, moves must be signed too. Without --trust, by the key of
    the first commit.
    """
    with exit_codes(json):
        from ...chain.channels import ChannelReader, channel_names

        with opened(url, verbose=verbose) as store:
            chain = reader_options(run, trust).open_log(store)
            chain.run  # noqa: B018 - a location without a chain has no channels, which is an error
            chain.trust_first_key()
            if channel is None:
                moves = [ChannelReader(chain, name).newest() for name in channel_names(chain)]
            else:
                moves = list(itertools.islice(ChannelReader(chain, channel).history(), count))
            found = [shown(chain, move) for move in moves]
        if json:
            listed = [move_as_json(each) for each in found]
            print_json(
                {"url": store.url, "channels": listed} if channel is None else {"url": store.url, "channel": channel, "moves": listed}
            )
        else:
            print_moves(store.url if channel is None else f"{store.url}, moves of the channel {channel}", found, now=time.time())
