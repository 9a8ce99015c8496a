"use strict";
// Bytes over each link, against full weights. Speeds are measured by members; bytes are computed from the sizes in commits.

const MOST_LINKS = 20;
const linksView = { all: false };

function drawLinks(data) {
  const deltas = data.chain.entries.filter((entry) => entry.kind === "delta" && !hasFlag(entry, "void")), typical = median(deltas.map((entry) => entry.bytes));
  $("links-card").hidden = !deltas.length;
  if (!deltas.length) return;
  const total = (name) => deltas.reduce((sum, entry) => sum + entry[name], 0), bytes = total("bytes"), full = total("state_bytes"), weights = data.chain.state_bytes;
  const crossed = [size(bytes), size(full), fewer(bytes, full)], unknown = ["–", "–", "–", "–", "–"];
  const rows = [["trainer to store", ...unknown, ...crossed], ...data.readers.relays.slice(0, 40).map((relay) => [`store to region ${shortName(relay.name, 32)}`, ...unknown, ...crossed])];
  const members = data.members.shown.filter((one) => one.state !== "left" && (finite(one.goodput) || one.taken?.versions > 0));
  members.sort((a, b) => (a.goodput ?? Infinity) - (b.goodput ?? Infinity) || (a.name < b.name ? -1 : 1));
  const shown = linksView.all ? members : members.slice(0, MOST_LINKS);
  for (const one of shown) {
    const seconds = (of) => (one.goodput ? duration((one.latency_ms || 0) / 1000 + of / one.goodput) : "–");
    rows.push([`to ${shortName(one.name, 40)}`, finite(one.goodput) ? `${size(one.goodput)}/s` : "–", duration(one.latency_ms === null ? NaN : one.latency_ms / 1000), count(one.failures), seconds(typical), seconds(weights),
      ...(one.taken?.versions ? [size(one.taken.bytes), size(one.taken.full), fewer(one.taken.bytes, one.taken.full)] : ["–", "–", "–"])]);
  }
  const titles = ["speed", "latency", "failures", "a version", "full weights", "bytes", "as full weights", "fewer"].map((title) => ({ title, number: true }));
  const made = table([{ title: "link", name: true }, ...titles], rows);
  made.tHead.prepend(el("tr", {}, el("th"), el("th", { colspan: 3, class: "group", scope: "colgroup", text: "measured by the member" }), el("th", { colspan: 2, class: "group", scope: "colgroup", text: "time, computed" }), el("th", { colspan: 3, class: "group", scope: "colgroup", text: "bytes, computed" })));
  const parts = [made];
  if (shown.length < members.length) parts.push(el("button", { type: "button", class: "more", text: `Show all ${count(members.length)}`, on: { click: () => { linksView.all = true; drawLinks(data); } } }));
  $("links").replaceChildren(...parts);
  const taken = data.members.shown.reduce((sum, one) => ({ bytes: sum.bytes + (one.taken?.bytes || 0), full: sum.full + (one.taken?.full || 0) }), { bytes: 0, full: 0 });
  $("links-words").textContent = `One version has ${size(typical)} typically, and full weights have ${size(weights)}. ` +
    (taken.bytes ? `Since deltawire first looked, members took ${size(taken.bytes)} together; as full weights that is ${size(taken.full)}. ` : "") +
    (members.length > shown.length ? `The slowest ${count(shown.length)} of ${count(members.length)} members are shown.` : "");
  $("links-note").textContent = `Nobody counts these bytes on the way. They are the sizes of ${count(deltas.length)} deltas in their commits, which cross the links to the store and to each region once, and for members the sizes of the versions that their heartbeats went through. ` +
    "Full checkpoints, skips and repeated transfers are not in them. A region is a relay that published itself; members read from the store or from the nearest copy, and do not say which.";
}

function fewer(bytes, full) { return bytes > 0 ? `${digits(full / bytes)}×` : "–"; }
