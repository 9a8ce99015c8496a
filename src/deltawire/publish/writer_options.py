"""Options that all writers of a chain share."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ..format.records.record_parts import Limits
from ..format.records.signing import SigningKey, public_keys
from ..store.base import StoreOptions
from .shortcuts.cadence import AnchorPolicy
from .upload.checkpoint_files import SHARD_BYTES
from .upload.segments import SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Says how versions are written to a chain. The defaults suit most runs.

    >>> Publisher("s3://bucket/run-7", options=WriterOptions(signing_key=key, auto_collect=3600))

    `Publisher`, `ShardedPublisher`, `FSDPPublisher`, `DeltaWireCallback`, `DeltaWireTransfer` and `GrpoTrainer` take it as `options`.

    Parameters
    ----------
    signing_key
        Every version is signed with this key. `SigningKey.load` reads it from a file. A publisher that signs accepts only a chain that was
        signed from its beginning, by this key or by one of `trusted_keys`; otherwise it raises `SignatureInvalid` before it takes the run
        over. A publisher without a key raises `SignatureInvalid` for a chain that is signed.
    trusted_keys
        Further public keys that may have signed the chain, for example your earlier ones after a change of keys. They need a `signing_key`.
    anchor_policy
        Says how often a full checkpoint (an anchor) is added, so that new readers need not replay the whole chain. See `AnchorPolicy`.
    skips
        Whether deltas over several versions (skips) are made, so that readers who are far behind catch up sooner. They cost the publisher
        a few per cent of the state in memory.
    auto_collect
        After every anchor, data that readers no longer need are deleted, at least this many seconds after they were marked for deletion.
        None: nothing is deleted; run `deltawire gc` instead.
    announce
        Whether the files of a delta are announced while others are still encoded, so that readers fetch and decode them before the commit.
        Deltas that are encoded and uploaded in a quarter of a second, or have one segment, are not announced.
    limits
        Limits of a new run: the most bytes, tensors and bytes per file that its readers have to accept. An existing run keeps its own.
    threads
        Number of threads that encode and hash. None: one per processor core.
    segment_bytes
        Tensors are encoded and uploaded in groups of about this many bytes. Smaller groups overlap better; larger ones make fewer objects.
    shard_bytes
        Largest size of one safetensors file in a full checkpoint. A single tensor may exceed it.
    close_timeout
        How many seconds `close`, or the end of a `with` block, waits for the store. Then it raises `CloseTimeout`, which names the versions
        that are not published. If only skips or anchors are not done, it gives them up with an event `shortcut-failed`. The time limit is
        for a `Store` of your own with a call that never returns: calls of the other stores end by themselves. None or infinity: no
        limit.
    store
        Says how the store is reached if the writer is given a URL. An open `Store` has its own options. See `StoreOptions`.
    """

    signing_key: SigningKey | None = None
    trusted_keys: Collection[str] = ()
    anchor_policy: AnchorPolicy = field(default_factory=AnchorPolicy)
    skips: bool = True
    auto_collect: float | None = None
    announce: bool = True
    limits: Limits = field(default_factory=Limits)
    threads: int | None = None
    segment_bytes: int = SEGMENT_BYTES
    shard_bytes: int = SHARD_BYTES
    close_timeout: float | None = 3600.0
    store: StoreOptions = field(default_factory=StoreOptions)

    def __post_init__(self) -> None:
        if self.signing_key is not None and not isinstance(self.signing_key, SigningKey):
            raise TypeError(f"signing_key is a {type(self.signing_key).__name__}: load the key with SigningKey.load(path)")
        object.__setattr__(self, "trusted_keys", public_keys(self.trusted_keys))
        if self.trusted_keys and self.signing_key is None:
            raise ValueError("trusted_keys are for a publisher that signs: give it a signing_key, too")
        if self.auto_collect is not None and not (math.isfinite(self.auto_collect) and self.auto_collect >= 0):
            raise ValueError("auto_collect is a finite number of seconds, at least 0")
        if self.close_timeout is not None and not self.close_timeout > 0:
            raise ValueError("close_timeout is a positive number of seconds, or None")
        if self.segment_bytes < 1 or self.shard_bytes < 1:
            raise ValueError("segment_bytes and shard_bytes must be at least 1")

    @property
    def accepted_keys(self) -> frozenset[str]:
        """The public keys that may have signed the chain. Empty if versions are not signed."""
        return frozenset() if self.signing_key is None else frozenset({self.signing_key.public, *self.trusted_keys})
