"""The context that all steps of one trainer share: its identity, its settings, and whether another trainer has taken over the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import DeltawireError, Fenced, LimitExceeded, ObjectMissing
from ...events import OnEvent, emit
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.trainer_records import Round
from ...store import keys
from ...store.requests import Get, Put
from ..fleet_keyring import FleetKeyring
from ..options import FleetOptions
from ..rules.staleness import StalenessBudget
from ..rules.training_limits import TrainingLimits
from .record_steps import parsed_answer
from .requests import Steps, Together


@dataclass(slots=True)
class TrainerContext:
    """One trainer of a run.

    Parameters
    ----------
    run
        The run's id.
    epoch
        The epoch that this trainer writes in.
    draw_nonce
        Returns 32 random hexadecimal digits.
    clock
        Returns milliseconds since 1970. They are written into records for people, and no decision depends on them.
    budget
        How old the policy may be that made a token.
    options
        How the trainer runs the fleet.
    training
        What the trainer's model can be trained on.
    keyring
        Signs the trainer's records, and checks the signatures of others.
    on_event
        Called with every event.
    """

    run: str
    epoch: int
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    budget: StalenessBudget = field(default_factory=StalenessBudget)
    options: FleetOptions = field(default_factory=FleetOptions)
    training: TrainingLimits = field(default_factory=TrainingLimits)
    keyring: FleetKeyring = field(default_factory=FleetKeyring)
    on_event: OnEvent | None = None
    _fenced: str | None = field(default=None, init=False)

    def check_fence(self) -> None:
        """Raise `Fenced` if this trainer already knows that another one has taken over."""
        if self._fenced is not None:
            raise Fenced(self._fenced)

    def look_for_fence(self, *harmless: Put) -> Steps[None]:
        """Raise `Fenced` if another trainer has claimed the next epoch. The board is then theirs, and nothing of ours counts from then on.

        Write some objects at the same time, which do no harm if another trainer has taken over. Raise the errors of all requests.
        """
        self.check_fence()
        answer, *others = yield Together((Get(keys.epoch_key(self.epoch + 1), MAX_RECORD_BYTES), *harmless))
        if not isinstance(answer, DeltawireError) or isinstance(answer, LimitExceeded):
            self.halt(self.epoch + 1)
        for each in (answer, *others):
            if isinstance(each, DeltawireError) and not isinstance(each, ObjectMissing):
                raise each

    def halt_if_newer(self, data: bytes) -> None:
        """Raise `Fenced` if these bytes are the record of a round that a later trainer opened."""
        record = parsed_answer(Round.parse, data)
        if record is not None and record.id == self.run and record.epoch > self.epoch and self.keyring.trusts(record):
            self.halt(record.epoch)

    def halt(self, epoch: int) -> None:
        """Raise `Fenced` now and at every later check, because the trainer of `epoch` has taken over."""
        self._fenced = f"a trainer of epoch {epoch} has taken over the run from this one of epoch {self.epoch}."
        emit(self.on_event, "fenced", epoch=self.epoch)
        raise Fenced(self._fenced)
