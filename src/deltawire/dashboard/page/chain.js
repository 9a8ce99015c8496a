"use strict";
// The chain as a picture: a column for each commit, with its bytes above, and below it the readers that need it and the skips to it.

const chainView = { chosen: null, last: null, columns: 1 };
let columnWidth = 15;  // the width of a column in pixels, more while there are few commits

const isVersion = (entry) => !["fence", "corrupt", "unread"].includes(entry.kind);
const hasFlag = (entry, name) => (entry.flags || []).includes(name);

function entryWords(entry, chain) {
  if (entry.kind === "corrupt") return `commit ${entry.seq}, corrupt: ${entry.problem}`;
  if (entry.kind === "unread") return `commit ${entry.seq}, which is not read yet`;
  const words = [entry.kind === "fence" ? `commit ${entry.seq}: publisher ${entry.epoch} takes over` : `version ${entry.version}, ${entry.kind === "anchor" ? "full checkpoint" : entry.kind}`];
  if (finite(entry.step)) words.push(`step ${entry.step}`);
  if (entry.kind === "delta") words.push(`${size(entry.bytes)}, ${digits(entry.state_bytes / Math.max(1, entry.bytes))}× smaller than full weights`);
  if (entry.kind === "anchor") words.push(size(entry.bytes));
  if (entry.kind === "rewind") words.push(`back to commit ${entry.base}`);
  words.push(...(entry.flags || []).map((flag) => (flag === "anchored" ? "with a full checkpoint" : flag)));
  if (entry.problem) words.push(`DAMAGED: ${entry.problem}`);
  return words.join(", ");
}

function drawChain(data) {
  const chain = data.chain, entries = chain.entries;
  if (!entries.length) { nothing("chain", "Nothing is published yet."); return; }
  columnWidth = Math.max(15, Math.min(34, Math.floor((widthOf("chain") - 66) / entries.length)));
  chainView.columns = Math.max(8, Math.floor((widthOf("chain") - 66) / columnWidth));
  const newest = entries[entries.length - 1].seq, lowest = lowestSeq(chain);
  const last = chainView.last === null ? newest : Math.min(newest, Math.max(chainView.last, lowest + chainView.columns - 1));
  const shown = entriesBetween(data, Math.max(lowest, last - chainView.columns + 1), last);
  $("chain").replaceChildren(chainPlot(data, shown));
  drawChainButtons(data, shown[0].seq, last);
  drawOverview(chain, shown);
  $("chain-words").textContent = `${count(chain.version)} versions of ${size(chain.state_bytes)} in ${count(chain.tensors)} tensors` +
    (chain.recipe ? `, ${chain.recipe}` : "") + `. A bar is the size of a version, on a logarithmic scale.` +
    (chain.floor >= 0 ? ` Data that only versions up to ${chain.floor_version ?? `commit ${chain.floor}`} need were collected.` : "") +
    (page.saved && entries[0].seq > 0 ? ` This file holds the newest ${count(entries.length)} commits, and samples of older ones.` : "") +
    (whyUnread(shown) ? ` Older versions could not be read, and are tried again: ${whyUnread(shown)}` : "");
  legend("chain-legend", [
    ["k-delta", "delta"], ["k-anchor", "full checkpoint"], ["k-rewind", "rewind"], ["k-corrupt", "corrupt or damaged"],
    [svgEl("svg", { viewBox: "0 0 13 13", "aria-hidden": "true" }, svgEl("path", { class: "skip", d: "M1 2Q6.5 18 12 2" })), "skip"],
    [svgEl("svg", { viewBox: "0 0 13 13", "aria-hidden": "true" }, svgEl("circle", { class: "pin", cx: 6.5, cy: 6.5, r: 4.5 })), "pinned by a reader"],
    [svgEl("svg", { viewBox: "0 0 13 13", "aria-hidden": "true" }, svgEl("circle", { class: "reader", cx: 6.5, cy: 6.5, r: 4.5 })), "members have it"],
  ]);
}

