"use strict";
// Elements and numbers. All text goes through textContent, so nothing from a store is ever read as HTML.

const $ = (id) => document.getElementById(id);

/** Make an element. `given.text` is its text, `given.on` are its listeners; all others are attributes. */
function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const finite = (value) => typeof value === "number" && Number.isFinite(value);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function count(value) { return finite(value) ? whole.format(value) : "–"; }

/** A number with three significant digits. */
function digits(value, most = 3) {
  if (!finite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(most)));
}

function size(bytes) {
  if (!finite(bytes)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit ? digits(bytes) : whole.format(bytes)} ${units[unit]}`;
}

function duration(seconds) {
  if (!finite(seconds)) return "–";
  if (seconds < 0) return "0 s";
  if (seconds < 0.01) return `${digits(1000 * seconds, 2)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function percent(share) { return finite(share) ? `${digits(100 * share)}%` : "–"; }

/** The time of day, with the date if it is not that of `now`. Both are seconds since 1970. */
function clock(seconds, now) {
  const at = new Date(1000 * seconds);
  if (!finite(seconds) || Number.isNaN(at.getTime())) return "–";
  const time = at.toLocaleTimeString("en-GB");
  return finite(now) && Math.abs(now - seconds) > 43200 ? `${at.toLocaleDateString("en-CA")} ${time}` : time;
}

function median(values) {
  const sorted = values.filter(finite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : NaN;
}

/** A long name without its middle, because names of one fleet differ at the end. */
function shortName(name, most) {
  return name.length <= most ? name : `${name.slice(0, Math.ceil(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}`;
}

const measure = document.createElement("canvas").getContext("2d");

/** A name that is at most this many pixels wide, in the font of plots. */
function fitName(name, width) {
  measure.font = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  let most = Math.min(name.length, 64);
  while (most > 3 && measure.measureText(shortName(name, most)).width > width) most -= 1;
  return shortName(name, most);
}

function nothing(id, words) { $(id).replaceChildren(el("p", { class: "nothing", text: words })); }

/** A table. A column is {title, number}; a row is a list of strings or elements. */
function table(columns, rows) {
  const head = el("tr", {}, ...columns.map((one) => el("th", { class: one.number ? "number" : null, scope: "col" }, one.head ?? one.title)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, at) => cellOf(cell, columns[at]))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

function cellOf(cell, column) {
  const made = el("td", { class: column.number ? "number" : column.name ? "name" : null });
  made.append(cell instanceof Node ? cell : String(cell));
  return made;
}
