"""The trainer opens rounds, and adopts rounds that earlier trainers opened."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from ...errors import CorruptRecord, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...events import emit
from ...format.records.fleet_files import Row, Tasks
from ...format.records.fleet_parts import ObjectRef
from ...format.records.trainer_records import Round, Sampling
from ...store import fleet_keys
from ...store.create_rule import create_steps
from ...store.requests import Get, Put
from ..rules.live_owners import LiveOwners
from ..rules.live_tasks import live_rows
from ..rules.round_state import RoundState
from .record_steps import FoundRounds, read_rounds
from .requests import Steps
from .trainer_context import TrainerContext


class OpenRounds:
    """The rounds that one trainer has opened or adopted, and the numbers that rounds of the run have used.

    Parameters
    ----------
    trainer
        The trainer that the rounds belong to.
    """

    def __init__(self, trainer: TrainerContext) -> None:
        self._trainer = trainer
        self.by_step: dict[int, RoundState] = {}
        """Open and acknowledged rounds, by the training step that they are for."""
        self.next_number: int | None = None
        """The first round number that no trainer has used. None until the store was listed."""
        self._step_of_number: dict[int, int] = {}
        self.owners = LiveOwners()
        """Which interactions the live tasks of all known rounds use."""
        self.unread: list[bytes] = []
        """Records of rounds of others that this trainer met when it opened a round, and whose rows it has not read."""

    def read(self) -> Steps[FoundRounds]:
        """Read all rounds of the run. Raise `Fenced` if a later trainer opened one of them."""
        trainer = self._trainer
        found = yield from read_rounds(trainer.run, trainer.keyring)
        newer = [record.epoch for record in found.rounds.values() if record.epoch > trainer.epoch]
        if newer:
            trainer.halt(max(newer))
        self.next_number = max(self.next_number or 0, found.next_number)
        self._step_of_number |= {number: record.for_step for number, record in found.rounds.items()}
        return found

    def open(self, rows: Sequence[Sequence[Row]], *, for_step: int, sampling: Sampling, newest_step: int) -> Steps[Round]:
        """Open a round, or return the one that is already open for this step. See `CoordinatorSteps.open_round`."""
        trainer = self._trainer
        trainer.check_fence()
        if for_step in self.by_step:
            return self.by_step[for_step].record
        last = trainer.budget.newest_open(newest_step) + 1  # the last one is not offered before the next version
        if not newest_step < for_step <= last:
            raise ValueError(f"no round can be opened for training step {for_step} now; {newest_step + 1} to {last} may be")
        tasks = Tasks(tuple(tuple(task) for task in rows))
        data = tasks.to_bytes()
        prompts = self._prompts(tasks.rows)
        digest = blake3(data).hexdigest()
        number = self.next_number
        if number is None:
            yield from self.read()
            number = self.next_number or 0
        while True:
            reference = ObjectRef(fleet_keys.tasks_key(number, digest), len(data), digest)
            record = Round(
                id=trainer.run,
                round=number,
                epoch=trainer.epoch,
                nonce=trainer.draw_nonce(),
                for_step=for_step,
                oldest_step=trainer.budget.oldest_step(for_step),
                tasks=len(tasks.rows),
                rows=reference,
                lease_seconds=trainer.options.lease_seconds,
                sampling=sampling,
                time=trainer.clock(),
            )
            raw = trainer.keyring.sign(record).to_bytes()
            yield Put(reference.key, data)
            found = yield from create_steps(fleet_keys.round_key(number), raw)
            self.next_number = number + 1
            if found == raw:
                break
            # The number belongs to an earlier trainer, or to an earlier call of ours whose outcome was unknown.
            trainer.halt_if_newer(found)
            self.unread.append(found)
            number += 1
        state = self.by_step[for_step] = RoundState(record, tasks.rows, trainer.options.quorum, prompts)
        self.owners.note(number, for_step, state.live.values())
        self._step_of_number[number] = for_step
        emit(trainer.on_event, "round-opened", round=number, step=for_step, tasks=record.tasks)
        return record

    def adopt(self, record: Round) -> Steps[RoundState | None]:
        """Return the state of a round that an earlier trainer opened; None if its rows cannot be read or encoded."""
        rows = yield from self.read_rows(record)
        if rows is None:
            emit(self._trainer.on_event, "round-unusable", round=record.round, step=record.for_step)
            return None
        self.owners.note(record.round, record.for_step, live_rows(rows).values())
        try:
            return RoundState(record, rows, self._trainer.options.quorum, self._prompts(rows), adopted=True)
        except DeltawireError as error:
            emit(self._trainer.on_event, "round-unusable", round=record.round, step=record.for_step, error=str(error))
            return None

    def drop_before(self, step: int) -> None:
        """Forget the rounds for training steps before this one."""
        for earlier in [each for each in self.by_step if each < step]:
            del self.by_step[earlier]

    def first_kept(self, upto_step: int) -> int:
        """Return the first round number to keep when all rounds for training steps up to this one are deleted."""
        kept = [number for number, step in self._step_of_number.items() if step > upto_step]
        return min([*kept, (self.next_number or 1) - 1])

    def read_rows(self, record: Round) -> Steps[tuple[tuple[Row, ...], ...] | None]:
        """Return the rows of a round; None if they are missing or damaged."""
        try:
            data: bytes = yield Get(record.rows.key, record.rows.size)
            rows = Tasks.parse(data).rows if blake3(data).hexdigest() == record.rows.blake3 else ()
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            return None
        return rows if len(rows) == record.tasks else None

    def _prompts(self, rows: Sequence[Sequence[Row]]) -> list[tuple[tuple[int, ...], ...]] | None:
        """Return the token ids of each task's prompts; None without a tokenizer. Raises what the tokenizer raises for unusable rows."""
        training = self._trainer.training
        if training.encode is None:
            return None
        live = live_rows(rows)
        return [(live[number].prompt_ids,) if number in live else training.prompts_of(task) or () for number, task in enumerate(rows)]