function chainPlot(data, shown) {
  const chain = data.chain, width = widthOf("chain"), room = 13 * labelLines(data, shown), height = 262 + room;
  const box = { left: 54, right: width - 8, top: 16 + room, floor: 140 + room, marks: 158 + room, readers: 180 + room, skips: 194 + room };
  const plot = newPlot(width, height, "Versions of the chain");
  const sizes = shown.filter((entry) => entry.bytes > 0).map((entry) => entry.bytes);
  const full = Math.max(chain.state_bytes, 1);
  const y = scale(Math.max(1, Math.min(full, ...sizes) / 3), Math.max(full, ...sizes) * 1.6, box.floor, box.top, true);
  const x = (seq) => box.left + columnWidth * (seq - shown[0].seq + 0.5);
  for (const value of ticks(y, 4)) {
    plot.append(svgEl("path", { class: "grid", d: `M${box.left} ${y(value).toFixed(1)}H${box.right}` }), svgEl("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end", text: size(value) }));
  }
  plot.append(svgEl("path", { class: "full", d: `M${box.left} ${y(full).toFixed(1)}H${box.right}` }));
  plot.append(svgEl("text", { x: box.right, y: y(full) - 5, "text-anchor": "end", text: `full weights: ${size(full)}` }));
  plot.append(svgEl("path", { class: "axis", d: `M${box.left} ${box.floor}H${box.right}` }));
  const seqs = new Map(shown.map((entry) => [entry.seq, entry]));
  for (const [seq, base] of skipsBetween(chain, shown[0].seq, shown[shown.length - 1].seq)) if (seqs.has(seq)) plot.append(skipArc(x(Math.max(base, shown[0].seq - 0.5)), x(seq), box.skips, `skip from commit ${base} to ${seq}`));
  const pins = countBy(data.readers.pins.filter((pin) => pin.until > data.status.time), (pin) => pin.seq);
  const having = countBy(data.members.shown.filter((one) => one.state !== "left"), (one) => one.seq);
  const every = Math.ceil(46 / columnWidth);
  for (const [at, entry] of shown.entries()) plot.append(column(data, entry, x, y, box, height, pins.get(entry.seq), having.get(entry.seq)));
  for (const [at, entry] of shown.entries()) {
    if (isVersion(entry) && (shown.length - 1 - at) % every === 0) plot.append(svgEl("text", { x: x(entry.seq), y: height - 3, "text-anchor": "middle", text: entry.version }));
    if (entry.kind === "rewind" && entry.base !== null) plot.append(rewindArc(x(Math.max(entry.base, shown[0].seq - 0.5)), x(entry.seq), box.marks - 8, entryWords(entry, chain)));
  }
  plot.append(...channelLabels(data, shown, x, box.top - 8, box.floor));
  plot.append(svgEl("text", { x: box.left - 6, y: box.readers + 4, "text-anchor": "end", text: "readers" }), svgEl("text", { x: box.left - 6, y: box.skips + 22, "text-anchor": "end", text: "skips" }), svgEl("text", { x: box.left - 6, y: height - 3, "text-anchor": "end", text: "version" }));
  return plot;
}

function column(data, entry, x, y, box, height, pins, having) {
  const at = x(entry.seq), damaged = entry.problem !== null, mark = damaged ? "k-corrupt" : `k-${entry.kind}`;
  const faded = ["void", "abandoned", "collected"].some((flag) => hasFlag(entry, flag)) ? "faded" : "";
  const group = svgEl("g", { class: `column ${entry.seq === chainView.chosen ? "chosen" : ""}`, "data-seq": entry.seq, title: entryWords(entry, data.chain), on: { click: () => { choose(data, entry.seq); openDetails(entry.seq); } } });
  group.append(svgEl("rect", { class: "hit", x: at - columnWidth / 2, y: box.top - 8, width: columnWidth, height: box.readers - box.top + 20, rx: 3 }));
  if (entry.bytes > 0) group.append(svgEl("rect", { class: `${mark} ${faded}`, x: at - columnWidth / 2 + 2, y: y(entry.bytes), width: columnWidth - 4, height: Math.max(1.5, box.floor - y(entry.bytes)), rx: 2 }));
  if (entry.kind === "fence" && !damaged) group.append(svgEl("path", { class: "fence", d: `M${at.toFixed(1)} ${box.top}V${box.marks + 6}` }));
  else if (damaged) group.append(svgEl("path", { class: "k-corrupt", d: cross(at, box.marks, 5) }));
  else if (entry.kind === "anchor" || hasFlag(entry, "anchored")) group.append(svgEl("rect", { class: `k-anchor ${faded}`, x: at - 4.5, y: box.marks - 4.5, width: 9, height: 9, rx: 1 }));
  else if (entry.kind === "rewind") group.append(svgEl("path", { class: "k-rewind", d: `M${at - 5} ${box.marks}L${at + 4} ${box.marks - 5}V${box.marks + 5}Z` }));
  else group.append(svgEl("circle", { class: `${mark} ${faded}`, cx: at, cy: box.marks, r: 2.6 }));
  if (having) group.append(svgEl("circle", { class: "reader", cx: at, cy: box.readers, r: Math.min(6.5, 3 + Math.sqrt(having)), title: `${having} member${having > 1 ? "s have" : " has"} this version` }));
  if (pins) group.append(svgEl("circle", { class: "pin", cx: at + (having ? 4 : 0), cy: box.readers + (having ? 4 : 0), r: Math.min(5, 2.5 + Math.sqrt(pins)), title: `${pins} reader${pins > 1 ? "s" : ""} pinned this version` }));
  return group;
}

