"""Reads live traffic for the page: answers by version and channel, and feedback by the age of the answers that it is about."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import CorruptFeedback, CorruptInteractions, UnsupportedVersion
from ..format.content_hash import content_hash
from ..format.feedback import Feedback, FeedbackFile
from ..format.interactions import Interaction, Interactions
from ..format.live_parts import id_time
from ..store import live_keys
from ..store.base import Store
from .chain_scan import ChainScan
from .fetch_many import RecordFetcher
from .newest_files import NewestFiles, NewFile
from .plain_values import short

MOST_FILES = 64
MOST_FILE_BYTES = 16 << 20
MOST_LOOK_BYTES = 16 << 20
"""The most files of a kind, and bytes of them, that are read in one look. Larger files are left out."""
MOST_ROWS = 256
"""The most pairs of a version and a channel, and the most metrics, that are kept."""
MOST_TIMES = 240
_MOST_COUNTS = 8 * MOST_TIMES
"""The most minutes of traffic that are kept, and the most counts in them, one for each minute and channel."""
AGES = (10, 60, 600, 3600, 6 * 3600, 86400)
"""Feedback is counted by the age of its answer, in seconds: up to each of these, and above the last."""
_MOST_EPISODES = 20_000
_MINUTE = 60
_File = TypeVar("_File", Interactions, FeedbackFile)
_Row = TypeVar("_Row", "_Answers", "_Feedback")


class _Read(NamedTuple, Generic[_File]):
    """The hash of a file; `problem` says why it could not be read."""

    blake3: str
    file: _File | None
    problem: str


@dataclass(slots=True)
class _Answers:
    """The answers of one version on one channel."""

    count: int = 0
    tokens: int = 0
    refusals: int = 0
    not_trained: int = 0
    mixed: int = 0
    last: float = 0.0


@dataclass(slots=True)
class _Feedback:
    """The feedback for one metric."""

    count: int = 0
    numbers: int = 0
    total: float = 0.0
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGES) + 1))
    unknown: int = 0
    last: float = 0.0


class TrafficScan:
    """Counts the traffic that is stored while the page is open, and the newest that was stored before. A look reads only new files.

    Parameters
    ----------
    store
        The store. The caller closes it.
    run
        The id of the run.
    chain
        Knows the numbers of versions.
    """

    def __init__(self, store: Store, run: str, chain: ChainScan) -> None:
        self._fetch = RecordFetcher(store)
        self._run = run
        self._chain = chain
        self._interactions = NewestFiles(store, live_keys.INTERACTIONS, live_keys.parse_interactions_key, most=MOST_FILES)
        self._feedback = NewestFiles(store, live_keys.FEEDBACK, live_keys.parse_feedback_key, most=MOST_FILES)
        self._answers: OrderedDict[tuple[str | None, int], _Answers] = OrderedDict()
        self._metrics: OrderedDict[str, _Feedback] = OrderedDict()
        self._times: dict[tuple[int, str | None], int] = {}
        self._episodes: OrderedDict[tuple[str, str | None], int] = OrderedDict()
        self._since: float | None = None
        self._damaged = 0
        self._problem: str | None = None

    def look(self) -> None:
        """Read what is new. Raises errors of the store, after which it can be called again."""
        self._read(self._interactions, Interactions.parse, self._note_interactions)
        self._read(self._feedback, FeedbackFile.parse, self._note_feedback)  # after the answers, whose episodes it names

    def close(self) -> None:
        """Stop the threads."""
        self._fetch.close()

    def plain(self) -> dict[str, Any]:
        """Return the traffic as plain values."""
        return {
            "answers": [
                {
                    "channel": channel,
                    "seq": seq,
                    "version": self._chain.version_of(seq),
                    "count": one.count,
                    "tokens": one.tokens,
                    "refusals": one.refusals,
                    "not_trained": one.not_trained,
                    "mixed": one.mixed,
                    "last": one.last,
                }
                for (channel, seq), one in sorted(self._answers.items(), key=lambda item: (-item[0][1], item[0][0] or ""))
            ],
            "times": [
                [minute * _MINUTE, channel, count]
                for (minute, channel), count in sorted(self._times.items(), key=lambda item: (item[0][0], item[0][1] or ""))
            ],
            "bounds": list(AGES),
            "feedback": [
                {
                    "metric": short(name, 100),
                    "count": one.count,
                    "mean": one.total / one.numbers if one.numbers else None,
                    "ages": one.ages,
                    "unknown": one.unknown,
                    "last": one.last,
                }
                for name, one in sorted(self._metrics.items())
            ],
            "since": self._since,
            "left_out": self._interactions.left_out + self._feedback.left_out,
            "damaged": self._damaged,
            "problem": self._problem,
        }

    def _read(self, files: NewestFiles, parse: Callable[[bytes], _File], note: Callable[[_File, float], None]) -> None:
        """Read new files, or only the newest of them if there are too many, and count what they hold."""
        found = files.look()
        taken = _newest_of(found)
        sizes = {file.info.key: file.info.size for file in taken}

        def one(data: bytes) -> _Read[_File]:
            try:
                return _Read(content_hash(data), parse(data), "")
            except (CorruptInteractions, CorruptFeedback, UnsupportedVersion) as error:
                return _Read("", None, str(error))

        read = self._fetch.read(sizes, one, limit=MOST_FILE_BYTES)
        files.note(found, taken)
        for new in taken:
            if new.info.key not in read:  # it was swept meanwhile
                continue
            about = read[new.info.key]
            file = about.file
            if file is None or (about.blake3, file.run, file.gateway, file.number) != (
                new.parts.blake3,
                self._run,
                new.parts.gateway,
                new.parts.number,
            ):
                self._damaged += 1
                self._problem = short(f"{new.info.key}: {about.problem or 'its content does not fit its key, or is of another run.'}", 300)
                continue
            stored = new.info.modified.timestamp()
            self._since = stored if self._since is None else min(self._since, stored)
            note(file, stored)

    def _note_interactions(self, file: Interactions, stored: float) -> None:
        for about, made in zip(file.interactions, file.rollouts.completions, strict=True):
            self._note_episode(about)
            row = _row(self._answers, (about.channel, made.spans[-1].seq if made.spans else -1), _Answers)
            row.count += 1
            row.tokens += about.facts.length
            row.refusals += about.facts.refusal
            row.not_trained += not about.train
            row.mixed += len({span.seq for span in made.spans}) > 1
            row.last = max(row.last, stored)
            minute = (int(stored) // _MINUTE, about.channel)
            self._times[minute] = self._times.get(minute, 0) + 1
        minutes = sorted({minute for minute, _ in self._times})
        while len(minutes) > MOST_TIMES or len(self._times) > _MOST_COUNTS:
            oldest = minutes.pop(0)
            self._times = {minute: count for minute, count in self._times.items() if minute[0] > oldest}

    def _note_episode(self, about: Interaction) -> None:
        if about.episode is not None:
            self._episodes.pop((about.episode, about.caller), None)
            self._episodes[about.episode, about.caller] = about.time
            if len(self._episodes) > _MOST_EPISODES:
                self._episodes.popitem(last=False)

    def _note_feedback(self, file: FeedbackFile, stored: float) -> None:
        for one in file.feedback:
            row = _row(self._metrics, one.metric, _Feedback)
            row.count += 1
            row.last = max(row.last, stored)
            if not isinstance(one.value, str):
                row.numbers += 1
                row.total += float(one.value)
            age = self._age(one)
            if age is None:
                row.unknown += 1
            else:
                row.ages[bisect_right(AGES, age)] += 1

    def _age(self, feedback: Feedback) -> float | None:
        """Return the seconds from the answer to its feedback, by the clocks of gateways; None if the episode is not known."""
        if feedback.inference is not None:
            return (feedback.time - id_time(feedback.inference)) / 1000
        answered = self._episodes.get((str(feedback.episode), feedback.caller))
        return None if answered is None else (feedback.time - answered) / 1000


def _newest_of(found: Sequence[NewFile]) -> list[NewFile]:
    """Return the newest files that may be read in one look, in the order in which they were stored."""
    taken: list[NewFile] = []
    left = MOST_LOOK_BYTES
    for file in sorted(found, key=lambda file: file.info.modified, reverse=True)[:MOST_FILES]:
        left -= file.info.size
        if left >= 0 and file.info.size <= MOST_FILE_BYTES:
            taken.append(file)
    return taken[::-1]


def _row(rows: OrderedDict[Any, _Row], key: Any, make: Callable[[], _Row]) -> _Row:
    """Return a row, which is made if it is missing. When there are too many, the one that was longest without new files is dropped."""
    found = rows.get(key)
    if found is None:
        found = rows[key] = make()
        if len(rows) > MOST_ROWS:
            rows.popitem(last=False)
    else:
        rows.move_to_end(key)
    return found
