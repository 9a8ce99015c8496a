"""Compare asynchronous with synchronous training, deltas with full weights, and ways to share work, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl_profile
from report import Table

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "examples" / "demo"
LATENCY, BANDWIDTH = 0.03, 1.5e6
_LAST = 5
"""The number of steps whose mean is the reward at the end."""
PROMPTS = 12
"""Prompts of a step, each a task of 192 tokens. A step then takes members two to three seconds; the steps of real runs take 20 to 60."""


@dataclass(frozen=True)
class Outcome:
    """One run after its first step: `busy` is each member's share of time spent on tasks, `waiting` the trainer's on rollouts."""

    seconds: float
    steps: int
    tokens: int
    first_reward: float
    reward: float
    lag: float
    bytes: float
    state_bytes: int
    changed: float
    waiting: float
    busy: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(model: Path, rates: Sequence[float], **settings: Any) -> Outcome:
    """Run a trainer and one member per rate over a new local store behind an emulated link."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        common = {
            "store": f"{folder}/store",
            "model": str(model),
            "latency": LATENCY,
            "bandwidth": BANDWIDTH,
            "equal": False,
            "full": False,
        }
        path = os.pathsep.join([str(DEMO), *filter(None, [os.environ.get("PYTHONPATH")])])  # the children run the same deltawire
        environment = os.environ | {"PYTHONPATH": path}
        outputs = []
        children = []
        roles = [("trainer", common | settings)]
        roles += [("member", common | {"name": f"member-{number}", "rate": rate}) for number, rate in enumerate(rates)]
        for number, (role, arguments) in enumerate(roles):
            output = Path(folder, f"{number}.jsonl")
            file = stack.enter_context(output.open("wb"))
            command = [sys.executable, str(HERE / "rl_processes.py"), role, json.dumps(arguments)]
            children.append(stack.enter_context(subprocess.Popen(command, stdout=file, env=environment)))
            stack.callback(children[-1].kill)
            outputs.append(output)
        for child in children:
            if child.wait(timeout=settings["seconds"] + 300):
                raise RuntimeError(f"{child.args!r} failed")
        return _outcome([[json.loads(line) for line in output.read_text().splitlines()] for output in outputs])


def _outcome(events: list[list[dict[str, Any]]]) -> Outcome:
    warm, *steps = [event for event in events[0] if event["event"] == "trained"]
    begin, end = warm["at"], steps[-1]["at"]
    generated = [[event for event in each if event["event"] == "generated" and begin < event["at"] <= end] for each in events[1:]]

    def mean(name: str, chosen: Sequence[dict[str, Any]] = steps) -> float:
        return float(sum(event[name] for event in chosen) / len(chosen))

    return Outcome(
        seconds=end - begin,
        steps=len(steps),
        tokens=sum(event["tokens"] for event in steps),
        first_reward=mean("reward", [warm, *steps][:_LAST]),
        reward=mean("reward", steps[-_LAST:]),
        lag=mean("lag"),
        bytes=mean("bytes"),
        state_bytes=steps[-1]["state_bytes"],
        changed=mean("changed") * 2 / steps[-1]["state_bytes"],
        waiting=sum(event["idle_seconds"] for event in steps) / (end - begin),
        busy=[min(1.0, sum(event["seconds"] for event in each) / (end - begin)) for each in generated],
    )


