"""`deltawire log URL`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.chain import RunOption, TrustOption, UrlArgument, reader_options
from ..options.common import JsonOption, VerboseOption
from ..output.terminal import print_json
from ..process.exit_codes import exit_codes
from ..stores.opened import opened

if TYPE_CHECKING:
    from ...format.records.run_records import Run
    from ..chain_history import Entry, History


def log(
    url: UrlArgument,
    count: Annotated[int, typer.Option("-n", "--count", min=1, metavar="N", help="Show this many versions.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Show all versions.")] = False,
    commits: Annotated[bool, typer.Option("--commits", help="Show every commit by its seq, also those that make no version.")] = False,
    trust: TrustOption = None,
    verbose: VerboseOption = False,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """List the versions of a chain, newest first, below a picture of the chain.

    The picture runs from old to new. In the list, "smaller" compares with the size of the full weights, and "in %" is the share of weights
    that changed, if each weight has 16 bits; it is empty for quantised versions. "skips from" lists older versions from which one delta
    leads directly to this one. A narrow terminal shows fewer columns. The command checks records against each other, but reads no data: see
    `deltawire verify`.
    """
    with exit_codes(json):
        from ..chain_history import read_history
        from ..output.chain_table import print_history

        with opened(url, verbose=verbose) as store:
            chain = reader_options(run, trust).open_log(store)
            found = chain.run
            history = read_history(chain, None if everything else count, by_commits=commits)
            if json:
                print_json(_as_json(store.url, found, history))
            else:
                print_history(store.url, found, history, now=time.time())


def _as_json(url: str, run: Run, history: History) -> dict[str, Any]:
    newest = history.head
    return {
        "url": url,
        "run": run.run,
        "id": run.id,
        "head": newest and newest.seq,
        "version": newest.updates if newest and newest.updates else None,
        "floor": history.floor if history.floor >= 0 else None,
        "commits" if history.by_commits else "versions": [_entry_as_json(entry) for entry in reversed(history.entries)],
    }


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    commit = entry.commit
    return {
        "version": None if commit.kind == "fence" or entry.void else commit.updates,
        "seq": commit.seq,
        "kind": commit.kind,
        "step": commit.step,
        "epoch": commit.epoch,
        "time": commit.time / 1000,
        "base": commit.base and commit.base.seq,
        "bytes": commit.stored_bytes,
        "state_bytes": commit.state_bytes,
        "times_smaller": commit.state_bytes / commit.stored_bytes if commit.stored_bytes else None,
        "changed": commit.changed,
        "files_changed": list(entry.changed_files),
        "digest": commit.digest and commit.digest.hex(),
        "meta": dict(commit.meta),
        "recipe": commit.recipe and commit.recipe.plain(),
        "signed_by": commit.signature and commit.signature.key,
        "anchored": entry.anchored,
        "skips_from": list(entry.skips),
        "void": entry.void,
        "abandoned": entry.abandoned,
        "collected": entry.collected,
        "channels": list(entry.channels),
    }
