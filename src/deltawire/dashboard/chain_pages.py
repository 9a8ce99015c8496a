"""Reads older commits of a chain when somebody wants to see them: a page of neighbours at a time, however long the chain is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ..chain.void_commits import abandoned_among, void_among
from ..format.records.record_parts import link_targets
from .chain_scan import ChainScan, ScannedCommit, check_links

PAGE = 128
"""The number of commits in a page. It is a power of two, so that few commits link each page to the newest ones."""
_KEPT_PAGES = 16
_NEIGHBOURS = 8
"""The number of commits before an unreadable one that are tried instead of it."""


class ChainPages:
    """Reads pages of a chain. May be used from several threads; one of them reads at a time.

    Parameters
    ----------
    scan
        Knows the newest commits, and reads others.
    """

    def __init__(self, scan: ChainScan) -> None:
        self._scan = scan
        self._kept: OrderedDict[int, tuple[list[ScannedCommit], set[int], set[tuple[int, int]]]] = OrderedDict()
        self._set_back = 0
        self._reading = threading.Lock()

    def page(self, number: int) -> dict[str, Any]:
        """Return a page as plain values: its commits as in the section of the chain, and the skips to them. Raises errors of the store.

        Parameters
        ----------
        number
            The number of the page; page 0 begins with commit 0. A page beyond the newest commit is empty.
        """
        with self._reading:
            head = self._scan.head
            if head is None or number * PAGE > head:
                return {"page": number, "entries": [], "skips": []}
            if self._set_back != self._scan.times_set_back:
                self._kept.clear()
                self._set_back = self._scan.times_set_back
            kept = self._kept.pop(number) if number in self._kept else self._read(number, head)
            page, anchors, skips = kept
            if len(page) == PAGE:  # a page that still grows is read again
                self._kept[number] = kept
            while len(self._kept) > _KEPT_PAGES:
                self._kept.popitem(last=False)
        known = {**self._scan.in_memory(), **{scanned.seq: scanned for scanned in page}}
        commits = [scanned.commit for _, scanned in sorted(known.items()) if scanned.commit is not None]
        void, abandoned = void_among(commits), abandoned_among(commits)
        return {
            "page": number,
            "entries": [self._scan.entry(scanned, void, abandoned, anchors) for scanned in page],
            "skips": [list(pair) for pair in sorted(skips)],
        }

    def seq_of(self, version: int) -> int | None:
        """Return the first commit at which the chain has this many versions, or the newest one. None if there is no chain.

        It asks for a few commits only: the number of versions never falls along the chain. Raises errors of the store.

        Parameters
        ----------
        version
            The number of the version.
        """
        head = self._scan.head
        if head is None:
            return None
        low, high = 0, head
        while low < high:
            middle = (low + high) // 2
            if self._versions_at(middle) < version:
                low = middle + 1
            else:
                high = middle
        return low

    def _versions_at(self, seq: int) -> int:
        for near in range(seq, max(-1, seq - _NEIGHBOURS), -1):
            commit = self._scan.scanned(near).commit
            if commit is not None:
                return commit.updates
        return 0

    def _read(self, number: int, head: int) -> tuple[list[ScannedCommit], set[int], set[tuple[int, int]]]:
        first, last = number * PAGE, min(head, number * PAGE + PAGE - 1)
        known = self._scan.in_memory()
        ladder = list(_ladder(min(last + 1, head), known))
        read = {scanned.seq: scanned for scanned in self._scan.read_all([*range(first, last + 1), *ladder])}
        checked = check_links({**known, **read})
        anchors, skips = self._scan.shortcuts(first - 1, last)
        return [checked[seq] for seq in range(first, last + 1)], anchors, skips


def _ladder(top: int, known: dict[int, ScannedCommit]) -> Iterator[int]:
    """Yield the commits that lead from one in memory down to `top`, each linked to by the one before it."""
    at = min((seq for seq in known if seq >= top), default=top)
    while at > top:
        at = min(target for target in (at - 1, *link_targets(at)) if target >= top)
        yield at
