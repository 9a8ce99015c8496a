"""Reads interactions and feedback, joins them, and makes the rows of live tasks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ...errors import CorruptFeedback, CorruptInteractions, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...events import OnEvent, emit
from ...fleet.rules.live_owners import LiveOwners
from ...fleet.rules.live_tasks import LiveItem, LiveRow
from ...fleet.steps.requests import Steps
from ...format.content_hash import content_hash
from ...format.feedback import MAX_FEEDBACK_BYTES, Feedback, FeedbackFile, Value
from ...format.interactions import MAX_INTERACTIONS_BYTES, ConversationText, Interaction, Interactions
from ...format.records.live_records import Metric
from ...store import live_keys
from ...store.base import ObjectInfo
from ...store.requests import Delete, Get, List
from ..rules.join import Joined, Pending, StoredFeedback
from ..rules.join_table import JoinTable
from ..rules.next_message import next_message
from .clock_steps import StoreClock
from .file_steps import FILES_PER_LOOK, FoundFile, LiveFiles

Judge: TypeAlias = Callable[[ConversationText, str], Value | None]
"""Called with a conversation that ends with an answer, and with the user's next message. Returns the value of the metric, or None."""

_File = TypeVar("_File", Interactions, FeedbackFile)

_TEXT_BYTES = 128 << 20
_SWEPT_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class JoinerOptions:
    """How live traffic is joined.

    Parameters
    ----------
    retention
        Seconds after which files of interactions and feedback are deleted, by the store's clock. A file of interactions stays longer while
        one of them waits for feedback, or while a round that uses it may still be taken over.
    most_pending
        The most interactions that wait for feedback in memory at the same time. More stay in the store until there is room.
    most_feedback
        The most feedback in memory. Above that, the oldest feedback without an interaction is forgotten.
    judge_metric
        The metric that the judge of next messages gives a value. Feedback for the same metric comes first.
    """

    retention: float = 7 * 86400.0
    most_pending: int = 200_000
    most_feedback: int = 500_000
    judge_metric: str | None = None

    def __post_init__(self) -> None:
        if not self.retention > 0 or self.most_pending < 1 or self.most_feedback < 1:
            raise ValueError("retention, most_pending and most_feedback must be above 0")


