"""The parts of pages that are made from the source: the tables of events and of metrics.

    python docs/_site/generated_parts.py

writes them into the pages, after a comment. A test compares the pages with the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from deltawire.events.kinds.kind import EventKind
from deltawire.events.registry import GROUPS, REGISTRY
from deltawire.telemetry.metric import Metric
from deltawire.telemetry.metric_table import EVENTS, METRICS

DOCS = Path(__file__).resolve().parents[1]
BEGIN = "<!-- The rest of this page is made from the source by docs/_site/generated_parts.py. -->\n"

_NOTES = {
    "Warnings": "Python's `warnings` show these as well.\n[Operate](operations.md#in-a-trainers-process) says what to do about them.\n",
    "Relays": "A relay also reports `shortcut-failed`, `retrying` and `pin-failed`.\n",
    "Members": "A member adds its name to all events that it emits, as the field `member`.\n",
    "Supervised members": "`deltawire fleet` and other programs that start members report these.\n",
    "Seen in the store": "`deltawire events` prints these, which it finds out by reading the store.\n",
    "Gates": "A gate also reports `channel-moved` and `sweep-failed`.\n",
    "Trainers": "[Watch the mismatch](router-replay.md#watch-the-mismatch) explains the numbers of `mismatch`.\n",
}


def events() -> str:
    """Return one section for each part of the library, and one for the fields."""
    parts = []
    for title, kinds in GROUPS.items():
        rows = [f"| `{kind.name}` | {kind.level} | {kind.meaning} | {_fields_of(kind)} |" for kind in kinds]
        notes = [_NOTES[title]] if title in _NOTES else []
        parts.append("\n".join([f"## {title}\n", *notes, "| event | level | what happened | fields |", "|---|---|---|---|", *rows, ""]))
    return "\n".join([*parts, _fields()])


def _fields_of(kind: EventKind) -> str:
    names = [f"`{field.name}`{'?' if field.is_optional else ''}" for field in kind.fields]
    return ", ".join([*names, *(["and others"] if kind.others is not None else [])])


def _fields() -> str:
    """Return the table of all fields. A name with several meanings has one row for each, with the events that it belongs to."""
    users: dict[str, dict[tuple[str, str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind in REGISTRY.values():
        for field in (*kind.fields, *([kind.others] if kind.others is not None else [])):
            users[field.name][field.type, field.unit, field.meaning].append(kind.name)
    lines = ["## Fields\n", "| field | type | unit | meaning |", "|---|---|---|---|"]
    for name in sorted(users):
        for (type_of, unit, meaning), names in users[name].items():
            of = f" ({_code(names)})" if len(users[name]) > 1 or "…" in name else ""
            lines.append(f"| `{name}`{of} | {type_of} | {unit} | {meaning} |")
    return "\n".join([*lines, ""])


def metrics() -> str:
    """Return the table of all metrics."""
    rows = [_metric(each, _code(dict.fromkeys(change.event for change in each.changes))) for each in METRICS.values()]
    build = "| `deltawire_build_info` | gauge | `version` | The label has the release of deltawire. |  |"
    head = "## All metrics\n\n| metric | type | labels | meaning | events |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, _metric(EVENTS, "all"), build, ""])


def _metric(metric: Metric, of: str) -> str:
    return f"| `{metric.full_name}` | {metric.type} | {_code(metric.labels)} | {metric.meaning} | {of} |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PARTS = {"events.md": events, "monitoring.md": metrics}


def page(name: str) -> str:
    """Return a page as it should be."""
    head, found, _ = (DOCS / name).read_text(encoding="utf-8").partition(BEGIN)
    assert found, f"{name} lacks the comment that begins the generated part"
    return f"{head}{BEGIN}\n{PARTS[name]()}"


if __name__ == "__main__":
    for each in PARTS:
        (DOCS / each).write_text(page(each), encoding="utf-8")
