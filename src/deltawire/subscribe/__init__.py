"""The reading side: follow a chain in memory or in a mirror directory, or pull one version of it.

subscriber       keep a replica at the newest version
pull             write one version to a directory
follow           look for new versions again and again
chain_view       the head of a chain, as far as a reader may trust it
sync_context     what one sync needs: the chain, routes, and fetchers
sync_report      what one sync cost
files_ahead      files that are fetched before the commit that names them exists
resolved_ahead   such files, decoded against the present weights
replica          the interface of replicas
memory_replica   a replica in memory
replica_weights  the weights that a replica in memory changes
prepared_swap    a prepared change of weights
undo             steps that lead back to earlier versions
tensor_table     the names, types and shapes of a chain's tensors
model_files      the config, tokenizer and tensor types of a version
pin_keeper       a reader's pin, which keeps objects from collection
seen             the newest commit that a mirror has seen
mirror/          a replica in a directory
spool/           a directory from which the workers of an engine take updates
cache/           data objects on a reader's disk
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from .mirror.mirror import Mirror
from .pull import pull
from .subscriber import Subscriber

__all__ = ["Mirror", "Subscriber", "pull", "reading_mirror"]


def reading_mirror(path: Path | str) -> AbstractContextManager[Path]:
    """Hold the version that a mirror serves, for a loader. Yields its directory, which does not change while the context lasts.

    >>> with reading_mirror("/dev/shm/policy") as checkpoint:
    ...     model = AutoModel.from_pretrained(checkpoint)

    Needs no store and no subscriber in this process. Raises `MirrorError` if the mirror has no sound version.

    Parameters
    ----------
    path
        The directory of the mirror.
    """
    return Mirror(Path(path)).reading()
