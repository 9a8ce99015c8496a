"use strict";
// The numbers that the trainer wrote into its versions: rewards, mismatch, and how many weights changed.

function metricPoints(data, name) {
  const found = new Map();
  for (const entry of [...data.chain.samples, ...data.chain.entries]) {
    const value = entry.metrics?.[name];
    if (finite(value) && isVersion(entry) && !hasFlag(entry, "void")) found.set(entry.step ?? entry.version, value);
  }
  return [...found].sort(([a], [b]) => a - b);
}

function drawTraining(data) {
  const rewards = metricPoints(data, "reward"), mismatch = metricPoints(data, "mismatch_kl").filter(([, value]) => value > 0);
  $("reward-card").hidden = rewards.length < 2;
  if (rewards.length > 1) {
    linePlot("reward", rewards, { label: "Reward", dots: true });
    const tenth = Math.max(1, Math.floor(rewards.length / 10)), mean = (points) => points.reduce((sum, [, value]) => sum + value, 0) / points.length;
    $("reward-words").textContent = `Mean reward of each step: ${digits(mean(rewards.slice(0, tenth)))} at first, ${digits(mean(rewards.slice(-tenth)))} now.`;
  }
  $("mismatch-card").hidden = mismatch.length < 2;
  if (mismatch.length > 1) {
    linePlot("mismatch", mismatch, { label: "Mismatch", log: true, yLabel: (value) => value.toExponential(0) });
    $("mismatch-words").textContent = "Between the policy that drew the tokens and the trainer's own, in nats per token.";
  }
  const densities = data.chain.entries.filter((entry) => entry.kind === "delta" && entry.state_bytes > 0 && !data.chain.recipe).map((entry) => [entry.version, 200 * entry.changed / entry.state_bytes]);
  $("density-card").hidden = densities.length < 2;
  if (densities.length > 1) {
    linePlot("density", densities, { label: "Density", yLabel: (value) => `${digits(value)}%`, low: 0 });
    const bits = median(data.chain.entries.filter((entry) => entry.kind === "delta" && entry.changed).map((entry) => (8 * entry.bytes) / entry.changed));
    $("density-words").textContent = `The share of weights that a version changes, if each has 16 bits. A change takes ${digits(bits)} bits.`;
  }
}
