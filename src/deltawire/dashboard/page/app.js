"use strict";
// Loads the data, keeps them up to date, and draws. In a single file the data stand in the page itself.

const page = { data: null, saved: null, live: false, heard: 0, number: 0 };
const EMPTY = {
  status: { problem: null, time: 0, looks: 0, run: null, url: "" }, chain: { entries: [], samples: [], skips: [], head: null, version: null, floor: -1, state_bytes: 0, tensors: 0 },
  members: { listed: 0, shown: [] }, tasks: { rounds: [], bars: [] }, readers: { pins: [], reports: [], relays: [] }, channels: [], traffic: { answers: [], times: [], bounds: [], feedback: [], since: null, left_out: 0 }, gates: [], faults: [], history: new Map(),
};
const DRAWN_BY = {
  chain: [drawTiles, drawChain, drawTraining, drawSync, drawLinks, drawStorage, drawReaders], members: [drawTiles, drawLag, drawPauses, drawSync, drawLinks, drawMembers, drawChain],
  channels: [drawChannels, drawChain], traffic: [drawTraffic], gates: [drawGates], tasks: [drawTasks, drawStaleness], readers: [drawReaders, drawLinks, drawChain], faults: [drawFaults, drawTiles], status: [drawStatus, drawTasks, drawLag, drawPauses, drawMembers],
};

/** Draw what depends on these sections, each picture once. A picture that fails must not hide the others. */
function draw(names) {
  for (const call of new Set(names.flatMap((name) => DRAWN_BY[name] || []))) {
    try { call(page.data); } catch (error) { console.error(call.name, error); }
  }
  document.documentElement.dataset.drawn = String((page.number += 1));
  if (page.data.chain.entries.length && !performance.getEntriesByName("all-drawn").length) performance.mark("all-drawn");
}

function drawStatus(data) {
  const status = data.status;
  $("run").textContent = status.run ? shortName(status.run, 80) : "deltawire";
  document.title = status.run ? `${shortName(status.run, 60)} · deltawire` : "deltawire";
  $("url").textContent = status.url;
  $("problem").hidden = !status.problem;
  $("problem").textContent = status.problem ? `The store could not be read, and is tried again: ${status.problem} What is shown is from the last look that succeeded.` : "";
  $("footer").textContent = `deltawire has read ${size(status.read_bytes)} from the store in ${count(status.requests)} requests and ${count(status.looks)} look${status.looks === 1 ? "" : "s"}. It never writes to it.`;
  drawLive();
}

function drawLive() {
  const live = $("live"), problem = page.data?.status.problem;
  if (page.saved) { live.className = "live"; live.textContent = `saved ${clock(page.data.status.time, 0)}`; return; }
  live.className = page.live && !problem ? "live on" : "live off";
  live.textContent = !page.live ? "no connection to deltawire" : problem ? "the store does not answer" : "live";
}

function drawTiles(data) {
  const chain = data.chain, versions = chain.entries.filter(isVersion), newest = versions[versions.length - 1], deltas = versions.filter((entry) => entry.kind === "delta");
  const tiles = [], alive = data.members.shown.filter((one) => !["left", "silent"].includes(one.state)), lags = alive.filter((one) => finite(one.seq)).map((one) => one.lag);
  if (newest) tiles.push([count(chain.version), `newest version${finite(newest.step) ? `, step ${count(newest.step)}` : ""}, ${duration(data.status.time - newest.time)} old`]);
  const bytes = deltas.reduce((sum, entry) => sum + entry.bytes, 0), full = deltas.reduce((sum, entry) => sum + entry.state_bytes, 0);
  if (deltas.length) tiles.push([`${digits(full / Math.max(1, bytes))}×`, `fewer bytes than full weights: ${size(bytes / deltas.length)} instead of ${size(chain.state_bytes)}`]);
  if (data.members.shown.length) tiles.push([`${count(alive.length)}`, `of ${count(data.members.listed)} members are alive, and ${count(alive.filter((one) => one.working > 0).length)} work`]);
  if (lags.length) tiles.push([count(Math.max(...lags)), `versions behind at most, ${count(median(lags))} typically`]);
  const rate = alive.reduce((sum, one) => sum + (one.working ? one.rate || 0 : 0), 0);
  if (rate) tiles.push([count(rate), "tokens per second, by the members' own count"]);
  const bad = data.faults.filter((fault) => fault.level !== "note").length;
  tiles.push([count(bad), bad === 1 ? "fault" : "faults", bad ? "bad" : null]);
  $("tiles").replaceChildren(...tiles.map(([number, words, kind]) => el("div", { class: `tile ${kind || ""}` }, el("b", { text: number }), el("span", { text: words }))));
}

