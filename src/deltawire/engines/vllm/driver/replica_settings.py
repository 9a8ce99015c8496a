"""Settings for updating a vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The way in which a server is brought to new versions.

    Parameters
    ----------
    url
        The location of the chain, for workers that load from the store.
    spool
        The directory of the spool.
    mirror
        The directory of the mirror, if there must be one.
    prefers_mirror
        Whether full checkpoints are loaded from the mirror, and not from the store. A mirror that exists is always preferred.
    run
        The name that the run must have, for workers that load from the store.
    confirm
        What the workers check after each update: "auto", "written" or "everything". `InitInfo` in backend.py describes them.
    threads
        Number of threads for decoding and digests. None means one per core.
    trusted_keys
        Public keys. A mirror that none of them signed is not used.
    staging_patience
        Seconds that the workers may take to stage a version.
    gpu_share
        The share of a GPU's time that staging may take. None leaves it to the workers.
    relays
        Copies of the chain that relays keep, for workers that load from the store.
    channel
        The channel that the mirror follows. None follows the newest version.
    undo_bytes
        The most memory that each worker may use to keep its last updates, so that it can go back to the versions before them at once.
    """

    url: str
    spool: Path
    mirror: Path
    prefers_mirror: bool = False
    run: str | None = None
    confirm: str = "auto"
    threads: int | None = None
    trusted_keys: Sequence[str] = ()
    staging_patience: float = 600.0
    gpu_share: float | None = None
    relays: Sequence[str] = ()
    channel: str | None = None
    undo_bytes: int = 0
