// The state of the cluster: asks /metrics every two seconds while it can be seen, and keeps five
// minutes of it. Knows no conversation.

import { byId, make, shape } from "./dom.js";
import { between, parse, stateOf } from "./exposition.js";
import { draw } from "./plot.js";
import { metrics } from "./server.js";

const EVERY_MS = 2000;
const SPAN_S = 300;

// Points of the latest five minutes.
class Series {
  constructor() {
    this.points = [];
  }

  add(time, value) {
    this.points.push([time, value]);
    while (this.points[0][0] < time - SPAN_S) this.points.shift();
  }

  top() {
    return this.points.reduce((most, [, value]) => Math.max(most, value ?? 0), 0);
  }
}

let wantKey = () => {};
let timer = null;
let asking = null; // an AbortController, while an answer is awaited
let last = null;
const plots = [
  plot("Time to the first token", "ttft", (ms) => `${ms.toFixed(ms < 10 ? 1 : 0)} ms`, "no new requests"),
  plot("Generated tokens per second", "rate", (rate) => rate.toFixed(rate < 10 ? 1 : 0)),
  plot("Running requests", "running", String),
  plot("Waiting requests", "waiting", String),
  plot("Prompt tokens queued", "queued", String),
  plot("KV blocks in use", "blocks", (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`),
];
const rows = new Map(); // by worker

export function startStatus(askKey) {
  wantKey = askKey;
  byId("plots").append(...plots.map(({ element }) => element));
  document.addEventListener("visibilitychange", look);
}

// Begins or ends asking, as the view is shown or not.
export function look() {
  const isSeen = !byId("status").hidden && document.visibilityState === "visible";
  if (!isSeen) {
    clearTimeout(timer);
    asking?.abort();
    timer = null;
  } else if (timer === null) {
    timer = setTimeout(poll, 0);
  }
}

async function poll() {
  const own = new AbortController();
  asking = own;
  const mine = timer;
  try {
    const page = await metrics(AbortSignal.any([own.signal, AbortSignal.timeout(5 * EVERY_MS)]));
    take(stateOf(parse(page), performance.now() / 1000));
    byId("status-said").textContent = "";
  } catch (error) {
    if (own.signal.aborted) return;
    if (error.status === 401) {
      timer = null; // until there is a key
      wantKey(error.message, look);
    }
    byId("status-said").textContent = error.status === undefined ? "The server did not answer in time." : error.message;
  }
  if (timer === mine) timer = setTimeout(poll, EVERY_MS);
}

function take(state) {
  const change = last === null ? null : between(last, state);
  last = state;
  const workers = [...state.workers.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  const total = (field) => workers.reduce((sum, worker) => sum + worker[field], 0);
  const blocks = total("blocks");
  showFigures([
    ["Model", state.model],
    ["Version", state.version],
    ["Workers", [...state.roles].filter(([, count]) => count > 0).map(([role, count]) => `${count} ${role}`).join(", ") || "none"],
    ["Prompts being answered", state.running],
    ["Tokens generated", state.tokens],
  ]);
  const share = blocks > 0 ? total("used") / blocks : null;
  const rates = [change?.ttftMs ?? null, change?.tokensPerS ?? null];
  const values = [...rates, total("running"), total("waiting"), state.queuedTokens, share];
  plots.forEach((each, at) => each.add(state.time, values[at]));
  for (const name of [...rows.keys()].filter((name) => !state.workers.has(name))) {
    rows.get(name).element.remove();
    rows.delete(name);
  }
  for (const worker of workers) {
    if (!rows.has(worker.name)) rows.set(worker.name, row(worker.name));
    rows.get(worker.name).take(worker, change?.rates.get(worker.name) ?? null, state.time);
  }
  byId("workers").tBodies[0].replaceChildren(...workers.map(({ name }) => rows.get(name).element));
}

function showFigures(figures) {
  byId("figures").replaceChildren(
    ...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))),
  );
}

// unit: the value in words. none: said of a moment without a value.
function plot(title, id, unit, none = "") {
  const series = new Series();
  const svg = shape("svg");
  const now = make("strong", { id: `now-${id}` });
  const most = make("span");
  const element = make("figure", { id: `plot-${id}` }, make("figcaption", {}, title, now), svg, make("figcaption", {}, "5 minutes", most));
  const add = (time, value) => {
    series.add(time, value);
    const limit = series.top();
    now.textContent = value === null ? none : unit(value);
    most.textContent = `up to ${unit(limit)}`;
    draw(svg, series.points, time - SPAN_S, time, limit, `${title}: ${now.textContent || "none"} now, up to ${unit(limit)}`);
  };
  return { element, add };
}

// One worker's line of the table.
function row(name) {
  const cells = Array.from({ length: 4 }, (_, at) => make("td", { class: at > 0 ? "number" : null }));
  const [role, running, waiting, used] = cells;
  const rate = make("td", { class: "number" });
  const drawings = [shape("svg"), shape("svg")];
  const series = [new Series(), new Series()];
  const element = make("tr", {}, make("th", { scope: "row" }, name), ...cells, make("td", {}, drawings[0]), rate, make("td", {}, drawings[1]));
  const take = (worker, perSecond, time) => {
    role.textContent = worker.role;
    running.textContent = worker.running;
    waiting.textContent = worker.waiting;
    used.textContent = `${worker.used} of ${worker.blocks}`;
    rate.textContent = perSecond === null ? "" : perSecond.toFixed(1);
    series[0].add(time, worker.used);
    series[1].add(time, perSecond);
    draw(drawings[0], series[0].points, time - SPAN_S, time, worker.blocks, `Blocks in use on ${name}: ${used.textContent}`);
    draw(drawings[1], series[1].points, time - SPAN_S, time, series[1].top(), `Tokens per second of ${name}: ${rate.textContent || "none"}`);
  };
  return { element, take };
}
