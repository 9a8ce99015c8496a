"""`deltawire show URL [VERSION]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, StepOption, TrustOption, UrlArgument, find_seq, reader_options, refuse_several
from ..options.common import JsonOption, VerboseOption
from ..output import figures
from ..output.terminal import print_json, print_rows
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...chain.log import ChainLog
    from ...chain.routes.restore import Hop
    from ...format.records.record_parts import FileEntry
    from ...format.records.version_records import Commit, Shortcut

_HOPS = {"anchor": "full checkpoint", "commit": "delta"}
"""The words for the hops of a route."""

_KINDS = {"anchor": "full checkpoint"}
"""The words for the kinds of commits."""


def show(
    url: UrlArgument,
    version: Annotated[
        int | None,
        typer.Argument(metavar="VERSION", min=1, help="The number of the version. The default is the newest.", show_default=False),
    ] = None,
    step: StepOption = None,
    seq: Annotated[
        int | None,
        typer.Option("--seq", min=0, metavar="N", help="Show the commit with this seq, as `log --commits` lists it.", show_default=False),
    ] = None,
    trust: TrustOption = None,
    verbose: VerboseOption = False,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Show all details of one version.

    The command prints the version's fields and files, the route by which a new reader gets it, and the key that signed it.
    """
    refuse_several(VERSION=version, step=step, seq=seq)
    with exit_codes(json):
        with opened(url, verbose=verbose) as store:
            chain = reader_options(run, trust).open_log(store)
            shown = find_commit(chain, seq if seq is not None else find_seq(chain, version, step))
        if json:
            print_json(_as_json(shown))
        else:
            _print(shown)


@dataclass(frozen=True, slots=True)
class Shown:
    """A commit, and the shortcuts and the route to its version. `route` is the cheapest one from nothing, or None."""

    commit: Commit
    hash: str
    void: bool
    signature: str
    shortcuts: list[Shortcut]
    route: list[Hop] | None
    numbers: Mapping[int, int]
    """The version numbers of all commits that are mentioned."""
    files: tuple[FileEntry, ...] | None
    """The files of the commit. None if they are in a file list that cannot be read."""

    @property
    def is_version(self) -> bool:
        return self.commit.kind != "fence" and not self.void

    @property
    def route_bytes(self) -> int:
        return sum(entry.size for hop in self.route or () for entry in hop.files)


def find_commit(log: ChainLog, seq: int | None) -> Shown:
    """Return the commit with this seq, or the newest one that made a version, checked by the hashes from the head down.

    Raises `VersionUnknown` if the chain does not have it.
    """
    from ...chain.find import version_number
    from ...errors import VersionUnknown

    run, head = log.run, log.head()
    if head is None or (seq is not None and seq > head.seq):
        raise VersionUnknown(
            f"the chain {run.run!r} at {log.store.url} has {'no commits' if head is None else f'only commits 0 to {head.seq}'}."
        )
    commit = log.ancestor(head, seq) if seq is not None else log.state_commit(log.in_force(head))
    void = log.is_void(commit)
    anchors, skips = log.shortcuts(commit.seq - 1 if commit.seq else None, commit.seq)
    found = [log.shortcut(at, None) for at in anchors] + [log.shortcut(at, base) for at, base in skips]
    route = None if void or commit.digest is None else _find_route(log, commit)
    shortcuts = [shortcut for shortcut in found if shortcut]
    bases = [end.seq for end in (commit.base, *(shortcut.base for shortcut in shortcuts)) if end is not None]
    numbers = {base: version_number(log, base) for base in bases}
    return Shown(commit, log.hash(commit.seq), void, _signature(commit), shortcuts, route, numbers, _files(log, commit))


def _files(log: ChainLog, commit: Commit) -> tuple[FileEntry, ...] | None:
    """Return the files of a commit. None if they are in a file list that cannot be read, for example because it was collected."""
    from ...errors import ChainError, UnsupportedVersion

    try:
        return log.files_of(commit)
    except (ChainError, UnsupportedVersion):
        return None


def _find_route(log: ChainLog, commit: Commit) -> list[Hop] | None:
    """Return the cheapest route from nothing whose data all exist; None if there is none."""
    from ...chain.routes.remaining_routes import Routes
    from ...errors import DataDamaged, DataMissing, ObjectMissing, VersionGone

    floor = log.floor()
    try:
        route = Routes(log).find(None, commit)
        for entry in (entry for hop in route if hop.target.seq <= floor for entry in hop.files):  # nothing above the floor is ever deleted
            log.store.head(entry.key)
    except (VersionGone, ObjectMissing, DataMissing, DataDamaged):
        return None
    return route


def _signature(commit: Commit) -> str:
    """Return whether the commit has a signature, and whether it is valid. This does not say whose key it is: --trust checks that."""
    from ...errors import SignatureInvalid
    from ...format.records.signing import check_signature

    if commit.signature is None:
        return "none"
    try:
        check_signature(commit, {commit.signature.key})
    except SignatureInvalid:
        return "invalid"
    return "valid"


