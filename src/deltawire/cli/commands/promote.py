"""`deltawire promote URL CHANNEL --version N`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..channel_moves import MoveTerms, make_move
from ..options.chain import RunOption, StepOption, TrustOption, UrlArgument, find_seq, refuse_several
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


def promote(
    url: UrlArgument,
    channel: ChannelArgument,
    version: Annotated[
        int | None,
        typer.Option("--version", min=1, metavar="N", help="The version, as `deltawire log` numbers it.", show_default=False),
    ] = None,
    step: StepOption = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="CHANNEL", help="Take the version that this channel names, such as canary.", show_default=False),
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
    """Let a channel name a version, for all engines that follow it.

    A channel is a named pointer into the chain, such as stable or canary; its first promotion makes it. Engines with `--channel CHANNEL`
    take the version at their next look. --share says how many of the users belong to the channel; with --share alone, the version stays.

    If somebody else moves the channel at the same time, one of the two commands fails and changes nothing.
    """
    refuse_several(version=version, step=step, **{"from": source})
    if version is None and step is None and source is None and share is None:
        raise typer.BadParameter(
            "say what to promote: --version N, --step N or --from CHANNEL; or --share PERCENT to change only the share."
        )

    def decide(writer: ChannelWriter, chain: ChainLog, terms: MoveTerms) -> ChannelMove:
        from ...chain.channels import ChannelReader

        seq = ChannelReader(chain, source).newest().target.seq if source is not None else find_seq(chain, version, step)
        commit = None if seq is None else chain.read(seq)
        if commit is None:
            assert terms.share is not None
            return writer.set_share(terms.share, reason=terms.reason, expect=terms.expect)
        return writer.promote(commit, share=terms.share, reason=terms.reason, expect=terms.expect)

    make_move(url, channel, decide, share=share, why=why, by=by, expect=expect, sign=sign, run=run, trust=trust, verbose=verbose, json=json)
