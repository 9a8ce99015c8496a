"""Events of readers."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

KINDS = (
    EventKind("planned", "debug", "A reader has a route to the newest version.", (f.SEQ, f.UPDATES, f.HOPS, f.BYTES)),
    EventKind(
        "synced",
        "info",
        "A reader has reached a version.",
        (
            f.SEQ,
            f.UPDATES,
            f.STEP.maybe,
            f.LAG,
            f.BYTES,
            f.size("shared_bytes", "Another process of this host had fetched this many of the bytes (host cache)."),
            f.size("ahead_bytes", "This many of the bytes came before the commit."),
            f.integer("objects", "This is the number of objects that were fetched."),
            f.HOPS,
            f.seconds("find_seconds", "Finding the newest commit took this long."),
            f.seconds("fetch_seconds", "Fetching took this long, summed over threads."),
            f.seconds("verify_seconds", "Comparing hashes took this long, summed over threads."),
            f.WAIT_SECONDS,
            f.seconds("resolve_seconds", "Decoding took this long, summed over threads."),
            f.APPLY_SECONDS,
            f.seconds("total_seconds", "All of it took this long. Phases overlap, so their sum may be larger."),
            f.TRACE,
        ),
    ),
    EventKind(
        "sync-failed",
        "warning",
        "A sync failed. The reader keeps its version, and tries again if `retryable`.",
        (f.SEQ.maybe, f.ERROR, f.REASON, f.RETRYABLE),
    ),
    EventKind("resynced", "info", "A version was rebuilt from a full checkpoint.", (f.SEQ, f.UPDATES, f.BYTES)),
    EventKind(
        "rolled-back",
        "info",
        "The trainer went back to an older version, and the reader followed.",
        (f.SEQ, f.integer("from_seq", "The reader had this commit before.")),
    ),
    EventKind(
        "avoiding",
        "warning",
        "An object is damaged or missing, so the reader takes another route.",
        (
            f.text("source", "The hop uses a `commit`, an `anchor` or a `skip`."),
            f.BASE.maybe,
            f.integer("target", "The hop leads to this commit."),
            f.REASON,
        ),
    ),
    EventKind(
        "state-refused",
        "warning",
        "The weights that the reader holds do not have the expected digest, so it loads them again.",
        (f.SEQ.maybe, f.text("slot", "This is the directory of a mirror.").maybe, f.REASON),
    ),
    EventKind(
        "retrying",
        "info",
        "A request to the store failed and is repeated.",
        (f.KEY.maybe, f.REASON, f.ATTEMPT.maybe, f.integer("attempts", "This many attempts are made at most.").maybe),
    ),
    EventKind("waiting", "info", "A reader or a member waits for a chain or a server.", (f.REASON, f.MEMBER.maybe)),
    EventKind(
        "not-shared",
        "info",
        "A file could not be shared with other processes of this host, so this one fetches it. The same reason is reported once in a row.",
        (f.KEY, f.REASON),
    ),
    EventKind("pin-failed", "warning", "A pin could not be written or deleted.", (f.READER, f.SEQ.maybe, f.REASON)),
)
