"use strict";
// Live traffic: answers by version and channel, and feedback by the age of the answers that it is about.

const MOST_ANSWER_ROWS = 12, TRAFFIC_COLOURS = 6;
const trafficView = { all: false };

const channelName = (channel) => channel ?? "–";

/** A button that goes to the version of a commit. */
function versionButton(seq, version) {
  return el("button", { type: "button", class: "plain", text: finite(version) ? `version ${count(version)}` : `commit ${count(seq)}`, on: { click: () => goTo(page.data, seq) } });
}

function drawTraffic(data) {
  const { answers, feedback, since, left_out: leftOut } = data.traffic, now = data.status.time;
  $("traffic-card").hidden = !(answers.length || feedback.length);
  if ($("traffic-card").hidden) return;
  const all = answers.reduce((sum, one) => sum + one.count, 0);
  const words = [`${count(all)} recorded answers since ${clock(since, now)}, by the version that made their last token.`];
  if (leftOut) words.push(`${count(leftOut)} older or larger files were not read.`);
  $("traffic-words").textContent = words.join(" ");
  drawTimes(data.traffic.times);
  const shown = trafficView.all ? answers : answers.slice(0, MOST_ANSWER_ROWS);
  const rows = shown.map((one) => [
    versionButton(one.seq, one.version), channelName(one.channel), count(one.count), percent(one.count / all), digits(one.tokens / one.count),
    percent(one.refusals / one.count), count(one.not_trained), count(one.mixed), clock(one.last, now),
  ]);
  const number = true;
  const columns = [{ title: "answers of" }, { title: "channel", name: true }, { title: "answers", number }, { title: "share", number }, { title: "mean tokens", number },
    { title: "refusals", number }, { title: "not for training", number }, { title: "several versions", number }, { title: "last", number }];
  $("traffic").replaceChildren(...(rows.length ? [table(columns, rows)] : []));
  if (shown.length < answers.length) $("traffic").append(el("button", { type: "button", class: "more", text: `Show all ${count(answers.length)}`, on: { click: () => { trafficView.all = true; drawTraffic(page.data); } } }));
  drawFeedback(data.traffic, now);
}

/** The minutes of the traffic as columns, one colour for each channel. */
function drawTimes(times) {
  const channels = [...new Set(times.map(([, channel]) => channel))].sort(), minutes = new Map();
  for (const [minute, channel, number] of times) minutes.set(minute, [...(minutes.get(minute) ?? []), [channel, number]]);
  const at = [...minutes.keys()].sort((a, b) => a - b), few = at.length < 2;
  $("traffic-times").replaceChildren();
  $("traffic-legend").replaceChildren();
  if (few) return;
  const width = widthOf("traffic-times"), height = 130, box = { left: 52, right: width - 8, top: 8, bottom: height - 24 }, plot = newPlot(width, height, "Answers in each minute, by channel");
  const sums = at.map((minute) => minutes.get(minute).reduce((sum, [, number]) => sum + number, 0));
  const x = scale(at[0], at[at.length - 1] + 60, box.left, box.right), y = scale(0, Math.max(...sums), box.bottom, box.top);
  axes(plot, x, y, box, { xLabel: (value) => clock(value, at[at.length - 1]).replace(/:\d\d$/, ""), yLabel: count, xTicks: Math.max(2, Math.floor(width / 110)), yTicks: 3 });
  for (const minute of at) {
    let below = 0;
    for (const channel of channels) {
      const number = minutes.get(minute).filter(([name]) => name === channel).reduce((sum, [, each]) => sum + each, 0);
      if (!number) continue;
      const top = y(below + number), wide = Math.max(1, x(minute + 60) - x(minute) - 1);
      plot.append(svgEl("rect", { class: `s${channels.indexOf(channel) % TRAFFIC_COLOURS}`, x: x(minute), y: top, width: wide, height: y(below) - top, title: `${clock(minute, at[at.length - 1])}, ${channelName(channel)}: ${count(number)} answers` }));
      below += number;
    }
  }
  $("traffic-times").append(plot);
  legend("traffic-legend", [...channels.slice(0, 12).map((channel, index) => [`s${index % TRAFFIC_COLOURS}`, channelName(channel)])]);
}

function drawFeedback({ feedback, bounds }, now) {
  const number = true, ages = bounds.map((bound, at) => ({ title: at ? `to ${duration(bound)}` : `age to ${duration(bound)}`, number }));
  const columns = [{ title: "feedback for", name: true }, { title: "pieces", number }, { title: "mean", number }, ...ages, { title: "older", number }, { title: "unknown", number }, { title: "last", number }];
  const rows = feedback.map((one) => [one.metric, count(one.count), digits(one.mean), ...one.ages.map(count), count(one.unknown), clock(one.last, now)]);
  $("feedback").replaceChildren(...(rows.length ? [el("h3", { text: "Feedback, by the age of the answer when it came" }), table(columns, rows)] : []));
}
