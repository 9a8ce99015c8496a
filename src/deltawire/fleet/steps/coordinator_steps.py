"""What a trainer does to get rollouts, as steps (docs/protocol.md §10). `Coordinator` runs them over a real store.

Nothing here is kept that the store does not have: a trainer that dies anywhere is followed by one that reads what there is, and goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from blake3 import blake3

from ...errors import CorruptRecord, DeltawireError, Fenced, FleetTimeout, LimitExceeded, ObjectMissing, StoreError, UnsupportedVersion
from ...events import OnEvent, emit, printable
from ...format.records.chain_records import MAX_RECORD_BYTES
from ...format.records.fleet_files import Accepted, AcceptedResult, Row, Tasks
from ...format.records.fleet_parts import ObjectRef
from ...format.records.trainer_records import MAX_BOARD_BYTES, BatchRecord, Board, Round, Sampling
from ...store import fleet_keys, keys
from ...store.base import ObjectInfo
from ...store.create_rule import create_steps
from ...store.fleet_keys import RolloutKey
from ...store.requests import Get, Head, List, Put, Sleep
from ..batch import Batch
from ..fleet_keyring import FleetKeyring
from ..options import FleetOptions
from ..rules.admission import Reason, Refusal
from ..rules.board import build_board
from ..rules.fleet_clock import FleetClock
from ..rules.roster import MemberStatus
from ..rules.round_state import RoundState
from ..rules.scheduler import Scheduler
from ..rules.staleness import KnownVersion, StalenessBudget
from ..rules.training_limits import TrainingLimits
from .intake_steps import Intake
from .rejection_steps import read_rejections, write_rejections
from .requests import Steps, Together
from .resume_steps import Acknowledged, Found, parsed_answer, read_acknowledged, read_rounds
from .sweep_steps import sweep

_LONGEST_PAUSE = 30.0
_LAST_NUMBER = 2**62
"""Boards with higher numbers are nobody's who counted."""