@contextmanager
def pretrained(seconds: float) -> Iterator[Path]:
    """Make the demo's policy, and return its directory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DEMO / "policy.py"), folder, "--seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True)
        yield Path(folder)


def measure_modes(seconds: float, pretraining: float) -> Table:
    """Measure the four combinations, each for this many seconds after its first step."""
    rate, count, before = 600, 2, os.getloadavg()[0]
    with pretrained(pretraining) as model:
        runs = {
            (mode, weights): run(model, [rate] * count, seconds=seconds, staleness=staleness, full=full, prompts=PROMPTS)
            for mode, staleness in (("synchronous", 0), ("asynchronous", 1))
            for weights, full in (("whole", True), ("deltas", False))
        }
    fast, slow = runs["asynchronous", "deltas"], runs["synchronous", "whole"]
    table = Table(
        "rl-async",
        f"The same GRPO run for {seconds:.0f} seconds: {count} members of {rate} tokens/s, a line of "
        f"{BANDWIDTH / 1e6:g} MB/s and {1000 * LATENCY:.0f} ms each (both emulated)",
        [
            "mode",
            "weights sent",
            "per step",
            "steps",
            "tokens/s",
            "share of their speed",
            "members idle",
            "trainer waits",
            "lag in steps",
            "reward, first → last",
        ],
    )
    for (mode, weights), one in runs.items():
        idle = 1 - sum(one.busy) / len(one.busy)
        table.rows.append(
            [
                mode,
                weights,
                f"{one.bytes / 1e3:,.0f} kB",
                str(one.steps),
                f"{one.rate:,.0f}",
                f"{one.rate / (count * rate):.0%}",
                f"{idle:.0%}",
                f"{one.waiting:.0%}",
                f"{one.lag:.2f}",
                f"{one.first_reward:.3f} → {one.reward:.3f}",
            ]
        )
    table.notes += [
        f"{fast.state_bytes / 1e6:.1f} MB of bf16 weights, of which {fast.changed:.1%} change per step: "
        f"{fast.state_bytes / fast.bytes:,.0f} × less to send.",
        "Real processes use a local store. Requests wait as long as they would on the emulated line, and members wait to keep to their "
        "speed. Asynchronous training has a staleness budget of 1 step, synchronous training one of 0; otherwise the code is the same. "
        f"A step has {PROMPTS} prompts of 8 completions. Rewards are means over {_LAST} steps. {_load(before)}",
    ]
    for weights in ("whole", "deltas"):
        gain = runs["asynchronous", weights].rate / runs["synchronous", weights].rate
        table.check(f"asynchronous is faster with {weights} ({gain:.2f} times the tokens)", gain > 1)
    table.check(f"deltas and asynchrony together at least double the tokens ({fast.rate / slow.rate:.1f} times)", fast.rate > 2 * slow.rate)
    share = fast.rate / (count * rate)
    table.check(f"deltas and asynchrony together make at least 90% of the tokens that members could make ({share:.0%})", share >= 0.9)
    table.check("deltas and asynchrony together reach a higher reward in the same time", fast.reward > slow.reward)
    return table


def measure_prompts(seconds: float, pretraining: float, sizes: Sequence[int] = (6, PROMPTS)) -> Table:
    """Measure asynchronous training with deltas and shares by speed for steps of several sizes, and compare it with virtual time."""
    before = os.getloadavg()[0]
    with pretrained(pretraining) as model:
        runs = {
            (name, size): run(model, rates, seconds=seconds, staleness=1, full=False, prompts=size)
            for name, rates in rl_profile.RUNS.items()
            for size in sizes
        }
    table = Table(
        "rl-prompts",
        f"Asynchronous runs with deltas and shares by speed as above, with steps of {' and '.join(map(str, sizes))} prompts",
        [
            "run",
            "prompts",
            "generation of a step",
            "steps",
            "tokens/s",
            "share of their speed",
            "in virtual time",
            "members idle",
            "trainer waits",
        ],
    )
    for (name, size), one in runs.items():
        rates = rl_profile.RUNS[name]
        shares = [rl_profile.run(rates, size, seed=seed).share for seed in range(3)]
        table.rows.append(
            [
                name,
                str(size),
                f"{size * rl_profile.TOKENS_PER_TASK / sum(rates):.2f} s",
                str(one.steps),
                f"{one.rate:,.0f}",
                f"{one.rate / sum(rates):.0%}",
                f"{sum(shares) / len(shares):.0%}",
                f"{1 - sum(one.busy) / len(one.busy):.0%}",
                f"{one.waiting:.0%}",
            ]
        )
    table.notes.append(f"In virtual time no other process disturbs trainer and members: a mean of 3 seeds. {_load(before)}")
    return table


def measure_shares(seconds: float) -> Table:
    """Compare shares by speed with equal shares, where one member is four times slower than the other two."""
    rates, before = [400, 400, 100], os.getloadavg()[0]
    with pretrained(1) as model:  # the quality of its text does not matter here
        runs = {
            name: run(model, rates, seconds=seconds, staleness=1, equal=equal, prompts=PROMPTS)
            for name, equal in (("equal shares", True), ("measured speed", False))
        }
    table = Table(
        "rl-shares",
        f"Members of {', '.join(map(str, rates))} tokens/s (emulated), {PROMPTS} tasks a step, for {seconds:.0f} seconds",
        ["tasks go to members by", "steps", "tokens/s", "share of their speed", *(f"busy, {rate} tokens/s" for rate in rates)],
    )
    for name, one in runs.items():
        busy = [f"{share:.0%}" for share in one.busy]
        table.rows.append([name, str(one.steps), f"{one.rate:,.0f}", f"{one.rate / sum(rates):.0%}", *busy])
    gain = runs["measured speed"].rate / runs["equal shares"].rate
    share = runs["measured speed"].rate / sum(rates)
    table.notes.append(f"Equal shares are assigned to members in turn, and are never reassigned. {_load(before)}")
    table.check(f"shares by speed make at least 92% of the tokens that members could make ({share:.0%})", share >= 0.92)
    table.check(f"shares by speed are at least 1.5 times as fast ({gain:.2f} times)", gain >= 1.5)
    return table


def _load(before: float) -> str:
    """Say how busy the machine was. Other processes slow the trainer and the members down."""
    return f"The load average of the machine was {before:.1f} before these runs, and {os.getloadavg()[0]:.1f} after them."
