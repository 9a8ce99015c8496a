"""Prints the result of `deltawire publish`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import figures
from .terminal import print_json, print_line, print_rows

if TYPE_CHECKING:
    from ...chain.version import Version
    from ...events import Event
    from ..publish_check import Forecast, PublishedForm

_FILES_ONLY = "files only, no weights changed"
_WARNINGS = (
    "wide-weights",
    "non-finite-published",
    "quantization-config-missing",
    "nothing-quantised",
    "pattern-unmatched",
    "recipe-changed",
    "layout-changed",
    "step-went-back",
)
"""The publisher's warnings that are printed."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that was published, and what the publisher reported about it.

    Parameters
    ----------
    url
        The chain's location.
    version
        The version.
    elements
        The number of weights.
    left_out
        The files of the checkpoint directory that were not published.
    events
        All events of the publisher.
    seconds
        The time that the command took.
    """

    url: str
    version: Version
    elements: int
    left_out: list[str]
    events: Sequence[Event]
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """The publisher's warnings."""
        return warnings_of(self.events)

    @property
    def files_changed(self) -> list[str]:
        """The attachments that differ from those of the version before. Removed ones have a minus sign before their name."""
        reported = [event for event in self.events if event.name == "attachments-changed" and event.fields["seq"] == self.version.seq]
        return [name for event in reported for name in str(event.fields["files"]).split(", ")]

    def shortcuts(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of all events with this name, one per shortcut that was made."""
        return [dict(event.fields) for event in self.events if event.name == name]


def warnings_of(events: Sequence[Event]) -> list[str]:
    """Return the messages of the publisher's warnings that are printed."""
    return [str(event.fields["message"]) for event in events if event.name in _WARNINGS]


def report_published(done: Published, as_json: bool) -> None:
    """Print that a version was published."""
    if as_json:
        print_json(_as_json(done))
    else:
        print_rows(f"version {done.version.updates}", _rows(done))


def report_unchanged(url: str, version: Version, as_json: bool) -> None:
    """Print that nothing was published because the newest version has the same weights and files."""
    if as_json:
        print_json({"url": url, "published": False, "version": version.updates, "seq": version.seq, "digest": version.digest.hex()})
    else:
        print_line(f"nothing to publish: version {version.updates} at {url} has these weights and files already")


def report_forecast(url: str, plan: Forecast, form: PublishedForm, left_out: list[str], warnings: list[str], as_json: bool) -> None:
    """Print what would be published."""
    weight_bytes, recipe = form.table.state_bytes, form.record
    if as_json:
        print_json(
            {
                "url": url,
                "published": False,
                "dry_run": True,
                "version": plan.version,
                "kind": plan.kind,
                "base": plan.base,
                "bytes": plan.bytes,
                "weight_bytes": weight_bytes,
                "changed": plan.changed,
                "recipe": recipe and recipe.plain(),
                "elements": form.elements,
                "quantised": form.quantised,
                "files_changed": plan.files,
                "same": plan.is_same,
                "left_out": left_out,
                "warnings": warnings,
            }
        )
        return
    base = "" if plan.base is None else f" over version {plan.base}"
    is_same = plan.kind == "delta" and not plan.changed
    size = _FILES_ONLY if is_same and plan.files else f"about {figures.size(plan.bytes)}, of {figures.size(weight_bytes)} of weights"
    print_rows(
        f"version {plan.version} would be published, nothing was written",
        [
            ("at", url),
            ("kind", ("a full checkpoint" if plan.kind == "anchor" else "delta") + base),
            ("quantised by", "" if recipe is None else str(recipe)),
            ("quantised weights", "" if recipe is None else f"{form.quantised:,} of {form.elements:,}"),
            ("changed weights", f"{plan.changed:,}" if plan.kind == "delta" else ""),
            ("changed files", ", ".join(plan.files)),
            ("size", size),
            ("not published", ", ".join(left_out)),
            *(("warning", text) for text in warnings),
        ],
    )


def _as_json(done: Published) -> dict[str, Any]:
    version = done.version
    return {
        "url": done.url,
        "published": True,
        "version": version.updates,
        "seq": version.seq,
        "kind": version.kind,
        "step": version.step,
        "epoch": version.epoch,
        "bytes": version.bytes,
        "weight_bytes": version.state_bytes,
        "times_smaller": version.state_bytes / version.bytes if version.bytes else None,
        "elements": done.elements,
        "changed": version.changed,
        "files_changed": done.files_changed,
        "density": version.changed / done.elements if done.elements else 0.0,
        "digest": version.digest.hex(),
        "meta": dict(version.meta),
        "recipe": version.recipe and version.recipe.plain(),
        "skips_from": [made["base"] for made in done.shortcuts("skip-made")],
        "anchored": bool(done.shortcuts("anchored")),
        "left_out": done.left_out,
        "warnings": done.warnings,
        "seconds": done.seconds,
    }


def _rows(done: Published) -> list[tuple[str, str]]:
    version = done.version
    compared = (
        f"{figures.ratio(version.state_bytes, version.bytes, '×')} smaller than the full weights ({figures.size(version.state_bytes)})"
    )
    whole = f"a full checkpoint of {version.state_bytes / 1e9:.2f} GB" if version.state_bytes >= 1e9 else "a full checkpoint"
    changed = f"{version.changed:,} of {done.elements:,} ({figures.percent(version.changed, done.elements)} %)"
    return [
        ("at", done.url),
        ("kind", whole if version.kind == "anchor" else version.kind),
        ("step", "" if version.step is None else f"{version.step:,}"),
        ("quantised by", "" if version.recipe is None else str(version.recipe)),
        ("changed weights", changed if version.kind == "delta" else ""),
        ("changed files", ", ".join(done.files_changed)),
        ("size", figures.size(version.bytes) if version.bytes or not done.files_changed else _FILES_ONLY),
        ("compared", compared if version.kind == "delta" and version.bytes else ""),
        ("skips", f"{len(done.shortcuts('skip-made'))} made" if done.shortcuts("skip-made") else ""),
        ("full checkpoint", "made, in addition to the delta" if done.shortcuts("anchored") else ""),
        ("not published", ", ".join(done.left_out)),
        *(("warning", warning) for warning in done.warnings),
        ("publisher", f"number {version.epoch} of this run"),
        ("digest", version.digest.hex()),
        ("time", f"{done.seconds:.2f} s"),
    ]
