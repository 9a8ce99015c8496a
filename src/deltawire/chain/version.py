"""What users see of a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import VersionUnknown
from ..format.digest import Digest
from ..format.records.chain_records import Commit


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the model: `seq` is its place in the chain, `updates` counts the versions up to it, so that lags can be subtracted.

    `bytes` is the size of the files that it took, `changed` the number of weights that differ from the version before (0 for kinds
    "anchor" and "rewind"), `time` the publisher's clock in seconds since 1970, `meta` the strings that it was published with,
    `attachments` the files beside its weights: names with the BLAKE3 of their contents (none of versions from before commits named them).
    """

    seq: int
    step: int | None
    digest: Digest
    epoch: int
    updates: int
    kind: str
    state_bytes: int
    bytes: int
    changed: int
    time: float
    meta: Mapping[str, str] = field(default_factory=dict)
    attachments: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, commit: Commit) -> Version:
        """The version that a commit makes. A fence makes none: ask for that of its `state_seq` (`VersionUnknown`)."""
        if commit.kind == "fence" or commit.digest is None:
            raise VersionUnknown(f"commit {commit.seq} is a fence, which makes no version; commit {commit.state_seq} is in force there.")
        return cls(
            seq=commit.seq,
            step=commit.step,
            digest=commit.digest,
            epoch=commit.epoch,
            updates=commit.updates,
            kind=commit.kind,
            state_bytes=commit.state_bytes,
            bytes=commit.stored_bytes,
            changed=commit.changed,
            time=commit.time / 1000,
            meta=dict(commit.meta),
            attachments={str(entry.name): entry.blake3 for entry in commit.attachments or ()},
        )

    def describe(self) -> str:
        """Name it in messages, as `Commit.describe` does."""
        return f"version {self.updates} (commit {self.seq})"
