"""Check the channels of a chain: whether their moves fit together, and readers can reach the versions that they name."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ChainError, ObjectMissing, UnsupportedVersion
from ...format.records.version_records import Commit
from ...store import keys
from ..channels import ChannelReader, channel_names, target_of
from ..log import ChainLog
from ..routes.restore import find_route
from .survey import is_stored
from .verify_report import Problem


def channel_problems(log: ChainLog, head: Commit) -> Iterator[Problem]:
    """Yield what is wrong with channels, at most one problem for each.

    A copy that a relay keeps may lack the data of versions from before its beginning. Readers fetch them from the origin.

    Parameters
    ----------
    log
        The chain.
    head
        Its newest commit.
    """
    names = channel_names(log)
    is_copy = bool(names) and _is_copy(log)
    for name in names:
        where = f"{keys.CHANNELS}{name}"
        try:
            newest, *_ = ChannelReader(log, name).history()
            target = target_of(log, newest, head)
            missing = next((entry for hop in find_route(log, None, target) for entry in hop.files if not is_stored(log, entry)), None)
        except (ChainError, UnsupportedVersion) as error:
            yield Problem(where, error.message)
            continue
        if missing is not None and not is_copy:
            yield Problem(where, f"no new reader can get to {target.describe()}, which it names: {missing.key} is missing or too short")


def _is_copy(log: ChainLog) -> bool:
    try:
        log.store.head(keys.COPY)
    except ObjectMissing:
        return False
    return True
