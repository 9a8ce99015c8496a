"""Writes the story of a run as one HTML page, without network, scripts or fonts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median

from plots import Plot, Point, clock
from rich.filesize import decimal
from story import MemberStory, Story, Work

STYLE = Path(__file__).with_name("report.css")


def write_report(story: Story, path: Path) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(story), encoding="utf-8")


def page(story: Story) -> str:
    """Return the page. A story that ended early gives a shorter page."""
    members = list(story.members.values())
    styles = {member.name: f"m{index % 4}" for index, member in enumerate(members)}
    plots = [
        _timeline(story, styles),
        _reward(story),
        _lag(story, styles),
        _bytes(story),
        _density(story),
        _mismatch(story),
        _pauses(story, styles),
    ]
    body = f"""<main>
<h1>deltawire demo</h1>
<p class="soft">{escape(_what(story))}</p>
{_proof(story)}
<div class="tiles">{"".join(_tile(number, words) for number, words in _headline(story))}</div>
<div class="plots">
{"".join(plots)}
{_rollouts(story, styles)}
{_member_table(story, members)}
{_happened(story)}
{_samples(story)}
</div>
<footer>{escape(_measured(story))}</footer>
</main>"""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>deltawire demo</title>'
    head += f"<style>{STYLE.read_text(encoding='utf-8')}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _what(story: Story) -> str:
    return (
        f"This run trained a model of {story.weights:,} weights from scratch, and then by GRPO in {len(story.steps)} steps. "
        f"One trainer and {len(story.members)} members, three at a time, each in its own process, "
        f"shared nothing except the store {story.location}."
        + (f" The members served the policy quantised by {story.recipe}." if story.recipe else "")
    )


def _headline(story: Story) -> Iterable[tuple[str, str]]:
    if story.steps:
        yield f"{story.first_reward:.2f} → {story.last_reward:.2f}", "reward: mean of the first and of the last tenth of the steps"
        yield (
            f"{story.reduction:,.0f}×",
            f"fewer bytes than full weights: {_size(_typical_bytes(story))} instead of {_size(story.state_bytes)} a step",
        )
        yield (
            f"{100 * median(story.densities):.2f}%",
            f"of the weights change in a step (from {100 * min(story.densities):.2f} to {100 * max(story.densities):.2f}%)",
        )
    if story.pauses:
        yield (
            f"{1e3 * median(story.pauses):.1f} ms",
            f"without generating at a swap ({len(story.pauses)} swaps, the longest {1e3 * max(story.pauses):.0f} ms)",
        )
    lags = [lag for member in story.members.values() for _, lag in member.lag]
    if lags:
        yield (
            str(max(lags)),
            "steps behind the newest policy at most, and " + ("0" if median(lags) == 0 else f"{median(lags):g}") + " typically",
        )
    if story.mismatches:
        yield f"{median(story.mismatches):.1e}", "nats per token between the trainer's policy and the one that drew the tokens"
    if story.takeovers:
        yield str(len(story.takeovers)), "task of the killed member that another member took over"


def _tile(number: str, words: str) -> str:
    return f'<div class="tile"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def _proof(story: Story) -> str:
    proof = story.proof
    if proof is None:
        return '<div class="proof fails"><strong>NOT PROVEN</strong><p>The run did not finish.</p></div>'
    rows = [("trainer", proof.trainer), ("the store's last version", proof.published), *proof.members.items()]
    table = "".join(f'<tr><th>{escape(name)}</th><td class="digest">{escape(digest or "not reported")}</td></tr>' for name, digest in rows)
    line = proof.line()
    how = f"After step {proof.step} every process read all of its weights and computed their digest again."
    if story.recipe:
        how += f" The trainer quantised its weights by {story.recipe} once more, and the digests are those of the dequantised weights."
    kind = "holds" if proof.holds else "fails"
    return f'<div class="proof {kind}"><strong>{escape(line[0].upper() + line[1:])}</strong><p>{how}</p><table>{table}</table></div>'


def _figure(title: str, words: str, inner: str, *, wide: bool = False) -> str:
    return f"<figure{' class=wide' if wide else ''}><figcaption><h2>{title}</h2><p>{words}</p></figcaption>{inner}</figure>\n"


def _timeline(story: Story, styles: dict[str, str]) -> str:
    members = list(story.members.values())
    begin = min((work.start for member in members for work in member.works), default=0.0)
    begin = max(0.0, begin - 2)
    rows = max(1, len(members))
    plot = Plot("Leases", (begin, story.now), (0, rows), width=1130, height=48 + 46 * rows, left=126, right=100, downwards=True)
    taken = {(work.round, work.task) for _, work, _ in story.takeovers}
    for row, member in enumerate(members):
        ended = story.now if member.ended is None else member.ended
        plot.bar((max(begin, member.started), ended), (row + 0.12, row + 0.88), "life")
        for work in member.works:
            style, words = _outcome(story, member, work, styles[member.name], taken)
            plot.bar((work.start, ended if work.end is None else work.end), (row + 0.2, row + 0.8), style, words)
        plot.words(4, row + 0.4, member.name)
        plot.words(4, row + 0.7, member.part, style="note")
        plot.words(plot.x.end + 8, row + 0.4, f"{member.tokens_per_second(story.now):,.0f} tokens/s")
        plot.words(plot.x.end + 8, row + 0.7, f"{sum(work.outcome == 'uploaded' for work in member.works)} results", style="note")
        if member.ending == "killed" and member.ended is not None:
            plot.sign(member.ended, row + 0.5, "✕", f"{member.name} was killed at {clock(member.ended)}")
        if member.swaps and member.is_late:
            plot.sign(member.swaps[0].at, row + 0.5, "▸", f"{member.name} joined at {clock(member.swaps[0].at)}")
    _mark_moments(story, plot)
    words = (
        "Every bar is a task that a member had leased. The member with ✕ was killed while it held a lease (red); the outlined bar is the "
        "same task, done by another member. The member with ▸ joined half-way. The results of faint bars were not used, because another "
        "result of the same task came first. In gaps the member waits for work. On the right are tokens per second, including waiting."
    )
    return _figure("Work of the members", words, plot.svg(y_axis=False), wide=True)


def _outcome(story: Story, member: MemberStory, work: Work, style: str, taken: set[tuple[int, int]]) -> tuple[str, str]:
    words = f"{member.name}: round {work.round}, task {work.task}, attempt {work.attempt}, {work.tokens} tokens, {work.outcome}"
    if work.outcome == "lost":
        return "lost", words
    winner = story.accepted_by.get((work.round, work.task))
    if (work.round, work.task) in taken and winner == member.name:
        return f"{style} taken", words + " (taken over)"
    return (style if winner in (None, member.name) else f"{style} unused"), words


def _mark_moments(story: Story, plot: Plot) -> None:
    for member in story.members.values():
        if member.ending == "killed" and member.ended is not None:
            plot.mark(member.ended, "killed", before=True)
        if member.swaps and member.is_late:
            plot.mark(member.swaps[0].at, "joined")


def _reward(story: Story) -> str:
    points = [(step.at, step.reward) for step in story.steps]
    values = [reward for _, reward in points] or [0.0, 1.0]
    margin = 0.08 * (max(values) - min(values)) or 0.1
    plot = Plot("Reward", _times(story), (min(values) - margin, max(values) + margin))
    plot.dots(points, "m0", [f"step {step.step}: {step.reward:.3f}" for step in story.steps])
    plot.line(smoothed(points, max(1, len(points) // 12)), "m0", title="moving mean")
    _mark_moments(story, plot)
    words = f"Mean of <code>{escape(story.reward_name)}</code> over each step's completions (dots), and the moving mean (line)."
    return _figure("Reward", words, plot.svg())


def _lag(story: Story, styles: dict[str, str]) -> str:
    members = list(story.members.values())
    top = max([lag for member in members for _, lag in member.lag] or [1])
    lane = max(2, top) + 1.0
    plot = Plot("Lag", _times(story), (0, lane * max(1, len(members))), left=70)
    for row, member in enumerate(reversed(members)):
        stairs: list[Point] = [(at, float(lag)) for at, lag in member.lag]
        plot.stairs(stairs, story.now if member.ended is None else member.ended, styles[member.name], base=lane * row, title=member.name)
        plot.words(plot.x.start - 6, lane * row + lane / 2.6, member.name, end=True)
    _mark_moments(story, plot)
    words = f"0 is the newest policy; the largest value here is {top}. Members switch to new policies while they generate."
    return _figure("Steps behind the newest policy", words, plot.svg(y_axis=False))


def _bytes(story: Story) -> str:
    full = story.state_bytes or 1
    sizes = [step.bytes for step in story.steps if step.bytes] or [full]
    x = (story.steps[0].step - 1, story.steps[-1].step) if story.steps else (0, 1)
    plot = Plot(
        "Bytes", x, (min(sizes) / 3, full * 3), log=True, x_label=lambda value: f"{value:g}", y_label=lambda value: _size(int(value))
    )
    for step in story.steps:
        title = f"step {step.step}: {_size(step.bytes)}, {step.state_bytes / max(1, step.bytes):.0f}× less than full weights"
        plot.bar((step.step - 0.9, step.step - 0.1), (plot.y.low, step.bytes), "m0", title)
    plot.level(full, "full", f"full weights: {_size(full)}")
    fetched, instead = story.fetched
    words = (
        f"The bytes that the trainer publishes for each step, on a logarithmic scale. All members together fetched {_size(fetched)}, "
        f"including full checkpoints when they joined; with full weights it would have been {_size(instead)}."
    )
    return _figure("Bytes per step", words, plot.svg())


def _density(story: Story) -> str:
    points = [(float(step.step), 100 * density) for step, density in zip(story.steps, story.densities, strict=False)]
    top = max([y for _, y in points] or [1.0])
    x = (story.steps[0].step, story.steps[-1].step) if story.steps else (0, 1)
    plot = Plot("Density", x, (0, 1.15 * top), x_label=lambda value: f"{value:g}", y_label=lambda value: f"{value:g}%")
    plot.area(points, "m0")
    plot.line(points, "m0")
    bits = [8 * step.bytes / step.changed for step in story.steps if step.changed]
    words = f"The share of the {story.recipe} codes and scales" if story.recipe else "The share of the bf16 weights"
    words += " that a step changes."
    if bits:
        words += f" Each changed weight takes {median(bits):.1f} bits, including headers."
    return _figure("Density", words, plot.svg())


def _mismatch(story: Story) -> str:
    """Show a logarithmic scale, because the first steps of a fleet are often much closer than the others."""
    found = [(float(step.step), max(1e-12, step.mismatch_kl)) for step in story.steps if step.mismatch_kl is not None]
    values = [y for _, y in found] or [1e-6]
    x = (found[0][0], found[-1][0]) if len(found) > 1 else (0, 1)
    plot = Plot("Mismatch", x, (min(values) / 2, max(values) * 2), log=True, x_label=lambda at: f"{at:g}", y_label=lambda at: f"{at:.0e}")
    plot.line(found, "m0")
    policy = f"served by {escape(story.recipe)}" if story.recipe else "served in bf16"
    words = (
        f"The estimate of the divergence between the policy that drew the tokens, {policy}, and the trainer's own, in nats per token. "
        "Importance weights correct for it."
    )
    return _figure("Mismatch", words, plot.svg())


def _pauses(story: Story, styles: dict[str, str]) -> str:
    pauses = [1e3 * pause for pause in story.pauses] or [1.0]
    low, high = max(1e-3, min(pauses)), max(pauses)
    plot = Plot("Pauses", _times(story), (low / 2, max(high * 2, low * 20)), log=True, y_label=lambda value: f"{value:g} ms")
    for member in story.members.values():
        points = [(swap.at, max(1e-3, 1e3 * swap.pause_seconds)) for swap in member.swaps]
        plot.dots(
            points, styles[member.name], [f"{member.name} to step {s.step}: {1e3 * s.pause_seconds:.2f} ms" for s in member.swaps], size=2.6
        )
    _mark_moments(story, plot)
    return _figure(
        "Pauses of swaps",
        "The time in which a member could not generate, including a check of all weights. " + _legend(story, styles),
        plot.svg(),
    )


def _member_table(story: Story, members: Sequence[MemberStory]) -> str:
    head = ["member", "part", "end", "results", "tokens", "tokens/s", "swaps", "pause: median", "longest", "fetched"]
    rows = []
    for member in members:
        pauses = [1e3 * swap.pause_seconds for swap in member.swaps] or [0.0]
        results = sum(work.outcome == "uploaded" for work in member.works)
        rate = f"{member.tokens_per_second(story.now):,.0f}"
        row = [member.name, member.part, member.ending, str(results), f"{member.tokens:,}", rate, str(len(member.swaps))]
        rows.append([*row, f"{median(pauses):.1f} ms", f"{max(pauses):.1f} ms", _size(member.fetched_bytes)])
    return _figure("Members", "", _table(head, rows, numbers_from=3), wide=True)


def _rollouts(story: Story, styles: dict[str, str]) -> str:
    by_member = Counter(story.accepted_by.values())
    rows = [(f"accepted: {name}", by_member[name], styles[name]) for name in story.members]
    rows += [(f"rejected: {reason}", count, "rejected") for reason, count in story.rejected.most_common()] or [("rejected", 0, "rejected")]
    top = max(1, *(count for _, count, _ in rows))
    bars = "".join(
        f'<tr><th>{escape(name)}</th><td class="number">{count}</td>'
        f'<td class="track"><i class="{style}" style="width:{100 * count / top:.1f}%"></i></td></tr>'
        for name, count, style in rows
    )
    words = f"The trainer accepted {story.accepted} results, the first valid one of each task. Every rejection has a reason."
    return _figure("Rollouts", words, f'<table class="bars">{bars}</table>')


def _happened(story: Story) -> str:
    rows = [[clock(at), text] for at, text in story.marks]
    shipped = ", ".join(f"{_size(count)} of {what}" for what, count in story.shipped.items())
    return _figure("What happened", escape(f"The trainer put into the store: {shipped}.") if shipped else "", _table([], rows), wide=True)


def _samples(story: Story) -> str:
    rows = "".join(
        f'<tr><td class="number">{step}</td><td class="text"><em>{escape(_one_line(prompt))}</em>{escape(_one_line(completion))}</td>'
        f'<td class="number">{reward:.2f}</td></tr>'
        for step, prompt, completion, reward in story.samples
    )
    if not rows:
        return ""
    head = '<tr><th class="number">step</th><th>prompt (grey) and completion</th><th class="number">reward</th></tr>'
    words = (
        "The policy completed the same prompts before and after training, with the same random numbers. The prompts were chosen beforehand."
    )
    return _figure("What it writes", words, f'<div class="scroll"><table>{head}{rows}</table></div>', wide=True)


def _measured(story: Story) -> str:
    if not story.steps:
        return ""
    train, idle = sum(step.train_seconds for step in story.steps), sum(step.idle_seconds for step in story.steps)
    publish = sum(step.publish_seconds for step in story.steps)
    return (
        f"In {len(story.steps)} steps the trainer trained for {train:.0f} s and waited for rollouts for {idle:.0f} s; "
        f"it published a version {publish / len(story.steps):.2f} s after its step, during the next step. "
        f"The run took {clock(story.now)} on one machine. All figures on this page were measured in this run."
    )


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """Return the moving mean of the points, with `reach` neighbours on either side."""
    values = [y for _, y in points]
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [(x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def _times(story: Story) -> tuple[float, float]:
    return (story.steps[0].at if story.steps else 0.0), max(story.now, 1.0)


def _typical_bytes(story: Story) -> int:
    return int(median(step.bytes for step in story.steps))


def _legend(story: Story, styles: dict[str, str]) -> str:
    return (
        '<span class="legend">'
        + "".join(f'<span><i class="{styles[name]}"></i>{escape(name)}</span>' for name in story.members)
        + "</span>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 99) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ((' class="number"' if index >= numbers_from else "") for index in range(len(row)))
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    heading = f"<tr>{cells('th', head)}</tr>" if head else ""
    body = "".join("<tr>" + cells("td", row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{heading}{body}</table></div>'


def _one_line(text: str) -> str:
    return text.replace("\n", "↵")


def _size(count: int) -> str:
    return decimal(count)
