"""Which training step each interaction belongs to, so that none is trained on twice (docs/protocol.md §13, "Used once")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...format.records.used_records import UsedList, UsedSession
from .live_tasks import LiveItem, LiveRow


class LiveOwners:
    """The steps that own interactions.

    An interaction belongs to the step of the round with the lowest number that names it. Only that step may train on it, whichever of its
    rounds is chosen, and a step is trained once. Rounds never change, so all trainers that know the same rounds agree.
    """

    def __init__(self) -> None:
        self._owners: dict[LiveItem | tuple[str, int], tuple[int, int]] = {}
        self._rounds: dict[int, tuple[int, tuple[LiveRow, ...]]] = {}
        self._marks: dict[str, int] = {}
        self._used: dict[str, dict[int, set[int]]] = {}
        self.settled: Mapping[str, int] = {}
        """For each session, a number below which no file holds an interaction that waits for feedback. It may be too low."""
        self.covers = 0
        """All rounds with numbers below this one are a part of the list that is in the store."""

    def restore(self, found: UsedList, round_number: int) -> None:
        """Note a list that is in the store, and forget the rounds that it covers.

        Parameters
        ----------
        found
            The list of used interactions, as the store has it.
        round_number
            The list covers all rounds with lower numbers.
        """
        for name, session in found.sessions.items():
            mark = self._marks[name] = max(session.mark, self._marks.get(name, 0))
            files = self._used.setdefault(name, {})
            for number, indices in session.items.items():
                files.setdefault(number, set()).update(indices)
            self._used[name] = {number: indices for number, indices in files.items() if number >= mark}
        self.covers = max(self.covers, round_number)
        rounds, self._rounds, self._owners = self._rounds, {}, {}
        for number, (step, rows) in rounds.items():
            self.note(number, step, rows)

    @property
    def marks(self) -> Mapping[str, int]:
        """For each session, the number of the first file of which interactions may still be joined, as the list in the store says."""
        return self._marks

    def first_needed(self, gateway: str) -> int:
        """Return the number of the first file of a session that a round or a window may still need.

        Parameters
        ----------
        gateway
            The session.
        """
        named = [row.item.number for _, rows in self._rounds.values() for row in rows if row.item.gateway == gateway]
        return min([self.settled.get(gateway, 0), *named])

    def note(self, number: int, step: int, rows: Iterable[LiveRow]) -> None:
        """Note the live tasks of a round. It may be noted twice.

        A round below the list in the store was swept. If it is there, a trainer that was replaced has used its number again, and nobody
        trains on it.

        Parameters
        ----------
        number
            The number of the round.
        step
            The training step that it is for.
        rows
            The rows of its live tasks.
        """
        if number < self.covers:
            return
        self._rounds[number] = (step, tuple(rows))
        for row in self._rounds[number][1]:
            for name in (row.item, (row.id, row.choice)):
                if number <= self._owners.get(name, (number, step))[0]:
                    self._owners[name] = (number, step)

    def owner(self, item: LiveItem, inference: str, choice: int) -> int | None:
        """Return the training step that an interaction belongs to, −1 if a swept round has used it, and None if it is free.

        Parameters
        ----------
        item
            The interaction.
        inference
            Its id.
        choice
            Which completion of the request it is.
        """
        if self._is_used(item):
            return -1
        owners = {self._owners[name] for name in (item, (inference, choice)) if name in self._owners}
        return min(owners)[1] if owners else None

    def allows(self, row: LiveRow, step: int) -> bool:
        """Tell whether a training step may train on the interaction of this row.

        Parameters
        ----------
        row
            The row of a live task of a round for that step.
        step
            The training step.
        """
        return self.owner(row.item, row.id, row.choice) == step

    def used_list(self, before: int) -> UsedList:
        """Return what all rounds below a number have used.

        Parameters
        ----------
        before
            The number of the first round that is not a part of it.
        """
        rounds = {number: rows for number, (_, rows) in self._rounds.items() if number < before}
        used = {name: {number: set(indices) for number, indices in files.items()} for name, files in self._used.items()}
        for rows in rounds.values():
            for row in rows:
                used.setdefault(row.item.gateway, {}).setdefault(row.item.number, set()).add(row.item.index)
        kept: dict[str, int] = {}
        """The lowest file of each session that a later round names."""
        for number, (_, rows) in self._rounds.items():
            for row in rows if number >= before else ():
                kept[row.item.gateway] = min(row.item.number, kept.get(row.item.gateway, row.item.number))
        sessions = {}
        for name, files in used.items():
            settled = self.settled.get(name, 0)
            mark = max(self._marks.get(name, 0), min(settled, kept.get(name, settled)))
            sessions[name] = UsedSession(mark, {number: frozenset(each) for number, each in files.items() if number >= mark})
        return UsedList(sessions)

    def _is_used(self, item: LiveItem) -> bool:
        files = self._used.get(item.gateway, {})
        return item.number < self._marks.get(item.gateway, 0) or item.index in files.get(item.number, ())
