"use strict";
// Plots as SVG. A plot is as wide as its card, and is drawn again when that changes.

function svgEl(name, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined) continue;
    if (key === "text") made.textContent = value;
    else if (key === "title") made.append(svgEl("title", { text: value }));
    else if (key === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else made.setAttribute(key, typeof value === "number" ? Math.round(10 * value) / 10 : value);
  }
  made.append(...children);
  return made;
}

function widthOf(id) { return Math.max(260, $(id).clientWidth || $(id).parentElement.clientWidth - 32 || 600); }

function newPlot(width, height, label) {
  return svgEl("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
}

/** A map from values to pixels. With `log`, values are positive. */
function scale(low, high, start, end, log = false) {
  const of = log ? (value) => Math.log(Math.max(value, 1e-300)) : (value) => value;
  const [from, to] = [of(low), of(high)];
  const at = (value) => start + ((end - start) * (of(value) - from)) / (to - from || 1);
  at.low = low; at.high = high; at.log = log;
  return at;
}

/** Round numbers within a scale, about `most` of them. */
function ticks(at, most) {
  const found = [];
  if (at.log) {
    const span = Math.log10(at.high) - Math.log10(at.low), decades = Math.max(1, Math.ceil(span / most));
    if (span < 2) {
      for (let power = Math.floor(Math.log10(at.low)); power <= Math.log10(at.high); power += 1) found.push(...[1, 2, 5].map((factor) => factor * 10 ** power));
      return found.filter((value) => value >= at.low && value <= at.high);
    }
    for (let power = Math.ceil(Math.log10(at.low)); power <= Math.log10(at.high) + 1e-9; power += decades) found.push(10 ** power);
    return found;
  }
  const rough = (at.high - at.low) / most;
  if (!(rough > 0)) return [at.low];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  for (let value = Math.ceil(at.low / step) * step; value <= at.high + step / 1e6 && found.length < 40; value += step) found.push(value);
  return found;
}

/** Draw the axes of a plot: horizontal lines with labels, and labels below. */
function axes(plot, x, y, box, { xLabel, yLabel, xTicks = 6, yTicks = 4 }) {
  for (const value of ticks(y, yTicks)) {
    plot.append(svgEl("path", { class: "grid", d: `M${box.left} ${y(value).toFixed(1)}H${box.right}` }));
    plot.append(svgEl("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end", text: yLabel(value) }));
  }
  for (const value of ticks(x, xTicks)) {
    plot.append(svgEl("text", { x: x(value), y: box.bottom + 15, "text-anchor": "middle", text: xLabel(value) }));
  }
  plot.append(svgEl("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }));
}

function path(points) { return points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""); }

/** Means of neighbours, so that noise does not hide the trend. */
function smooth(points, reach) {
  return points.map(([x], at) => {
    const near = points.slice(Math.max(0, at - reach), at + reach + 1);
    return [x, near.reduce((sum, [, y]) => sum + y, 0) / near.length];
  });
}

/** A line of values over numbers, with dots if there are few, in a card. */
function linePlot(id, points, { label, log = false, yLabel = digits, xLabel = count, dots = false, low = null }) {
  const width = widthOf(id), height = 190, box = { left: 52, right: width - 8, top: 10, bottom: height - 24 };
  const plot = newPlot(width, height, label);
  const values = points.map(([, y]) => y);
  let [least, most] = [Math.min(...values), Math.max(...values)];
  if (log) { least /= 1.6; most *= 1.6; } else { const room = 0.08 * (most - least) || Math.abs(most) * 0.1 || 1; least -= room; most += room; }
  if (low !== null && !log) least = Math.min(low, least + 0);
  const x = scale(points[0][0], points[points.length - 1][0], box.left, box.right);
  const y = scale(least, most, box.bottom, box.top, log);
  axes(plot, x, y, box, { xLabel, yLabel, xTicks: Math.max(2, Math.floor(width / 90)) });
  const pixels = points.map(([at, value]) => [x(at), y(value)]);
  if (dots || points.length < 3) {
    for (const [at, [px, py]] of pixels.entries()) plot.append(svgEl("circle", { class: "dot s0", cx: px, cy: py, r: 2.6, title: `${xLabel(points[at][0])}: ${yLabel(values[at])}` }));
  }
  const drawn = dots ? smooth(pixels, Math.floor(points.length / 24)) : pixels;
  plot.append(svgEl("path", { class: "line l0", d: path(drawn) }));
  $(id).replaceChildren(plot);
}

/** Entries of a legend: [class of the mark, words]. */
function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([mark, words]) => el("span", {}, mark instanceof Node ? mark : square(mark), document.createTextNode(words))));
}

function square(mark) { return svgEl("svg", { viewBox: "0 0 13 13", "aria-hidden": "true" }, svgEl("rect", { class: mark, x: 1, y: 1, width: 11, height: 11, rx: 2 })); }
