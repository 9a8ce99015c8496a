"""The trainer writes the board."""

from __future__ import annotations

from dataclasses import replace

from ...errors import DeltawireError, LimitExceeded, ObjectMissing
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
        self._put_at: float | None = None
        self._dated = float("-inf")

    @property
    def questions(self) -> tuple[Head, ...]:
        """Requests for the next look: now and then it asks when the last board was written."""
        return () if self._put_at is None else (Head(fleet_keys.BOARD),)

    def answered(self, answer: ObjectInfo | DeltawireError) -> None:
        """Set the fleet clock by the store's time of the last board. Raise the error if the store could not say it."""
        assert self._put_at is not None
        if isinstance(answer, ObjectInfo):
            self._clock.wrote(answer.modified.timestamp(), self._put_at)
            self._dated = self._put_at
        elif not isinstance(answer, ObjectMissing):
            raise answer
        self._put_at = None

    def write(self, board: Board) -> Steps[None]:
        """Write the board if it differs from the last one, or if the last one is old. Raise `Fenced` if another trainer has taken over."""
        now = self._clock.now
        if self._clock.is_set and board == self._board and now - self._written < self._trainer.options.lease_seconds / 8:
            return
        yield from self._trainer.look_for_fence()
        number = (yield from self._number_in_store()) if self.number is None else self.number
        self.number = max(number + 1, self._trainer.clock())
        signed = self._trainer.keyring.sign(replace(board, number=self.number))
        yield Put(fleet_keys.BOARD, signed.to_bytes(), durable=False)
        self._board, self._written, wrote = board, now, self._clock.begin()
        if not self._clock.is_set:
            self._put_at = wrote
            self.answered((yield Head(fleet_keys.BOARD)))
        elif wrote - self._dated >= self._trainer.options.lease_seconds / 4:
            self._put_at = wrote  # the next look asks for the date, together with its other requests

    def _number_in_store(self) -> Steps[int]:
        """Return the number of the board that an earlier object of this epoch wrote; 0 if there is none."""
        trainer = self._trainer
        try:
            board = parsed_answer(Board.parse, (yield Get(fleet_keys.BOARD, MAX_BOARD_BYTES)))
        except (ObjectMissing, LimitExceeded):
            return 0
        is_ours = board is not None and board.id == trainer.run and board.epoch == trainer.epoch and trainer.keyring.trusts(board)
        return board.number if board is not None and is_ours and board.number < _LAST_NUMBER else 0
