"""The chain of a simulated run: the model of the fleet simulation, which also writes real records, without data."""

from __future__ import annotations

from random import Random

from ...fleet.rules.staleness import KnownVersion
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, FileEntry, Limits, link_targets, record_hash
from ...format.records.run_records import Head, Run
from ...format.records.version_records import Commit
from ...store import keys
from ...store.requests import Create, Put
from ..fleet_simulation.chain_model import ChainModel
from ..fleet_simulation.store_model import Objects

_BYTES = 64


class LiveChain(ChainModel):
    """A chain whose commits are in the store, so that channels, gates and gateways can read them.

    Parameters
    ----------
    random
        Draws digests and nonces.
    objects
        The content of the store.
    run
        The run's id.
    """

    def __init__(self, random: Random, objects: Objects, run: str) -> None:
        super().__init__(random)
        self._objects = objects
        self._run = run
        self.records: list[Commit] = []
        """The record of each commit."""
        objects.perform(Create(keys.RUN, Run("live", run, 0, Limits()).to_bytes()))

    def fence(self, epoch: int, resume_step: int) -> KnownVersion | None:
        found = super().fence(epoch, resume_step)
        self._write()
        return found

    def _append(self, step: int, digest: Digest) -> KnownVersion:
        version = super()._append(step, digest)
        self._write()
        return version

    def ref(self, seq: int) -> CommitRef:
        """Return the reference to a commit."""
        return self.records[seq].ref(record_hash(self.records[seq].to_bytes()))

    def _write(self) -> None:
        """Write the records of new commits."""
        while len(self.records) < len(self._commits):
            record = self._record(len(self.records))
            self.records.append(record)
            self._objects.perform(Create(keys.commit_key(record.seq), record.to_bytes()))
            self._objects.perform(Put(keys.HEAD, Head(record.seq).to_bytes()))

    def _record(self, seq: int) -> Commit:
        version, before = self._commits[seq], self.records[-1] if self.records else None
        made = None if version is not None or before is None or before.state_seq is None else self._commits[before.state_seq]
        shown = version or made
        entry = FileEntry(keys.data_key(self.epoch, seq, "ab" * 32, "safetensors"), _BYTES, _BYTES, "ab" * 32, name="model.safetensors")
        return Commit(
            id=self._run,
            seq=seq,
            epoch=self.epoch,
            nonce=f"{self._random.getrandbits(128):032x}",
            kind="fence" if version is None else "anchor",
            parent=None if before is None else self.ref(seq - 1).commit,
            links=tuple((other, self.ref(other).commit) for other in link_targets(seq)),
            base=self.ref(seq - 1) if version is None and shown is not None else None,
            state_seq=None if shown is None else shown.seq,
            updates=(before.updates if before is not None else 0) + (version is not None),
            digest=None if shown is None else shown.digest,
            state_bytes=0 if shown is None else _BYTES,
            tensors=0 if shown is None else 1,
            changed=0,
            step=None if shown is None else shown.step,
            time=1000 * seq,
            files=() if version is None else (entry,),
        )
