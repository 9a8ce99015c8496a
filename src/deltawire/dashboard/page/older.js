"use strict";
// Versions of any age: pages of commits, which the page asks the server for when they come into sight, and keeps a few of.

const PAGE = 128, MOST_PAGES = 64, ASK_AGAIN_MS = 3000;
const older = { pages: new Map(), asked: new Map(), failed: new Map(), basis: "" };

const lowestSeq = (chain) => (page.saved ? chain.entries[0].seq : 0);

/** The commit of this number: of the newest ones, of the pages that were read, or one that is not read yet. */
function entryAt(chain, seq) {
  const lowest = chain.entries[0].seq;
  if (seq >= lowest) return chain.entries[seq - lowest];
  return older.pages.get(Math.floor(seq / PAGE))?.entries[seq % PAGE] ?? { seq, kind: "unread", problem: null, flags: [] };
}

/** The commits of a stretch of the chain. Those that are not in memory are asked for. */
function entriesBetween(data, first, last) {
  const chain = data.chain, basis = `${chain.floor} ${chain.set_back}`, found = [];
  if (older.basis !== basis) { older.basis = basis; for (const known of [older.pages, older.asked, older.failed]) known.clear(); }
  for (let seq = first; seq <= last; seq += 1) found.push(entryAt(chain, seq));
  const unread = found.filter((entry) => entry.kind === "unread");
  if (unread.length && !page.saved) askPage(Math.floor(unread[unread.length - 1].seq / PAGE));
  return found;
}

function skipsBetween(chain, first, last) {
  const found = [...chain.skips];
  for (let number = Math.floor(first / PAGE); number <= Math.floor(last / PAGE); number += 1) found.push(...(older.pages.get(number)?.skips ?? []).filter(([seq]) => seq < chain.entries[0].seq));
  return found;
}

/** Why commits of a stretch could not be read; null if they were, or are on their way. */
function whyUnread(shown) {
  const entry = shown.find((one) => one.kind === "unread" && older.failed.has(Math.floor(one.seq / PAGE)));
  return entry ? older.failed.get(Math.floor(entry.seq / PAGE)) : null;
}

async function askPage(number) {
  const now = Date.now();
  if (now - (older.asked.get(number) ?? -Infinity) < ASK_AGAIN_MS) return;
  older.asked.set(number, now);
  try {
    const found = await asked(`api/commits?page=${number}`);
    older.pages.delete(number);
    older.pages.set(number, found);
    older.failed.delete(number);
  } catch (error) {
    older.failed.set(number, String(error.message || error));
    setTimeout(() => drawChain(page.data), ASK_AGAIN_MS + 50);
  }
  for (const old of older.pages.keys()) { if (older.pages.size <= MOST_PAGES) break; older.pages.delete(old); older.asked.delete(old); }
  drawChain(page.data);
}

/** Show a commit of any age as soon as it is read, and choose it. */
function goTo(data, seq) {
  const newest = data.chain.entries[data.chain.entries.length - 1].seq, wanted = Math.min(newest, Math.max(lowestSeq(data.chain), seq));
  const last = Math.max(wanted + Math.floor(chainView.columns / 2), lowestSeq(data.chain) + chainView.columns - 1);
  chainView.last = last >= newest ? null : last;
  chainView.chosen = wanted;
  drawChain(data);
}

async function goToVersion(text) {
  const version = Number(text);
  if (!Number.isSafeInteger(version) || version < 0 || !page.data.chain.entries.length) return;
  const known = page.data.chain.entries.find((entry) => isVersion(entry) && entry.version === version);
  if (known || page.saved) { goTo(page.data, known ? known.seq : lowestSeq(page.data.chain)); return; }
  try {
    const { seq } = await asked(`api/find?version=${version}`);
    if (finite(seq)) goTo(page.data, seq);
  } catch (error) {
    $("go").value = "";
    $("go").placeholder = shortName(String(error.message || error), 60);
  }
}

function drawChainButtons(data, first, last) {
  const newest = data.chain.entries[data.chain.entries.length - 1].seq, lowest = lowestSeq(data.chain), isAll = first <= lowest && last >= newest;
  $("chain-buttons").hidden = isAll;
  $("chain-oldest").disabled = $("chain-older").disabled = first <= lowest;
  $("chain-newest").disabled = $("chain-newer").disabled = last >= newest;
}

/** Move the picture by some screens, without choosing a version. */
function turn(data, screens) {
  const newest = data.chain.entries[data.chain.entries.length - 1].seq, last = (chainView.last ?? newest) + screens * chainView.columns;
  chainView.last = last >= newest ? null : Math.max(last, lowestSeq(data.chain) + chainView.columns - 1);
  drawChain(data);
}

for (const [id, screens] of [["chain-oldest", -Infinity], ["chain-older", -1], ["chain-newer", 1], ["chain-newest", Infinity]]) {
  $(id).addEventListener("click", () => { if (page.data?.chain.entries.length) turn(page.data, screens); });
}
$("go").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); goToVersion(event.target.value); } });
