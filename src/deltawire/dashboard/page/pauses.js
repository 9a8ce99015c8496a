"use strict";
// The pauses of engines over time: a dot for each update that was seen, on a canvas because there may be many thousand.

const pauseView = { dots: [] };

function drawPauses(data) {
  const wanted = $("filter").value.toLowerCase(), dots = [];
  for (const one of data.members.shown) {
    for (const [time, seconds] of data.history.get(one.name)?.pause ?? []) dots.push({ name: one.name, time, seconds, marked: wanted !== "" && one.name.toLowerCase().includes(wanted) });
  }
  $("pause-card").hidden = !dots.length;
  if (!dots.length) return;
  dots.sort((a, b) => a.time - b.time);
  const width = widthOf("pauses"), height = 190, box = { left: 52, right: width - 8, top: 10, bottom: height - 24 }, ratio = window.devicePixelRatio || 1;
  const canvas = el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), role: "img" }), pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  canvas.style.height = `${height}px`;
  pen.scale(ratio, ratio);
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  let least = Infinity, most = 0;  // not Math.min(...dots): so many arguments overflow the stack
  for (const dot of dots) { least = Math.min(least, Math.max(dot.seconds, 1e-6)); most = Math.max(most, dot.seconds, 1e-6); }
  const first = dots[0].time, end = Math.max(endOf(data), dots[dots.length - 1].time, first + 1), now = data.status.time;
  const x = scale(first, end, box.left + 4, box.right - 4), y = scale(least / 1.6, most * 1.6, box.bottom, box.top, true);
  for (const value of ticks(y, 4)) {
    pen.fillStyle = style.getPropertyValue("--rule");
    pen.fillRect(box.left, Math.round(y(value)), box.right - box.left, 1);
    pen.fillStyle = style.getPropertyValue("--soft");
    const text = duration(value);
    pen.fillText(text, box.left - 6 - pen.measureText(text).width, y(value) + 4);
  }
  for (const marked of [false, true]) {
    pen.fillStyle = style.getPropertyValue(marked ? "--c1" : "--c0");
    pen.globalAlpha = marked ? 1 : dots.length > 2000 ? 0.3 : 0.6;
    for (const dot of dots) if (dot.marked === marked) { dot.x = x(dot.time); dot.y = y(Math.max(dot.seconds, 1e-6)); pen.beginPath(); pen.arc(dot.x, dot.y, marked ? 3 : 2.4, 0, 7); pen.fill(); }
  }
  pen.globalAlpha = 1;
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.fillText(clock(first, now), box.left, height - 6);
  const text = clock(end, now);
  pen.fillText(text, box.right - pen.measureText(text).width, height - 6);
  pauseView.dots = dots;
  canvas.addEventListener("pointermove", (event) => { canvas.title = nearestPause(event.offsetX, event.offsetY, now); });
  $("pauses").replaceChildren(canvas);
  const longest = dots.reduce((a, b) => (b.seconds > a.seconds ? b : a));
  $("pause-words").textContent = `How long engines could not generate, in each update that was seen: ${duration(median(dots.map((dot) => dot.seconds)))} typically, and ${duration(longest.seconds)} at most (${shortName(longest.name, 24)}, ${clock(longest.time, now)}). ` +
    (wanted ? "Members that match the filter are marked." : "A heartbeat tells of the last update only, so this begins when deltawire first looked.");
  canvas.setAttribute("aria-label", $("pause-words").textContent);
}

function nearestPause(x, y, now) {
  let best = null, least = 144;
  for (const dot of pauseView.dots) {
    const far = (dot.x - x) ** 2 + (dot.y - y) ** 2;
    if (far < least) { best = dot; least = far; }
  }
  return best ? `${best.name}: ${duration(best.seconds)}, ${clock(best.time, now)}` : "";
}
