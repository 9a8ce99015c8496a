"use strict";
// Members: how far they are behind over time, how long updates take them, and a table of all.

const membersView = { sort: "heard", down: true, all: false };
const MOST_ROWS = 60;
const HOT_LAG = 8;

/** Add what the page has just heard to the history, which it got when it was loaded. */
function noteHistory(data) {
  for (const one of data.members.shown) {
    if (!finite(one.seq)) continue;
    if (!data.history.has(one.name)) data.history.set(one.name, { lag: [], pause: [] });
    const { lag, pause } = data.history.get(one.name), lastLag = lag[lag.length - 1], lastPause = pause[pause.length - 1];
    if (!lastLag || (lastLag[1] !== one.lag && lastLag[0] < one.heard)) lag.push([one.heard, one.lag]);
    const seconds = finite(one.update?.pause_us) ? one.update.pause_us / 1e6 : null;
    if (seconds !== null && (!lastPause || ((lastPause[1] !== seconds || lastPause[2] !== one.seq) && lastPause[0] < one.heard))) pause.push([one.heard, seconds, one.seq]);
    for (const points of [lag, pause]) if (points.length > 240) points.splice(0, points.length - 240);
  }
}

/** The end of plots over time: now, or the last sign of life of a fleet that has ended. */
function endOf(data) {
  const members = data.members.shown;
  return members.some((one) => !["left", "silent"].includes(one.state)) ? data.status.time : Math.max(0, ...members.map((one) => one.heard)) || data.status.time;
}

function colourOf(lag, style) {
  if (lag <= 0) return style.getPropertyValue("--good");
  const share = Math.min(1, lag / HOT_LAG), [from, to] = [style.getPropertyValue("--heat"), style.getPropertyValue("--hot")].map((text) => text.split(",").map(Number));
  return `rgb(${from.map((part, at) => Math.round(part + share * (to[at] - part))).join(",")})`;
}

/** A row for each member and a colour for each lag, on a canvas because there may be many thousand pieces. */
function drawLag(data) {
  const names = data.members.shown.filter((one) => data.history.get(one.name)?.lag.length).map((one) => one.name);
  $("lag-card").hidden = !names.length;
  if (!names.length) return;
  const width = widthOf("lag"), row = Math.max(2, Math.min(20, Math.floor(320 / names.length))), labelled = row >= 11;
  const left = labelled ? 108 : 8, height = row * names.length + 22, ratio = window.devicePixelRatio || 1;
  const canvas = el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), role: "img", "aria-label": "Versions that each member is behind, over time" });
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.scale(ratio, ratio);
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  const now = endOf(data), states = new Map(data.members.shown.map((one) => [one.name, one]));
  const first = Math.min(...names.map((name) => data.history.get(name).lag[0][0])), x = scale(first, Math.max(now, first + 1), left, width - 4);
  for (const [at, name] of names.entries()) {
    const points = data.history.get(name).lag, one = states.get(name), end = ["left", "silent"].includes(one.state) ? one.heard : now;
    pen.fillStyle = style.getPropertyValue("--faint");
    pen.fillRect(left, at * row + 0.5, width - 4 - left, Math.max(1, row - 1));
    points.forEach(([from, lag], index) => {
      const to = index + 1 < points.length ? points[index + 1][0] : Math.max(end, from);
      pen.fillStyle = colourOf(lag, style);
      pen.fillRect(x(from), at * row + 0.5, Math.max(1, x(to) - x(from)), Math.max(1, row - 1));
    });
    if (labelled) {
      pen.fillStyle = style.getPropertyValue("--ink");
      pen.fillText(fitName(name, left - 8), 0, at * row + row / 2 + 4);
    }
  }
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.fillText(clock(first, data.status.time), left, height - 6);
  const text = clock(now, data.status.time);
  pen.fillText(text, width - 4 - pen.measureText(text).width, height - 6);
  canvas.addEventListener("pointermove", (event) => { const name = names[Math.floor(event.offsetY / row)]; canvas.title = name ? `${name}: ${states.get(name)?.lag ?? "?"} behind now` : ""; });
  $("lag").replaceChildren(canvas);
  const lags = data.members.shown.filter((one) => one.state !== "left" && finite(one.seq)).map((one) => one.lag);
  $("lag-words").textContent = `Versions that members are behind: green is the newest version, blue is one behind, red is ${HOT_LAG} or more. ` + (lags.length ? `Now ${count(median(lags))} typically, and ${count(Math.max(...lags))} at most.` : "");
}

const PHASES = [
  ["wait", "s5", "until the member looks, and waiting"], ["fetch", "s0", "fetch"], ["verify", "s3", "verify"], ["resolve", "s4", "decode"], ["pause", "s2", "pause of the engine"], ["rest", "s1", "other"],
];

/** The facts that a heartbeat tells about updates, in seconds. Without the times of the last update, the transfer follows from the link. */
function phasesOf(one, bytes) {
  if (!finite(one.behind_ms) && !one.update) return null;
  const update = one.update || {}, told = (name) => (finite(update[`${name}_us`]) ? update[`${name}_us`] / 1e6 : 0);
  const total = Math.max(finite(one.behind_ms) ? one.behind_ms / 1000 : 0, told("total"));
  const found = { total, fetch: told("fetch"), verify: told("verify"), resolve: told("resolve"), pause: told("pause") };
  if (!one.update && one.goodput) found.fetch = Math.min(total, (one.latency_ms || 0) / 1000 + bytes / one.goodput);
  const known = found.fetch + found.verify + found.resolve + found.pause;
  const within = told("total") || known;  // phases overlap, so they are drawn as shares of the whole sync
  if (known > within) for (const name of ["fetch", "verify", "resolve", "pause"]) found[name] *= within / known;
  found.wait = Math.max(0, total - within);
  found.rest = Math.max(0, total - found.wait - Math.min(known, within));
  return found;
}

