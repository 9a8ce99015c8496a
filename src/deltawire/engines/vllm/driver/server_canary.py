"""Checks what a server computes after each update, and keeps what the checks have shown.

- `self`: decoding must agree with prompts. This finds CUDA graphs that read old memory.
- `recorded`: decoding and prompts must agree with what a healthy server computed with the same version. A trusted process records that
  (`deltawire canary`). It may come after the version, so the sidecar makes the check `self` at once, and the other one when the record is
  there. A record that cannot be trusted is not used.

The checks send requests to the server, which must run. So requests of others are answered too, between a swap and the end of its check.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....chain.log import ChainLog
from ....chain.records.canaries import put_canary, read_canary
from ....errors import (
    ChainError,
    CorruptRecord,
    DecodingDiffers,
    EngineRefused,
    EngineUnavailable,
    SignatureInvalid,
    StoreError,
    UnsupportedVersion,
)
from ....events import OnEvent, emit
from ....format.records.canary_records import CanaryRecord
from ....format.records.signing import SigningKey
from ....format.records.version_records import Commit
from .. import QUARANTINED_LABEL
from .canary import MOST_DIFFERENCE, MOST_MEAN, UNKNOWN_USUAL, CanaryResult, check_decoding, check_recorded, generate
from .routes import RouteFailed, VllmRoutes

CanaryKind: TypeAlias = Literal["off", "self", "recorded"]
"""The check after each update."""


class ServerCanary:
    """Checks the results of one server.

    Parameters
    ----------
    kind
        The check.
    routes
        A client of the server's routes.
    on_event
        Called with each event.
    """

    def __init__(self, kind: Literal["self", "recorded"], routes: VllmRoutes, on_event: OnEvent | None = None) -> None:
        self._kind = kind
        self._routes = routes
        self._on_event = on_event
        self._usual: CanaryResult | None = None
        self._may_learn = True
        self._checked: Commit | None = None
        """The version that the server had when the last check passed."""
        self._awaits_record = False
        self._failed: Commit | None = None
        """The version whose last check failed."""
        self._told_missing: tuple[int, str] | None = None

    def learn(self) -> None:
        """Find out how much decoding and prompts usually differ, before the server is changed for the first time.

        Some models and kernels differ more than others: MLA decodes in another way than it reads prompts. A server that does not run yet
        is compared with `UNKNOWN_USUAL`, and its first check that passes tells what is usual.

        Raises `EngineRefused` if the server cannot be checked at all.
        """
        if not self._may_learn or self._routes.is_paused() or self._routes.weight_version() == QUARANTINED_LABEL:
            return
        self._may_learn = False
        try:
            found = check_decoding(self._routes, most_difference=math.inf, most_mean=math.inf)
        except RouteFailed as error:
            if error.status < 500:
                raise EngineRefused(
                    f"the server cannot be checked by a canary: {error}.", hint="Leave out --canary for this server."
                ) from error
            return  # weights that were never loaded may give results that are not numbers
        except DecodingDiffers:
            return
        self._learn(found)

    def forget(self) -> None:
        """Check the present version again, because the server was restarted, or changed by another process."""
        self._checked, self._awaits_record = None, False

    def check(self, commit: Commit, log: ChainLog) -> None:
        """Check what the server computes, unless that was done since it got this version. Does nothing while the server is paused.

        Raises `DecodingDiffers` if its results are wrong, and the errors of the server's routes.

        Parameters
        ----------
        commit
            The version that the server has.
        log
            The chain, which may have a record of the version.
        """
        is_checked = commit == self._checked
        record = None
        if not is_checked or self._awaits_record:
            record = self._record(commit, log)
        if (is_checked and record is None) or self._routes.is_paused():
            return
        self._may_learn = False
        began = time.monotonic()
        try:
            kind, result = self._compare(commit, record)
        except DecodingDiffers as error:
            self._checked = None
            emit(self._on_event, "canary-failed", seq=commit.seq, updates=commit.updates, reason=str(error))
            raise
        if self._usual is None and kind == "self":
            self._learn(result)
        self._checked, self._failed = commit, None
        self._awaits_record = self._kind == "recorded" and record is None
        emit(
            self._on_event,
            "canary-passed",
            seq=commit.seq,
            updates=commit.updates,
            canary=kind,
            largest=result.largest,
            mean=result.mean,
            tokens=result.tokens,
            seconds=time.monotonic() - began,
        )

    def note_failure(self, commit: Commit) -> bool:
        """Note that the check of a version failed. Returns whether it also failed the time before, so that loading it anew does not help.

        Parameters
        ----------
        commit
            The version.
        """
        is_second, self._failed = self._failed == commit, commit
        return is_second

    def _learn(self, found: CanaryResult) -> None:
        self._usual = found
        if found.largest > MOST_DIFFERENCE or found.mean > MOST_MEAN:
            emit(self._on_event, "canary-learnt", largest=found.largest, mean=found.mean)

    def _record(self, commit: Commit, log: ChainLog) -> CanaryRecord | None:
        if self._kind != "recorded":
            return None
        reason = "nothing is recorded for this version yet"
        try:
            record = read_canary(log, commit)
        except (ChainError, StoreError, UnsupportedVersion) as error:  # also a hostile record, which must not stop the server
            record, reason = None, str(error)
        if record is None:
            self._tell_missing(commit, reason)
        return record

    def _compare(self, commit: Commit, record: CanaryRecord | None) -> tuple[str, CanaryResult]:
        usual = self._usual or UNKNOWN_USUAL
        try:
            if record is not None:
                try:
                    return "recorded", check_recorded(self._routes, record, usual=usual)
                except RouteFailed as error:
                    if error.status >= 500:
                        raise
                    self._tell_missing(commit, str(error))  # the record has tokens that the model does not know
            return "self", check_decoding(self._routes, usual=usual)
        except RouteFailed as error:
            if error.status < 500:
                raise
            raise DecodingDiffers(f"the server cannot compute the log-probs of a few tokens: {error}.") from error

    def _tell_missing(self, commit: Commit, reason: str) -> None:
        if self._told_missing != (commit.seq, reason):
            emit(self._on_event, "canary-missing", seq=commit.seq, updates=commit.updates, reason=reason)
        self._told_missing = commit.seq, reason


@dataclass(frozen=True, slots=True)
class Recording:
    """The record of a version that the store has, and whether it was there before.

    Parameters
    ----------
    record
        The record.
    was_there
        True if the version was recorded before. That record was kept, and the server's tokens and the key were not used.
    """

    record: CanaryRecord
    was_there: bool


def record_canary(
    routes: VllmRoutes, log: ChainLog, commit: Commit | None = None, *, key: SigningKey | None = None, replace: bool = False
) -> Recording:
    """Record what a healthy server computes with a version. An earlier record of the version is kept, unless `replace` is True.

    Raises `EngineRefused` if the server does not have the version, `DecodingDiffers` if it was updated and decodes otherwise than it reads
    prompts, and the errors of the server's routes and of the store.

    Parameters
    ----------
    routes
        A client of the server's routes.
    log
        The chain.
    commit
        The version with which the server was started. None for a server that `deltawire sidecar` has updated: its label tells.
    key
        The key to sign the record with.
    replace
        True to replace an earlier record.
    """
    label = routes.weight_version()
    if label == QUARANTINED_LABEL or routes.is_paused():
        raise EngineRefused(
            "the server is paused or in an unknown state, so nothing can be recorded.",
            hint="Wait until it serves a version, and try again.",
        )
    is_labelled = label.isdecimal()
    if is_labelled:
        commit = _labelled(routes, log, int(label), commit)
    elif commit is None:
        raise EngineRefused(
            "the server does not tell which version it has.", hint="Name the version that it was started with (--at VERSION)."
        )
    if is_labelled:
        check_decoding(routes, usual=UNKNOWN_USUAL)
    recorded = generate(routes)
    if routes.weight_version() != label:
        raise EngineUnavailable("the server was updated while tokens were recorded. Try again.")
    before = None if replace else _usable_record(log, commit)
    record = put_canary(log, commit, recorded, key=key, replace=replace)
    return Recording(record, was_there=record == before)


def _labelled(routes: VllmRoutes, log: ChainLog, seq: int, named: Commit | None) -> Commit:
    """Return the commit of the version that a server has, according to its label and its workers. Raises `EngineRefused` if it is not
    `named`, or is one of another chain: labels are only numbers, which every chain has.
    """
    version = log.version(seq)
    if named is not None and version.seq != named.seq:
        raise EngineRefused(
            f"the server has {version.describe()}, not {named.describe()}.", hint="Leave out --at to record the version that it has."
        )
    found = log.read(version.seq)
    assert found is not None, "its version was read"
    try:
        told = {worker.get("commit") for worker in routes.status()}
    except RouteFailed as error:
        raise EngineRefused(
            f"the server does not tell which chain its version {seq} is of: {error}.",
            hint="Use a server that was started with the weight-transfer backend deltawire.",
        ) from error
    if told != {log.ref(found).commit}:
        raise EngineRefused(
            f"the server has commit {seq} of another chain, and not {found.describe()} of {log.store.url}.",
            hint="Name the chain that its sidecar follows.",
        )
    return found


def _usable_record(log: ChainLog, commit: Commit) -> CanaryRecord | None:
    try:
        return read_canary(log, commit)
    except (CorruptRecord, SignatureInvalid):  # `put_canary` replaces it
        return None
