"use strict";
// Gates: what they found about the newest canaries, and what they decided.

const MOST_GATES_SHOWN = 3;
const gatesView = { all: false };
const GATE_OUTCOMES = { promote: "promoted", rollback: "rolled back", continue: "not decided yet" };

const versionWords = (seq, version) => (finite(version) ? `version ${count(version)}` : `commit ${count(seq)}`);

/** The differences that the test has not refuted, as a line, and the threshold of the limit. */
function intervalPicture(one) {
  const ends = [one.low, one.high, one.threshold].filter(finite), low = Math.min(...ends), high = Math.max(...ends);
  const words = `between ${digits(one.low)} and ${digits(one.high)}${finite(one.threshold) ? `, must be ${one.is_upper ? "below" : "above"} ${digits(one.threshold)}` : ""}`;
  const x = scale(low, high, 6, 164), picture = svgEl("svg", { class: "interval", viewBox: "0 0 170 18", role: "img", "aria-label": words });
  if (high - low < Infinity) picture.append(svgEl("path", { class: one.verdict, d: `M${x(one.low).toFixed(1)} 5V13M${x(one.low).toFixed(1)} 9H${x(one.high).toFixed(1)}M${x(one.high).toFixed(1)} 5V13`, title: words }));
  if (high - low < Infinity && finite(one.threshold)) picture.append(svgEl("path", { class: "limit", d: `M${x(one.threshold).toFixed(1)} 1V17`, title: words }));
  return el("div", { title: words }, picture, el("span", { class: "soft", text: `${digits(one.low)} … ${digits(one.high)}` }));
}

/** The evidence about one canary. */
function gateParts(one, now) {
  const title = el("h3", {}, document.createTextNode(`${one.channel}: ${versionWords(one.seq, one.version)}`));
  if (one.problem) return [title, el("p", { class: "damage", text: one.problem })];
  title.append(` against ${versionWords(one.stable_seq, one.stable_version)} on ${one.stable}: `, el("span", { class: `outcome-${one.outcome}`, text: GATE_OUTCOMES[one.outcome] ?? one.outcome }));
  const facts = [`${count(one.answers)} answers in ${duration(one.age)}, alpha ${percent(one.alpha)}, record ${count(one.number)} of ${clock(one.time, now)}.`];
  if (one.evaluation) {
    const { passed, attempts, why, scores } = one.evaluation, state = passed === null ? "did not finish" : passed ? "passed" : "failed";
    facts.push(`The evaluation ${state} (attempt ${count(attempts)}): ${[why, ...scores.slice(0, 8).map(([name, value]) => `${name} ${digits(value)}`)].filter(Boolean).join(", ")}.`);
  }
  const parts = [title, el("p", { class: "soft", text: facts.join(" ") })];
  if (one.why) parts.push(el("p", { class: "soft", text: one.why }));
  const number = true, mean = ([answers, value]) => `${answers ? digits(value) : "–"} (${count(answers)})`;
  const columns = [{ title: "limit", name: true }, { title: "kind" }, { title: "canary (answers)", number }, { title: "stable (answers)", number }, { title: "blocks", number }, { title: "difference, threshold" }, { title: "verdict" }];
  const rows = one.limits.map((limit) => [limit.limit, limit.must_hold ? "metric" : "monitor", mean(limit.canary), mean(limit.stable), count(limit.blocks), intervalPicture(limit), el("span", { class: `verdict-${limit.verdict}`, text: limit.verdict })]);
  if (rows.length) parts.push(table(columns, rows));
  return parts;
}

function drawGates(data) {
  const gates = data.gates;
  $("gates-card").hidden = !gates.length;
  if (!gates.length) return;
  const newest = new Map(gates.map((one) => [one.channel, Math.max(...gates.filter((other) => other.channel === one.channel).map((other) => other.move))]));
  const order = [...gates].sort((a, b) => Number(b.move === newest.get(b.channel)) - Number(a.move === newest.get(a.channel)) || (b.time ?? 0) - (a.time ?? 0));
  const shown = gatesView.all ? order : order.slice(0, Math.max(MOST_GATES_SHOWN, newest.size)), parts = shown.flatMap((one) => gateParts(one, data.status.time));
  if (shown.length < order.length) parts.push(el("button", { type: "button", class: "more", text: `Show all ${count(order.length)}`, on: { click: () => { gatesView.all = true; drawGates(page.data); } } }));
  $("gates").replaceChildren(...parts);
  $("gates-words").textContent = "A limit compares the means of the canary and of stable. The line shows the differences that the test has not refuted; the limit is decided when its threshold lies outside.";
}
