"""Check the channels of a chain: whether their moves fit together, and readers can reach the versions that they name."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ChainError, UnsupportedVersion
from ...format.records.version_records import Commit
from ...store import keys
from ..channels import ChannelReader, channel_names, target_of
from ..log import ChainLog
from ..restore import find_route
from .survey import is_stored
from .verify_report import Problem


def channel_problems(log: ChainLog, head: Commit) -> Iterator[Problem]:
    """Yield what is wrong with channels, at most one problem for each.

    Parameters
    ----------
    log
        The chain.
    head
        Its newest commit.
    """
    for name in channel_names(log):
        where = f"{keys.CHANNELS}{name}"
        try:
            newest, *_ = ChannelReader(log, name).history()
            target = target_of(log, newest, head)
            missing = next((entry for hop in find_route(log, None, target) for entry in hop.files if not is_stored(log, entry)), None)
        except (ChainError, UnsupportedVersion) as error:
            yield Problem(where, error.message)
            continue
        if missing is not None:
            yield Problem(where, f"no new reader can get to {target.describe()}, which it names: {missing.key} is missing or too short")
