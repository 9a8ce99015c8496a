"""Events of relays, and of readers that have several stores."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

KINDS = (
    EventKind(
        "relayed",
        "info",
        "The region has another version.",
        (f.SEQ, f.UPDATES, f.STEP.maybe, f.BYTES, f.integer("behind", "The region still lacks this many versions.").maybe, f.TRACE),
    ),
    EventKind(
        "relay-failed",
        "warning",
        "A relay could not copy a version, and tries again if `retryable`.",
        (f.ERROR, f.REASON, f.RETRYABLE),
    ),
    EventKind(
        "channel-refused",
        "warning",
        "A move of a channel cannot be used, so the channel stays at the move before it in the region.",
        (f.CHANNEL, f.REASON),
    ),
    EventKind(
        "shortcut-relayed",
        "info",
        "The region has another full checkpoint or skip.",
        (
            f.KIND,
            f.SEQ,
            f.BASE.maybe,
            f.size("rebuilt", "This many bytes were made in the region."),
            f.size("fetched", "This many bytes crossed the link."),
        ),
    ),
    EventKind(
        "shortcut-left-out",
        "debug",
        "A skip cannot be made in the region, and is not worth a transfer. Readers fetch the deltas instead.",
        (f.KIND, f.SEQ, f.BASE.maybe, f.REASON),
    ),
)

READER_KINDS = (
    EventKind(
        "relay-used", "debug", "Data were read from a copy, for the first time or for the first time since it was avoided.", (f.RELAY,)
    ),
    EventKind(
        "relay-avoided",
        "warning",
        "A copy fails, serves something wrong, or holds no chain yet (reported once), so it is not read for some time.",
        (f.RELAY, f.REASON, f.seconds("seconds", "The copy is not read for this long.")),
    ),
    EventKind(
        "relay-late",
        "info",
        "A copy lags behind, so this version and later ones are read from the origin until the copy has caught up.",
        (f.RELAY, f.KEY, f.REASON),
    ),
)
