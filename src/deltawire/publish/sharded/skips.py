"""Skips by many processes: each composes the deltas of its own parts, and all together judge whether they are worth their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...format.records.chain_records import FileEntry
from ..shortcuts.compose import Composition
from ..upload.data_objects import DataPlace, Uploads
from ..upload.segments import Segment
from .parts import PartsBaseline
from .ranks import Ranks, together


def skips_due(ranks: Ranks, baseline: PartsBaseline) -> Iterator[Composition]:
    """This process's parts of the skips that are due at the version that the baselines are at, shortest first. In all processes alike.

    One of them may have had to forget what others still know, for want of room; then there is none of that span. To be exhausted after
    every version: it is what keeps the histories short.
    """
    level = 1
    try:
        while True:
            own: list[Composition] = []

            def compose(level: int = level, own: list[Composition] = own) -> list[int] | None:
                found = baseline.compose(level)
                if found is None:
                    return None
                own.append(found)
                return [found.base.seq, found.forward_bytes, found.replaced_bytes]

            answers = together(ranks, compose)
            if any(answer is None or answer[0] != answers[0][0] for answer in answers):
                return
            worth_it = sum(answer[1] for answer in answers) < sum(answer[2] for answer in answers)
            baseline.keep(own[0].reverse(has_skip=worth_it))
            if worth_it:
                yield own[0]
            level += 1
    finally:
        baseline.forget()


def upload_skip(ranks: Ranks, place: DataPlace, skip: Composition, segments: tuple[Segment, ...]) -> tuple[FileEntry, ...]:
    """Upload one's own parts of a skip. Returns the files of all processes, in the order that records want."""

    def upload() -> list[dict[str, Any]]:
        uploads = Uploads(place.pool)
        try:
            for index, delta in sorted(skip.forward.items()):
                uploads.start_delta(place, delta, segments[index])
            files, _ = uploads.finish()
        except BaseException:
            uploads.abandon()
            raise
        return [entry.plain() for entry in files]

    return in_order(together(ranks, upload))


def in_order(files: list[list[dict[str, Any]]]) -> tuple[FileEntry, ...]:
    """The files of each rank as one list: by the tensors that they are about, and of the same ones by rank."""
    entries = [(FileEntry(**entry), rank) for rank, own in enumerate(files) for entry in own]
    return tuple(entry for entry, _ in sorted(entries, key=lambda pair: (pair[0].first, pair[1])))