class CoordinatorSteps:
    """The trainer's side of a fleet. Every method that returns `Steps` must be driven to its end before the next is begun.

    `newest` is the version in force, whose step the training goes on from. `draw_nonce` gives 32 hexadecimal digits, `clock` milliseconds
    that are written for people and never compared, `ticks` seconds that never run backwards, by which leases and heartbeats are judged.
    """

    def __init__(
        self,
        *,
        run: str,
        epoch: int,
        newest: KnownVersion,
        draw_nonce: Callable[[], str],
        clock: Callable[[], int],
        ticks: Callable[[], float],
        budget: StalenessBudget | None = None,
        scheduler: Scheduler | None = None,
        options: FleetOptions | None = None,
        training: TrainingLimits | None = None,
        keyring: FleetKeyring | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.run = run
        self.epoch = epoch
        self.newest = newest
        self.budget = budget or StalenessBudget()
        self.scheduler = scheduler or Scheduler()
        self.options = options or FleetOptions()
        self.stopping = False
        self.rounds: dict[int, RoundState] = {}
        """By the training step that they are for."""
        self._draw_nonce = draw_nonce
        self._clock = clock
        self._on_event = on_event
        self._time = FleetClock(ticks)
        self.training = training or TrainingLimits()
        self._intake = Intake(run, self.budget, self.scheduler, self.options, self._time, self.training, on_event)
        self._intake.versions[newest.seq] = newest
        self._next_round: int | None = None
        self._steps_of: dict[int, int] = {}
        self._keyring = keyring or FleetKeyring()
        self._board: Board | None = None
        self._number: int | None = None
        self._written = float("-inf")
        self._swept: int | None = None
        self._fenced: str | None = None
        self._told_waiting = False

    @property
    def rejected(self) -> Counter[Reason]:
        """Results that were refused so far, by reason."""
        return self._intake.rejected

    @property
    def now(self) -> float:
        """The time of the last look at the store, by the trainer's own clock (`ticks`)."""
        return self._time.now

    def published(self, version: KnownVersion) -> None:
        """A version is out: its step is trained, and the next may begin."""
        self._intake.versions[version.seq] = version
        self.newest = version
        for step in [step for step in self.rounds if step < version.step]:
            del self.rounds[step]

    def members(self) -> list[MemberStatus]:
        """Everybody who was ever heard of and not swept, by name."""
        alive = self._intake.roster.alive(self.now, self.options.lease_seconds)
        shares = self.scheduler.shares(sorted(alive), self.now) if alive else {}
        holding: Counter[str] = Counter()
        for state in self.rounds.values():
            if state.taking:
                _, held = state.survey(self._intake.roster, self.scheduler, self.now)
                holding.update(one.lease.member for one in held if one.lease is not None)
        return [
            MemberStatus(
                member=member,
                state=beat.state,
                alive=member in alive,
                silent=max(0.0, self.now - since),
                seq=beat.seq,
                step=beat.step,
                lag=beat.lag,
                tokens=beat.tokens,
                holding=holding[member],
                rate=self.scheduler.rate(member),
                share=shares.get(member, 0.0),
                why=None if beat.reason is None else printable(beat.reason),
            )
            for member, (beat, since) in sorted(self._intake.roster.all().items())
        ]

    def resume(self) -> Steps[list[Round]]:
        """Take up what earlier trainers left: rounds for steps after the newest version's, and of these what was acknowledged.

        Acknowledged results that still hold are accepted at once, before any other result of their tasks. What does not hold under the
        chain as it is now is counted, and its task offered again. Gives the rounds that are open now, by rising step.
        """
        found = yield from self._look_at_rounds()
        chosen = {one.for_step: one for one in sorted(found.rounds.values(), key=lambda one: one.round) if one.for_step > self.newest.step}
        acknowledged = yield from read_acknowledged(self.run, self.epoch, self.newest.step, self._keyring)
        self._intake.left_out |= yield from read_rejections(self.run, self.epoch, self.newest.step, self._keyring)
        for step, one in acknowledged.items():
            if one.record.round in found.rounds and found.rounds[one.record.round].for_step == step:
                chosen[step] = found.rounds[one.record.round]
        for step, record in sorted(chosen.items()):
            if step in self.rounds:
                continue
            rows = yield from self._read_rows(record)
            if rows is None:
                emit(self._on_event, "round-unusable", round=record.round, step=step)
                continue
            try:
                state = self._state(record, rows, adopted=True)
            except DeltawireError as error:
                emit(self._on_event, "round-unusable", round=record.round, step=step, error=str(error))
                continue
            if step in acknowledged and acknowledged[step].record.round == record.round:
                yield from self._take_up(state, acknowledged[step])
            self.rounds[step] = state
            emit(self._on_event, "round-adopted", round=record.round, step=step, epoch=record.epoch)
        return [state.record for _, state in sorted(self.rounds.items())]

    def open_round(self, rows: Sequence[Sequence[Row]], *, for_step: int, sampling: Sampling) -> Steps[Round]:
        """Offer work for a training step: one task for each sequence of rows. Gives the round that is open for it already, if there is one.

        ValueError for a step that is past, or so far ahead that the staleness budget could not be kept. `Fenced`.
        """
        self._check_fence()
        if for_step in self.rounds:
            return self.rounds[for_step].record
        if not self.newest.step < for_step <= self.budget.newest_open(self.newest.step):
            allowed = f"{self.newest.step + 1} to {self.budget.newest_open(self.newest.step)}"
            raise ValueError(f"no round can be opened for training step {for_step} now; {allowed} may be")
        tasks = Tasks(tuple(tuple(task) for task in rows))
        data = tasks.to_bytes()
        prompts = self._prompts(tasks.rows)
        digest = blake3(data).hexdigest()
        number = self._next_round
        if number is None:
            yield from self._look_at_rounds()
            number = self._next_round or 0
        while True:
            reference = ObjectRef(fleet_keys.tasks_key(number, digest), len(data), digest)
            record = Round(
                id=self.run,
                round=number,
                epoch=self.epoch,
                nonce=self._draw_nonce(),
                for_step=for_step,
                oldest_step=self.budget.oldest_step(for_step),
                tasks=len(tasks.rows),
                rows=reference,
                lease_seconds=self.options.lease_seconds,
                sampling=sampling,
                time=self._clock(),
            )
            raw = self._keyring.sign(record).to_bytes()
            yield Put(reference.key, data)
            found = yield from create_steps(fleet_keys.round_key(number), raw)
            self._next_round = number + 1
            if found == raw:
                break
            self._halt_if_newer(found)
            number += 1  # an earlier trainer's, or what is left of a call of ours whose outcome nobody could tell
        self.rounds[for_step] = RoundState(record, tasks.rows, self.options.quorum, prompts)
        self._steps_of[number] = for_step
        emit(self._on_event, "round-opened", round=number, step=for_step, tasks=record.tasks)
        return record

    def collect(self, for_step: int, *, timeout: float | None = None, stop: Callable[[], bool] | None = None) -> Steps[Batch]:
        """Poll until the round for this step is settled, then acknowledge it. May be called again after any error that is `retryable`.

        Losses of the store are waited out. `FleetTimeout` after `timeout` seconds of waiting, or when `stop` says so; `FleetDeserted` if
        members leave because of errors and nobody comes back; `Fenced`.
        """
        state = self.rounds.get(for_step)
        if state is None:
            raise ValueError(f"no round is open for training step {for_step}")
        waited, failures = 0.0, 0
        while True:
            try:
                if not state.settled:
                    yield from self.poll()
                if state.settled:
                    return (yield from self._acknowledge(state))
                failures = 0
            except DeltawireError as error:
                if not error.retryable:
                    raise
                failures += 1
                emit(self._on_event, "fleet-retrying", step=for_step, error=str(error))
            if stop is not None and stop():
                raise FleetTimeout(f"collecting for training step {for_step} was told to stop.")
            if timeout is not None and waited >= timeout:
                raise FleetTimeout(f"the round for training step {for_step} did not settle in {timeout:g} seconds.")
            pause = self._pause(failures)
            waited += pause
            self._note_waiting(for_step, 0.0 if failures else pause)
            yield Sleep(pause)

    def reject(self, batch: Batch, results: Collection[int], why: str) -> Steps[Batch]:
        """Leave results out of an acknowledged batch, given by their indices, before its step is trained. Returns the batch without them.

        The store has it first: no trainer that takes over will accept them. Losses of the store are waited out. `Fenced`.
        """
        state = self.rounds.get(batch.step)
        if state is None or state.record.round != batch.round.round or not state.closed:
            raise ValueError(f"training step {batch.step} is not the one that is being trained")
        chosen = [(index, batch.results[index]) for index in sorted(results)]
        failures = 0
        while True:
            try:
                yield from self._look_for_fence()
                yield from self._record_rejection(batch.step, batch.round.round, [one for _, one in chosen], why)
                break
            except StoreError as error:
                if not error.retryable:
                    raise
                failures += 1
                emit(self._on_event, "fleet-retrying", step=batch.step, error=str(error))
            yield Sleep(self._pause(failures))
        for _, one in chosen:
            place = RolloutKey(batch.round.round, one.task, one.attempt, one.blake3)
            self._intake.refuse(state, place, Refusal("untrainable", why), one.member)
        return replace(batch.without(results), rejected=Counter(state.rejected))

    def poll(self) -> Steps[None]:
        """One look at the fleet: read what came in, judge it, and write the board if it says something new, or is old."""
        yield from self._look_for_fence()
        if not self._time.is_set:
            yield from self._write_board()  # the store's time of this write tells how old everything else is
        watched = [state for state in self.rounds.values() if state.record.for_step >= self.newest.step]
        first = min((state.record.round for state in watched), default=self._next_round or 0)
        began = self._time.begin()
        listings = yield Together(
            (
                List(fleet_keys.ROLLOUTS, after=fleet_keys.first_key_of(fleet_keys.ROLLOUTS, first)),
                List(fleet_keys.LEASES, after=fleet_keys.first_key_of(fleet_keys.LEASES, first)),
                List(fleet_keys.MEMBERS),
            )
        )
        rollouts, leases, members = (_raised(found) for found in listings)
        self._time.looked(began)
        by_number = {state.record.round: state for state in watched}
        yield from self._intake.read_heartbeats(members)
        yield from self._intake.read_leases(by_number, leases, rollouts)
        self._intake.note_free_attempts(watched)
        yield from self._intake.admit_all(by_number, rollouts)
        self._intake.count_losses(watched)
        yield from self._write_board()
        if self._swept != self.newest.step:
            yield from self._sweep()

    def stop(self) -> Steps[None]:
        """Tell all members to leave, now and at every later poll."""
        self.stopping = True
        yield from self._look_for_fence()
        yield from self._write_board()

    def _look_at_rounds(self) -> Steps[Found]:
        found = yield from read_rounds(self.run, self._keyring)
        newer = [record.epoch for record in found.rounds.values() if record.epoch > self.epoch]
        if newer:
            self._halt(max(newer))
        self._next_round = max(self._next_round or 0, found.next_round)
        self._steps_of |= {number: record.for_step for number, record in found.rounds.items()}
        return found

    def _read_rows(self, record: Round) -> Steps[tuple[tuple[Row, ...], ...] | None]:
        try:
            data: bytes = yield Get(record.rows.key, record.rows.size)
            rows = Tasks.parse(data).rows if blake3(data).hexdigest() == record.rows.blake3 else ()
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            return None
        return rows if len(rows) == record.tasks else None

    def _write_board(self) -> Steps[None]:
        board = build_board(
            list(self.rounds.values()),
            self._intake.roster,
            self.scheduler,
            run=self.run,
            epoch=self.epoch,
            newest=self.newest,
            newest_open=self.budget.newest_open(self.newest.step),
            lease_seconds=self.options.lease_seconds,
            now=self.now,
            stop=self.stopping,
        )
        if self._time.is_set and board == self._board and self.now - self._written < self.options.lease_seconds / 8:
            return
        number = (yield from self._last_number()) if self._number is None else self._number
        self._number = max(number + 1, self._clock())
        yield Put(fleet_keys.BOARD, self._keyring.sign(replace(board, number=self._number)).to_bytes(), durable=False)
        self._board, self._written = board, self.now
        info: ObjectInfo = yield Head(fleet_keys.BOARD)
        self._time.wrote(info.modified.timestamp())

    def _last_number(self) -> Steps[int]:
        """Returns the number of the board that this epoch has already, if a `CoordinatorSteps` before this one wrote it."""
        try:
            board = parsed_answer(Board.parse, (yield Get(fleet_keys.BOARD, MAX_BOARD_BYTES)))
        except (ObjectMissing, LimitExceeded):
            return 0
        is_ours = board is not None and board.id == self.run and board.epoch == self.epoch and self._keyring.trusts(board)
        return board.number if board is not None and is_ours and board.number < _LAST_NUMBER else 0

    def _sweep(self) -> Steps[None]:
        upto = self.newest.step - self.options.keep_steps
        kept = [number for number, step in self._steps_of.items() if step > upto]
        gone = self._intake.roster.silent_since(self.now - max(3600.0, 20.0 * self.options.lease_seconds))
        try:
            yield from sweep(min([*kept, (self._next_round or 1) - 1]), self.epoch, upto, gone)
        except StoreError as error:  # a matter of space, and tried again after the next version
            emit(self._on_event, "sweep-failed", error=str(error))
        self._swept = self.newest.step

    def _acknowledge(self, state: RoundState) -> Steps[Batch]:
        """Write down what the step will be trained on. Only after that may it be."""
        yield from self._look_for_fence()
        step = state.record.for_step
        if state.sealed is None:
            accepted = Accepted(state.record.round, _results(state)).to_bytes()
            digest = blake3(accepted).hexdigest()
            reference = ObjectRef(fleet_keys.accepted_key(state.record.round, digest), len(accepted), digest)
            yield Put(reference.key, accepted)
            record = BatchRecord(self.run, self.epoch, step, state.record.round, self._draw_nonce(), reference, self._clock())
            state.sealed = self._keyring.sign(record).to_bytes()
        found = yield from create_steps(fleet_keys.batch_key(self.epoch, step), state.sealed)
        if found != state.sealed:
            self._halt(self.epoch)
        state.closed = True
        taken = [(one, task.rollouts) for task in state.tasks if (one := task.accepted) is not None and task.rollouts is not None]
        rollouts = tuple(made for _, made in taken)
        results = tuple(one for one, _ in taken)
        emit(self._on_event, "batch-acknowledged", step=step, round=state.record.round, results=len(rollouts))
        return Batch(step, state.record, tuple(state.rows[one.task] for one in results), rollouts, results, Counter(state.rejected))

    def _take_up(self, state: RoundState, found: Acknowledged) -> Steps[None]:
        """Accept again what was acknowledged. An acknowledgement of this very epoch stays in force, without what does not hold any more."""
        yield from self._intake.take_up(state, found.accepted)
        if found.record.epoch != self.epoch:
            return  # a new one is written under this epoch, when the tasks that are open again are done
        kept = _results(state)
        lost = [one for one in found.accepted.results if one not in kept]
        lost = [one for one in lost if RolloutKey(found.record.round, one.task, one.attempt, one.blake3) not in self._intake.left_out]
        if lost:
            yield from self._record_rejection(
                found.record.step, found.record.round, lost, "it does not pass the checks of admission any more"
            )
        state.sealed = found.data

    def _record_rejection(self, step: int, number: int, results: Sequence[AcceptedResult], why: str) -> Steps[None]:
        named = [(one.task, one.attempt, one.blake3) for one in results]
        yield from write_rejections(self.run, self.epoch, step, number, named, why, self._clock(), self._keyring)
        self._intake.left_out |= {RolloutKey(number, *one): why for one in named}

    def _state(self, record: Round, rows: tuple[tuple[Row, ...], ...], *, adopted: bool = False) -> RoundState:
        return RoundState(record, rows, self.options.quorum, self._prompts(rows), adopted=adopted)

    def _prompts(self, rows: Sequence[Sequence[Row]]) -> list[tuple[tuple[int, ...], ...]] | None:
        """Return the token ids of each task's prompts. Raises what the trainer's tokenizer raises for rows that have none."""
        if self.training.encode is None:
            return None
        return [self.training.prompts_of(task) or () for task in rows]

    def _note_waiting(self, step: int, pause: float) -> None:
        """Tell once that nobody is there. Raises `FleetDeserted`."""
        is_anybody_alive = bool(self._intake.roster.alive(self.now, self.options.lease_seconds))
        if not is_anybody_alive and not self._told_waiting:
            emit(self._on_event, "waiting-for-members", step=step)
        self._told_waiting = not is_anybody_alive
        self._intake.desertion.waited(pause, is_anybody_alive=is_anybody_alive)

    def _pause(self, failures: int) -> float:
        return min(_LONGEST_PAUSE, self.options.poll_seconds * 2.0 ** min(failures, 10))

    def _look_for_fence(self) -> Steps[None]:
        """Whether another trainer has claimed the next epoch: then nothing of ours counts any more, and the board is theirs."""
        self._check_fence()
        try:
            yield Get(keys.epoch_key(self.epoch + 1), MAX_RECORD_BYTES)
        except ObjectMissing:
            return
        except LimitExceeded:
            pass
        self._halt(self.epoch + 1)

    def _halt_if_newer(self, data: bytes) -> None:
        record = parsed_answer(Round.parse, data)
        if record is not None and record.id == self.run and record.epoch > self.epoch and self._keyring.trusts(record):
            self._halt(record.epoch)

    def _halt(self, epoch: int) -> None:
        self._fenced = f"a trainer of epoch {epoch} has taken over the run from this one of epoch {self.epoch}."
        emit(self._on_event, "fenced", epoch=self.epoch)
        raise Fenced(self._fenced)

    def _check_fence(self) -> None:
        if self._fenced is not None:
            raise Fenced(self._fenced)


def _results(state: RoundState) -> tuple[AcceptedResult, ...]:
    return tuple(task.accepted for task in state.tasks if task.accepted is not None)


def _raised(answer: list[ObjectInfo] | DeltawireError) -> list[ObjectInfo]:
    if isinstance(answer, DeltawireError):
        raise answer
    return answer
