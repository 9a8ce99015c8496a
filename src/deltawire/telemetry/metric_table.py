"""Every metric, and the events that change it. Names and units follow the conventions of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from ..events import Event
from .live_metrics import LIVE_METRICS
from .metric import STEPS, Change, Metric, always, field_of, number, one, phases, texts, time_of, zero


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


_FAILED_BY_ERROR = tuple(Change(event, one, texts("error")) for event in ("sync-failed", "swap-failed"))

_ALL = (
    # Publishers
    Metric(
        "deltawire_published_version",
        "gauge",
        "This is the number of the newest version.",
        (Change("published", field_of("updates")), Change("commit-seen", _in_force(field_of("updates")))),
    ),
    Metric(
        "deltawire_last_commit_timestamp_seconds",
        "gauge",
        "The newest version was published at this time, in seconds since 1970.",
        (Change("published", time_of), Change("commit-seen", _in_force(time_of))),
    ),
    Metric(
        "deltawire_publish_seconds",
        "histogram",
        "A phase of publishing a version took this long.",
        phases("published", "quantise", "encode", "upload", "wait", "commit", "total"),
        ("phase",),
    ),
    Metric("deltawire_delta_bytes", "gauge", "This is the size of the newest delta.", (Change("published", _of_kind("delta", "bytes")),)),
    Metric(
        "deltawire_anchor_bytes",
        "gauge",
        "This is the size of the newest full checkpoint.",
        (Change("published", _of_kind("anchor", "bytes")), Change("anchored", field_of("bytes"))),
    ),
    Metric(
        "deltawire_state_bytes",
        "gauge",
        "This is the size of all weights.",
        (Change("published", field_of("state_bytes")), Change("commit-seen", _in_force(field_of("state_bytes")))),
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
            Change("published", field_of("bytes"), texts("kind")),
            Change("anchored", field_of("bytes"), always("anchor")),
            Change("skip-made", field_of("bytes"), always("skip")),
        ),
        ("kind",),
    ),
    Metric(
        "deltawire_publish_failures",
        "counter",
        "This many versions could not be published, by the class of the error.",
        (Change("publish-failed", one, texts("error")),),
        ("reason",),
    ),
    Metric("deltawire_fenced", "gauge", "It is 1 if another publisher has taken over.", (Change("fenced", one), Change("published", zero))),
    Metric(
        "deltawire_collected_bytes", "counter", "Garbage collection has deleted these bytes.", (Change("collected", field_of("bytes")),)
    ),
    # Readers
    Metric(
        "deltawire_applied_version",
        "gauge",
        "This is the number of the version that a member has.",
        tuple(Change(event, field_of("updates")) for event in ("synced", "swapped", "adopted")),
        ("member",),
    ),
    Metric(
        "deltawire_last_sync_timestamp_seconds",
        "gauge",
        "A member reached a version at this time, in seconds since 1970.",
        tuple(Change(event, time_of) for event in ("synced", "swapped", "adopted")),
        ("member",),
    ),
    Metric(
        "deltawire_version_lag",
        "gauge",
        "A member was this many versions behind when its last sync ended, or when its record was last seen.",
        (Change("synced", field_of("lag")), Change("member-seen", field_of("lag"))),
        ("member",),
    ),
    Metric(
        "deltawire_sync_seconds",
        "histogram",
        "A phase of a sync took this long. Phases overlap, and are summed over threads.",
        phases("synced", "find", "fetch", "verify", "wait", "resolve", "apply", "total"),
        ("phase",),
    ),
    Metric(
        "deltawire_fetched_bytes",
        "counter",
        "These bytes were fetched, from the `store` or from the `host-cache`.",
        (Change("synced", _from_the_store, always("store")), Change("synced", field_of("shared_bytes"), always("host-cache"))),
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
        (Change("state-refused", one), Change("avoiding", one)),
    ),
    Metric(
        "deltawire_rollbacks",
        "counter",
        "Readers followed the trainer back to an older version this many times.",
        (Change("rolled-back", one),),
    ),
    Metric("deltawire_store_retries", "counter", "This many requests to the store were repeated.", (Change("retrying", one),)),
    # Engines
    Metric(
        "deltawire_pause_seconds",
        "histogram",
        "A swap paused the engine for this long.",
        (Change("swapped", field_of("pause_seconds"), texts("engine")),),
        ("engine",),
    ),
    Metric(
        "deltawire_swap_seconds",
        "histogram",
        "A phase of a swap took this long.",
        phases("swapped", "stage", "wait", "apply", "confirm"),
        ("phase",),
    ),
    Metric(
        "deltawire_behind_seconds",
        "histogram",
        "A version was published this long before the engine had it, by the clocks of both machines.",
        (Change("swapped", field_of("behind_seconds")),),
    ),
    Metric(
        "deltawire_engine_quarantined",
        "gauge",
        "It is 1 if the engine stays paused because its weights are in an unknown state.",
        (Change("engine-quarantined", one), Change("repaired", zero), Change("swapped", zero)),
        ("member",),
    ),
    # Relays
    Metric(
        "deltawire_relayed_version", "gauge", "This is the newest version that the region has.", (Change("relayed", field_of("updates")),)
    ),
    Metric("deltawire_relay_behind", "gauge", "The region lacks this many versions.", (Change("relayed", field_of("behind")),)),
    Metric(
        "deltawire_relayed_bytes",
        "counter",
        "These bytes came into the region: `fetched` over the link, or `rebuilt` in the region.",
        (
            Change("relayed", field_of("bytes"), always("fetched")),
            Change("shortcut-relayed", field_of("fetched"), always("fetched")),
            Change("shortcut-relayed", field_of("rebuilt"), always("rebuilt")),
        ),
        ("how",),
    ),
    Metric(
        "deltawire_relay_failures",
        "counter",
        "A relay could not copy this many times, by the class of the error.",
        (Change("relay-failed", one, texts("error")),),
        ("reason",),
    ),
    # Fleets
    Metric(
        "deltawire_generated_tokens",
        "counter",
        "A member has generated these tokens.",
        (Change("generated", field_of("tokens")),),
        ("member",),
    ),
    Metric(
        "deltawire_rollouts",
        "counter",
        "The trainer has judged this many results: `accepted`, or the reason why one does not count.",
        (Change("rollout-accepted", one, always("accepted")), Change("rollout-rejected", one, texts("reason"))),
        ("result",),
    ),
    Metric(
        "deltawire_accepted_tokens", "counter", "These tokens of results were accepted.", (Change("rollout-accepted", field_of("tokens")),)
    ),
    Metric("deltawire_member_deaths", "counter", "Members ended by themselves this many times.", (Change("member-died", one),)),
    # Trainers
    Metric(
        "deltawire_trained_step", "gauge", "This is the newest step that is trained and published.", (Change("trained", field_of("step")),)
    ),
    Metric(
        "deltawire_train_seconds",
        "histogram",
        "A phase of a training step took this long: `idle` is the time without results.",
        phases("trained", "idle", "train", "publish"),
        ("phase",),
    ),
    Metric("deltawire_reward", "gauge", "This is the mean reward of the newest step.", (Change("trained", field_of("reward")),)),
    Metric("deltawire_loss", "gauge", "This is the loss of the newest step.", (Change("trained", field_of("loss")),)),
    Metric(
        "deltawire_staleness_steps",
        "histogram",
        "The policy was this many steps behind when it drew a token, as the mean of a training step.",
        (Change("trained", field_of("lag")),),
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
        (Change("mismatch", _by("member"), texts("group")),),
        ("of",),
    ),
    Metric(
        "deltawire_routed_experts_missing_ratio",
        "gauge",
        "This share of the routing decisions of the newest step could not be replayed.",
        (Change("trained", _missing_experts),),
    ),
    *LIVE_METRICS,
)

METRICS: dict[str, Metric] = {metric.full_name: metric for metric in _ALL}
"""Every metric by the name that Prometheus shows, except for `EVENTS`."""

EVENTS = Metric("deltawire_events", "counter", "This many events were emitted, by name and level.", (), ("event", "level"))
"""It counts all events."""
