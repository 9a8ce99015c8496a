"""Prints the progress of a trainer without `on_event`: one line per step, and one line per problem."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from ..events import Event, printable

_SHOWN = {"reward": "reward", "loss": "loss", "entropy": "entropy", "completions/mean_length": "length"}
"""The metrics in the line of a step, and what they are called there."""


class StepReporter:
    """Prints events of a `GrpoTrainer` as lines.

    Long lines wrap between words in a terminal and stay whole in a file. For rejected rollouts only the first of each reason in a step is
    printed; the step's line counts all of them. Rollouts of abandoned versions are counted and printed as one line.

    Parameters
    ----------
    write
        Called with each line. By default lines go to the standard error.
    """

    def __init__(self, write: Callable[[str], Any] | None = None) -> None:
        self._write = write or _to_stderr
        self._told: set[tuple[object, object]] = set()
        self._abandoned = 0

    def __call__(self, event: Event) -> None:
        if event.name == "rollout-rejected" and event.fields.get("reason") == "abandoned":
            self._abandoned += 1
            return
        line = self._line(event.name, event.fields)
        if line is not None:
            if self._abandoned:
                self._write(_abandoned_line(self._abandoned))
                self._abandoned = 0
            self._write(printable(line))

    def _line(self, name: str, fields: Mapping[str, Any]) -> str | None:
        match name:
            case "trained":
                return _step_line(fields)
            case "evaluated":
                numbers = "  ".join(f"{key} {_number(value)}" for key, value in fields.items() if key != "step")
                return f"step {fields['step']}  evaluated: {numbers}"
            case "mismatch-alarm":
                return f"step {fields['step']}  member {fields['member']} stands out: kl {fields['kl']:.2g}, others {fields['others']:.2g}"
            case "member-excluded":
                return f"member {fields['member']} is excluded: {fields['why']}"
            case "step-skipped":
                return f"step {fields['step']}  skipped, weights unchanged: {fields['why']}"
            case "rollout-rejected":
                return self._rejected(fields)
            case "waiting-for-members":
                return f"step {fields['step']}  waiting for members: none is running"
            case "member-left" if fields.get("why"):
                return f"member {fields['member']} left: {fields['why']}"
            case "fleet-retrying" | "publish-failed" | "sweep-failed":
                return f"{name}: {fields.get('error')}"
        return None

    def _rejected(self, fields: Mapping[str, Any]) -> str | None:
        step, reason = fields.get("step"), fields.get("reason")
        if reason in ("late", "duplicate") or (step, reason) in self._told:
            return None
        self._told = {(at, why) for at, why in self._told if at == step} | {(step, reason)}
        return f"step {step}  result of {fields.get('member')} rejected, {reason}: {fields.get('why', '')}".rstrip(": ")


def _step_line(fields: Mapping[str, Any]) -> str:
    parts = [f"step {fields['step']}"]
    for name, title in _SHOWN.items():
        if fields.get(name) is not None:
            parts.append(f"{title} {fields[name]:{'.2g' if name == 'loss' else '.3g'}}")
    if fields.get("mismatch_kl") is not None:
        parts.append(f"kl {fields['mismatch_kl']:.1g}")
    parts.append(f"{fields.get('bytes', 0) / 1e6:.3g} MB")
    if fields.get("rejected"):
        parts.append(f"{fields['rejected']} rejected")
    return "  ".join(parts)


def _abandoned_line(count: int) -> str:
    results = "1 result is" if count == 1 else f"{count:,} results are"
    return f"{results} not used, because the trainer went back to its checkpoint and abandoned their versions"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def _to_stderr(line: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        parts = textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        line = "\n".join(parts)
    print(line, file=sys.stderr, flush=True)
