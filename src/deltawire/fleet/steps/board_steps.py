"""The trainer writes the board."""

from __future__ import annotations

from dataclasses import replace

from ...errors import LimitExceeded, ObjectMissing
from ...format.records.trainer_records import MAX_BOARD_BYTES, Board
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.requests import Get, Head, Put
from ..rules.fleet_clock import FleetClock
from .record_steps import parsed_answer
from .requests import Steps
from .trainer_context import TrainerContext

_LAST_NUMBER = 2**62
"""No trainer reaches this number by counting, so a board with a higher number is ignored."""


class BoardWriter:
    """Writes the boards of one trainer, and sets the fleet clock by the store's time of each write.

    Parameters
    ----------
    trainer
        The trainer that the board belongs to.
    clock
        The fleet clock.
    """

    def __init__(self, trainer: TrainerContext, clock: FleetClock) -> None:
        self._trainer = trainer
        self._clock = clock
        self.number: int | None = None
        """The number of the last board. Numbers rise, so that members can tell an old board from a new one."""
        self._board: Board | None = None
        self._written = float("-inf")

    def write(self, board: Board) -> Steps[None]:
        """Write the board if it differs from the last one, or if the last one is old."""
        now = self._clock.now
        if self._clock.is_set and board == self._board and now - self._written < self._trainer.options.lease_seconds / 8:
            return
        number = (yield from self._number_in_store()) if self.number is None else self.number
        self.number = max(number + 1, self._trainer.clock())
        signed = self._trainer.keyring.sign(replace(board, number=self.number))
        yield Put(fleet_keys.BOARD, signed.to_bytes(), durable=False)
        self._board, self._written = board, now
        info: ObjectInfo = yield Head(fleet_keys.BOARD)
        self._clock.wrote(info.modified.timestamp())

    def _number_in_store(self) -> Steps[int]:
        """Return the number of the board that an earlier object of this epoch wrote; 0 if there is none."""
        trainer = self._trainer
        try:
            board = parsed_answer(Board.parse, (yield Get(fleet_keys.BOARD, MAX_BOARD_BYTES)))
        except (ObjectMissing, LimitExceeded):
            return 0
        is_ours = board is not None and board.id == trainer.run and board.epoch == trainer.epoch and trainer.keyring.trusts(board)
        return board.number if board is not None and is_ours and board.number < _LAST_NUMBER else 0
