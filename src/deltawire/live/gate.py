"""The gate: watches a canary, decides, writes the evidence, and then moves a channel (docs/gate.md).

The evidence comes first. A gate that starts finds the newest record of the canary. If that is a decision, the gate only makes the move that
is missing. A move is made at most once: it is created if absent, and only if the channel has not been moved since the record.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ..chain.channels import ChannelReader
from ..chain.find import newest_version
from ..chain.log import ChainLog
from ..chain.version import Version
from ..errors import ChainBroken, ChannelMoved, NoChannel, StoreError
from ..events import OnEvent, emit
from ..format.records.channel_records import ChannelMove
from ..format.records.gate_records import MOST_TEXT, ChannelPosition, EvaluationResult, GateRecord, LimitFinding
from ..format.records.live_records import Metric
from ..format.records.record_parts import CommitRef
from ..format.records.signing import SigningKey
from ..format.records.version_records import Commit
from ..publish.channels import ChannelWriter, Reason
from ..store import keys
from .gate_records import GateRecords, StoredRecord
from .gate_rules import GatePolicy, Limit, Range, decide, judge, silent_channels
from .gate_traffic import CanaryTraffic, Source
from .traffic_reader import TrafficReader

_RECORDS = 100
"""A gate writes about this many records of a canary, if it is not decided earlier."""
_GROWTH = 1.1
"""It also writes one after each growth of the canary's answers by this factor."""
_TRIES = 10
"""A gate tries a move this many times while others change the share of the channel."""

State = Literal["waiting", "idle", "watching", "decided"]


class Evaluator(Protocol):
    """Evaluates a version while the gate watches, such as `deltawire.cli`'s evaluation command."""

    @property
    def terms(self) -> str | None:
        """The hash of what makes a version pass. The gate uses an earlier result only if it was found by the same terms."""

    def start(self, canary: Version, stable: Version, attempt: int) -> None:
        """Begin to evaluate the version of the canary, and return at once."""

    def poll(self) -> EvaluationResult | None:
        """Return the result, or None while it runs or if nothing was started."""

    def stop(self) -> None:
        """End an evaluation that runs."""


@dataclass(frozen=True, slots=True)
class GateOptions:
    """How a gate watches a canary.

    Parameters
    ----------
    canary
        The channel whose version is judged.
    stable
        The channel that it is compared with, and that is moved to the version if it is good enough.
    ranges
        Ranges of metrics and facts, by name. They replace those of the declarations.
    wait
        Seconds that feedback may take. None means the window of each metric.
    by_user
        Whether only the first answer of each user counts.
    dry_run
        Whether nothing is written and moved.
    retention
        Seconds after which evidence about earlier canaries is deleted, by the store's clock.
    """

    canary: str = "canary"
    stable: str = "stable"
    ranges: Mapping[str, Range] = field(default_factory=dict)
    wait: float | None = None
    by_user: bool = False
    dry_run: bool = False
    retention: float = 30 * 86400.0

    def __post_init__(self) -> None:
        if not self.retention > 0:
            raise ValueError("retention must be above 0")


@dataclass(frozen=True, slots=True)
class GateLook:
    """The state after a look.

    Parameters
    ----------
    state
        "waiting": a channel does not exist yet. "idle": there is no canary. "watching": there is no decision yet. "decided": there is one,
        and its move was made, if this was still possible.
    record
        The newest evidence, as it was written, or would be with `dry_run`. None while waiting or idle.
    moved
        The move that this look made, or None.
    is_evaluating
        Whether an evaluation runs.
    missing
        While waiting, the message that names the channel that does not exist, and those that do. None otherwise.
    stale
        Why the promotion that was decided is no longer made: somebody has moved `stable` since. None otherwise.
    """

    state: State
    record: GateRecord | None = None
    moved: ChannelMove | None = None
    is_evaluating: bool = False
    missing: str | None = None
    stale: str | None = None


@dataclass(slots=True)
class _Watch:
    """All that is known about the canary that is judged at present."""

    canary: ChannelPosition
    stable: ChannelPosition
    began: float
    records: GateRecords
    reader: TrafficReader
    traffic: CanaryTraffic
    newest: StoredRecord | None
    now: float
    written: float | None = None
    """When this process last wrote a record, by its own clock."""
    evaluation: EvaluationResult | None = None
    is_evaluating: bool = False
    is_swept: bool = False
    """Whether old evidence about earlier canaries was deleted since the gate began to watch this one."""