function cross(x, y, r) {
  const t = 1.6;
  return `M${x - r} ${y - r + t}L${x - r + t} ${y - r}L${x} ${y - t}L${x + r - t} ${y - r}L${x + r} ${y - r + t}L${x + t} ${y}L${x + r} ${y + r - t}L${x + r - t} ${y + r}L${x} ${y + t}L${x - r + t} ${y + r}L${x - r} ${y + r - t}L${x - t} ${y}Z`;
}

function skipArc(from, to, top, words) {
  const depth = Math.min(46, 8 + 9 * Math.log2(1 + (to - from) / columnWidth));
  return svgEl("path", { class: "skip", d: `M${from.toFixed(1)} ${top}Q${((from + to) / 2).toFixed(1)} ${(top + depth * 1.4).toFixed(1)} ${to.toFixed(1)} ${top}`, title: words });
}

function rewindArc(from, to, bottom, words) {
  const rise = Math.min(60, 10 + 0.35 * (to - from));
  return svgEl("path", { class: "back", d: `M${to.toFixed(1)} ${bottom}Q${((from + to) / 2).toFixed(1)} ${(bottom - rise).toFixed(1)} ${from.toFixed(1)} ${bottom}`, title: words });
}

/** The whole chain in one strip: samples of its versions, and where the columns below are. */
function drawOverview(chain, shown) {
  if (chain.samples.length < 2) { $("overview").replaceChildren(); return; }
  const width = widthOf("overview"), height = 46, box = { left: 54, right: width - 8 };
  const all = [...chain.samples, ...chain.entries];
  const x = scale(0, Math.max(1, chain.head), box.left, box.right), plot = newPlot(width, height, "The whole chain");
  plot.classList.add("clickable");
  plot.addEventListener("click", (event) => {
    const at = plot.getBoundingClientRect(), share = ((event.clientX - at.left) * width) / at.width;
    goTo(page.data, Math.round((chain.head * (share - box.left)) / (box.right - box.left)));
  });
  const full = Math.max(chain.state_bytes, 1), sizes = all.filter((entry) => entry.bytes > 0).map((entry) => entry.bytes);
  const y = scale(Math.max(1, Math.min(full, ...sizes) / 2), Math.max(full, ...sizes), 32, 4, true);
  for (const entry of all) {
    if (entry.problem) plot.append(svgEl("path", { class: "k-corrupt", d: cross(x(entry.seq), 18, 4), title: entryWords(entry, chain) }));
    else if (entry.bytes > 0) plot.append(svgEl("rect", { class: `k-${entry.kind}`, x: x(entry.seq) - 0.8, y: y(entry.bytes), width: 1.6, height: 32 - y(entry.bytes), title: entryWords(entry, chain) }));
  }
  plot.append(svgEl("rect", { class: "l0", x: x(shown[0].seq) - 2, y: 1, width: Math.max(5, x(shown[shown.length - 1].seq) - x(shown[0].seq) + 4), height: 33, fill: "none", rx: 3 }));
  plot.append(svgEl("path", { class: "axis", d: `M${box.left} 33H${box.right}` }));
  plot.append(svgEl("text", { x: box.left, y: 45, text: "commit 0" }), svgEl("text", { x: box.right, y: 45, "text-anchor": "end", text: `commit ${count(chain.head)}` }), svgEl("text", { x: (box.left + box.right) / 2, y: 45, "text-anchor": "middle", text: `every ${count(chain.stride)}th commit, and all of the newest; click to go there` }));
  $("overview").replaceChildren(plot);
}

function countBy(items, key) {
  const found = new Map();
  for (const item of items) found.set(key(item), (found.get(key(item)) || 0) + 1);
  return found;
}

/** Mark a version, and move the picture so that it is seen. */
function choose(data, seq) {
  const entries = data.chain.entries;
  chainView.chosen = seq;
  const newest = entries[entries.length - 1].seq;
  const last = chainView.last ?? newest;
  if (seq > last) chainView.last = seq >= newest ? null : seq;
  else if (seq <= last - chainView.columns) chainView.last = seq + chainView.columns - 1;
  drawChain(data);
}

function moveChoice(data, by) {
  const entries = data.chain.entries;
  if (!entries.length) return;
  const newest = entries[entries.length - 1].seq, lowest = lowestSeq(data.chain);
  choose(data, chainView.chosen === null && Number.isFinite(by) ? newest : Math.min(newest, Math.max(lowest, (chainView.chosen ?? newest) + by)));
}
