"""Moves of channels: records that say which version a channel names from now on (docs/protocol.md §12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .canonical import CanonicalRecord, Fields
from .record_parts import HASH, NONCE, READER, CommitRef, Signature, read_short, read_signature

KINDS = ("promote", "rollback", "share")
MILLION = 1_000_000
"""Shares of users are in parts per million."""
MOST_WHY, MOST_BY = 2000, 200
"""The most characters of the texts of a move."""


@dataclass(frozen=True, slots=True)
class ChannelMove(CanonicalRecord):
    """One change of a channel. The channel names `target` until the next move.

    Parameters
    ----------
    id
        The id of the run.
    channel
        The name of the channel.
    move
        The number of this move, from 0 without gaps.
    kind
        "promote": the channel names a version that somebody wants users to get. "rollback": it goes back to an earlier version. "share":
        only the share of users changes.
    target
        The version.
    before
        The hash of the record of the move before. None for move 0.
    share
        How many of a million users belong to the channel. None if it is not for a share of the users.
    why, by
        Texts for people: the reason, and the author of the move.
    time
        When, in milliseconds since 1970, by the clock of the process that moved it.
    nonce
        Makes the record unique, so that its writer recognises it.
    signature
        The signature, if the chain is signed.
    """

    id: str
    channel: str
    move: int
    kind: str
    target: CommitRef
    before: str | None
    share: int | None
    why: str
    by: str
    time: int
    nonce: str
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"move {self.move} of the channel {self.channel}"

    def plain(self) -> dict[str, Any]:
        return {
            "deltawire": "channel",
            "version": 1,
            "id": self.id,
            "channel": self.channel,
            "move": self.move,
            "kind": self.kind,
            "target": self.target.plain(),
            "before": self.before,
            "share": self.share,
            "why": self.why,
            "by": self.by,
            "time": self.time,
            "nonce": self.nonce,
            "signature": self.signature and self.signature.plain(),
        }

    @classmethod
    def parse(cls, data: bytes) -> ChannelMove:
        fields = Fields.parse(data, "channel")
        record = cls(
            id=fields.matching("id", NONCE),
            channel=fields.matching("channel", READER),
            move=read_short(fields, "move"),
            kind=fields.text("kind"),
            target=CommitRef.of(fields.object("target")),
            before=fields.nullable("before", lambda name: fields.matching(name, HASH)),
            share=fields.nullable("share", fields.integer),
            why=_line(fields, "why", MOST_WHY),
            by=_line(fields, "by", MOST_BY),
            time=fields.integer("time"),
            nonce=fields.matching("nonce", NONCE),
            signature=read_signature(fields),
        )
        fields.done()
        if record.kind not in KINDS:
            fields.refuse(f"its kind is {record.kind!r}")
        if (record.move == 0) != (record.before is None):
            fields.refuse("move 0, and no other, has no move before it")
        if record.move == 0 and record.kind != "promote":
            fields.refuse(f"move 0 is of kind promote, not {record.kind}")
        if record.target.digest is None:
            fields.refuse("its target has no digest")
        if record.share is not None and record.share > MILLION:
            fields.refuse(f"share must be at most {MILLION:,}")
        return record


def _line(fields: Fields, name: str, most: int) -> str:
    text = fields.text(name)
    if len(text) > most or not text.isprintable():
        fields.refuse(f"{name} must be one line of at most {most:,} printable characters")
    return text