async function readDetails(seq) {
  if (page.saved) {
    const found = page.saved[String(seq)];
    if (found) return found;
    throw new Error("This file does not hold the details of this version. The command deltawire dashboard reads them from the store.");
  }
  return asked(`api/version?seq=${seq}`);
}

/** The answer of the server as plain values. */
async function asked(address) {
  let answer;
  try { answer = await fetch(address); } catch (error) { throw new Error("There is no connection to deltawire."); }
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function take(sections) {
  page.data = { ...(page.data || EMPTY), ...sections };
  if (sections.history) page.data.history = new Map(Object.entries(sections.history));  // a member may be called __proto__
  noteHistory(page.data);
  draw(Object.keys(sections));
}

/** Follow the run. A lost connection is tried again for ever, and then gets everything anew. */
function follow() {
  const source = new EventSource("api/live");
  let waiting = {};
  const flush = () => { const sections = waiting; waiting = {}; if (Object.keys(sections).length) take(sections); };
  for (const name of Object.keys(DRAWN_BY)) {
    source.addEventListener(name, (event) => { if (!Object.keys(waiting).length) queueMicrotask(flush); waiting[name] = JSON.parse(event.data); page.live = true; });
  }
  source.onopen = () => { page.live = true; drawLive(); };
  source.onerror = () => {
    page.live = false;
    drawLive();
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  };
}

async function start() {
  const embedded = $("data");
  if (embedded) {
    const { details, notes, ...sections } = JSON.parse(embedded.textContent);
    page.saved = details;
    $("notes").hidden = !notes.length;
    $("notes").replaceChildren(...notes.map((text) => el("p", { text })));
    take(sections);
    draw(Object.keys(DRAWN_BY));
    return;
  }
  try {
    take(await (await fetch("api/sections")).json());
  } catch (error) {
    drawLive();
  }
  follow();
}

const THEMES = ["", "light", "dark"];
function changeTheme() {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme || "") + 1) % THEMES.length];
  if (next) root.dataset.theme = next; else delete root.dataset.theme;
  if (page.data) draw(Object.keys(DRAWN_BY));
}

const KEYS = [["← →", "choose the version before or after"], ["Shift ← →", "go a screen back or forward"], ["Home End", "choose the oldest or newest version"], ["g", "go to a version by its number"], ["Enter", "show the chosen version"], ["/", "filter members"], ["t", "change the colours"], ["Esc", "close"], ["?", "show the keys"]];
function showKeys() {
  $("keys-body").replaceChildren(el("dl", {}, ...KEYS.flatMap(([key, words]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text: words })])));
  $("keys").showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !page.data) return;
  if (event.target instanceof HTMLInputElement) { if (event.key === "Escape") event.target.blur(); return; }
  const onButton = event.target instanceof HTMLButtonElement;
  const actions = {
    ArrowLeft: () => moveChoice(page.data, event.shiftKey ? -chainView.columns : -1), ArrowRight: () => moveChoice(page.data, event.shiftKey ? chainView.columns : 1),
    Home: () => moveChoice(page.data, -Infinity), End: () => moveChoice(page.data, Infinity), g: () => $("go").focus(), "/": () => $("filter").focus(), t: changeTheme, "?": showKeys,
  };
  if (event.key === "Enter" && !onButton && chainView.chosen !== null && !$("details").open) { event.preventDefault(); openDetails(chainView.chosen); return; }
  const action = actions[event.key];
  if (!action || ($("keys").open && event.key !== "?")) return;
  event.preventDefault();
  action();
  if ($("details").open && event.key.startsWith("Arrow") && chainView.chosen !== null) openDetails(chainView.chosen);
});
$("theme").addEventListener("click", changeTheme);
$("help").addEventListener("click", showKeys);
$("filter").addEventListener("input", () => { drawMembers(page.data); drawPauses(page.data); });
$("details").addEventListener("close", () => { detailsView.seq = null; });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (page.data) draw(Object.keys(DRAWN_BY)); });
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => { if (page.data && window.innerWidth !== drawnWidth) { drawnWidth = window.innerWidth; draw(Object.keys(DRAWN_BY)); } });
start();
