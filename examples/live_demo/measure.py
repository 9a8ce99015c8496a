"""Measures the live demo: from the events of its processes, from the users, and from the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from releases import ENGINES, Story
from users import Reaction

from deltawire import ReaderOptions
from deltawire.chain.channels import ChannelReader
from deltawire.chain.find import newest_version
from deltawire.format.feedback import MAX_FEEDBACK_BYTES, FeedbackFile
from deltawire.format.records.fleet_files import MAX_TASKS_BYTES, Tasks
from deltawire.format.records.trainer_records import Round
from deltawire.store import keys, live_keys
from deltawire.store.fleet_keys import ROUNDS

_BUCKET = 5.0
_PART = 30.0
CLOSED, OPEN = {"stable", "canary"}, {"open"}
"""The channels whose users have the loop closed, and those with the loop open."""


def curve(reactions: Iterable[Reaction], began: float, channels: set[str]) -> list[tuple[float, float]]:
    """Return the mean rating of the answers of some channels, for each five seconds."""
    buckets = defaultdict(list)
    for each in reactions:
        if each.channel in channels:
            buckets[int((each.at - began) / _BUCKET)].append(each.rating)
    return [(_BUCKET * (number + 0.5), mean(values)) for number, values in sorted(buckets.items())]


def parts(story: Story) -> list[dict[str, Any]]:
    """Return for each half minute: the answers, their mean rating with the loop closed and with it open, and what the gate decided."""
    assert story.crowd is not None
    ratings = defaultdict(list)
    for each in story.crowd.reactions:
        ratings[int((each.at - story.began) / _PART), each.channel in OPEN].append(each.rating)
    decided = [each for each in story.events if each["event"] == "gate-decided"]
    return [
        {
            "from_seconds": _PART * number,
            "answers": len(ratings[number, False]) + len(ratings[number, True]),
            "closed": mean(ratings[number, False]) if ratings[number, False] else None,
            "open": mean(ratings[number, True]) if ratings[number, True] else None,
            "decided": [each["outcome"] for each in decided if int((each["at"] - story.began) / _PART) == number],
        }
        for number in range(1 + max((number for number, _ in ratings), default=-1))
    ]


def rollback_seconds(story: Story) -> float | None:
    """Return the time from the decision about the damaged version until the last engine of the canary served the version before."""
    for move in story.moves("canary", "rollback"):
        decided = [each for each in story.events if each["event"] == "gate-decided" and each["at"] <= move["at"]]
        if decided and decided[-1]["seq"] == story.damaged_seq:
            swaps: dict[str, float] = {}
            for each in story.events:
                if (
                    each["event"] == "swapped"
                    and each["channel"] == "canary"
                    and each["seq"] == move["seq"]
                    and each["at"] >= decided[-1]["at"]
                ):
                    swaps.setdefault(each["engine"], each["at"])
            return max(swaps.values()) - decided[-1]["at"] if len(swaps) == ENGINES.count("canary") else None
    return None


def feedback_to_release(store_folder: Path) -> list[tuple[float, float]]:
    """Return, for each released version, when it was released and the median time since the feedback that it learned from.

    All times are the store's. A step learned from the answers in its round. It is released with the first promotion of stable to a version
    of this step or a later one.
    """
    with ReaderOptions().open_store(str(store_folder)) as store:
        given = {}
        for info in store.list(live_keys.FEEDBACK):
            for feedback in FeedbackFile.parse(store.get(info.key, limit=MAX_FEEDBACK_BYTES)).feedback:
                given[feedback.inference] = info.modified.timestamp()
        learned: dict[int, list[float]] = defaultdict(list)
        for info in store.list(ROUNDS):
            opened = Round.parse(store.get(info.key, limit=1 << 20))
            for rows in Tasks.parse(store.get(opened.rows.key, limit=MAX_TASKS_BYTES)).rows:
                learned[opened.for_step] += [given[row["live"]] for row in rows if row.get("live") in given]
        log = ReaderOptions().open_log(store)
        head = newest_version(log)
        found, released = [], 0
        moves = [move for move in ChannelReader(log, "stable").history() if move.kind == "promote"][::-1]
        began = store.head(keys.channel_key("stable", 0)).modified.timestamp()
        for move in moves[1:]:
            step = log.ancestor(head, move.target.seq).step or 0
            at = store.head(keys.channel_key("stable", move.move)).modified.timestamp()
            times = [stored for each in range(released + 1, step + 1) for stored in learned.get(each, ())]
            if times:
                found.append((at - began, at - median(times)))
            released = max(released, step)
        return found
