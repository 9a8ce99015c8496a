"""Change a checkpoint directory in place, delta by delta, through memory maps.

No other code may read its files meanwhile. A change that fails leaves a mix of versions behind. Therefore slots of a mirror and staged
outputs of `pull` use it only on files that no reader can reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...codec import default_codec
from ...delta.resolve import apply_file
from ...errors import CorruptDelta
from ...format import delta_file
from ...format.checkpoints.checkpoint import Checkpoint, Shard, open_shard
from ...format.checkpoints.staged_output import sync_file
from ...format.delta_file import Coverage, DeltaBytes
from ...format.digest import Digest
from ...format.safetensors_header import TensorEntry
from ...tensors.bits import Tensor
from ...tensors.state import Progress, batches, state_digest


class CheckpointInPlace:
    """The tensors of the checkpoint directory `path`, writable, for the files of one delta. Raises `CheckpointError` if it cannot be
    opened.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self._threads = threads
        self._shards = [open_shard(shard.name, shard.path, writable=True) for shard in Checkpoint(path).shards]
        self._places: dict[str, tuple[Shard, TensorEntry]] = {
            name: (shard, entry) for shard in self._shards for name, entry in shard.header.entries.items()
        }
        self._order = sorted(self._places)
        self._coverage = Coverage()

    def apply(self, delta: DeltaBytes, first: int, count: int) -> Digest:
        """Apply a delta to the `count` tensors from number `first` on, in the order of names. Return the digest after minus the digest
        before.

        Checks both digests in the delta. Raises the errors of `apply_delta`, and `CorruptDelta` for a file that is not a delta of a chain,
        or that changes elements which an earlier file of the same hop changed.
        """
        if first + count > len(self._order):
            raise CorruptDelta(f"the delta is for tensors {first} to {first + count - 1}, but there are {len(self._order)}.")
        file = delta_file.parse(delta, names=self._order[first : first + count])
        if file.structure.added or file.structure.removed:
            raise CorruptDelta("the delta adds or removes tensors, which no delta of a chain may do.")
        part: dict[str, Tensor] = {name: self._array(name) for name in self._order[first : first + count]}
        apply_file(part, file, coverage=self._coverage, threads=self._threads)
        return file.after - file.before

    def flush(self) -> None:
        """Flush every change to disk."""
        for shard in self._shards:
            shard.map.flush()
            sync_file(shard.path)

    def _array(self, name: str) -> NDArray[Any]:
        shard, entry = self._places[name]
        return shard.array(entry)


def checkpoint_digest(checkpoint: Checkpoint, *, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """Return the digest of a checkpoint, by reading all of it."""
    total = Digest()
    for batch in batches(list(checkpoint), lambda name: checkpoint.entry(name).nbytes, default_codec()):
        total += state_digest({name: checkpoint[name] for name in batch}, threads=threads)
        if progress:
            progress(sum(checkpoint.entry(name).nbytes for name in batch))
    return total