function drawSync(data) {
  const deltas = data.chain.entries.filter((entry) => entry.kind === "delta").slice(-20), bytes = median(deltas.map((entry) => entry.bytes)) || 0;
  const rows = data.members.shown.map((one) => ({ one, phases: phasesOf(one, bytes) })).filter((row) => row.phases);
  $("sync-card").hidden = !rows.length;
  if (!rows.length) return;
  rows.sort((a, b) => b.phases.total - a.phases.total);
  const shown = rows.slice(0, 12), width = widthOf("sync"), row = 21, height = row * shown.length + 22, left = 112;
  const plot = newPlot(width, height, "How long updates take members"), x = scale(0, shown[0].phases.total || 1, left, width - 64);
  for (const [at, { one, phases }] of shown.entries()) {
    let from = 0;
    plot.append(svgEl("text", { class: "name", x: left - 8, y: at * row + 14, "text-anchor": "end", text: fitName(one.name, left - 12) }));
    for (const [name, mark] of PHASES) {
      plot.append(svgEl("rect", { class: mark, x: x(from), y: at * row + 3, width: Math.max(0, x(from + phases[name]) - x(from)), height: row - 7, rx: 2, title: `${one.name}: ${name} ${duration(phases[name])}` }));
      from += phases[name];
    }
    plot.append(svgEl("text", { x: x(phases.total) + 6, y: at * row + 14, text: duration(phases.total) }));
  }
  plot.append(svgEl("text", { x: left, y: height - 5, text: "0" }));
  $("sync").replaceChildren(plot);
  $("sync-words").textContent = `From the publication of a version until a member has it. Median ${duration(median(rows.map((one) => one.phases.total)))}, of which the engine pauses ${duration(median(rows.map((one) => one.phases.pause)))}` + (rows.length > shown.length ? `; the slowest ${shown.length} of ${rows.length} are shown.` : ".");
  legend("sync-legend", PHASES.filter(([name]) => shown.some((row) => row.phases[name] > 0)).map(([, mark, words]) => [mark, words]));
}

const COLUMNS = [
  { key: "name", title: "member", name: true, show: (one) => one.name },
  { key: "state", title: "state", show: (one) => el("span", { class: `state-${one.state}`, text: one.state }) },
  { key: "step", title: "step", number: true, show: (one) => count(one.step) },
  { key: "lag", title: "behind", number: true, show: (one) => (finite(one.seq) ? count(one.lag) : "–") },
  { key: "behind_ms", title: "update", number: true, show: (one) => duration(one.behind_ms === null ? NaN : one.behind_ms / 1000) },
  { key: "pause", title: "pause", number: true, show: (one) => duration(finite(one.update?.pause_us) ? one.update.pause_us / 1e6 : NaN) },
  { key: "goodput", title: "link", number: true, show: (one) => (finite(one.goodput) ? `${size(one.goodput)}/s` : "–") },
  { key: "latency_ms", title: "latency", number: true, show: (one) => duration(one.latency_ms === null ? NaN : one.latency_ms / 1000) },
  { key: "working", title: "tasks", number: true, show: (one) => count(one.working) },
  { key: "tokens", title: "tokens", number: true, show: (one) => count(one.tokens) },
  { key: "rate", title: "tokens/s", number: true, show: (one) => (finite(one.rate) ? count(one.rate) : "–") },
  { key: "engine", title: "engine", show: (one) => one.engine || "–" },
  { key: "heard", title: "heard", number: true, show: (one, now) => duration(now - one.heard) },
];

function drawMembers(data) {
  const { listed, shown } = data.members, now = data.status.time, wanted = $("filter").value.toLowerCase();
  $("members-card").hidden = !shown.length;
  if (!shown.length) return;
  const rows = shown.filter((one) => one.name.toLowerCase().includes(wanted));
  const order = (one) => (membersView.sort === "pause" ? one.update?.pause_us : one[membersView.sort]) ?? -Infinity;
  rows.sort((a, b) => (order(a) < order(b) ? -1 : order(a) > order(b) ? 1 : a.name < b.name ? -1 : 1) * (membersView.down ? -1 : 1));
  const visible = membersView.all ? rows : rows.slice(0, MOST_ROWS);
  const columns = COLUMNS.map((column) => ({ ...column, head: el("button", { type: "button", text: column.title + (membersView.sort === column.key ? (membersView.down ? " ↓" : " ↑") : ""), on: { click: () => sortBy(data, column.key) } }) }));
  const parts = [table(columns, visible.map((one) => COLUMNS.map((column) => column.show(one, now))))];
  if (visible.length < rows.length) parts.push(el("button", { type: "button", class: "more", text: `Show all ${count(rows.length)}`, on: { click: () => { membersView.all = true; drawMembers(data); } } }));
  $("members").replaceChildren(...parts);
  const alive = shown.filter((one) => !["left", "silent"].includes(one.state)), working = alive.filter((one) => one.working > 0);
  $("members-words").textContent = `${count(alive.length)} alive, ${count(working.length)} working` + (listed > shown.length ? `; ${count(listed)} are listed in the store, and ${count(shown.length)} were read` : "");
}

function sortBy(data, key) {
  membersView.down = membersView.sort === key ? !membersView.down : key !== "name";
  membersView.sort = key;
  drawMembers(data);
}
