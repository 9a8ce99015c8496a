"""`deltawire gc URL`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..output import figures
from ..output.terminal import print_json, print_rows
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...chain.log import ChainLog
    from ...chain.maintenance.collect import Collected
    from ...chain.records.pins import StoredPin

_GRACE = 3600.0


def gc(
    url: UrlArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what could be deleted, and write and delete nothing.")] = False,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0.0,
            max=1e9,
            metavar="SECONDS",
            help="Delete data this long after they were marked. It must be longer than any reader takes to sync.",
        ),
    ] = _GRACE,
    keep_anchors: Annotated[
        int,
        typer.Option(
            "--keep-anchors",
            min=1,
            metavar="N",
            help="Keep this many of the newest full checkpoints, and everything above the oldest of them.",
        ),
    ] = 2,
    trust: TrustOption = None,
    verbose: VerboseOption = False,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Delete data that readers of newer versions do not need (garbage collection).

    Collection has two steps, by the store's clock: a first call marks data, and a later call deletes them when the grace period has passed,
    unless a reader needs them by then. So run the command regularly. Readers that are behind write pins, which keep the data that they
    need. Commits are never deleted.

    On a signed chain only signed full checkpoints count. Without --trust, the key of the first commit must have signed all of them.
    """
    with exit_codes(json):
        from ...chain.find import version_number
        from ...chain.maintenance.collect import collect

        with opened(url, verbose=verbose) as store:
            chain = reader_options(run, trust).open_log(store)
            chain.run  # noqa: B018 - a location without a chain is refused before anything is written to it
            done = collect(store, grace=grace, keep_anchors=keep_anchors, dry_run=dry_run, log=chain)
            pins = blocking_pins(chain, keep_anchors)
            seqs = {placed.pin.seq for placed in pins} | ({done.floor} if done.floor is not None else set())
            numbers = {seq: version_number(chain, seq) for seq in seqs}
            swept = Swept(store.url, dry_run, keep_anchors, done, pins, numbers)
        if json:
            print_json(_as_json(swept))
        else:
            print_rows(swept.url, _rows(swept))


@dataclass(frozen=True, slots=True)
class Swept:
    """The objects that were collected, or would be, and the pins that prevent more."""

    url: str
    dry_run: bool
    keep_anchors: int
    done: Collected
    pins: list[StoredPin]
    numbers: Mapping[int, int]
    """The version numbers of all commits that are mentioned."""

    @property
    def floor_version(self) -> int | None:
        return None if self.done.floor is None else self.numbers[self.done.floor]


def blocking_pins(log: ChainLog, keep_anchors: int) -> list[StoredPin]:
    """Return the pins without which the floor could be higher, lowest first."""
    from ...chain.maintenance.survey import survey
    from ...chain.records.pins import read_pins

    now = datetime.now(timezone.utc)
    anchors = survey(log, keep_anchors, now).anchors
    if len(anchors) < keep_anchors:
        return []
    pins = [placed for placed in read_pins(log.store, log.run) if placed.holds(now) and placed.pin.seq < anchors[keep_anchors - 1].seq]
    return sorted(pins, key=lambda placed: (placed.pin.seq, placed.pin.reader))


def _as_json(swept: Swept) -> dict[str, Any]:
    done = swept.done
    return {
        "url": swept.url,
        "dry_run": swept.dry_run,
        "outcome": done.outcome,
        "mark": done.mark,
        "floor": done.floor,
        "floor_version": swept.floor_version,
        "deleted": done.deleted,
        "bytes": done.bytes,
        "kept": done.kept,
        "wait": done.wait,
        "pins": [{"reader": placed.pin.reader, "seq": placed.pin.seq, "ttl": placed.pin.ttl} for placed in swept.pins],
    }


def _rows(swept: Swept) -> list[tuple[str, str]]:
    done = swept.done
    objects = f"{done.deleted:,} objects, {figures.size(done.bytes)}"
    rows = {
        "collected": [("would be deleted" if swept.dry_run else "deleted", objects)],
        "waiting": [
            ("marked", f"data that only versions up to {swept.floor_version} need"),
            ("deletion", f"in {figures.duration(done.wait)}: run this command again then"),
        ],
        "held": [
            ("marked", f"data that only versions up to {swept.floor_version} need"),
            ("not deleted yet", "because of a reader's pin, a new publisher or a damaged full checkpoint"),
        ],
        "nothing": [("nothing to collect", _why_nothing(swept))],
    }[done.outcome]
    if done.kept:
        rows.append(("data objects kept", f"{done.kept:,}"))
    if done.floor is not None and done.outcome == "collected":
        rows.append(("floor", f"version {swept.floor_version}"))
    for placed in swept.pins:
        rows.append((f"pin of {placed.pin.reader}", f"keeps data that a reader at version {swept.numbers[placed.pin.seq]} needs"))
    return rows


def _why_nothing(swept: Swept) -> str:
    if swept.done.floor is None:
        kept = swept.keep_anchors
        return f"nothing is older than the {'newest full checkpoint' if kept == 1 else f'{kept} newest full checkpoints'}"
    return f"data below version {swept.floor_version} were deleted already"
