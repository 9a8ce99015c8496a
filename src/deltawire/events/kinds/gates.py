"""Events of gates, which judge canaries."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

_CANARY = (
    f.CHANNEL,
    f.integer("move", "This is the number of the move that made the canary."),
    f.SEQ,
    f.integer("answers", "The canary has given this many answers."),
    f.seconds("age_seconds", "The canary is this old, by the store's clock."),
    f.WHY,
)

KINDS = (
    EventKind("gate-watching", "debug", "The gate has no decision about a canary yet. `why` says what is missing.", _CANARY),
    EventKind(
        "gate-decided",
        "info",
        "The gate has decided about a canary. The move of the channel follows as `channel-moved`.",
        (*_CANARY, f.text("outcome", "It is `promote` or `rollback`.")),
    ),
    EventKind(
        "gate-limit",
        "debug",
        "The gate has judged a limit. These events come before `gate-watching` and `gate-decided`.",
        (
            f.text("limit", "This is the limit, such as `length:+20%`."),
            f.text("verdict", "The limit `holds`, is `broken`, or is `open`."),
            f.number("canary", "This is the mean of the canary's answers."),
            f.number("stable", "This is the mean of the other channel's answers."),
            f.integer("blocks", "This many blocks of answers were compared."),
            f.number("low", "The difference that the limit is about is at least this, except with the probability `alpha`."),
            f.number("high", "The difference is at most this, except with the probability `alpha`."),
            f.number("threshold", "The limit holds on one side of this difference, and is broken on the other."),
        ),
    ),
    EventKind(
        "gate-evaluated",
        "info",
        "The evaluation of a canary has ended.",
        (
            f.CHANNEL,
            f.flag("passed", "It is 1 if the canary passed. It is absent if the evaluation did not finish.").maybe,
            f.ATTEMPT,
            f.WHY,
        ),
    ),
    EventKind(
        "live-file-refused",
        "warning",
        "A file of interactions or feedback breaks a rule. Nothing of it counts.",
        (f.KEY, f.WHY),
    ),
)