def _as_json(shown: Shown) -> dict[str, Any]:
    commit = shown.commit
    return {
        "version": commit.updates if shown.is_version else None,
        "seq": commit.seq,
        "kind": commit.kind,
        "void": shown.void,
        "step": commit.step,
        "time": commit.time / 1000,
        "epoch": commit.epoch,
        "nonce": commit.nonce,
        "run_id": commit.id,
        "hash": shown.hash,
        "parent": commit.parent,
        "base": commit.base and {"seq": commit.base.seq, "hash": commit.base.commit},
        "digest": commit.digest and commit.digest.hex(),
        "state_bytes": commit.state_bytes,
        "tensors": commit.tensors,
        "changed": commit.changed,
        "bytes": commit.stored_bytes,
        "meta": dict(commit.meta),
        "recipe": commit.recipe and commit.recipe.plain(),
        "signature": {"is": shown.signature, "key": commit.signature and commit.signature.key},
        "files": None if shown.files is None else [entry.plain() for entry in shown.files],
        "list": commit.file_list and commit.file_list.plain(),
        "attachments": [{"name": entry.name, "size": entry.size, "key": entry.key} for entry in commit.attachments or ()],
        "shortcuts": [
            {
                "kind": "anchor" if shortcut.base is None else "skip",
                "base": shortcut.base and shortcut.base.seq,
                "bytes": shortcut.stored_bytes,
                "files": [entry.plain() for entry in shortcut.files],
                "list": shortcut.file_list and shortcut.file_list.plain(),
            }
            for shortcut in shown.shortcuts
        ],
        "route": shown.route
        and [
            {"from": hop.base, "to": hop.target.seq, "by": hop.source, "bytes": sum(entry.size for entry in hop.files)}
            for hop in shown.route
        ],
    }


def _moment(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # the publisher's clock may have been wrong
        return f"{milliseconds:,} ms after 1970"


def _print(shown: Shown) -> None:
    commit = shown.commit
    moment = f"{_moment(commit.time)}, by the publisher's clock"
    base = f"version {shown.numbers[commit.base.seq]}" if commit.base else ""
    name = f"commit {commit.seq}"
    kind = _KINDS.get(commit.kind, commit.kind)
    newest = "no version yet" if commit.state_seq is None else f"version {commit.updates}"
    print_rows(
        f"version {commit.updates}, {kind}" if shown.is_version else f"{name}, {kind}",
        [
            ("void", "it does not count, because a newer publisher had taken over" if shown.void else ""),
            ("newest version then", "" if shown.is_version else newest),
            ("in the chain", name if shown.is_version else ""),
            ("step", "" if commit.step is None else f"{commit.step:,}"),
            ("published", moment),
            ("publisher", f"number {commit.epoch} of this run"),
            ("base", base),
            ("weights", f"{figures.size(commit.state_bytes)} in {commit.tensors:,} tensors" if commit.tensors else ""),
            ("quantised by", "" if commit.recipe is None else str(commit.recipe)),
            ("changed weights", f"{commit.changed:,}" if commit.kind == "delta" else ""),
            ("size", _size(commit) if commit.file_count else ""),
            ("digest", "" if commit.digest is None else commit.digest.hex()),
            ("hash", shown.hash),
            ("signature", _signature_text(shown)),
            *((f"meta {name}", value) for name, value in sorted(commit.meta.items())),
        ],
    )
    if commit.file_list is not None:
        print_rows("files", [(f"{commit.file_count:,} files", f"listed in {commit.file_list.key}")])
    elif commit.files:
        print_rows("files", [(figures.size(entry.size), _file_text(entry)) for entry in commit.files])
    if commit.attachments:
        print_rows("attachments", [(figures.size(entry.size), _file_text(entry)) for entry in commit.attachments])
    if commit.digest is not None and not shown.void:
        print_rows("how readers get it", _routes(shown))


def _size(commit: Commit) -> str:
    compared = figures.ratio(commit.state_bytes, commit.stored_bytes, "×")
    return (
        f"{figures.size(commit.stored_bytes)}, {compared} smaller than the full weights"
        if commit.kind == "delta"
        else figures.size(commit.stored_bytes)
    )


def _signature_text(shown: Shown) -> str:
    if shown.commit.signature is None:
        return "none"
    return f"{shown.signature}, by key {shown.commit.signature.key}"


def _file_text(entry: FileEntry) -> str:
    what = entry.name or f"tensors {entry.first or 0:,} to {(entry.first or 0) + (entry.count or 0) - 1:,}"
    return f"{what}  {entry.key}"


def _routes(shown: Shown) -> list[tuple[str, str]]:
    rows = []
    for shortcut in shown.shortcuts:
        size = figures.size(shortcut.stored_bytes)
        if shortcut.base is None:
            rows.append(("full checkpoint", size))
        else:
            rows.append(("skip", f"one delta from version {shown.numbers[shortcut.base.seq]}, {size}"))
    if shown.route is None:
        return [*rows, ("from nothing", "impossible: its data were deleted by garbage collection")]
    steps = " → ".join(
        f"{hop.target.updates} ({_HOPS.get(hop.source, hop.source)}, {figures.size(sum(entry.size for entry in hop.files))})"
        for hop in shown.route
        if hop.source != "fence"
    )
    return [*rows, ("from nothing", f"version {steps}; {figures.size(shown.route_bytes)} in all")]
