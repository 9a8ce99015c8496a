"""Events that are made from what the store alone shows, for `deltawire events`."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

KINDS = (
    EventKind(
        "commit-seen",
        "info",
        "There is another commit.",
        (
            f.SEQ,
            f.UPDATES,
            f.KIND,
            f.STEP.maybe,
            f.EPOCH,
            f.BYTES,
            f.STATE_BYTES,
            f.CHANGED.maybe,
            f.BASE.maybe,
            f.flag("void", "It is 1 if the publisher of the commit was already replaced, so that the commit does not count."),
        ),
    ),
    EventKind("anchor-seen", "info", "There is a full checkpoint of a version.", (f.SEQ,)),
    EventKind("skip-seen", "debug", "There is a skip.", (f.SEQ, f.BASE)),
    EventKind("collection-seen", "info", "Garbage was collected.", (f.FLOOR,)),
    EventKind("engine-seen", "info", "An engine reports another state or version.", (f.READER, f.STATE, f.SEQ.maybe, f.REASON.maybe)),
    EventKind(
        "member-seen",
        "info",
        "A member is new, has another version or leaves.",
        (f.MEMBER, f.STATE, f.SEQ.maybe, f.STEP.maybe, f.LAG, f.TOKENS, f.REASON.maybe),
    ),
    EventKind("round-seen", "info", "There is a round for a training step.", (f.ROUND, f.STEP, f.TASKS, f.EPOCH)),
    EventKind("batch-seen", "info", "A trainer has acknowledged the results of a step.", (f.ROUND, f.STEP, f.RESULTS)),
)
