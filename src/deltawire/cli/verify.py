"""`deltawire verify URL`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from . import figures
from .chain_options import TrustOption, UrlArgument, opened
from .terminal import JsonOption, ThreadsOption, count_bar, exit_codes, print_json, print_rows, result_console

if TYPE_CHECKING:
    from ..chain.verify import Problem, Report

DAMAGED = 3
"""The exit code where something was found."""


def verify(
    url: UrlArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read all data and rebuild every version. Needs memory for one state.")] = False,
    trust: TrustOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Check a whole chain: every record, every link, every signature, and that all data are there.

    Without --deep only the sizes of data are compared; with it every byte is read and every version rebuilt. What was collected is not
    missed. Exits with 3 if anything is wrong.
    """
    with exit_codes(json):
        from ..chain.verify import verify as verify_chain

        with opened(url) as store, count_bar("rebuild versions", quiet=json or not deep) as progress:
            report = verify_chain(store, deep, progress, trusted_keys=trust or (), threads=threads)
        if json:
            print_json(_as_json(store.url, deep, report))
        else:
            _print(store.url, deep, report)
        if not report.ok:
            raise typer.Exit(DAMAGED)


def _as_json(url: str, deep: bool, report: Report) -> dict[str, Any]:
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
        "problems": [{"where": problem.where, "what": _finding(problem)} for problem in report.problems],
        "notes": [{"where": note.where, "what": note.what} for note in report.notes],
    }


def _finding(problem: Problem) -> str:
    """What is wrong, without the advice to do what is being done."""
    from ..errors import ChainBroken, CorruptRecord, DataDamaged, DataMissing

    what = problem.what
    for error in (ChainBroken, CorruptRecord, DataDamaged, DataMissing):
        what = what.removesuffix(error.hint)
    return what.rstrip()


def _print(url: str, deep: bool, report: Report) -> None:
    found = len(report.problems)
    rebuilt = f"{report.rebuilt:,} version{'' if report.rebuilt == 1 else 's'}"
    print_rows(
        url,
        [
            (
                "commits",
                f"{report.commits:,}, of which {report.versions:,} made versions" + (f", {report.void:,} void" if report.void else ""),
            ),
            ("shortcuts", f"{report.shortcuts:,}"),
            ("data", f"{report.files:,} files, {figures.size(report.bytes)}: {'all were read' if deep else 'their sizes were compared'}"),
            (
                "rebuilt",
                f"{rebuilt}, each with the digest of its commit" if deep else "",
            ),
            ("floor", f"version {report.floor}: what lies below may be collected" if report.floor >= 0 else ""),
            ("to be collected", f"{len(report.notes):,} shortcuts that lead nowhere; `deltawire gc` removes them" if report.notes else ""),
            ("result", "no damage found" if report.ok else f"{found} {'thing is' if found == 1 else 'things are'} wrong"),
        ],
    )
    console = result_console()
    for colour, findings in (("red", report.problems), ("yellow", report.notes)):
        for problem in findings:
            text = Text.assemble("  ", (figures.printable(problem.where), colour), f": {figures.printable(_finding(problem))}")
            console.print(text, soft_wrap=True)
