"""`deltawire verify URL`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, ThreadsOption, VerboseOption
from ..output import figures
from ..output.progress import count_bar
from ..output.terminal import print_json, print_rows, print_wrapped, result_console
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...chain.maintenance.verify_report import Problem, Report

DAMAGED = 3
"""The exit code if damage was found."""


def verify(
    url: UrlArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read all data and rebuild every version. This needs memory for the weights of one version.")
    ] = False,
    trust: TrustOption = None,
    run: RunOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Check a whole chain: records, links, signatures and data.

    Without --deep the command compares only the sizes of data. With --deep it reads every byte and rebuilds every version. Data that
    garbage collection has deleted are not reported as missing.

    The command ends with code 3 if it finds damage that can affect readers of the newest version. Damage that cannot affect them is listed
    as superseded: in versions that were abandoned, or that are older than the newest undamaged full checkpoint.
    """
    with exit_codes(json):
        from ...chain.maintenance.verify import verify as verify_chain

        with opened(url, verbose=verbose) as store, count_bar("rebuild versions", quiet=json or verbose or not deep) as progress:
            report = verify_chain(store, deep, progress, options=reader_options(run, trust), threads=threads)
        if json:
            print_json(_as_json(store.url, deep, report))
        else:
            _print(store.url, deep, report)
        if not report.ok:
            raise typer.Exit(DAMAGED)


def _cause_as_json(cause: Cause) -> dict[str, Any]:
    return {"where": cause.affects[0], "what": cause.what, "affects": cause.affects}


def _as_json(url: str, deep: bool, report: Report) -> dict[str, Any]:
    causes, superseded = causes_of(report, url)
    return {
        "url": url,
        "deep": deep,
        "ok": report.ok,
        "commits": report.commits,
        "versions": report.versions,
        "void": report.void,
        "shortcuts": report.shortcuts,
        "files": report.files,
        "bytes": report.bytes,
        "rebuilt": report.rebuilt if deep else None,
        "floor": report.floor if report.floor >= 0 else None,
        "reachable": not _is_out_of_reach(report),
        "remedy": remedy_for(causes, url),
        "problems": [_cause_as_json(cause) for cause in causes],
        "superseded": [_cause_as_json(cause) for cause in superseded],
        "notes": [{"where": note.where, "what": note.what} for note in report.notes],
    }


def _finding(problem: Problem) -> str:
    """Return the problem without its hint, which advises to run this command."""
    from ...errors import ChainBroken, CorruptRecord, DataDamaged, DataMissing

    what = problem.what
    for error in (ChainBroken, CorruptRecord, DataDamaged, DataMissing):
        what = what.removesuffix(error.hint)
    return what.rstrip()


@dataclass(slots=True)
class Cause:
    """One cause of damage, and the keys and versions at which it was noticed."""

    what: str
    affects: list[str]


def causes_of(report: Report, url: str) -> tuple[list[Cause], list[Cause]]:
    """Return the causes of damage, and the causes of superseded damage.

    A damaged object is one cause, however many versions need it, even if some of these are superseded. An unreachable newest version is a
    consequence, so it is left out if a cause is known.
    """
    from ...chain.maintenance.verify_report import NO_ROUTE

    causes: dict[str, Cause] = {}
    superseded: dict[str, Cause] = {}
    for problem in report.problems:
        _add_to(causes, problem, url)
    for problem in report.superseded:
        key = _cause_of(problem, url)[0]
        _add_to(causes if key in causes else superseded, problem, url)
    known = [cause for cause in causes.values() if cause.what != NO_ROUTE]
    return known or list(causes.values()), list(superseded.values())


def _add_to(causes: dict[str, Cause], problem: Problem, url: str) -> None:
    key, what = _cause_of(problem, url)
    cause = causes.setdefault(key, Cause(what, []))
    if problem.where not in cause.affects:
        cause.affects.append(problem.where)


def _cause_of(problem: Problem, url: str) -> tuple[str, str]:
    """Return a key that identifies the cause, and a text that describes it."""
    from ...store.keys import find_data_key

    what = _finding(problem).replace(f" in {url}", "")
    return find_data_key(what) or f"{problem.where}: {what}", what


def _is_out_of_reach(report: Report) -> bool:
    from ...chain.maintenance.verify_report import NO_ROUTE

    return any(problem.what.startswith(NO_ROUTE) for problem in report.problems)


def _result(causes: int, superseded: int) -> str:
    if causes:
        return f"damage found: {causes:,} problem{'s' if causes > 1 else ''}"
    return "no damage that affects readers of the newest version" if superseded else "no damage found"


def remedy_for(causes: list[Cause], url: str) -> str | None:
    """Return advice about the worst damage; None if there is none."""
    from ...store import keys

    affected = [cause.affects[0] for cause in causes]
    if any(where.startswith(keys.COMMITS) for where in affected):
        return (
            "Restore the named commits from a backup of the bucket, or begin a new run, because readers follow hashes through all commits."
        )
    data = [where for where in affected if not where.startswith((keys.ANCHORS, keys.SKIPS, keys.MARKS.rstrip("/")))]
    if data:
        return (
            f"Publish the newest undamaged checkpoint that you have: deltawire publish CKPT {url} --full. Readers then need no damaged "
            "data. A running trainer repairs the chain with its next full checkpoint."
        )
    return "Delete the named records: they are shortcuts or marks, which publishers and collectors make again." if affected else None


def _data(report: Report, deep: bool) -> str:
    files = f"{report.files:,} file{'' if report.files == 1 else 's'}"
    return f"{files}, {figures.size(report.bytes)}: {'all were read' if deep else 'their sizes were compared (--deep reads them)'}"


def _superseded(count: int) -> str:
    return f"{count:,} damaged; no reader of the newest version needs {'it' if count == 1 else 'them'}" if count else ""


def _to_be_collected(count: int) -> str:
    if not count:
        return ""
    what, them = ("shortcut", "it") if count == 1 else ("shortcuts", "them")
    return f"{count:,} {what} without files; `deltawire gc` removes {them} once there are two newer full checkpoints"


def _print(url: str, deep: bool, report: Report) -> None:
    causes, superseded = causes_of(report, url)
    rebuilt = f"{report.rebuilt:,} version{'' if report.rebuilt == 1 else 's'}"
    print_rows(
        url,
        [
            (
                "commits",
                f"{report.commits:,}, of which {report.versions:,} made versions" + (f", {report.void:,} void" if report.void else ""),
            ),
            ("shortcuts", f"{report.shortcuts:,}"),
            ("data", _data(report, deep)),
            (
                "rebuilt",
                f"{rebuilt}, each with the digest of its commit" if deep else "",
            ),
            ("floor", f"commit {report.floor}: data below it may have been deleted" if report.floor >= 0 else ""),
            ("superseded", _superseded(len(superseded))),
            ("to be collected", _to_be_collected(len(report.notes))),
            ("new readers", "cannot reach the newest version" if _is_out_of_reach(report) else ""),
            ("result", _result(len(causes), len(superseded))),
        ],
    )
    console = result_console()
    for style, found in (("red", causes), ("yellow", superseded)):
        for cause in found:
            print_wrapped(console, f"  {cause.what}", style=style, indent=4)
            print_wrapped(console, f"    noticed at: {', '.join(cause.affects)}", indent=6)
    if remedy := remedy_for(causes, url):
        print_wrapped(console, f"  What to do: {remedy}", indent=4)
    for note in report.notes:
        print_wrapped(console, f"  {note.where}: {_finding(note)}", style="yellow", indent=4)
