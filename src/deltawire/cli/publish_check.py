"""Compares a checkpoint with the chain before `deltawire publish` takes the run over. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..chain.attachments import attachments_of
from ..chain.fetch import Fetcher
from ..chain.find import newest_version
from ..chain.log import ChainLog
from ..chain.memory_state import MemoryState
from ..chain.rebuild import rebuild
from ..chain.restore import fetched_hops
from ..chain.routes import Routes
from ..delta.encode import encode_with_summary
from ..errors import NoChain
from ..events import emit
from ..format.content_hash import content_hash
from ..format.records.record_parts import Limits
from ..publish.advice import Advice
from ..publish.resume import read_table
from ..publish.upload.segments import TensorTable
from ..store.occupancy import refuse_occupied
from ..tensors.state import state_digest

if TYPE_CHECKING:
    from ..events import OnEvent
    from ..format.checkpoints.checkpoint import Checkpoint
    from ..format.records.version_records import Commit


@dataclass(frozen=True, slots=True)
class Forecast:
    """The version that would be published. `bytes` is about the size of its files; `base` is the number of the version it builds on."""

    version: int
    kind: str
    base: int | None
    bytes: int
    changed: int
    files: list[str]
    """The attachments that are new or changed."""

    @property
    def is_same(self) -> bool:
        return self.kind == "delta" and not self.changed and not self.files


def refuse_above_limits(log: ChainLog, state: Checkpoint) -> None:
    """Raise `LimitExceeded` if the run does not allow this checkpoint, and a `TensorError` if no run does."""
    try:
        limits = log.limits
    except NoChain:
        limits = Limits()
    TensorTable.of(state).check_limits(limits)


def newest_if_same(log: ChainLog, state: Checkpoint, attached: Mapping[str, bytes | Path] | None, threads: int | None) -> Commit | None:
    """Return the newest version if it has these weights and these attachments already. Reads no weights of the chain."""
    newest = newest_or_none(log)
    if newest is None or newest.digest != state_digest(state, threads=threads) or changed_files(log, newest, attached):
        return None
    return newest


def forecast(
    log: ChainLog,
    state: Checkpoint,
    attached: Mapping[str, bytes | Path] | None,
    base: Commit | None,
    *,
    step: int | None,
    full: bool,
    threads: int | None,
    on_event: OnEvent | None,
) -> Forecast:
    """Compare a checkpoint with a version, and return what would be published.

    Parameters
    ----------
    log
        The chain.
    state
        The checkpoint.
    attached
        The files to publish with it; None keeps those of the version before.
    base
        The version to compare with; None takes the newest.
    step
        The step to publish it with.
    full
        Whether a full checkpoint was asked for.
    threads
        The number of threads; None uses one per core.
    on_event
        Gets the events of reading the version back, and the warnings that the publisher would give.
    """
    newest = newest_or_none(log)
    if newest is None:
        refuse_occupied(log.store)
        return Forecast(1, "anchor", None, state.weight_bytes, 0, sorted(attached or ()))
    base = base or newest
    is_rewound = base.seq != newest.seq
    files = changed_files(log, base, attached)
    version = newest.updates + (2 if is_rewound else 1)
    advice = Advice(on_event, has_dtype=True, refuse_nonfinite=False)
    advice.follows(None, None if is_rewound else base.step)
    advice.check_step(step)
    if full:
        advice.follows(read_table(log, base), None)
        advice.check_layout(TensorTable.of(state))
        return Forecast(version, "anchor", None, state.weight_bytes, 0, files)
    before = MemoryState(threads=threads)
    routes = Routes(log, on_event=on_event)
    hops = routes.find(None, base)
    size = sum(entry.size for hop in hops for entry in hop.files)
    emit(on_event, "planned", seq=base.seq, updates=base.updates, hops=fetched_hops(hops), bytes=size)
    rebuild(before, log, Fetcher(log.store, limits=log.limits, on_event=on_event), base, routes=routes)
    table, table_before = TensorTable.of(state), TensorTable.of(before)
    advice.follows(table_before, None)
    advice.check_layout(table)
    if table == table_before:
        delta, summary = encode_with_summary(before, state, threads=threads)
        if len(delta) < state.weight_bytes or not summary.changed:
            return Forecast(version, "delta", base.updates, len(delta), summary.changed, files)
    return Forecast(version, "anchor", None, state.weight_bytes, 0, files)


def newest_or_none(log: ChainLog) -> Commit | None:
    """Return the commit that made the newest version; None if there is none yet. Raises `RunMismatch` if the run has another name."""
    try:
        log.run  # noqa: B018 - this compares its name with the one that was asked for
        return log.state_commit(newest_version(log))
    except NoChain:
        return None


def changed_files(log: ChainLog, commit: Commit, attached: Mapping[str, bytes | Path] | None) -> list[str]:
    """Return the names of attachments that differ from those of a version, or that only one of the two has."""
    if attached is None:
        return []
    named = commit.attachments if commit.attachments is not None else attachments_of(commit, Routes(log).find(None, commit)[0])
    there = {str(entry.name): entry.blake3 for entry in named}
    here = {name: content_hash(content.read_bytes() if isinstance(content, Path) else content) for name, content in attached.items()}
    return sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