class Gate:
    """Watches the canary of a chain. Call `look` again and again, from one thread.

    Parameters
    ----------
    log
        The chain.
    policy
        The proofs that a canary has to give.
    metrics
        Returns the metrics that are declared. It is called for each new canary.
    options
        How the gate watches.
    evaluator
        Evaluates versions, if the policy wants that.
    key
        The key to sign records and moves with, if the chain is signed.
    on_event
        Called with the events of gates.
    clock
        Returns the time in seconds since 1970, for people.
    ticks
        Returns seconds that never run backwards.
    sleep
        Waits some seconds.
    """

    def __init__(
        self,
        log: ChainLog,
        policy: GatePolicy,
        metrics: Callable[[], Sequence[Metric]],
        *,
        options: GateOptions | None = None,
        evaluator: Evaluator | None = None,
        key: SigningKey | None = None,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if policy.evaluate and evaluator is None:
            raise ValueError("the policy wants an evaluation, but there is no evaluator")
        self._log = log
        self._policy = policy
        self._metrics = metrics
        self._options = options or GateOptions()
        self._evaluator = evaluator
        self._key = key
        self._on_event = on_event
        self._clock = clock
        self._ticks = ticks
        self._sleep = sleep
        self._canary = ChannelReader(log, self._options.canary)
        self._stable = ChannelReader(log, self._options.stable)
        self._watch: _Watch | None = None
        self._sources: tuple[Source, ...] = ()

    def look(self) -> GateLook:
        """Read what is new, decide, write evidence that is due, and make the move if there is a decision. Then delete old evidence."""
        found = self._look()
        self._sweep()
        return found

    def _look(self) -> GateLook:
        try:
            canary, stable = standing(self._canary), standing(self._stable)
        except NoChannel as error:
            return GateLook("waiting", missing=error.message)
        if canary.kind != "promote" or canary.target == stable.target:
            self._forget()
            return GateLook("idle")
        watch = self._watching(_position(canary), _position(stable))
        if watch.newest is None or watch.newest.record.outcome == "continue":
            record = self._judge(watch)
            if not self._is_due(watch, record):
                return GateLook("watching", record, is_evaluating=watch.is_evaluating)
            if self._options.dry_run:
                return GateLook("watching" if record.outcome == "continue" else "decided", record)
            self._write(watch, record)
        assert watch.newest is not None
        record = watch.newest.record
        if record.outcome == "continue":
            return GateLook("watching", record, is_evaluating=watch.is_evaluating)
        moved = None if self._options.dry_run else self._move(record)
        return GateLook("decided", record, moved, stale=self._stale(record) if moved is None else None)

    def check_limits(self) -> None:
        """Check that each limit names a metric that is declared now, or a fact. Raises `UnusableGate`. `look` does it for each canary."""
        self._find_sources()

    def _find_sources(self) -> tuple[Source, ...]:
        declared, options = self._metrics(), self._options
        return tuple(
            Source.find(limit.name, declared, values=options.ranges.get(limit.name), wait=options.wait) for limit in self._policy.limits
        )

    def close(self) -> None:
        """End an evaluation that runs."""
        self._forget()

    def _forget(self) -> None:
        self._watch = None
        if self._evaluator is not None:
            self._evaluator.stop()

    def _watching(self, canary: ChannelPosition, stable: ChannelPosition) -> _Watch:
        """Return what is known about this canary. For a new pair of versions, everything begins anew."""
        watch = self._watch
        if watch is not None and (watch.canary, watch.stable) == (canary, stable):
            return watch
        self._forget()
        options = self._options
        self._sources = self._find_sources()
        metrics = [source.metric for source in self._sources if source.metric is not None]
        moves = [keys.channel_key(position.channel, position.move) for position in (canary, stable)]
        began = max(self._log.store.head(move).modified.timestamp() for move in moves)
        records = GateRecords(self._log, canary, key=self._key, sleep=self._sleep)
        newest = records.newest()
        self._watch = watch = _Watch(
            canary,
            stable,
            began,
            records,
            TrafficReader(self._log.store, self._log.run.id, since=began, on_event=self._on_event),
            CanaryTraffic(canary, stable, metrics, wait=options.wait, by_user=options.by_user),
            newest,
            began if newest is None else max(began, newest.stored),
            evaluation=None if newest is None else self._usable(newest.record.evaluation),
        )
        return watch

    def _usable(self, earlier: EvaluationResult | None) -> EvaluationResult | None:
        """Return an earlier result, unless this gate evaluates by other terms."""
        if earlier is None or self._evaluator is None:
            return earlier
        return earlier if earlier.terms == self._evaluator.terms else None

    def _judge(self, watch: _Watch) -> GateRecord:
        """Read new traffic and return what follows from everything that was read, as the next record."""
        for answers in watch.reader.interactions():
            watch.traffic.add_interactions(answers.file, answers.stored)
            watch.now = max(watch.now, answers.stored)
        for opinions in watch.reader.feedback():  # after `now` is known: all feedback from before it is found
            watch.traffic.add_feedback(opinions.file, opinions.stored)
        self._evaluate(watch)
        findings, silent = [], {}
        for limit, source in zip(self._policy.limits, self._sources, strict=True):
            samples = watch.traffic.samples(source, watch.now)
            findings.append(judge(limit, samples, source.values, self._policy))
            if samples and (channels := silent_channels(samples)):
                silent[limit.text] = " and ".join(channels)
        age = watch.now - watch.began
        limits = zip(self._policy.limits, self._sources, strict=True)
        may_stay_empty = [limit.text for limit, source in limits if source.may_stay_empty]
        given = watch.traffic.canary_answers
        decision = decide(self._policy, findings, watch.evaluation, given, age, silent=silent, may_stay_empty=may_stay_empty)
        return GateRecord(
            id=self._log.run.id,
            number=0 if watch.newest is None else watch.newest.record.number + 1,
            canary=watch.canary,
            stable=watch.stable,
            outcome=decision.outcome,
            why=decision.why[:MOST_TEXT],
            alpha=self._policy.alpha,
            answers=given,
            age=int(age * 1000),
            evaluation=watch.evaluation,
            limits=tuple(findings),
            time=int(self._clock() * 1000),
            nonce=secrets.token_hex(16),
        )

    def _evaluate(self, watch: _Watch) -> None:
        """Take the result of an evaluation that has ended, or start one that is missing."""
        if not self._policy.evaluate or self._evaluator is None or self._options.dry_run:
            return
        if watch.is_evaluating:
            result = self._evaluator.poll()
            if result is None:
                return
            result = replace(result, terms=self._evaluator.terms)
            watch.is_evaluating, watch.evaluation = False, result
            passed = None if result.passed is None else int(result.passed)
            emit(self._on_event, "gate-evaluated", channel=watch.canary.channel, passed=passed, attempt=result.attempts, why=result.why)
        done = watch.evaluation
        attempts = 0 if done is None else done.attempts
        if (done is None or done.passed is None) and attempts < self._policy.attempts:
            canary, stable = (self._log.version(position.target.seq) for position in (watch.canary, watch.stable))
            self._evaluator.start(canary, stable, attempts + 1)
            watch.is_evaluating = True

    def _is_due(self, watch: _Watch, record: GateRecord) -> bool:
        """Return whether a record should be written now. Its time in the store also tells a gate without traffic how late it is."""
        before = watch.newest.record if watch.newest is not None else None
        if record.outcome != "continue" or before is None or watch.written is None or before.evaluation != record.evaluation:
            return True
        grown = record.answers >= max(_GROWTH * before.answers, before.answers + self._policy.min_answers / 10)
        return grown or self._ticks() - watch.written >= self._policy.max_seconds / _RECORDS

    def _write(self, watch: _Watch, record: GateRecord) -> None:
        """Write a record, unless another gate has decided. A record of another gate without a decision is passed over."""
        for _ in range(_TRIES):
            watch.newest = watch.records.write(record)
            watch.written, watch.now = self._ticks(), max(watch.now, watch.newest.stored)
            found = watch.newest.record
            if found.nonce == record.nonce:
                return self._report(watch, record)
            if found.outcome != "continue":
                return None
            record = replace(record, number=found.number + 1)
        return None

    def _sweep(self) -> None:
        """Delete old evidence about earlier canaries, once for each canary that has a record. An error of the store spoils nothing."""
        watch = self._watch
        if watch is None or watch.is_swept or watch.written is None:
            return
        watch.is_swept = True
        try:
            watch.records.sweep(watch.now - self._options.retention)
        except StoreError as error:
            emit(self._on_event, "sweep-failed", error=str(error))

    def _report(self, watch: _Watch, record: GateRecord) -> None:
        for limit, finding in zip(self._policy.limits, record.limits, strict=True):
            self._report_limit(limit, finding)
        canary = watch.canary
        known: dict[str, int | str] = {"channel": canary.channel, "move": canary.move, "seq": canary.target.seq, "answers": record.answers}
        if record.outcome == "continue":
            emit(self._on_event, "gate-watching", **known, age_seconds=record.age / 1000, why=record.why)
        else:
            emit(self._on_event, "gate-decided", **known, age_seconds=record.age / 1000, why=record.why, outcome=record.outcome)

    def _report_limit(self, limit: Limit, finding: LimitFinding) -> None:
        emit(
            self._on_event,
            "gate-limit",
            limit=finding.limit,
            verdict=finding.verdict,
            canary=finding.canary.mean,
            stable=finding.stable.mean,
            blocks=finding.blocks,
            low=finding.low,
            high=finding.high,
            threshold=limit.offset,
        )

    def _move(self, record: GateRecord) -> ChannelMove | None:
        """Make the move that a record decided, unless the channels were moved since. Changes of a share do not count as moves.

        A rollback leads to the present version of stable. So it is made although stable was moved.
        """
        promotes = record.outcome == "promote"
        position = record.stable if promotes else record.canary
        writer = ChannelWriter(self._log, position.channel, key=self._key, on_event=self._on_event, clock=self._clock)
        for last in reversed(range(_TRIES)):
            expect = (self._stable if promotes else self._canary).newest().move
            canary, stable = standing(self._canary), standing(self._stable)
            if canary.move != record.canary.move or (promotes and stable.move != record.stable.move):
                return None
            commit = self._commit(canary.target if promotes else stable.target)
            make = writer.promote if promotes else writer.rollback
            try:
                return make(commit, reason=Reason(record.why, "deltawire gate"), expect=expect)
            except ChannelMoved:
                if not last:
                    raise
        return None

    def _stale(self, record: GateRecord) -> str | None:
        """Return why the promotion of a record is no longer made, or None if it can be made, or if there is another canary."""
        canary, stable = standing(self._canary), standing(self._stable)
        since = stable.move > record.stable.move
        if record.outcome != "promote" or canary.move != record.canary.move or canary.target == stable.target or not since:
            return None
        name = stable.channel
        later = itertools.takewhile(lambda move: move.move > record.stable.move, self._stable.history())
        made = next((move for move in later if move.kind == "promote" and move.target == record.canary.target), None)
        by = f"move {stable.move} by {stable.by or 'an unnamed author'}"
        if made is None:
            what = f"this canary was to be promoted, but {name} was moved first ({by})"
        else:
            what = f"this canary was promoted before (move {made.move}), and {name} was moved since ({by})"
        return f"nothing to do: {what}. Promote another version to {canary.channel}."

    def _commit(self, target: CommitRef) -> Commit:
        commit = self._log.ancestor(newest_version(self._log), target.seq)
        if self._log.ref(commit) != target:
            raise ChainBroken(f"a channel in {self._log.store.url} does not name a version of this chain.")
        return commit


def standing(reader: ChannelReader) -> ChannelMove:
    """Return the move that brought a channel to its version: the newest one that did not only change the share of users.

    Parameters
    ----------
    reader
        The reader of the channel. Raises `NoChannel` if it does not exist.
    """
    return next(move for move in reader.history() if move.kind != "share")


def _position(move: ChannelMove) -> ChannelPosition:
    return ChannelPosition(move.channel, move.move, move.target)
