"""The metrics of channels, gates and gateways."""

from __future__ import annotations

from collections.abc import Callable

from ..events import Event
from .metric import AGES, Change, Fields, Metric, field_of, one, texts, zero


def _limit_and(label: str) -> Callable[[Fields], tuple[str, ...]]:
    return lambda fields: (str(fields.get("limit") or ""), label)


def _verdict(event: Event) -> float | None:
    return {"holds": 1.0, "broken": -1.0, "open": 0.0}.get(str(event.fields.get("verdict")))


LIVE_METRICS = (
    # Channels
    Metric(
        "deltawire_channel_moves",
        "counter",
        "Channels were moved this many times: by a `promote`, `rollback` or `share`. A process counts the moves that it made or saw.",
        (Change("channel-moved", one, texts("channel", "kind")),),
        ("channel", "kind"),
    ),
    Metric(
        "deltawire_channel_commit",
        "gauge",
        "The channel names the version of this commit.",
        (Change("channel-moved", field_of("seq"), texts("channel")),),
        ("channel",),
    ),
    # Gates
    Metric(
        "deltawire_gate_decisions",
        "counter",
        "The gate has decided this many times, by outcome: `promote` or `rollback`.",
        (Change("gate-decided", one, texts("outcome")),),
        ("outcome",),
    ),
    Metric(
        "deltawire_gate_answers",
        "gauge",
        "The canary has given this many answers.",
        (Change("gate-watching", field_of("answers")), Change("gate-decided", field_of("answers"))),
    ),
    Metric(
        "deltawire_gate_limit_mean",
        "gauge",
        "This is the mean of a limit's metric, for the `canary` and for `stable`.",
        (
            Change("gate-limit", field_of("canary"), _limit_and("canary")),
            Change("gate-limit", field_of("stable"), _limit_and("stable")),
        ),
        ("limit", "group"),
    ),
    Metric(
        "deltawire_gate_limit_difference",
        "gauge",
        "The difference that a limit is about lies between `low` and `high`. The limit is proved or broken when `threshold` lies outside.",
        tuple(Change("gate-limit", field_of(bound), _limit_and(bound)) for bound in ("low", "high", "threshold")),
        ("limit", "bound"),
    ),
    Metric(
        "deltawire_gate_limit_verdict",
        "gauge",
        "It is 1 if the limit holds, -1 if it is broken, and 0 if the test has not decided.",
        (Change("gate-limit", _verdict, texts("limit")),),
        ("limit",),
    ),
    # Gateways
    Metric(
        "deltawire_gateway_answers",
        "counter",
        "The gateway has answered this many requests, by route and channel.",
        (Change("answered", one, texts("route", "channel")),),
        ("route", "channel"),
    ),
    Metric(
        "deltawire_gateway_answer_seconds",
        "histogram",
        "The gateway answered a request in this time.",
        (Change("answered", field_of("seconds"), texts("route")),),
        ("route",),
    ),
    Metric(
        "deltawire_gateway_version_answers",
        "counter",
        "The gateway has answered this many requests, by the commit of the engine's version, and by channel.",
        (Change("answered", one, texts("seq", "channel")),),
        ("seq", "channel"),
        forgets=True,
    ),
    Metric(
        "deltawire_gateway_refusals",
        "counter",
        "The gateway refused this many requests, or lost an engine in the middle of an answer, by the class of the error.",
        (Change("request-refused", one, texts("error")), Change("answer-failed", one, texts("error"))),
        ("reason",),
    ),
    Metric(
        "deltawire_gateway_engine_up",
        "gauge",
        "It is 1 if the engine answers.",
        (Change("engine-back", one, texts("engine")), Change("engine-away", zero, texts("engine"))),
        ("engine",),
    ),
    Metric(
        "deltawire_interactions_stored",
        "counter",
        "This many answers are recorded in the store.",
        (Change("interactions-stored", field_of("interactions")),),
    ),
    Metric(
        "deltawire_interactions_unusable",
        "counter",
        "This many answers were given, but could not be recorded.",
        (Change("interaction-unusable", one),),
    ),
    Metric(
        "deltawire_recording_stopped",
        "gauge",
        "It is 1 if the gateway does not record answers, because the journal is full or cannot be written.",
        (Change("recording-stopped", one), Change("recording-resumed", zero)),
    ),
    Metric(
        "deltawire_feedback_stored",
        "counter",
        "This many pieces of feedback are in the store.",
        (Change("feedback-stored", field_of("feedback")),),
    ),
    Metric(
        "deltawire_store_feedback_seconds",
        "histogram",
        "The store confirmed a file of feedback in this time.",
        (Change("feedback-stored", field_of("seconds")),),
    ),
    Metric(
        "deltawire_feedback_age_seconds",
        "histogram",
        "Feedback came this long after its answer, by the metric that it is about. The label is empty if the metric is not declared.",
        (Change("feedback-acknowledged", field_of("age_seconds"), texts("metric")),),
        ("metric",),
        AGES,
    ),
)
