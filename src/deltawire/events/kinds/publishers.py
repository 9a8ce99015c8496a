"""Events of publishers."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind, Field

KINDS = (
    EventKind(
        "published",
        "info",
        "A version is visible to readers.",
        (
            f.SEQ,
            f.UPDATES,
            f.STEP.maybe,
            f.EPOCH,
            f.KIND,
            f.BYTES,
            f.STATE_BYTES,
            f.CHANGED.maybe,
            f.number("ratio", "All weights are this many times larger than what was stored.").maybe,
            f.seconds("quantise_seconds", "Quantising took this long. Weights that are quantised while encoded count there.").maybe,
            f.seconds("encode_seconds", "Comparing and encoding took this long.").maybe,
            f.UPLOAD_SECONDS.maybe,
            f.WAIT_SECONDS.maybe,
            f.seconds("commit_seconds", "Creating the commit took this long."),
            f.seconds("total_seconds", "All of it took this long. Phases overlap, so their sum may be larger.").maybe,
            f.TRACE,
        ),
    ),
    EventKind(
        "rank-published",
        "debug",
        "One rank of a sharded publisher has uploaded its part of a version.",
        (f.integer("rank", "This is the number of the rank."), f.SEQ, f.BYTES, f.SECONDS),
    ),
    EventKind(
        "channel-moved",
        "info",
        "A channel names another version, or has another share of the users. Its followers report it, too, when they see it.",
        (
            f.CHANNEL,
            f.integer("move", "This is the number of the move."),
            f.text("kind", "The move is a `promote`, a `rollback` or a `share`."),
            f.SEQ,
            f.integer("share", "This many of a million users belong to the channel.").maybe,
            f.WHY,
        ),
    ),
    EventKind("superseded", "info", "A version in the background was left out, because a newer one came first.", (f.STEP.maybe, f.TRACE)),
    EventKind("publish-failed", "error", "A version could not be published.", (f.STEP.maybe, f.ERROR, f.REASON, f.TRACE)),
    EventKind(
        "attachments-changed", "info", "A version has new or changed attachments. The vLLM sidecar also reports it.", (f.SEQ, f.FILES)
    ),
    EventKind(
        "skip-made",
        "info",
        "A skip is in the store.",
        (f.SEQ, f.BASE, f.integer("versions", "The skip covers this many versions."), f.BYTES),
    ),
    EventKind("anchored", "info", "A full checkpoint of a version is in the store.", (f.SEQ, f.BYTES, f.UPLOAD_SECONDS)),
    EventKind("shortcut-failed", "warning", "A shortcut could not be made. Readers take a longer route.", (f.SEQ.maybe, f.KIND, f.REASON)),
    EventKind(
        "collected",
        "info",
        "Garbage collection has run.",
        (
            f.FLOOR.maybe,
            f.integer("deleted", "This is the number of objects that were deleted."),
            f.BYTES,
            f.text("outcome", "This word says what was done: `collected`, `waiting`, `held` and others."),
        ),
    ),
    EventKind("fenced", "error", "Another publisher or trainer has taken over.", (f.EPOCH, f.REASON.maybe)),
)


def _warning(name: str, meaning: str, *fields: Field) -> EventKind:
    return EventKind(name, "warning", meaning, (f.MESSAGE, *fields), is_warned=True)


_DTYPE = f.text("dtype", "This is the type of the weights.")
WARNINGS = (
    _warning("wide-weights", "The weights are float32, and nothing says that the engines serve float32.", _DTYPE),
    _warning("dense-updates", "Nearly all weights changed in several versions in a row.", f.CHANGED, f.ELEMENTS),
    _warning("attachments-missing", "No config.json is published."),
    _warning("attachment-left-out", "A version has an attachment with a name that mirrors use for their own record.", f.SEQ),
    _warning("non-finite-published", "Some weights are NaN or infinite.", f.TENSORS, f.ELEMENTS),
    _warning("quantization-config-missing", "The weights are quantised, and no config.json tells engines how."),
    _warning("nothing-quantised", "A recipe is given, and it quantises none of the weights.", f.RECIPE, f.TENSORS),
    _warning(
        "pattern-unmatched",
        "A pattern of layers that are not to be quantised matches no layer.",
        f.RECIPE,
        f.integer("patterns", "This is the number of patterns that match no layer."),
    ),
    _warning(
        "recipe-changed",
        "A version is quantised by another recipe than the version before.",
        f.text("before", "This is the recipe of the version before."),
        f.text("after", "This is the recipe of the version."),
    ),
    _warning(
        "layout-changed",
        "A version has other tensors than the version before.",
        f.integer("added", "This many tensors are new."),
        f.integer("removed", "This many tensors are gone."),
        f.integer("differing", "This many tensors have another shape or type."),
    ),
    _warning(
        "step-went-back",
        "A version has a lower step than the version before.",
        f.STEP,
        f.integer("newest_step", "This is the step of the version before."),
    ),
    _warning("versions-lost", "A version that `publish` accepted is not published.", f.REASON),
)
