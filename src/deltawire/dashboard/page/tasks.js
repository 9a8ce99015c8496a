"use strict";
// The fleet's tasks: a row for each member, a bar for each attempt, and how stale the accepted ones were.

const MOST_LANES = 40;
const OUTCOMES = [["accepted", "accepted"], ["uploaded", "uploaded"], ["working", "in work"], ["unused", "not used: another result came first"], ["lost", "lost"], ["rejected", "rejected by training"]];

const asBar = ([member, round, task, attempt, start, end, outcome, stale]) => ({ member, round, task, attempt, start, end, outcome, stale });

function drawTasks(data) {
  const bars = data.tasks.bars.map(asBar), now = data.status.time;
  $("tasks-card").hidden = !bars.length;
  if (!bars.length) return;
  const latest = new Map();
  for (const bar of bars) latest.set(bar.member, Math.max(latest.get(bar.member) || 0, bar.start));
  const names = [...latest.keys()].sort((a, b) => latest.get(b) - latest.get(a)).slice(0, MOST_LANES).sort();
  const stopped = Math.max(...bars.map((bar) => bar.end ?? (data.status.stopped ? bar.start : now)));
  const width = widthOf("tasks"), row = names.length > 20 ? 15 : 24, left = width < 500 ? 74 : 128, height = row * names.length + 22;
  const span = width < 500 ? 120 : 600, begin = Math.max(Math.min(...bars.map((bar) => bar.start)), stopped - span);
  const x = scale(begin, Math.max(stopped, begin + 1), left, width - 8), plot = newPlot(width, height, "Tasks of the members over time");
  const states = new Map(data.members.shown.map((one) => [one.name, one]));
  names.forEach((name, at) => {
    plot.append(svgEl("path", { class: "grid", d: `M${left} ${at * row + row - 0.5}H${width - 8}` }));
    plot.append(svgEl("text", { class: "name", x: left - 8, y: at * row + row / 2 + 4, "text-anchor": "end", text: fitName(name, left - 10), title: `${name}: ${states.get(name)?.state ?? "gone"}` }));
  });
  for (const bar of bars) {
    const at = names.indexOf(bar.member), end = bar.end ?? Math.max(bar.start, stopped);
    if (at < 0 || end < begin) continue;
    const from = x(Math.max(begin, bar.start));
    plot.append(svgEl("rect", { class: `b-${bar.outcome}`, x: from, y: at * row + 3, width: Math.max(1.5, x(end) - from - 0.6), height: row - 6, rx: 2,
      title: `${bar.member}: round ${bar.round}, task ${bar.task}, attempt ${bar.attempt}, ${bar.outcome}, ${duration(end - bar.start)}` + (finite(bar.stale) ? `, begun ${bar.stale} steps stale` : "") }));
  }
  for (const value of ticks(scale(0, stopped - begin, 0, 1), Math.floor((width - left) / 110))) {
    if (value === 0 || stopped - begin >= 8) plot.append(svgEl("text", { x: x(begin + value), y: height - 5, "text-anchor": "middle", text: clock(begin + value) }));
  }
  $("tasks").replaceChildren(plot);
  const rounds = data.tasks.rounds.slice(-3).map((one) => `step ${one.step}: ${one.acknowledged ? "acknowledged" : `${one.delivered} of ${one.tasks} tasks delivered`}`);
  $("tasks-words").textContent = `A bar is an attempt at a task, from its lease to its result. ${rounds.join("; ")}.` + (latest.size > names.length ? ` ${names.length} of ${count(latest.size)} members are shown.` : "");
  const present = new Set(bars.map((bar) => bar.outcome));
  legend("tasks-legend", OUTCOMES.filter(([name]) => present.has(name)).map(([name, words]) => [`b-${name}`, words]));
}

function drawStaleness(data) {
  const stale = data.tasks.bars.map(asBar).filter((bar) => finite(bar.stale) && bar.outcome !== "working").map((bar) => bar.stale);
  $("staleness-card").hidden = !stale.length;
  if (!stale.length) return;
  const allowed = Math.max(0, ...data.tasks.rounds.map((one) => one.allowed)), most = Math.min(24, Math.max(allowed, ...stale));
  const counts = Array.from({ length: most + 1 }, (_, at) => stale.filter((value) => Math.min(value, most) === at).length);
  const width = widthOf("staleness"), height = 170, box = { left: 44, right: width - 8, top: 10, bottom: height - 24 };
  const plot = newPlot(width, height, "Staleness of attempts"), x = scale(-0.5, most + 0.5, box.left, box.right), y = scale(0, Math.max(...counts), box.bottom, box.top);
  for (const value of ticks(y, 4)) plot.append(svgEl("path", { class: "grid", d: `M${box.left} ${y(value).toFixed(1)}H${box.right}` }), svgEl("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end", text: count(value) }));
  counts.forEach((value, at) => {
    plot.append(svgEl("rect", { class: at > allowed ? "k-corrupt" : "s0", x: x(at - 0.4), y: y(value), width: Math.max(2, x(at + 0.4) - x(at - 0.4)), height: box.bottom - y(value), rx: 2, title: `${value} attempts, ${at} steps stale` }));
    plot.append(svgEl("text", { x: x(at), y: box.bottom + 15, "text-anchor": "middle", text: at }));
  });
  $("staleness").replaceChildren(plot);
  $("staleness-words").textContent = `How many steps older than the newest possible the version was with which a task began. ${allowed} ${allowed === 1 ? "is" : "are"} allowed.`;
}
