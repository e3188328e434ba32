"use strict";
// Fetch the runs once a second and draw them. Text from a run is always inserted as text, never as markup.

const COLOURS = ["#0b6e99", "#d1495b", "#edae49", "#3f7d4f", "#6b4e9b", "#7a7a7a", "#c06014", "#2e86ab"];
const EVERY = 1000; // milliseconds
const LEAST_SPAN = 0.1; // smallest range of a metric's axis
const LOWER_IS_BETTER = new Set(["log_loss", "brier", "rmse", "mae"]);
const MARGIN = { left: 58, right: 14, top: 12, bottom: 40 };
const ACROSS = {
  seconds: { of: (point) => point.seconds, label: "seconds (the run's clock)" },
  updates: { of: (point) => point.updates, label: "server updates" },
  megabytes: { of: (point) => (point.bytes_up + point.bytes_down) / 1e6, label: "megabytes, both ways" },
};
const CLIENT = [
  ["client", (client) => client.name],
  ["uploads", (client) => whole(client.activations)],
  ["mean delay", (client) => client.delay_mean.toFixed(1)],
  ["longest", (client) => whole(client.delay_max)],
  ["MB up", (client) => (client.bytes_up / 1e6).toFixed(2)],
  ["MB down", (client) => (client.bytes_down / 1e6).toFixed(2)],
];
let across = "seconds";
let chosen = ""; // the metric shown: the headline metric of the newest run until the reader chooses another
let runs = [];
const colours = new Map(); // run -> colour, so that a run keeps its colour when it moves on the page
let hand = null; // the pointer's position over the chart, 0 to 1 of its width; null if outside

const find = (id) => document.getElementById(id);
const whole = (number) => Math.round(number).toLocaleString("en");
const brief = (number) => (Math.abs(number) >= 1e4 ? whole(number) : String(Number(number.toPrecision(4))));

