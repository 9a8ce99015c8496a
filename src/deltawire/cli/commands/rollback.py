"""`deltawire rollback URL CHANNEL`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..channel_moves import MoveTerms, make_move
from ..options.chain import RunOption, TrustOption, UrlArgument
from ..options.channels import (
    ByOption,
    ChannelArgument,
    ExpectOption,
    ShareOption,
    SignMoveOption,
    WhyOption,
)
from ..options.common import JsonOption, VerboseOption

if TYPE_CHECKING:
    from ...chain.log import ChainLog
    from ...format.records.channel_records import ChannelMove
    from ...publish.channels import ChannelWriter


def rollback(
    url: UrlArgument,
    channel: ChannelArgument,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=1,
            metavar="N",
            help="Go back to this version. The default is the one that the channel named before its present one was promoted.",
            show_default=False,
        ),
    ] = None,
    share: ShareOption = None,
    why: WhyOption = "",
    by: ByOption = None,
    expect: ExpectOption = None,
    sign: SignMoveOption = None,
    trust: TrustOption = None,
    run: RunOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Let a channel go back to an earlier version, for all engines that follow it.

    Engines take the earlier version at their next look, also those that are just fetching a later one. The chain itself does not change:
    the trainer continues. A second rollback goes further back.
    """

    def decide(writer: ChannelWriter, chain: ChainLog, terms: MoveTerms) -> ChannelMove:
        from ...chain.find import find_version

        target = None if to is None else find_version(chain, to)
        return writer.rollback(target, share=terms.share, reason=terms.reason, expect=terms.expect)

    make_move(url, channel, decide, share=share, why=why, by=by, expect=expect, sign=sign, run=run, trust=trust, verbose=verbose, json=json)
