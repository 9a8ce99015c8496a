"use strict";
// One version: its facts, how large its steps are, and which tensors it changes, as a heat map over the model.

const detailsView = { seq: null };

async function openDetails(seq) {
  detailsView.seq = seq;
  $("details-title").textContent = `Commit ${count(seq)}`;
  $("details-body").replaceChildren(el("p", { class: "nothing", text: "reading the store …" }));
  if (!$("details").open) $("details").showModal();
  let found;
  try {
    found = await readDetails(seq);
  } catch (error) {
    found = { seq, kind: "unknown", problem: String(error.message || error) };
  }
  if (found.problem) older.pages.delete(Math.floor(seq / PAGE));  // it is read again, and then marked as damaged
  if (detailsView.seq === seq) showDetails(found);
}

function showDetails(found) {
  const named = found.version !== undefined && found.kind !== "fence";
  $("details-title").textContent = named ? `Version ${count(found.version)}` : `Commit ${count(found.seq)}`;
  const parts = [];
  if (found.problem) parts.push(el("p", { class: "damage", text: `This ${named ? "version" : "commit"} cannot be used. ${found.problem}` }));
  if (found.kind !== "corrupt" && found.kind !== "unknown") parts.push(facts(found));
  if (found.note) parts.push(el("p", { class: "soft", text: `Not everything is shown: ${found.note}` }));
  if (found.segments?.length) parts.push(...stepParts(found));
  if (found.tensors_changed) parts.push(...heatParts(found.tensors_changed));
  $("details-body").replaceChildren(...parts);
}

function facts(found) {
  const rows = [
    ["kind", found.kind === "anchor" ? "full checkpoint" : found.kind], ["step", finite(found.step) ? count(found.step) : ""], ["published", clock(found.time, 0)],
    ["publisher", `number ${found.epoch} of this run`], ["commit", count(found.seq)], ["base", found.base === null ? "" : `commit ${count(found.base)}`],
    ["weights", found.tensors ? `${size(found.state_bytes)} in ${count(found.tensors)} tensors` : ""], ["quantised by", found.recipe || ""],
    ["size", found.files ? `${size(found.bytes)} in ${count(found.files)} file${found.files > 1 ? "s" : ""}` + (found.kind === "delta" ? `, ${digits(found.state_bytes / Math.max(1, found.bytes))}× smaller than full weights` : "") : ""],
    ["changed", found.kind === "delta" ? `${count(found.changed)} weights, ${digits((8 * found.bytes) / Math.max(1, found.changed))} bits each` : ""],
    ["digest", found.digest || ""], ["signed by", found.signed_by || ""], ["files beside", found.attachments.join(", ")], ...found.meta,
  ];
  const list = el("dl");
  for (const [name, value] of rows) if (value) list.append(el("dt", { text: name }), el("dd", {}, /^[0-9a-f]{32,}$/.test(value) ? el("code", { text: value }) : document.createTextNode(value)));
  return list;
}

function stepParts(found) {
  const steps = [], parts = [el("h3", { text: "Sizes of the steps" })];
  for (const segment of found.segments) for (const payload of segment.payloads) payload.steps.forEach((value, at) => { steps[at] = (steps[at] || 0) + value; });
  const total = steps.reduce((sum, value) => sum + value, 0);
  if (total) {
    parts.push(el("p", { class: "soft", text: "Changed weights by their distance from the old value, in representable values (ULP)." }));
    const rows = steps.map((value, at) => [at ? `${2 ** at}–${2 ** (at + 1) - 1}` : "1", count(value), percent(value / total), bar(value / Math.max(...steps))]);
    parts.push(table([{ title: "ULP" }, { title: "weights", number: true }, { title: "share", number: true }, { title: "" }], rows));
  }
  parts.push(el("h3", { text: "Where weights changed" }), el("p", { class: "soft", text: "From the first element to the last of each file; stronger parts have more changes." }));
  for (const segment of found.segments.slice(0, 60)) {
    for (const payload of segment.payloads) {
      const most = Math.max(...payload.strip, 1e-12), strip = el("div", { class: "strip" });
      for (const share of payload.strip) { const cell = el("i", { title: percent(share) }); cell.style.background = `rgba(var(--heat), ${(share / most).toFixed(3)})`; strip.append(cell); }
      parts.push(el("p", { class: "soft", text: `tensors ${count(segment.first)} to ${count(segment.first + segment.count - 1)}, ${payload.label}: ${count(payload.changed)} changed, ${percent(payload.changed / Math.max(1, payload.elements))} or more` }), strip);
    }
  }
  return parts;
}

