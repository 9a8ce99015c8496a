"""A version as users see it.

Several types describe a version, each for one purpose:

- `Commit` (format.records): the record in the chain that makes the version. Only code that follows chains sees it.
- `CommitRef` (format.records): a reference from one record to a commit: number, hash of the record, digest of the state.
- `Version` (here): what publishers and readers return to users. It is made from a commit.
- `PendingVersion` (publish.background): a state that a background publisher has accepted, before it is a version.
- `ClaimedVersion` (format.rollouts): step and digest of a version that made tokens, as a member claims them in a rollout file.
- `KnownVersion` (fleet.rules.staleness): the same facts as the chain has them. The trainer compares claims with it.
- `LiveVersion` (engines.vllm.live): the version that the live memory of one of vLLM's workers has.
- `LiveInterval` (engines.swap): the time in which one version was live in an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import VersionUnknown
from ..format.digest import Digest
from ..format.records.record_parts import RecipeRecord
from ..format.records.version_records import Commit


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the model.

    Parameters
    ----------
    seq
        The number of the commit that made the version.
    step
        The training step that the publisher gave, if any.
    digest
        The digest of the state.
    epoch
        The epoch of the writer that published it.
    updates
        The number of versions up to this one, counted from 1. The difference of two such numbers is a lag in versions.
    kind
        How it was published: "delta", "anchor" or "rewind".
    state_bytes
        The size of the state in bytes.
    bytes
        The size of the files that were uploaded for it.
    changed
        The number of weights that differ from the version before. It is 0 for the kinds "anchor" and "rewind".
    time
        When it was published, by the publisher's clock, in seconds since 1970.
    meta
        The strings that it was published with.
    attachments
        The names of its attachments, with the BLAKE3 hash of each. Empty for versions whose commits (record version 1) name none.
    recipe
        How the publisher quantised the weights: `name`, `release` and `options` of the recipe. None if it did not quantise them.
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
    recipe: RecipeRecord | None = None

    @classmethod
    def of(cls, commit: Commit) -> Version:
        """Return the version that a commit makes.

        Raises `VersionUnknown` for a fence, which makes none: use the commit with the number `state_seq`.

        Parameters
        ----------
        commit
            The commit's record.
        """
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
            recipe=commit.recipe,
        )

    def describe(self) -> str:
        """Return the name for messages, in the form of `Commit.describe`."""
        return f"version {self.updates} (commit {self.seq})"