class JoinerSteps:
    """Joins the live traffic of a run. Finish the steps that one method returns before you begin those of another.

    Parameters
    ----------
    run
        The run's id.
    metrics
        The declared metrics.
    options
        How live traffic is joined.
    ticks
        Returns seconds that never run backwards.
    judge
        Gives `options.judge_metric` a value by the user's next message; None if there is none.
    on_event
        Called with every event.
    """

    def __init__(
        self,
        run: str,
        metrics: Sequence[Metric],
        options: JoinerOptions,
        ticks: Callable[[], float],
        *,
        judge: Judge | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if (judge is None) != (options.judge_metric is None):
            raise ValueError("a judge needs judge_metric, and judge_metric needs a judge")
        if options.judge_metric is not None and options.judge_metric not in [metric.name for metric in metrics]:
            raise ValueError(f"judge_metric {options.judge_metric!r} is not declared")
        if options.retention <= max((metric.window for metric in metrics), default=0):
            raise ValueError("retention must be longer than the window of every metric")
        self._run = run
        self._options = options
        self._judge = judge
        self._on_event = on_event
        self.table = JoinTable(metrics, most_pending=options.most_pending, most_feedback=options.most_feedback)
        self._clock = StoreClock(ticks)
        self._interactions = LiveFiles(live_keys.INTERACTIONS, live_keys.parse_interactions_key, MAX_INTERACTIONS_BYTES)
        self._feedback = LiveFiles(live_keys.FEEDBACK, live_keys.parse_feedback_key, MAX_FEEDBACK_BYTES)
        self._texts: OrderedDict[LiveItem, ConversationText] = OrderedDict()
        self._text_bytes = 0
        self._until = float("-inf")
        self._has_read_all = False
        self.counts: Counter[str] = Counter()
        """How many interactions were "read", had "no-consent", were "used" before, "stale", "unfit" or "joined"; and damaged "files"."""

    def look(self, owners: LiveOwners | None = None) -> Steps[None]:
        """Read what is new, as far as there is room for it.

        Parameters
        ----------
        owners
            Which interactions rounds have used. None: none.
        """
        if owners is not None:
            self._interactions.skip(owners.marks)
        self._has_read_all = False
        if not self.table.is_full:
            files, is_every = yield from self._interactions.read(FILES_PER_LOOK)
            for file in files:
                if self.table.is_full:
                    break
                self._note_interactions(file, owners)
                self._interactions.read_up_to(file)
            else:
                self._has_read_all = is_every
        until = yield from self._clock.now()
        notes, is_all = yield from self._feedback.read()
        for file in notes:
            self._note_feedback(file)
            self._feedback.read_up_to(file)
        if is_all:
            self._until = until
        if owners is not None:
            owners.settled = self._interactions.next_numbers | self.table.lowest()

    def ripe(self) -> list[Joined]:
        """Return the interactions that have their rewards, as of the last look that read all feedback."""
        return self.table.ripe(self._until)

    def take(
        self,
        most: int,
        *,
        step: int,
        oldest_step: int,
        newest_step: int,
        owners: LiveOwners,
        reserved: Collection[LiveItem] = (),
        fits: Callable[[Pending], bool] = lambda pending: True,
    ) -> Steps[list[LiveRow]]:
        """Return the rows of live tasks for a round, oldest interactions first. They stay here until `look` finds them in a round.

        Parameters
        ----------
        most
            The most rows to return.
        step
            The training step that the round is for.
        oldest_step
            The step of the oldest version that the round admits.
        newest_step
            The step of the newest version. Interactions that no round for a later step can admit are dropped.
        owners
            Which interactions rounds have used.
        reserved
            Interactions to leave alone.
        fits
            Tells whether training can use an interaction. The others are dropped.
        """
        chosen: list[Joined] = []
        for joined in self.ripe():
            pending = joined.pending
            if pending.item in reserved:
                continue
            owner = owners.owner(pending.item, pending.id, pending.choice)
            if owner is not None and owner <= newest_step:
                self._drop(pending, "used")
            elif not fits(pending):
                self._drop(pending, "unfit")
            elif pending.steps[0] < oldest_step - (step - newest_step - 1):
                self._drop(pending, "stale")  # also for the next step
            elif owner in (None, step) and oldest_step <= pending.steps[0] and pending.steps[1] < step and len(chosen) < most:
                chosen.append(joined)
        return (yield from self._rows(chosen))

    def sweep(self, owners: LiveOwners) -> Steps[None]:
        """Delete files that are older than `retention` and that no round and no window needs.

        Feedback also stays while an interaction waits that was stored less than `retention` after it: the next trainer joins it again.

        Parameters
        ----------
        owners
            Which interactions rounds have used.
        """
        now = yield from self._clock.now()
        for session in list(self._interactions.next_numbers):
            yield from self._sweep_before(live_keys.INTERACTIONS, session, owners.first_needed(session), now)
        if not self._has_read_all:
            return
        needed = min(now, self.table.oldest())
        for session in list(self._feedback.next_numbers):
            yield from self._sweep_before(live_keys.FEEDBACK, session, self._feedback.next_numbers[session], needed)

    def _sweep_before(self, prefix: str, session: str, number: int, now: float) -> Steps[None]:
        before = live_keys.start_of_file(prefix, session, number)
        listed: list[ObjectInfo] = yield List(live_keys.session_folder(prefix, session), before=before, most=_SWEPT_AT_ONCE)
        old = tuple(info.key for info in listed if info.modified.timestamp() + self._options.retention < now)
        if old:
            yield Delete(old)

    def _note_interactions(self, file: FoundFile, owners: LiveOwners | None) -> None:
        try:
            found = self._own(file, Interactions.parse)
        except (CorruptInteractions, UnsupportedVersion) as error:
            self._refuse(file, str(error))
            return
        if found is None:
            return
        for index, about in enumerate(found.interactions):
            self.counts["read"] += 1
            item = LiveItem(found.gateway, found.number, index)
            if about.train:
                self._judge_before(about, item, file.stored)
            if not about.train:
                self.counts["no-consent"] += 1
            elif owners is not None and (owners.owner(item, about.id, about.choice) or 0) < 0:
                self.counts["used"] += 1
            else:
                self._keep(found, about, item, file)

    def _keep(self, found: Interactions, about: Interaction, item: LiveItem, file: FoundFile) -> None:
        made = found.rollouts.completions[item.index]
        steps = [found.rollouts.versions[span.seq].step for span in made.spans]
        pending = Pending(
            item=item,
            key=file.key,
            id=about.id,
            choice=about.choice,
            stored=file.stored,
            steps=(min(steps), max(steps)),
            prompt_tokens=len(found.rollouts.prompts[made.prompt]),
            tokens=len(made.tokens),
            temperature=about.temperature,
            top_p=about.top_p,
            episode=about.episode,
            caller=about.caller,
            channel=about.channel,
        )
        self.table.add_interaction(pending)
        if self._judge is not None and about.text is not None and about.episode is not None and item in self.table:
            self._texts[item] = about.text
            self._text_bytes += _size(about.text)
            while self._text_bytes > _TEXT_BYTES:
                _, dropped = self._texts.popitem(last=False)
                self._text_bytes -= _size(dropped)

    def _judge_before(self, about: Interaction, item: LiveItem, stored: float) -> None:
        """Let the judge see the message that followed each earlier answer of the same episode."""
        if self._judge is None or self._options.judge_metric is None or about.episode is None or about.text is None:
            return
        for earlier in self.table.of_episode(about.episode):
            text = self._texts.get(earlier.item)
            message = None if text is None or earlier.item == item else next_message(text, about.text)
            if text is None or message is None or earlier.caller != about.caller:
                continue
            self._forget_text(earlier.item)
            try:
                value = self._judge(text, message)
            except Exception as error:
                emit(self._on_event, "judge-failed", error=f"{type(error).__name__}: {error}")
                continue
            if value is not None:
                # The lowest revision: whatever a user or a program said about the same metric comes first.
                name = content_hash(f"{earlier.id}/{earlier.choice}".encode())[:32]
                feedback = Feedback(name, self._options.judge_metric, value, inference=earlier.id, revision=-1)
                self.table.add_feedback(StoredFeedback(feedback, stored, ("", 0, earlier.choice)))

    def _note_feedback(self, file: FoundFile) -> None:
        try:
            found = self._own(file, FeedbackFile.parse)
        except (CorruptFeedback, UnsupportedVersion) as error:
            self._refuse(file, str(error))
            return
        if found is None:
            return
        for index, one in enumerate(found.feedback):
            self.table.add_feedback(StoredFeedback(one, file.stored, (found.gateway, found.number, index)))

    def _own(self, file: FoundFile, parse: Callable[[bytes], _File]) -> _File | None:
        """Return a file that is of this run and is what its key says. Refuse any other."""
        found = None if file.data is None else parse(file.data)
        if found is None or (found.run, found.gateway, found.number) != (self._run, file.parts.gateway, file.parts.number):
            self._refuse(file, "its content does not fit its key, or is of another run.")
            return None
        return found

    def _refuse(self, file: FoundFile, why: str) -> None:
        self.counts["files"] += 1
        emit(self._on_event, "live-file-refused", key=file.key, why=why)

    def _rows(self, chosen: Sequence[Joined]) -> Steps[list[LiveRow]]:
        """Read the prompts of these interactions again. An interaction that can no longer be read is dropped."""
        by_key: dict[str, list[Joined]] = {}
        for joined in chosen:
            by_key.setdefault(joined.pending.key, []).append(joined)
        rows: dict[LiveItem, LiveRow] = {}
        for key, group in by_key.items():
            found = yield from self._read(key)
            for joined in group:
                pending = joined.pending
                if found is None or pending.item.index >= len(found.interactions):
                    self._drop(pending, "unfit")
                    continue
                prompt = found.rollouts.prompts[found.rollouts.completions[pending.item.index].prompt]
                ids = tuple(int(each) for each in prompt)
                rows[pending.item] = LiveRow(pending.id, pending.choice, key, pending.item.index, ids, joined.rewards)
        return [rows[joined.pending.item] for joined in chosen if joined.pending.item in rows]

    def _read(self, key: str) -> Steps[Interactions | None]:
        parts = live_keys.parse_interactions_key(key)
        try:
            data: bytes = yield Get(key, MAX_INTERACTIONS_BYTES)
            return Interactions.parse(data) if parts is not None and content_hash(data) == parts.blake3 else None
        except (ObjectMissing, LimitExceeded, CorruptInteractions, UnsupportedVersion):
            return None

    def taken(self, rows: Sequence[LiveRow]) -> None:
        """Note that a round with these rows exists.

        Parameters
        ----------
        rows
            The rows of its live tasks.
        """
        for row in rows:
            self.table.drop(row.item)
            self._forget_text(row.item)
            self.counts["joined"] += 1

    def _drop(self, pending: Pending, why: str) -> None:
        self.table.drop(pending.item)
        self._forget_text(pending.item)
        self.counts[why] += 1

    def _forget_text(self, item: LiveItem) -> None:
        text = self._texts.pop(item, None)
        self._text_bytes -= 0 if text is None else _size(text)


def _size(text: ConversationText) -> int:
    return len(text.answer) + sum(len(message.content) + 64 for message in text.messages)
