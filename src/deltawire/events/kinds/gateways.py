"""Events of gateways."""

from __future__ import annotations

from . import fields as f
from .kind import EventKind

_ROUTE = f.text("route", "This is the route of the request: `chat`, `completions` or `responses`, or the path of a refused one.")
_SESSION = f.text("session", "This is the session of the gateway: its name, a dot, and 16 digits.")
_URL = f.text("engine", "This is the address of the engine.")
_NUMBER = f.integer("number", "This is the number of the file among those of the session.")

KINDS = (
    EventKind("gateway-serving", "info", "The gateway accepts requests.", (f.text("url", "This is its address."), _SESSION)),
    EventKind(
        "gateway-name-used",
        "warning",
        "Another gateway with this name uses the same journal. Give each gateway a name of its own.",
        (_SESSION,),
    ),
    EventKind(
        "caller-without-answers",
        "warning",
        "All keys of a caller are for feedback without `all`, so no answer is its own, and it can rate none.",
        (f.text("caller", "This is the name of the caller."),),
    ),
    EventKind(
        "answered",
        "debug",
        "A request was answered.",
        (_ROUTE, _URL, f.text("channel", "This is the channel of the engine.").maybe, f.SEQ.maybe, f.SECONDS),
    ),
    EventKind("answer-failed", "warning", "An engine was lost in the middle of an answer.", (_ROUTE, f.ERROR, f.REASON)),
    EventKind(
        "request-refused", "info", "The gateway refused a request.", (_ROUTE, f.integer("status", "This is the HTTP status."), f.ERROR)
    ),
    EventKind(
        "engine-away",
        "warning",
        "An engine does not answer, perhaps since the gateway started. It gets no requests until it does.",
        (_URL, f.REASON),
    ),
    EventKind("engine-back", "info", "An engine answers.", (_URL, f.SEQ.maybe)),
    EventKind("channel-unreadable", "warning", "A channel cannot be read. Users stay in the channels that are known.", (f.REASON,)),
    EventKind(
        "interactions-stored",
        "debug",
        "A file of interactions is in the store.",
        (_NUMBER, f.integer("interactions", "It has this many answers, if they are from this session.").maybe, f.BYTES, f.SECONDS),
    ),
    EventKind("interaction-unusable", "warning", "An answer was given, but cannot be recorded.", (f.REASON,)),
    EventKind(
        "interaction-untrained",
        "warning",
        "An answer is recorded, but must not be trained on, although its user agrees. The gateway tells each reason once, and at most 100.",
        (f.REASON,),
    ),
    EventKind("recording-waits", "warning", "The store does not take interactions. They stay in the journal.", (f.REASON,)),
    EventKind("recording-stopped", "error", "The gateway no longer records answers. It still gives them.", (f.REASON,)),
    EventKind("recording-resumed", "info", "The gateway records answers again.", ()),
    EventKind("journal-recovered", "info", "Everything that an ended session left in the journal is in the store.", (_SESSION,)),
    EventKind(
        "feedback-stored",
        "debug",
        "A file of feedback is in the store.",
        (_NUMBER, f.integer("feedback", "It has this many pieces of feedback."), f.SECONDS),
    ),
    EventKind(
        "feedback-acknowledged",
        "debug",
        "Feedback is in the store, and its sender is told so. This event comes after `feedback-stored`.",
        (
            f.text("metric", "This is the metric, if it is declared.").maybe,
            f.seconds("age_seconds", "The answer is this old, or the newest known answer of the episode.").maybe,
        ),
    ),
    EventKind(
        "metric-undeclared",
        "warning",
        "Feedback came for a metric that is not among the declared ones. It is stored, and no trainer reads it. The gateway tells each "
        "name once, and at most 100.",
        (f.text("metric", "This is the metric."),),
    ),
    EventKind("feedback-waits", "warning", "The store does not take feedback. Its senders are told to send it again.", (f.REASON,)),
)
