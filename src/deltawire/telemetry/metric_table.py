"""Every metric, and the events that change it. Names and units follow the conventions of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..events import Event, Value

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)

Fields = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Change:
    """How an event changes a metric.

    Parameters
    ----------
    event
        The name of the event.
    value
        Returns the new value of a gauge, what a counter grows by, or what a histogram observes. None changes nothing.
    labels
        The values of the metric's labels, except for `member`.
    """

    event: str
    value: Callable[[Event], float | None]
    labels: Callable[[Fields], tuple[str, ...]] = lambda fields: ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name
        Its name, without the suffix `_total` of a counter.
    type
        Its type.
    meaning
        A sentence about it.
    changes
        The events that change it.
    labels
        The names of its labels. The value of `member` is the event's field of this name, or the name of the listener.
    buckets
        The bounds of a histogram's buckets.
    """

    name: str
    type: Literal["gauge", "counter", "histogram"]
    meaning: str
    changes: tuple[Change, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS

    @property
    def full_name(self) -> str:
        """The name that Prometheus shows."""
        return f"{self.name}_total" if self.type == "counter" else self.name


def number(value: Value) -> float | None:
    """Return a field as a number, or None if it is not a finite one."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer that is too large
        return None


def _field(name: str) -> Callable[[Event], float | None]:
    return lambda event: number(event.fields.get(name))


def _one(event: Event) -> float | None:
    return 1.0


def _zero(event: Event) -> float | None:
    return 0.0


def _time(event: Event) -> float | None:
    return event.time


def _text(*names: str) -> Callable[[Fields], tuple[str, ...]]:
    return lambda fields: tuple(str(fields.get(name) or "") for name in names)


def _always(*labels: str) -> Callable[[Fields], tuple[str, ...]]:
    return lambda fields: labels


def _phases(event: str, *phases: str) -> tuple[Change, ...]:
    """Return one change for each field `PHASE_seconds` of an event."""
    return tuple(Change(event, _field(f"{phase}_seconds"), _always(phase)) for phase in phases)


def _of_kind(kind: str, field: str) -> Callable[[Event], float | None]:
    return lambda event: number(event.fields.get(field)) if event.fields.get("kind") == kind else None


def _in_force(value: Callable[[Event], float | None]) -> Callable[[Event], float | None]:
    """Return the value of a version that was seen in the store. Commits that are void or make no version do not count."""
    return lambda event: None if event.fields.get("void") or event.fields.get("kind") == "fence" else value(event)


def _bits_per_change(event: Event) -> float | None:
    size, changed = _of_kind("delta", "bytes")(event), number(event.fields.get("changed"))
    return 8 * size / changed if size is not None and changed else None


def _from_the_store(event: Event) -> float | None:
    size, shared = number(event.fields.get("bytes")), number(event.fields.get("shared_bytes"))
    return None if size is None else max(0.0, size - (shared or 0.0))


def _by(group: str) -> Callable[[Event], float | None]:
    return lambda event: number(event.fields.get("kl")) if event.fields.get("by") == group else None


def _missing_experts(event: Event) -> float | None:
    replayed = number(event.fields.get("routing/replayed_ratio"))
    return None if replayed is None else 1.0 - replayed


_FAILED_BY_ERROR = tuple(Change(event, _one, _text("error")) for event in ("sync-failed", "swap-failed"))

_ALL = (
    # Publishers
    Metric(
        "deltawire_published_version",
        "gauge",
        "This is the number of the newest version.",
        (Change("published", _field("updates")), Change("commit-seen", _in_force(_field("updates")))),
    ),
    Metric(
        "deltawire_last_commit_timestamp_seconds",
        "gauge",
        "The newest version was published at this time, in seconds since 1970.",
        (Change("published", _time), Change("commit-seen", _in_force(_time))),
    ),
    Metric(
        "deltawire_publish_seconds",
        "histogram",
        "A phase of publishing a version took this long.",
        _phases("published", "quantise", "encode", "upload", "wait", "commit", "total"),
        ("phase",),
    ),
    Metric("deltawire_delta_bytes", "gauge", "This is the size of the newest delta.", (Change("published", _of_kind("delta", "bytes")),)),
    Metric(
        "deltawire_anchor_bytes",
        "gauge",
        "This is the size of the newest full checkpoint.",
        (Change("published", _of_kind("anchor", "bytes")), Change("anchored", _field("bytes"))),
    ),
    Metric(
        "deltawire_state_bytes",
        "gauge",
        "This is the size of all weights.",
        (Change("published", _field("state_bytes")), Change("commit-seen", _in_force(_field("state_bytes")))),
    ),
    Metric(
        "deltawire_changed_weights",
        "gauge",
        "This is the number of weights that the newest delta changes.",
        (Change("published", _of_kind("delta", "changed")),),
    ),
    Metric(
        "deltawire_bits_per_change",
        "gauge",
        "This is the number of bits of the newest delta for each changed weight.",
        (Change("published", _bits_per_change),),
    ),
    Metric(
        "deltawire_published_bytes",
        "counter",
        "These bytes were uploaded, by the kind of commit or shortcut.",
        (
            Change("published", _field("bytes"), _text("kind")),
            Change("anchored", _field("bytes"), _always("anchor")),
            Change("skip-made", _field("bytes"), _always("skip")),
        ),
        ("kind",),
    ),
    Metric(
        "deltawire_publish_failures",
        "counter",
        "This many versions could not be published, by the class of the error.",
        (Change("publish-failed", _one, _text("error")),),
        ("reason",),
    ),
    Metric(
        "deltawire_fenced", "gauge", "It is 1 if another publisher has taken over.", (Change("fenced", _one), Change("published", _zero))
    ),
    Metric("deltawire_collected_bytes", "counter", "Garbage collection has deleted these bytes.", (Change("collected", _field("bytes")),)),
    # Readers
    Metric(
        "deltawire_applied_version",
        "gauge",
        "This is the number of the version that a member has.",
        tuple(Change(event, _field("updates")) for event in ("synced", "swapped", "adopted")),
        ("member",),
    ),
    Metric(
        "deltawire_last_sync_timestamp_seconds",
        "gauge",
        "A member reached a version at this time, in seconds since 1970.",
        tuple(Change(event, _time) for event in ("synced", "swapped", "adopted")),
        ("member",),
    ),
    Metric(
        "deltawire_version_lag",
        "gauge",
        "A member was this many versions behind when its last sync ended, or when its record was last seen.",
        (Change("synced", _field("lag")), Change("member-seen", _field("lag"))),
        ("member",),
    ),
    Metric(
        "deltawire_sync_seconds",
        "histogram",
        "A phase of a sync took this long. Phases overlap, and are summed over threads.",
        _phases("synced", "find", "fetch", "verify", "wait", "resolve", "apply", "total"),
        ("phase",),
    ),
    Metric(
        "deltawire_fetched_bytes",
        "counter",
        "These bytes were fetched, from the `store` or from the `host-cache`.",
        (Change("synced", _from_the_store, _always("store")), Change("synced", _field("shared_bytes"), _always("host-cache"))),
        ("source",),
    ),
    Metric(
        "deltawire_sync_failures",
        "counter",
        "This many syncs and swaps failed, by the class of the error.",
        _FAILED_BY_ERROR,
        ("reason",),
    ),
    Metric(
        "deltawire_digest_mismatch",
        "counter",
        "Weights did not have the expected digest, or an object was damaged or missing, this many times.",
        (Change("state-refused", _one), Change("avoiding", _one)),
    ),
    Metric(
        "deltawire_rollbacks",
        "counter",
        "Readers followed the trainer back to an older version this many times.",
        (Change("rolled-back", _one),),
    ),
    Metric("deltawire_store_retries", "counter", "This many requests to the store were repeated.", (Change("retrying", _one),)),
    # Engines
    Metric(
        "deltawire_pause_seconds",
        "histogram",
        "A swap paused the engine for this long.",
        (Change("swapped", _field("pause_seconds"), _text("engine")),),
        ("engine",),
    ),
    Metric(
        "deltawire_swap_seconds",
        "histogram",
        "A phase of a swap took this long.",
        _phases("swapped", "stage", "wait", "apply", "confirm"),
        ("phase",),
    ),
    Metric(
        "deltawire_behind_seconds",
        "histogram",
        "A version was published this long before the engine had it, by the clocks of both machines.",
        (Change("swapped", _field("behind_seconds")),),
    ),
    Metric(
        "deltawire_engine_quarantined",
        "gauge",
        "It is 1 if the engine stays paused because its weights are in an unknown state.",
        (Change("engine-quarantined", _one), Change("repaired", _zero), Change("swapped", _zero)),
        ("member",),
    ),
    # Relays
    Metric(
        "deltawire_relayed_version", "gauge", "This is the newest version that the region has.", (Change("relayed", _field("updates")),)
    ),
    Metric("deltawire_relay_behind", "gauge", "The region lacks this many versions.", (Change("relayed", _field("behind")),)),
    Metric(
        "deltawire_relayed_bytes",
        "counter",
        "These bytes came into the region: `fetched` over the link, or `rebuilt` in the region.",
        (
            Change("relayed", _field("bytes"), _always("fetched")),
            Change("shortcut-relayed", _field("fetched"), _always("fetched")),
            Change("shortcut-relayed", _field("rebuilt"), _always("rebuilt")),
        ),
        ("how",),
    ),
    Metric(
        "deltawire_relay_failures",
        "counter",
        "A relay could not copy this many times, by the class of the error.",
        (Change("relay-failed", _one, _text("error")),),
        ("reason",),
    ),
    # Fleets
    Metric(
        "deltawire_generated_tokens",
        "counter",
        "A member has generated these tokens.",
        (Change("generated", _field("tokens")),),
        ("member",),
    ),
    Metric(
        "deltawire_rollouts",
        "counter",
        "The trainer has judged this many results: `accepted`, or the reason why one does not count.",
        (Change("rollout-accepted", _one, _always("accepted")), Change("rollout-rejected", _one, _text("reason"))),
        ("result",),
    ),
    Metric(
        "deltawire_accepted_tokens", "counter", "These tokens of results were accepted.", (Change("rollout-accepted", _field("tokens")),)
    ),
    Metric("deltawire_member_deaths", "counter", "Members ended by themselves this many times.", (Change("member-died", _one),)),
    # Trainers
    Metric(
        "deltawire_trained_step", "gauge", "This is the newest step that is trained and published.", (Change("trained", _field("step")),)
    ),
    Metric(
        "deltawire_train_seconds",
        "histogram",
        "A phase of a training step took this long: `idle` is the time without results.",
        _phases("trained", "idle", "train", "publish"),
        ("phase",),
    ),
    Metric("deltawire_reward", "gauge", "This is the mean reward of the newest step.", (Change("trained", _field("reward")),)),
    Metric("deltawire_loss", "gauge", "This is the loss of the newest step.", (Change("trained", _field("loss")),)),
    Metric(
        "deltawire_staleness_steps",
        "histogram",
        "The policy was this many steps behind when it drew a token, as the mean of a training step.",
        (Change("trained", _field("lag")),),
        buckets=STEPS,
    ),
    Metric(
        "deltawire_mismatch_kl",
        "gauge",
        "This is the mismatch of the newest step, in nats per token.",
        (Change("mismatch", _by("all")),),
    ),
    Metric(
        "deltawire_member_mismatch_kl",
        "gauge",
        "This is the mismatch of a member's tokens in the newest step, in nats per token.",
        (Change("mismatch", _by("member"), _text("group")),),
        ("of",),
    ),
    Metric(
        "deltawire_routed_experts_missing_ratio",
        "gauge",
        "This share of the routing decisions of the newest step could not be replayed.",
        (Change("trained", _missing_experts),),
    ),
    # Gates
    Metric(
        "deltawire_gate_decisions",
        "counter",
        "The gate has decided this many times, by outcome: `promote` or `rollback`.",
        (Change("gate-decided", _one, _text("outcome")),),
        ("outcome",),
    ),
    Metric(
        "deltawire_gate_answers",
        "gauge",
        "The canary has given this many answers.",
        (Change("gate-watching", _field("answers")), Change("gate-decided", _field("answers"))),
    ),
    Metric(
        "deltawire_gate_limit_mean",
        "gauge",
        "This is the mean of a limit's metric, for the `canary` and for `stable`.",
        (
            Change("gate-limit", _field("canary"), lambda fields: (str(fields.get("limit") or ""), "canary")),
            Change("gate-limit", _field("stable"), lambda fields: (str(fields.get("limit") or ""), "stable")),
        ),
        ("limit", "group"),
    ),
    # Gateways
    Metric(
        "deltawire_gateway_answers",
        "counter",
        "The gateway has answered this many requests, by route and channel.",
        (Change("answered", _one, _text("route", "channel")),),
        ("route", "channel"),
    ),
    Metric(
        "deltawire_gateway_answer_seconds",
        "histogram",
        "The gateway answered a request in this time.",
        (Change("answered", _field("seconds"), _text("route")),),
        ("route",),
    ),
    Metric(
        "deltawire_gateway_version_answers",
        "counter",
        "The engines that answered had this version, by the number of the commit.",
        (Change("answered", _one, _text("seq")),),
        ("seq",),
    ),
    Metric(
        "deltawire_gateway_refusals",
        "counter",
        "The gateway refused this many requests, or lost an engine in the middle of an answer, by the class of the error.",
        (Change("request-refused", _one, _text("error")), Change("answer-failed", _one, _text("error"))),
        ("reason",),
    ),
    Metric(
        "deltawire_gateway_engine_up",
        "gauge",
        "It is 1 if the engine answers.",
        (Change("engine-back", _one, _text("engine")), Change("engine-away", _zero, _text("engine"))),
        ("engine",),
    ),
    Metric(
        "deltawire_interactions_stored",
        "counter",
        "This many answers are recorded in the store.",
        (Change("interactions-stored", _field("interactions")),),
    ),
    Metric(
        "deltawire_interactions_unusable",
        "counter",
        "This many answers were given, but could not be recorded.",
        (Change("interaction-unusable", _one),),
    ),
    Metric(
        "deltawire_recording_stopped",
        "gauge",
        "It is 1 if the gateway does not record answers, because the journal is full or cannot be written.",
        (Change("recording-stopped", _one), Change("recording-resumed", _zero)),
    ),
    Metric(
        "deltawire_feedback_stored",
        "counter",
        "This many pieces of feedback are in the store.",
        (Change("feedback-stored", _field("feedback")),),
    ),
    Metric(
        "deltawire_store_feedback_seconds",
        "histogram",
        "The store confirmed a file of feedback in this time.",
        (Change("feedback-stored", _field("seconds")),),
    ),
)

METRICS: dict[str, Metric] = {metric.full_name: metric for metric in _ALL}
"""Every metric by the name that Prometheus shows, except for `EVENTS`."""

EVENTS = Metric("deltawire_events", "counter", "This many events were emitted, by name and level.", (), ("event", "level"))
"""It counts all events."""
