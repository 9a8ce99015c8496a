"""Plan routes over every commit of a toy chain, because the real planner might choose other routes for tiny states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from toy_chain import ToyChain

from deltawire.chain.routes.walk_route import HopFailed
from deltawire.errors import ChainError, DataDamaged, DataMissing, MirrorError, ObjectMissing
from deltawire.format.records.record_parts import CommitRef, FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.subscribe.mirror.mirror import HeldSlot, Mirror
from deltawire.subscribe.mirror.mirror_update import MirrorUpdate
from deltawire.subscribe.sync_report import SyncReport


@dataclass(frozen=True)
class StraightHop:
    target: Commit
    base: int | None
    files: tuple[FileEntry, ...]
    source: str = "commit"


class StraightRoutes:
    """A planner of routes from the current state, or the newest anchor, over every commit. It never uses an avoided hop."""

    def __init__(self, chain: ToyChain) -> None:
        self.chain = chain
        self.avoided: list[HopFailed] = []
        self.fetched: list[str] = []

    def find(self, have: CommitRef | None, target: Commit) -> list[StraightHop]:
        hops: list[StraightHop] = []
        if any(not isinstance(failure.error, ChainError) or failure.hop.base is None for failure in self.avoided):
            raise self.avoided[-1].error
        lost = {failure.hop.target.seq for failure in self.avoided}
        seq = target.seq
        while have is None or seq != have.seq:
            commit = self.chain.commits[seq]
            if seq in lost and commit.kind != "anchor":
                raise self.avoided[-1].error
            hops.append(StraightHop(commit, None if commit.kind == "anchor" else seq - 1, commit.files))
            if commit.kind == "anchor":
                break
            seq -= 1
        return hops[::-1]

    def avoid(self, failure: HopFailed) -> None:
        self.avoided.append(failure)

    def to_memory(self, hop: StraightHop, entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, memoryview]]:
        for entry in entries:
            try:
                data = self.chain.store.get(entry.key, limit=entry.size)
            except ObjectMissing:
                raise DataMissing(f"{entry.key} is missing.") from None
            if blake3(data).hexdigest() != entry.blake3:
                raise DataDamaged(f"{entry.key} is damaged.")
            self.fetched.append(entry.key)
            yield entry, memoryview(data)

    def abandon(self) -> None:
        """Do nothing, because these routes never wait."""

    def to_file(self, hop: StraightHop, entry: FileEntry, path: Path) -> None:
        for _, data in self.to_memory(hop, [entry]):
            path.write_bytes(data)


def update(mirror: Mirror, chain: ToyChain, seq: int | None = None, routes: StraightRoutes | None = None) -> HeldSlot:
    """Update the mirror to a version of the chain, by default the newest."""
    target = chain.commits[-1 if seq is None else seq]
    routes = routes or StraightRoutes(chain)
    writer = mirror.try_writer()
    if writer is None:
        raise MirrorError("the writer's lock is taken")
    with writer:
        return MirrorUpdate(mirror, routes, routes, SyncReport()).run(target)
