"use strict";
// Readers, relays, storage and faults.

function drawReaders(data) {
  const { pins, reports, relays } = data.readers, now = data.status.time, versions = new Map(data.chain.entries.map((entry) => [entry.seq, entry.version]));
  $("readers-card").hidden = !(pins.length || reports.length || relays.length);
  const label = (seq) => (finite(seq) ? (versions.get(seq) === 0 ? "everything" : versions.get(seq) ? `from version ${versions.get(seq)} on` : `from commit ${seq} on`) : "–"), parts = [];
  if (pins.length) {
    const shown = [...pins].sort((a, b) => a.seq - b.seq).slice(0, 40);
    parts.push(table([{ title: "pin of", name: true }, { title: "needs" }, { title: "expires", number: true }], shown.map((pin) => [pin.reader, label(pin.seq), pin.until > now ? `in ${duration(pin.until - now)}` : "expired"])));
    if (shown.length < pins.length) parts.push(el("p", { class: "soft", text: `and ${count(pins.length - shown.length)} more` }));
  }
  if (reports.length) parts.push(table([{ title: "engine", name: true }, { title: "state" }, { title: "has" }, { title: "heard", number: true }], reports.slice(0, 40).map((one) => [one.reader, el("span", { class: `state-${one.state}`, text: one.state }), label(one.seq).replace(/^from | on$/g, ""), duration(now - one.time)])));
  if (relays.length) parts.push(table([{ title: "relay", name: true }, { title: "copy at", name: true }], relays.slice(0, 40).map((one) => [one.name, el("code", { text: one.url })])));
  $("readers").replaceChildren(...parts);
}

function drawStorage(data) {
  const versions = data.chain.entries.filter(isVersion), deltas = versions.filter((entry) => entry.kind === "delta"), first = versions[0], last = versions[versions.length - 1];
  $("storage-card").hidden = !deltas.length;
  if (!deltas.length) return;
  const bytes = deltas.reduce((sum, entry) => sum + entry.bytes, 0), full = deltas.reduce((sum, entry) => sum + entry.state_bytes, 0);
  const anchors = versions.filter((entry) => entry.kind === "anchor" || hasFlag(entry, "anchored")), hours = Math.max(last.time - first.time, 1) / 3600;
  const collected = versions.filter((entry) => hasFlag(entry, "collected"));
  const rows = [
    [`${count(deltas.length)} deltas`, size(bytes), `${size(full)} as full weights`],
    [`${count(anchors.length)} full checkpoint${anchors.length === 1 ? "" : "s"}`, size(anchors.reduce((sum, entry) => sum + entry.state_bytes, 0)), "about"],
    [`${count(data.chain.skips.length)} skips`, "", "sizes are not read"],
    [`${count(collected.length)} collected versions`, size(collected.reduce((sum, entry) => sum + entry.bytes, 0)), "deleted, or will be"],
    ["new deltas per hour", size(bytes / hours), `${size(full / hours)} as full weights`],
    ["a month of such training", `$${digits((23e-12 * (bytes / hours) * 730))}`, `to keep its deltas for a month, at $0.023 for a GB; $${digits((23e-12 * (full / hours) * 730))} as full weights`],
  ];
  $("storage").replaceChildren(table([{ title: "of the newest versions" }, { title: "bytes", number: true }, { title: "" }], rows));
  $("storage-words").textContent = `Counted from the records of the newest ${count(versions.length)} versions. The command deltawire gc shows and deletes garbage.`;
}

function drawFaults(data) {
  const faults = data.faults;
  $("faults-card").hidden = !faults.length;
  $("faults").replaceChildren(...faults.slice(0, 60).map((fault) => el("li", { class: fault.level }, el("time", { text: finite(fault.time) ? clock(fault.time, data.status.time) : "" }), el("span", { text: fault.text }))));
  if (faults.length > 60) $("faults").append(el("li", { text: `and ${count(faults.length - 60)} more` }));
}
