"""The trainer does the live tasks of its rounds, and remembers in the store which interactions were used (docs/protocol.md §13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from ...errors import CorruptInteractions, CorruptRecord, DataMissing, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...events import emit
from ...format.interactions import MAX_INTERACTIONS_BYTES, Interactions
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.trainer_records import Round
from ...format.records.used_records import Used, UsedList
from ...format.rollouts import Rollouts
from ...store import fleet_keys, live_keys
from ...store.base import ObjectInfo
from ...store.create_rule import create_steps
from ...store.fleet_keys import RolloutKey
from ...store.requests import Delete, Get, List, Put
from ..rules.admission import Refusal
from ..rules.live_tasks import LIVE_ATTEMPT, LIVE_MEMBER, live_rollouts, live_rows
from ..rules.round_state import RoundState
from .intake_steps import Intake
from .record_steps import parsed_answer
from .requests import MOST_TOGETHER, Steps, Together
from .round_steps import OpenRounds
from .trainer_context import TrainerContext

_FILES_AT_ONCE = 4
"""Number of files of interactions that are in memory at the same time."""

_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Made:
    """A result of a live task that passed all checks."""

    state: RoundState
    key: RolloutKey
    data: bytes
    rollouts: Rollouts


class LiveTasks:
    """Does the live tasks of one trainer's rounds.

    Parameters
    ----------
    trainer
        The trainer.
    intake
        Judges the results, as it judges those of members.
    rounds
        The trainer's rounds.
    """

    def __init__(self, trainer: TrainerContext, intake: Intake, rounds: OpenRounds) -> None:
        self._trainer = trainer
        self._intake = intake
        self._rounds = rounds
        self._has_learnt = False
        self._is_absent = False

    def learn(self) -> Steps[None]:
        """Find out which interactions all rounds of the run have used. Later calls only read what is new.

        Rounds are read first, and the list of swept rounds afterwards: a round that disappears meanwhile is in that list.
        """
        if not self._has_learnt:
            found = yield from self._rounds.read()
            for record in found.rounds.values():
                yield from self._note(record)
        while self._rounds.unread:
            met = parsed_answer(Round.parse, self._rounds.unread[0])
            if met is not None and met.id == self._trainer.run and self._trainer.keyring.trusts(met):
                yield from self._note(met)
            del self._rounds.unread[0]
        if not self._has_learnt:
            yield from self._read_used()
            self._has_learnt = True

    def do(self, states: Sequence[RoundState]) -> Steps[None]:
        """Make, judge and store the results of all live tasks that have none.

        A task whose result is refused is given up, because every other attempt would be the same.
        """
        wanted: dict[str, list[tuple[RoundState, int]]] = {}
        for state in states:
            for task in sorted(state.open_live) if state.is_accepting else ():
                wanted.setdefault(state.live[task].object, []).append((state, task))
        if not wanted:
            return
        yield from self.learn()
        keys = sorted(wanted)
        for start in range(0, len(keys), _FILES_AT_ONCE):
            group = keys[start : start + _FILES_AT_ONCE]
            answers = yield Together(tuple(Get(key, MAX_INTERACTIONS_BYTES) for key in group))
            made: list[_Made] = []
            for key, answer in zip(group, answers, strict=True):
                file = yield from self._parsed(key, answer)
                for state, task in wanted[key]:
                    result = yield from self._make(state, task, file)
                    made += [] if result is None else [result]
            yield from self._store(made)

    def before_sweep(self, first_kept: int) -> Steps[None]:
        """Write down which interactions the rounds below this number have used, before these rounds are deleted.

        A run without live traffic needs no such record. In all others, every deletion needs one: it also says which numbers are used up.
        """
        trainer, owners = self._trainer, self._rounds.owners
        if first_kept <= owners.covers:
            return
        if not self._has_learnt and not self._is_absent:
            listed: list[ObjectInfo] = yield List(live_keys.LIVE, most=1)
            self._is_absent = not listed
        if self._is_absent and not any(state.live for state in self._rounds.by_step.values()):
            return
        yield from self.learn()
        used = owners.used_list(first_kept)
        data = used.to_bytes()
        digest = blake3(data).hexdigest()
        record = Used(trainer.run, first_kept, trainer.epoch, trainer.draw_nonce(), len(data), digest, trainer.clock())
        raw = trainer.keyring.sign(record).to_bytes()
        yield Put(live_keys.used_list_key(first_kept, digest), data)
        found = yield from create_steps(live_keys.used_key(first_kept), raw)
        if found != raw:  # another trainer knew the same rounds
            theirs = yield from self._read_used_list(first_kept, found)
            if theirs is None:
                raise CorruptRecord(f"{live_keys.used_key(first_kept)!r} is not a record of used interactions.")
            used = theirs
        owners.restore(used, first_kept)
        yield from self._delete_used(first_kept)

    def _note(self, record: Round) -> Steps[None]:
        """Note the live tasks of a round. Rows that are missing are in the list of swept rounds; damaged ones can never be adopted."""
        rows = yield from self._rounds.read_rows(record)
        if rows is not None:
            self._rounds.owners.note(record.round, record.for_step, live_rows(rows).values())

    def _read_used(self) -> Steps[None]:
        """Read the newest list. If it disappears meanwhile, another trainer has written a newer one."""
        for _ in range(_TRIES):
            listed: list[ObjectInfo] = yield List(live_keys.USED)
            numbers = [number for info in listed if (number := live_keys.parse_used_key(info.key)) is not None]
            try:
                for number in sorted(numbers, reverse=True):
                    data: bytes = yield Get(live_keys.used_key(number), MAX_RECORD_BYTES)
                    found = yield from self._read_used_list(number, data)
                    if found is not None:
                        self._rounds.owners.restore(found, number)
                        return
                return
            except ObjectMissing:
                continue
        raise DataMissing(f"the list of used interactions under {live_keys.USED!r} is missing.")

    def _read_used_list(self, number: int, data: bytes) -> Steps[UsedList | None]:
        """Return the list of a record; None if the record is not one of a trusted trainer. Raise `CorruptRecord` for a damaged list."""
        record = parsed_answer(Used.parse, data)
        if record is None or (record.id, record.round) != (self._trainer.run, number) or not self._trainer.keyring.trusts(record):
            return None
        key = live_keys.used_list_key(number, record.blake3)
        listed: bytes = yield Get(key, record.size)
        if blake3(listed).hexdigest() != record.blake3:
            raise CorruptRecord(f"{key!r} does not have the hash of its name.")
        return UsedList.parse(listed)

    def _delete_used(self, number: int) -> Steps[None]:
        """Delete the records that a later one replaces, and their lists last."""
        for prefix, parse in ((live_keys.USED, live_keys.parse_used_key), (live_keys.USED_LISTS, live_keys.parse_used_list_key)):
            listed: list[ObjectInfo] = yield List(prefix, most=1000)
            parsed = [(info.key, parse(info.key)) for info in listed]
            old = [key for key, found in parsed if found is not None and (found if isinstance(found, int) else found[0]) < number]
            if old:
                yield Delete(tuple(old))

    def _parsed(self, key: str, answer: bytes | DeltawireError) -> Steps[Interactions | None]:
        """Return a file of interactions; None if it is missing or damaged. Raise any other error."""
        expected = live_keys.parse_interactions_key(key)
        assert expected is not None
        if isinstance(answer, bytes) and blake3(answer).hexdigest() != expected.blake3:  # perhaps it was damaged on the way here
            (answer,) = yield Together((Get(key, MAX_INTERACTIONS_BYTES),))
        if isinstance(answer, DeltawireError):
            if isinstance(answer, (ObjectMissing, LimitExceeded)):
                return None
            raise answer
        if blake3(answer).hexdigest() != expected.blake3:
            return None
        try:
            return Interactions.parse(answer)
        except (CorruptInteractions, UnsupportedVersion):
            return None

    def _make(self, state: RoundState, task: int, file: Interactions | None) -> Steps[_Made | None]:
        """Return the result of a live task. Return None if it is refused, and give the task up."""
        row, record = state.live[task], state.record
        rollouts = None if file is None else live_rollouts(row, file, record, task)
        data = b"" if rollouts is None else rollouts.to_bytes()
        key = RolloutKey(record.round, task, LIVE_ATTEMPT, blake3(data).hexdigest())
        refusal: Refusal | None = None
        if rollouts is None:
            refusal = Refusal("malformed", f"{row.object} does not hold interaction {row.id} with consent to training")
        elif not self._rounds.owners.allows(row, record.for_step):
            refusal = Refusal("duplicate", f"interaction {row.id} belongs to another training step")
        elif len(data) > self._intake.most_bytes(state, key):
            refusal = Refusal("malformed", f"it has {len(data):,} bytes, more than a result of this round may have")
        else:
            refusal = self._intake.rejected_before(key) or (yield from self._intake.judge_substance(state, key, rollouts))
        if rollouts is None or refusal is not None:
            state.open_live.discard(task)
            self._intake.refuse(state, key, refusal or Refusal("malformed"), LIVE_MEMBER)
            return None
        return _Made(state, key, data, rollouts)

    def _store(self, made: Sequence[_Made]) -> Steps[None]:
        """Store results, and accept them. They have the same keys and bytes if an earlier trainer stored them."""
        for start in range(0, len(made), MOST_TOGETHER):
            group = made[start : start + MOST_TOGETHER]
            answers = yield Together(tuple(Put(fleet_keys.rollout_key(one.key), one.data) for one in group))
            for one, answer in zip(group, answers, strict=True):
                if isinstance(answer, DeltawireError):
                    raise answer
                one.state.accept(one.key, len(one.data), one.rollouts)
                emit(
                    self._trainer.on_event,
                    "rollout-accepted",
                    round=one.key.round,
                    task=one.key.task,
                    attempt=one.key.attempt,
                    member=LIVE_MEMBER,
                    tokens=one.rollouts.tokens,
                    step=one.state.record.for_step,
                )
