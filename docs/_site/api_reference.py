"""The pages of the API reference: every public name of every public package, for mkdocstrings to render."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One page: the package whose `__all__` it lists (None: none), its title, its first line, and public names of other modules."""

    package: str | None
    title: str
    text: str
    more: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Return the full names of everything on the page."""
        listed = [] if self.package is None else importlib.import_module(self.package).__all__
        return [*(f"{self.package}.{name}" for name in listed), *self.more]

    def markdown(self) -> str:
        """Return the page."""
        return "\n\n".join([f"# {self.title}", self.text, *(f"::: {name}" for name in self.names())]) + "\n"


PAGES = {
    "deltawire": Page(
        "deltawire",
        "deltawire",
        "The names that you import from `deltawire`, and some for mirrors and background publishing.",
        ("deltawire.subscribe.reading_mirror", "deltawire.publish.PendingVersion"),
    ),
    "engines": Page(
        "deltawire.engines",
        "Engines",
        "[Serve with deltawire](../serve.md) says how to use them.",
        ("deltawire.engines.routed_experts.read_vllm_experts", "deltawire.engines.routed_experts.read_sglang_experts"),
    ),
    "trainers": Page(
        "deltawire.trainers",
        "Trainers",
        "[Train with deltawire](../train.md) says how to use them.",
        (
            "deltawire.trainers.trl.DeltaWireTransfer",
            "deltawire.trainers.trl_samples.label_samples",
            "deltawire.trainers.trl_rollouts.FleetRolloutWorker",
        ),
    ),
    "fleet": Page(
        "deltawire.fleet",
        "Fleet",
        "[Run a fleet](../fleet.md) says how to use it.",
        (
            "deltawire.fleet.member.Member",
            "deltawire.fleet.generation.Generator",
            "deltawire.fleet.supervision.Supervisor",
            "deltawire.rl.ray_members.RayCluster",
        ),
    ),
    "rl": Page(
        "deltawire.rl",
        "RL",
        "[The GRPO trainer](../fleet.md#the-grpo-trainer) has an example.",
        (
            "deltawire.rl.member.MemberOptions",
            "deltawire.rl.member.serve",
            "deltawire.rl.serving.openai_server.serve_openai",
            "deltawire.rl.report.StepReporter",
            "deltawire.rl.mismatch_alarm.AlarmRule",
            "deltawire.rl.routing.router_replay.ReplayCounts",
            "deltawire.rl.routing.router_replay.Recording",
            "deltawire.rl.routing.router_replay.lay_out",
            "deltawire.rl.routing.trl_replay.RouterReplayMixin",
            "deltawire.rl.routing.router_export.experts_for_megatron",
            "deltawire.rl.routing.router_export.experts_for_verl",
            "deltawire.rl.routing.router_export.experts_for_skyrl",
        ),
    ),
    "live": Page(
        "deltawire.live", "Live traffic", "[Learn from live traffic](../train.md#learn-from-live-traffic) says how a trainer uses them."
    ),
    "gateway": Page("deltawire.gateway", "Gateway", "[Learn from live traffic](../live.md) says how to use it."),
    "channels": Page(
        None,
        "Channels and gates",
        "[Channels](../channels.md) and [Gates](../gate.md) say how to use them.",
        (
            "deltawire.publish.channels.ChannelWriter",
            "deltawire.publish.channels.Reason",
            "deltawire.chain.channels.ChannelReader",
            "deltawire.chain.channels.channel_of",
            "deltawire.chain.find.find_version",
            "deltawire.live.gate.Gate",
            "deltawire.live.gate.GateOptions",
            "deltawire.live.gate.GateLook",
            "deltawire.live.gate_rules.GatePolicy",
            "deltawire.live.gate_rules.Limit",
            "deltawire.live.gate_rules.Range",
            "deltawire.live.declared_metrics.declared_metrics",
        ),
    ),
    "relay": Page("deltawire.relay", "Relays", "[Relays](../relays.md) says how to use them."),
    "dashboard": Page("deltawire.dashboard", "Dashboard", "[See a run](../dashboard.md) says how to use it."),
    "planning": Page("deltawire.planning", "Planning", "[What a step costs](../scale.md) has examples, and what the plan leaves out."),
    "telemetry": Page(
        "deltawire.telemetry",
        "Monitoring",
        "[Monitor](../monitoring.md) says how to use it.",
        ("deltawire.events.log_events", "deltawire.events.tell_all", "deltawire.fleet.store_events.StoreEvents"),
    ),
    "quantise": Page("deltawire.quantise", "Quantising", "[Quantise](../quantise.md) says what each recipe makes."),
    "store": Page("deltawire.store", "Stores", "[Operate](../operations.md#stores) says how to use them."),
    "testing": Page(
        "deltawire.testing",
        "Testing",
        "Conformance suites for your own [store](../operations.md#stores) and [engine](../serve.md#your-own-engine).",
    ),
}