function element(name, content = "", className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (Array.isArray(content)) made.append(...content);
  else made.textContent = content;
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// --- each run ---

function card(run) {
  const status = run.status;
  const head = element("div", [element("h2", run.name), element("span", run.state, "state")], "bar");
  const parts = [head];
  if (status) parts.push(element("p", status.title, "title"));
  if (run.why) parts.push(element("p", (run.state === "waiting" ? "waiting for " : "") + run.why, "why"));
  if (status && run.state !== "ended") parts.push(bar(status.share));
  parts.push(figures(run));
  const measured = metrics(run);
  if (measured) parts.push(measured);
  if (status && isActive(run)) parts.push(...status.clients.flatMap(alarms));
  if (status && status.clients.length) parts.push(clients(status.clients, isActive(run)));
  return element("section", parts, `card ${run.state}`);
}

function bar(share) {
  const made = element("progress");
  made.max = 1;
  made.value = share;
  made.setAttribute("aria-label", "towards the run's limits");
  return made;
}

function figures(run) {
  const last = run.evaluations[run.evaluations.length - 1];
  const shown = [];
  if (last && last.train_loss !== null) shown.push(["training loss", brief(last.train_loss)]);
  const at = run.status || last;
  if (at) shown.push(["updates", whole(at.updates)], ["seconds", brief(at.seconds)]);
  if (run.status && run.state === "running") shown.push(["updates per second", brief(run.status.rate)]);
  const pairs = shown.map(([term, value]) => element("div", [element("dt", term), element("dd", value)]));
  return element("dl", pairs);
}

// A table of every metric of the last evaluation or the kept models, and of the baselines on the same rows.
function metrics(run) {
  const last = run.evaluations[run.evaluations.length - 1];
  const ours = Object.keys(run.kept).length ? run.kept : last ? { [run.rows]: last.metrics } : {};
  const columns = Object.entries(ours);
  if (!columns.length) return null;
  const rows = columns[columns.length - 1][0];
  for (const [baseline, byRows] of Object.entries(run.baselines)) {
    if (byRows[rows]) columns.push([`${baseline} baseline, ${rows}`, byRows[rows]]);
  }
  const names = Object.keys(columns[0][1]).sort((one, other) => (other === run.metric) - (one === run.metric));
  const heads = ["metric", ...columns.map(([heading]) => heading)].map((heading) => element("th", heading));
  const lines = names.map((name) => {
    const values = columns.map(([, figures]) => figure(figures[name]));
    return element("tr", [shownName(name), ...values].map((cell) => element("td", cell)));
  });
  const head = element("thead", [element("tr", heads)]);
  return element("div", [element("table", [head, element("tbody", lines)])], "wide");
}

function clients(all, active) {
  const heads = element("tr", CLIENT.map(([heading]) => element("th", heading)));
  const lines = all.map((client) => {
    const cells = CLIENT.map(([, of]) => element("td", of(client)));
    cells[0].prepend(element("span", "", "dot"));
    const missed = active && client.gone;
    if (missed) cells[0].append(" (not here)");
    else if (active && client.silent) cells[0].append(` (silent for ${Math.round(client.silent)} s)`);
    return element("tr", cells, missed ? "gone" : "");
  });
  return element("div", [element("table", [element("thead", [heads]), element("tbody", lines)])], "wide");
}

function alarms(client) {
  return client.alarms.map((alarm) => element("p", `alarm: ${client.name}: ${alarm}`, "alarm"));
}

function colourOf(name) {
  if (!colours.has(name)) colours.set(name, COLOURS[colours.size % COLOURS.length]);
  return colours.get(name);
}

// F1 is measured at a probability of 0.5. A run also reports the F1 at its decision threshold.
const shownName = (metric) => (metric === "f1" ? "f1 (at 0.5)" : metric);
const isActive = (run) => run.state === "running" || run.state === "waiting";
const figure = (value) => (typeof value !== "number" ? "–" : Math.abs(value) < 1e4 ? value.toFixed(4) : brief(value));

// --- the chart of all runs ---

// The chart shows one metric of every run that has measured it. Different metrics cannot share an axis.
function drawnMetric() {
  const known = new Set(runs.flatMap((run) => run.evaluations.slice(-1).flatMap((point) => Object.keys(point.metrics))));
  if (!known.has(chosen)) chosen = (runs.find((run) => known.has(run.metric)) || { metric: "" }).metric;
  const select = find("metric");
  if ([...select.options].map((option) => option.value).join() !== [...known].join()) {
    select.replaceChildren(...[...known].map((name) => element("option", name)));
  }
  select.value = chosen;
  return chosen;
}

function lines(metric) {
  return runs
    .map((run) => ({
      run,
      colour: colourOf(run.name),
      points: run.evaluations
        .filter((point) => typeof point.metrics[metric] === "number")
        .map((point) => ({ x: ACROSS[across].of(point), y: point.metrics[metric], updates: point.updates })),
    }))
    .filter((line) => line.points.length);
}

function ticks(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

function focus(shown, metric) {
  // Leave out the first evaluations, of untrained models, which would flatten the rest. Keep a minimum range
  // so that noise does not look large.
  const values = shown.flatMap((line) => line.points.map((point) => point.y));
  const sorted = values.sort((one, other) => one - other);
  const untrained = Math.floor(sorted.length / 12);
  const lower = LOWER_IS_BETTER.has(metric);
  const high = sorted[sorted.length - 1 - (lower ? untrained : 0)];
  const low = lower ? sorted[0] : Math.min(sorted[untrained], high - LEAST_SPAN);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function draw() {
  const metric = drawnMetric();
  const shown = lines(metric);
  find("picture").hidden = !shown.length;
  if (!shown.length) return;
  const svg = find("chart");
  const box = svg.getBoundingClientRect();
  const right = box.width - MARGIN.right;
  const bottom = box.height - MARGIN.bottom;
  const farthest = Math.max(...shown.flatMap((line) => line.points.map((point) => point.x))) || 1;
  const [low, high] = focus(shown, metric);
  const x = (value) => MARGIN.left + (value / farthest) * (right - MARGIN.left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
  const parts = [];
  for (const at of ticks(low, high, 5)) {
    parts.push(drawn("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(at), y2: y(at) }));
    parts.push(drawn("text", { x: MARGIN.left - 8, y: y(at) + 4, "text-anchor": "end" }, brief(at)));
  }
  for (const at of ticks(0, farthest, Math.max(2, Math.floor(box.width / 110)))) {
    parts.push(drawn("text", { x: x(at), y: bottom + 18, "text-anchor": "middle" }, brief(at)));
  }
  const middle = (MARGIN.left + right) / 2;
  parts.push(drawn("text", { x: middle, y: bottom + 35, "text-anchor": "middle" }, ACROSS[across].label));
  parts.push(inside(right, bottom));
  for (const line of shown) {
    const way = line.points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`);
    const same = { class: "run", "clip-path": "url(#inside)", stroke: line.colour };
    const last = line.points[line.points.length - 1];
    const level = last.x === 0 && last.updates > 0; // a centralised run has no clock and sends nothing: draw a level line
    const path = level ? `M${MARGIN.left},${way.at(-1).split(",")[1]}H${right}` : `M${way.join("L")}`;
    parts.push(drawn("path", { ...same, d: path, ...(level && { "stroke-dasharray": "6 4" }) }));
  }
  if (hand !== null) {
    const at = MARGIN.left + hand * (right - MARGIN.left);
    parts.push(drawn("line", { class: "hand", x1: at, x2: at, y1: MARGIN.top, y2: bottom }));
  }
  svg.replaceChildren(...parts);
  read(shown, farthest, metric);
  name(shown);
}

function inside(right, bottom) {
  const clip = drawn("clipPath", { id: "inside" });
  const size = { width: Math.max(0, right - MARGIN.left), height: Math.max(0, bottom - MARGIN.top) };
  clip.append(drawn("rect", { x: MARGIN.left, y: MARGIN.top, ...size }));
  return clip;
}

function name(shown) {
  find("legend").replaceChildren(
    ...shown.map((line) => {
      const mark = element("i");
      mark.style.background = line.colour;
      return element("span", [mark, line.run.name]);
    }),
  );
}

function read(shown, farthest, metric) {
  const rows = [...new Set(shown.map((line) => line.run.rows))].sort().join(" or ");
  const missing = runs.length - shown.length;
  const without = missing ? `; runs that have not measured it: ${missing}` : "";
  if (hand === null) {
    find("reading").textContent = `${rows} ${shownName(metric)}${without}`;
    return;
  }
  const at = hand * farthest;
  const told = shown.map((line) => {
    const before = line.points.filter((point) => point.x <= at);
    return `${line.run.name} ${before.length ? before[before.length - 1].y.toFixed(4) : "–"}`;
  });
  find("reading").textContent = `${rows} ${shownName(metric)} at ${brief(at)} ${across}: ${told.join(", ")}`;
}

function choose(which) {
  across = which;
  for (const button of document.querySelectorAll("[data-across]")) {
    button.setAttribute("aria-pressed", String(button.dataset.across === which));
  }
  draw();
}

// --- once a second ---

function news(others) {
  const active = runs.filter(isActive).length;
  if (!runs.length) return "no run here yet; it appears as soon as one begins";
  const older = others ? `; ${whole(others)} older ones are not shown` : "";
  return `${active} going on, ${runs.length - active} over${older}`;
}

async function look() {
  const told = find("news");
  try {
    const answer = await fetch("runs.json", { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    runs = found.runs;
    told.textContent = news(found.others);
    told.className = "";
    find("runs").replaceChildren(...runs.map(card));
    draw();
  } catch (error) {
    told.textContent = `vafl watch does not answer (${error.message}): what is shown is old`;
    told.className = "lost";
  }
  setTimeout(look, EVERY);
}

for (const button of document.querySelectorAll("[data-across]")) {
  button.addEventListener("click", () => choose(button.dataset.across));
}
find("chart").addEventListener("pointermove", (event) => {
  const box = find("chart").getBoundingClientRect();
  const width = box.width - MARGIN.left - MARGIN.right;
  hand = Math.min(1, Math.max(0, (event.clientX - box.left - MARGIN.left) / width));
  draw();
});
find("chart").addEventListener("pointerleave", () => {
  hand = null;
  draw();
});
find("metric").addEventListener("change", (event) => {
  chosen = event.target.value;
  draw();
});
addEventListener("resize", draw);
choose(across);
look();
