"""The work of a trainer that collects rollouts, as steps (docs/protocol.md §10). `Coordinator` runs them over a real store.

All that matters is in the store. If a trainer dies at any point, the next one reads the store and continues from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ...errors import ChainError, DeltawireError, FleetTimeout, StoreError
from ...events import emit, printable
from ...format.records.fleet_files import Row
from ...format.records.trainer_records import Round, Sampling
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.fleet_keys import RolloutKey
from ...store.requests import List, Sleep
from ..rules.admission import Reason, Refusal
from ..rules.board import build_board
from ..rules.fleet_clock import FleetClock
from ..rules.roster import MemberStatus
from ..rules.round_state import RoundState
from ..rules.scheduler import Scheduler
from ..rules.staleness import KnownVersion
from ..rules.version_delays import admissible_share
from .batch_steps import Batch, BatchWriter
from .board_steps import BoardWriter
from .intake_steps import Intake
from .live_steps import LiveTasks
from .record_steps import read_acknowledged, read_rejections, sweep
from .requests import Steps, Together
from .round_steps import OpenRounds
from .trainer_context import TrainerContext

_LONGEST_PAUSE = 30.0


class CoordinatorSteps:
    """The trainer's side of a fleet. Finish the steps that one method returns before you begin those of another.

    Parameters
    ----------
    trainer
        The trainer: its run, epoch, settings and keys.
    newest
        The version in force. Training continues from its step.
    ticks
        Returns seconds that never run backwards. Leases and heartbeats are judged by them.
    scheduler
        Decides how many tasks each member is offered.
    ask_newest
        Returns the newest published version, or None if it is not known. It is asked before each board is made, so that members are
        offered work for a version that is published while the trainer looks at the fleet. `published` says the same at other times.
    """

    def __init__(
        self,
        trainer: TrainerContext,
        *,
        newest: KnownVersion,
        ticks: Callable[[], float],
        scheduler: Scheduler | None = None,
        ask_newest: Callable[[], KnownVersion | None] = lambda: None,
    ) -> None:
        self.trainer = trainer
        self._ask_newest = ask_newest
        self.newest = newest
        self.scheduler = scheduler or Scheduler()
        self.stopping = False
        self._time = FleetClock(ticks)
        self._intake = Intake(self.trainer, self.scheduler, self._time)
        self._intake.versions[newest.seq] = newest
        self.open_rounds = OpenRounds(self.trainer)
        self.live_tasks = LiveTasks(self.trainer, self._intake, self.open_rounds)
        self.board_writer = BoardWriter(self.trainer, self._time)
        self._batches = BatchWriter(self.trainer, self._intake)
        self._swept: int | None = None
        self._reported_waiting = False

    @property
    def epoch(self) -> int:
        """The epoch that this trainer writes in."""
        return self.trainer.epoch

    @property
    def rounds(self) -> dict[int, RoundState]:
        """Open and acknowledged rounds, by the training step that they are for."""
        return self.open_rounds.by_step

    @property
    def rejected(self) -> Counter[Reason]:
        """The number of results that were refused so far, by reason."""
        return self._intake.rejected

    @property
    def now(self) -> float:
        """The time of the last look at the store, by the trainer's own clock (`ticks`)."""
        return self._time.now

    def published(self, version: KnownVersion) -> None:
        """Note that the trainer has published a version: its step is trained, and the next one may begin. Repeating it does no harm."""
        if version.seq <= self.newest.seq:
            return
        self._intake.versions[version.seq] = version
        self._intake.roster.delays.published(version.seq, self._time.begin())
        self.newest = version
        self.open_rounds.drop_before(version.step)

    def exclude(self, member: str, why: str) -> None:
        """Offer a member nothing from now on, and refuse its results. Acknowledged results stay."""
        if member not in self._intake.excluded:
            self._intake.excluded[member] = why
            emit(self.trainer.on_event, "member-excluded", member=member, why=why)

    def members(self) -> list[MemberStatus]:
        """Return all members that have a heartbeat in the store, by name."""
        alive = self._intake.roster.alive(self.now, self.trainer.options.lease_seconds)
        delays, steps = self._intake.roster.delays, self.trainer.budget.steps
        slack = self.trainer.options.lease_seconds / 4
        seconds = {name: delays.delay(name, self.now, slack + (self.scheduler.expected_seconds(name) or 0.0)) for name in sorted(alive)}
        period = delays.period
        useful = {name: 1.0 if each is None or period is None else admissible_share(each, period, steps) for name, each in seconds.items()}
        shares = self.scheduler.shares(useful, self.now)
        holding: Counter[str] = Counter()
        for state in self.rounds.values():
            if state.is_accepting:
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
                update_seconds=seconds.get(member),
                goodput=None if beat.link is None else beat.link.goodput,
                latency=None if beat.link is None or beat.link.latency_ms is None else beat.link.latency_ms / 1000,
                engine=beat.engine,
            )
            for member, (beat, since) in sorted(self._intake.roster.all().items())
        ]

    def resume(self) -> Steps[list[Round]]:
        """Adopt the rounds that earlier trainers opened for steps after the newest version's. Return the open rounds by rising step.

        Acknowledged results that are still valid are accepted at once, before any other result of their tasks. Results that are no longer
        valid, as the chain is now, are counted as refused, and their tasks are offered again.
        """
        run, epoch, keyring = self.trainer.run, self.trainer.epoch, self.trainer.keyring
        found = yield from self.open_rounds.read()
        chosen = {one.for_step: one for one in sorted(found.rounds.values(), key=lambda one: one.round) if one.for_step > self.newest.step}
        acknowledged = yield from read_acknowledged(run, epoch, self.newest.step, keyring)
        self._intake.left_out |= yield from read_rejections(run, epoch, self.newest.step, keyring)
        for step, one in acknowledged.items():
            if one.record.round in found.rounds and found.rounds[one.record.round].for_step == step:
                chosen[step] = found.rounds[one.record.round]
        for step, record in sorted(chosen.items()):
            if step in self.rounds:
                continue
            state = yield from self.open_rounds.adopt(record)
            if state is None:
                continue
            if step in acknowledged and acknowledged[step].record.round == record.round:
                yield from self._batches.restore(state, acknowledged[step])
            self.rounds[step] = state
            emit(self.trainer.on_event, "round-adopted", round=record.round, step=step, epoch=record.epoch)
        return [state.record for _, state in sorted(self.rounds.items())]

    def open_round(self, rows: Sequence[Sequence[Row]], *, for_step: int, sampling: Sampling) -> Steps[Round]:
        """Offer work for a training step: one task for each sequence of rows. Return the round, even if it was already open.

        The round may be for one step more than the staleness budget admits now. It is offered as soon as the next version is published.
        Raise ValueError for a step that is already trained, or further ahead. Raise `Fenced` if another trainer has taken over.
        """
        return (yield from self.open_rounds.open(rows, for_step=for_step, sampling=sampling, newest_step=self.newest.step))

    def collect(self, for_step: int, *, timeout: float | None = None, stop: Callable[[], bool] | None = None) -> Steps[Batch]:
        """Poll until the round for this step is settled, then acknowledge it. After any `retryable` error this may be called again.

        The steps wait while the store is unavailable. They raise `FleetTimeout` after `timeout` seconds of waiting or when `stop` returns
        true, `FleetDeserted` if members leave because of errors and none comes back, and `Fenced` if another trainer has taken over.
        """
        state = self.rounds.get(for_step)
        if state is None:
            raise ValueError(f"no round is open for training step {for_step}")
        waited, failures = 0.0, 0
        while True:
            try:
                if not state.settled:
                    yield from self.poll(awaited=state)
                if state.settled:
                    return (yield from self._batches.acknowledge(state))
                failures = 0
            except DeltawireError as error:
                if not error.retryable:
                    raise
                failures += 1
                emit(self.trainer.on_event, "fleet-retrying", step=for_step, error=str(error))
            if stop is not None and stop():
                raise FleetTimeout(f"collecting for training step {for_step} was told to stop.")
            if timeout is not None and waited >= timeout:
                raise FleetTimeout(f"the round for training step {for_step} did not settle in {timeout:g} seconds.")
            pause = self._pause(failures)
            waited += pause
            self._note_waiting(for_step, 0.0 if failures else pause)
            yield Sleep(pause)

    def reject(self, batch: Batch, results: Collection[int], why: str) -> Steps[Batch]:
        """Leave results out of an acknowledged batch before its step is trained. Return the batch without them.

        `results` are indices into the batch. The rejection is recorded in the store first, so no trainer that takes over accepts these
        results. The steps wait while the store is unavailable, and raise `Fenced` if another trainer has taken over.
        """
        state = self.rounds.get(batch.step)
        if state is None or state.record.round != batch.round.round or not state.closed:
            raise ValueError(f"training step {batch.step} is not the one that is being trained")
        chosen = [(index, batch.results[index]) for index in sorted(results)]
        failures = 0
        while True:
            try:
                yield from self.trainer.look_for_fence()
                yield from self._batches.reject(batch.step, batch.round.round, [one for _, one in chosen], why)
                break
            except StoreError as error:
                if not error.retryable:
                    raise
                failures += 1
                emit(self.trainer.on_event, "fleet-retrying", step=batch.step, error=str(error))
            yield Sleep(self._pause(failures))
        for _, one in chosen:
            key = RolloutKey(batch.round.round, one.task, one.attempt, one.blake3)
            self._intake.refuse(state, key, Refusal("untrainable", why), one.member)
        return replace(batch.without(results), rejected=Counter(state.rejected))

    def poll(self, *, awaited: RoundState | None = None) -> Steps[None]:
        """Look at the fleet once: read and judge what members wrote, and write the board if it changed or is old.

        If the round `awaited` is settled, return before that: the trainer acknowledges it first, and the next look writes the board.
        """
        self.trainer.check_fence()
        if not self._time.is_set:
            yield from self._write_board()  # the store's time of this write tells how old all other objects are
        watched = [state for state in self.rounds.values() if state.record.for_step >= self.newest.step]
        first = min((state.record.round for state in watched), default=self.open_rounds.next_number or 0)
        began = self._time.begin()
        answers = yield Together(
            (
                List(fleet_keys.ROLLOUTS, after=fleet_keys.first_key_of(fleet_keys.ROLLOUTS, first)),
                List(fleet_keys.LEASES, after=fleet_keys.first_key_of(fleet_keys.LEASES, first)),
                List(fleet_keys.MEMBERS),
                *self.board_writer.questions,
            )
        )
        rollouts, leases, members = (_listing_or_raise(answer) for answer in answers[:3])
        for answer in answers[3:]:
            self.board_writer.answered(answer)
        self._time.looked(began)
        by_number = {state.record.round: state for state in watched}
        yield from self._intake.read_members(by_number, members, leases, rollouts)
        self._intake.note_free_attempts(watched)
        yield from self.live_tasks.do(watched)
        yield from self._intake.admit_all(by_number, rollouts)
        self._intake.count_losses(watched)
        if awaited is not None and awaited.settled:
            return
        yield from self._write_board()
        if self._swept != self.newest.step:
            yield from self._sweep()

    def stop(self) -> Steps[None]:
        """Tell all members to leave, now and at every later poll."""
        self.stopping = True
        yield from self._write_board()

    def _write_board(self) -> Steps[None]:
        newest = self._ask_newest()
        if newest is not None:
            self.published(newest)
        board = build_board(
            list(self.rounds.values()),
            self._intake.roster,
            self.scheduler,
            run=self.trainer.run,
            epoch=self.trainer.epoch,
            newest=self.newest,
            newest_open=self.trainer.budget.newest_open(self.newest.step),
            lease_seconds=self.trainer.options.lease_seconds,
            now=self.now,
            stop=self.stopping,
            excluded=self._intake.excluded.keys(),
        )
        yield from self.board_writer.write(board)

    def _sweep(self) -> Steps[None]:
        """Delete what is older than `FleetOptions.keep_steps`. A failure only costs space; the next version tries again."""
        options = self.trainer.options
        upto = self.newest.step - options.keep_steps
        silent = self._intake.roster.silent_since(self.now - max(3600.0, 20.0 * options.lease_seconds))
        first_kept = self.open_rounds.first_kept(upto)
        try:
            yield from self.live_tasks.before_sweep(first_kept)
            yield from sweep(first_kept, self.trainer.epoch, upto, silent)
        except (StoreError, ChainError) as error:
            emit(self.trainer.on_event, "sweep-failed", error=str(error))
        self._swept = self.newest.step

    def _note_waiting(self, step: int, pause: float) -> None:
        """Emit "waiting-for-members" once while no member is alive. Raise `FleetDeserted` if that has lasted too long."""
        is_any_alive = bool(self._intake.roster.alive(self.now, self.trainer.options.lease_seconds))
        if not is_any_alive and not self._reported_waiting:
            emit(self.trainer.on_event, "waiting-for-members", step=step)
        self._reported_waiting = not is_any_alive
        self._intake.desertion.waited(pause, is_any_alive=is_any_alive)

    def _pause(self, failures: int) -> float:
        return min(_LONGEST_PAUSE, self.trainer.options.poll_seconds * 2.0 ** min(failures, 10))


def _listing_or_raise(answer: list[ObjectInfo] | DeltawireError) -> list[ObjectInfo]:
    if isinstance(answer, DeltawireError):
        raise answer
    return answer