function bar(share) {
  const made = svgEl("svg", { viewBox: "0 0 160 12", height: 12, "aria-hidden": "true" }, svgEl("rect", { class: "s0", x: 0, y: 1, width: 160 * share, height: 10, rx: 2 }));
  made.style.width = "160px";
  return made;
}

/** The layer of a tensor, and its name within the layer: model.layers.3.mlp.up_proj.weight gives 3 and mlp.up_proj. */
function layerAndKindOf(name) {
  const found = /^(.*?)(?:\.|^)(\d+)\.(.+?)(?:\.weight)?$/.exec(name);
  return found ? { layer: `${found[1].split(".").pop()} ${found[2]}`, kind: found[3] } : { layer: "other", kind: name.replace(/\.weight$/, "") };
}

function heatParts(tensors) {
  const layers = new Map(), kinds = [], others = [];
  for (const tensor of tensors) {
    const own = layerAndKindOf(tensor.name);
    if (own.layer === "other") { others.push(tensor); continue; }
    if (!layers.has(own.layer)) layers.set(own.layer, new Map());
    layers.get(own.layer).set(own.kind, tensor);
    if (!kinds.includes(own.kind)) kinds.push(own.kind);
  }
  const parts = [], most = Math.max(...tensors.map((one) => one.changed / Math.max(1, one.elements)), 1e-12), largest = Math.max(...tensors.map(wideShare), 1e-12);
  const natural = [...layers.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true })), cut = kinds.slice(0, 40);
  if (layers.size) {
    parts.push(el("h3", { text: "Density by layer" }), el("p", { class: "soft", text: `The share of weights that changed in each tensor: the strongest colour is ${percent(most)}.` }), heat(natural, cut, layers, (one) => one.changed / Math.max(1, one.elements) / most, (one) => percent(one.changed / Math.max(1, one.elements))));
    parts.push(el("h3", { text: "ULP steps by layer" }), el("p", { class: "soft", text: `Of the weights that changed, the share that moved by more than 1 ULP: the strongest colour is ${percent(largest)}.` }), heat(natural, cut, layers, (one) => wideShare(one) / largest, (one) => `${percent(wideShare(one))}, median ${digits(typicalStep(one))} ULP`));
  }
  const rows = [...tensors].filter((one) => one.changed).sort((a, b) => b.changed - a.changed).slice(0, 100);
  parts.push(el("h3", { text: `Tensors that changed the most (${count(tensors.filter((one) => one.changed).length)} of ${count(tensors.length)} changed)` }));
  const list = el("div", { class: "scroll" });
  list.append(table([{ title: "tensor", name: true }, { title: "type" }, { title: "weights", number: true }, { title: "changed", number: true }, { title: "share", number: true }, { title: "median step", number: true }],
    rows.map((one) => [one.name, one.dtype, count(one.elements), count(one.changed), percent(one.changed / Math.max(1, one.elements)), `${digits(typicalStep(one))} ULP`])));
  parts.push(list);
  return parts;
}

/** The share of changed weights that moved by more than the smallest step. */
function wideShare(one) { return one.changed ? 1 - (one.steps[0] || 0) / one.changed : 0; }

function typicalStep(one) {
  let left = one.changed / 2;
  for (const [at, value] of one.steps.entries()) { left -= value; if (left <= 0 && value) return 2 ** at; }
  return 0;
}

function heat(rows, columns, layers, share, words) {
  const head = el("tr", {}, el("th"), ...columns.map((kind) => el("th", { scope: "col" }, el("span", { text: shortName(kind, 32), title: kind }))));
  const body = rows.slice(0, 400).map((layer) => el("tr", {}, el("th", { scope: "row", text: shortName(layer, 24) }), ...columns.map((kind) => {
    const one = layers.get(layer).get(kind), cell = el("td", { title: one ? `${one.name}: ${words(one)}` : "no such tensor" });
    if (one) cell.style.background = `rgba(var(--heat), ${Math.max(one.changed ? 0.06 : 0, share(one)).toFixed(3)})`;
    return cell;
  })));
  return el("div", { class: "scroll" }, el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, ...body)));
}
