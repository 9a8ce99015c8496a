"use strict";
// Channels: labels in the picture of the chain, and the moves of each.

const MOST_MOVES_SHOWN = 12;
const channelsView = { all: false };

/** The names of the channels by the commits that they point to. */
function channelsAt(data) {
  const found = new Map();
  for (const { name, moves } of data.channels) if (moves.length) found.set(moves[0].seq, [...(found.get(moves[0].seq) ?? []), name]);
  return found;
}

/** Labels above the columns of the versions that channels point to, each on a line of its own. */
function channelLabels(data, shown, x, top, floor) {
  const at = channelsAt(data), parts = [];
  let line = 0;
  for (const entry of shown) {
    const names = at.get(entry.seq);
    if (!names) continue;
    const text = shortName(names.join(", "), 40), high = top - 13 * (line % LABEL_LINES), left = x(entry.seq) > (x(shown[0].seq) + x(shown[shown.length - 1].seq)) / 2;
    parts.push(svgEl("path", { class: "channel-line", d: `M${x(entry.seq).toFixed(1)} ${high + 3}V${floor}` }));
    parts.push(svgEl("text", { class: "channel", x: x(entry.seq) + (left ? 2 : -2), y: high, "text-anchor": left ? "end" : "start", text, title: `${names.join(", ")}: ${entryWords(entry, data.chain)}` }));
    line += 1;
  }
  return parts;
}

const LABEL_LINES = 4;
function labelLines(data, shown) {
  const at = channelsAt(data);
  return Math.min(LABEL_LINES, shown.filter((entry) => at.has(entry.seq)).length);
}

function drawChannels(data) {
  const channels = data.channels;
  $("channels-card").hidden = !channels.length;
  if (!channels.length) return;
  const now = data.status.time, moves = channels.flatMap((channel) => channel.moves.map((move, at) => ({ ...move, channel: channel.name, newest: at === 0 })));
  moves.sort((a, b) => Number(b.newest) - Number(a.newest) || b.time - a.time);
  const shown = channelsView.all ? moves : moves.slice(0, Math.max(MOST_MOVES_SHOWN, channels.length));
  const rows = shown.map((move) => [
    move.newest ? el("b", { text: move.channel }) : move.channel, el("span", { class: `move-${move.kind}`, text: move.kind }),
    el("button", { type: "button", class: "plain", text: finite(move.version) ? `version ${count(move.version)}` : `commit ${count(move.seq)}`, on: { click: () => goTo(page.data, move.seq) } }),
    finite(move.share) ? percent(move.share) : "–", move.why || "–", move.by || "–", clock(move.time, now),
  ]);
  const parts = channels.filter((channel) => channel.problem).map((channel) => el("p", { class: "damage", text: `${channel.name}: ${channel.problem}` }));
  parts.push(table([{ title: "channel", name: true }, { title: "move" }, { title: "to" }, { title: "users", number: true }, { title: "why", name: true }, { title: "by", name: true }, { title: "when", number: true }], rows));
  if (shown.length < moves.length) parts.push(el("button", { type: "button", class: "more", text: `Show all ${count(moves.length)}`, on: { click: () => { channelsView.all = true; drawChannels(page.data); } } }));
  $("channels").replaceChildren(...parts);
  $("channels-words").textContent = "A channel names the version that its readers take. Its newest move comes first, in bold; the others follow by time.";
}
