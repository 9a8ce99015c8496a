"""Shows the story while it happens: on a terminal of at least 80 × 24, as plain lines, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text
from story import MemberStory, Story, TrainedStep

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLOT_ROWS, _LAST_MARKS = 5, 4
COLOURS = ("blue", "yellow", "magenta", "green")


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class View(Protocol):
    """Gets every event, and the story so far."""

    def __call__(self, event: dict[str, Any], story: Story) -> None: ...
    def __enter__(self) -> View: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class LiveView:
    """Redraws one screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn = 0.0

    def __call__(self, event: dict[str, Any], story: Story) -> None:
        if time.monotonic() - self._drawn >= 0.4 or event["event"] == "ended":
            self._live.update(screen(story, self._console.width), refresh=True)
            self._drawn = time.monotonic()

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class LineView:
    """Prints a line for each important event, and for one step in ten."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0

    def __call__(self, event: dict[str, Any], story: Story) -> None:
        if event["event"] == "demo":
            self._line(event, f"{event['steps']} steps, over {event['store']}")
        elif event["event"] == "model":
            self._line(event, f"a new model of {event['weights']:,} weights reads the documentation")
        elif event["event"] == "joined":
            self._line(event, f"{event['from']} has joined the fleet")
        elif event["event"] == "trained" and (event["step"] % 10 == 0 or event["step"] in (1, story.goal)):
            step = story.steps[-1]
            wire = f"{decimal(step.bytes)} for {decimal(step.state_bytes)}, {100 * step.changed / max(1, story.weights):.2f}% changed"
            self._line(event, f"step {step.step}: reward {step.reward:.3f}, {wire}, rollouts {step.lag:.1f} steps old{_mismatch(step)}")
        for at, text in story.marks[self._told :]:
            self._line({"at": at}, text)
        self._told = len(story.marks)

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _line(self, event: dict[str, Any], text: str) -> None:
        self._console.print(f"{clock(event['at'])}  {text}", highlight=False, markup=False, soft_wrap=True)


class JsonView:
    """Prints every event as a line of JSON."""

    def __call__(self, event: dict[str, Any], story: Story) -> None:
        if event["event"] != "tick":
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *_: object) -> None: ...


def screen(story: Story, width: int) -> RenderableType:
    """Return the whole screen, which has at most 24 lines with up to four members."""
    done = story.steps[-1].step if story.steps else 0
    where = f"step {done} of {story.goal}"
    if story.stage == "pre-training":
        share, loss = story.pretraining
        where = f"{100 * share:.0f}% of the reading done, loss {loss:.2f}"
    title = Text.assemble(("deltawire demo", "bold"), f"  {story.stage}, {where}")
    head = _between(title, Text(clock(story.now)), width)
    return Group(head, *_reward(story, width), Text(), _members(story), Text(), *_facts(story, width), *_marks(story, width))


def _reward(story: Story, width: int) -> list[Text]:
    values = [step.reward for step in story.steps]
    title = Text("reward", "bold")
    if values:
        title.append(f"  {story.reward_name}: {story.first_reward:.3f} at first, {story.last_reward:.3f} now", "default")
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    rows = text_plot(values, width - 8, _PLOT_ROWS)
    labels = [f"{high:7.3f}", *[" " * 7] * (_PLOT_ROWS - 2), f"{low:7.3f}"] if values else [" " * 7] * _PLOT_ROWS
    return [title, *(Text.assemble((f"{label} ", "dim"), (row, "cyan")) for label, row in zip(labels, rows, strict=True))]


def text_plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw values as columns of blocks, the latest at the right. If there are more values than columns, average them."""
    if not values:
        return [" " * width] * height
    count = min(width, len(values))
    parts = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(values), max(values)
    heights = [1 + round((8 * height - 1) * (mean - low) / (high - low)) if high > low else 4 for mean in means]
    rows = []
    for row in reversed(range(height)):
        rows.append("".join(_BLOCKS[min(8, max(0, tall - 8 * row))] for tall in heights).ljust(width))
    return rows


def _members(story: Story) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name, justify in (("member", "left"), ("", "left"), ("policy", "right"), ("lag", "right"), ("leases", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("done", "tok/s", "pauses", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, member in enumerate(story.members.values()):
        table.add_row(Text(member.name, COLOURS[index % 4]), *_member(member, story.now), style="" if member.is_living else "dim")
    return table


def _member(member: MemberStory, now: float) -> list[str]:
    pauses = [1e3 * swap.pause_seconds for swap in member.swaps]
    policy = "" if member.step is None else f"step {member.step}"
    lag = str(member.lag[-1][1]) if member.lag and member.is_living else ""
    held = sum(work.outcome == "working" for work in member.works)
    done = sum(work.outcome == "uploaded" for work in member.works)
    rate = f"{member.tokens_per_second(now):,.0f}" if member.works else ""
    what = member.part if member.ending == "in the fleet" else member.ending
    timing = [f"{median(pauses):.1f} ms", f"{max(pauses):.0f} ms"] if pauses else ["", ""]
    return [what, policy, lag, str(held) if member.is_living else "", str(done), rate, *timing]


def _facts(story: Story, width: int) -> list[Text]:
    if not story.steps:
        return []
    fetched, instead = story.fetched
    last = story.steps[-1]
    density = f"{100 * last.changed / max(1, story.weights):.2f}% changed"
    rejected = ", ".join(f"{count} {reason}" for reason, count in story.rejected.most_common()) or "none"
    facts = [
        ("wire", f"{decimal(last.bytes)} per step instead of {decimal(last.state_bytes)}: {story.reduction:.0f}× less; {density}"),
        ("fetched", f"{decimal(fetched)} by all members, including joining; {decimal(instead)} as full weights"),
        ("rollouts", f"{story.accepted} accepted; rejected: {rejected}; trained on {last.lag:.1f} steps old{_mismatch(last)}"),
    ]
    return [_cut(Text.assemble((f"{name:<10}", "bold"), text), width) for name, text in facts]


def _mismatch(step: TrainedStep) -> str:
    return "" if step.mismatch_kl is None else f", mismatch {step.mismatch_kl:.0e}"


def _marks(story: Story, width: int) -> list[Text]:
    return [_cut(Text.assemble((f"{clock(at):<10}", "dim"), text), width) for at, text in story.marks[-_LAST_MARKS:]]


def _between(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(0, width - len(right) - 1), overflow="ellipsis", pad=True)
    return Text.assemble(left, " ", right)


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
