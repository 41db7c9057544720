// Reads Prometheus' text format as this server writes it (docs/use/metrics.md), and says what the
// status view wants to know of two pages of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// {family: [{labels, value}]}
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const match = LINE.exec(line);
    if (match === null) continue;
    const labels = new Map();
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels.set(name, value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign)));
    }
    if (!families.has(match[1])) families.set(match[1], []);
    families.get(match[1]).push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return families;
}

const ROUTER = "pdserve_router_";
const TTFT = `${ROUTER}time_to_first_token_seconds`;

// What one page says, at this time in seconds.
export function stateOf(families, time) {
  const sum = (name) => (families.get(name) ?? []).reduce((total, sample) => total + sample.value, 0);
  const info = families.get(`${ROUTER}info`)?.[0]?.labels;
  const roles = new Map((families.get(`${ROUTER}workers`) ?? []).map(({ labels, value }) => [labels.get("role"), value]));
  return {
    time,
    model: info?.get("model_name") ?? "",
    version: info?.get("version") ?? "",
    roles,
    running: sum(`${ROUTER}num_requests_running`),
    queuedTokens: sum(`${ROUTER}queued_tokens`),
    ttftSum: sum(`${TTFT}_sum`),
    ttftCount: sum(`${TTFT}_count`),
    tokens: sum(`${ROUTER}generation_tokens_total`),
    workers: workersOf(families),
  };
}

// By worker. Engines of several ranks or homes have one sample a rank or home; these add up.
function workersOf(families) {
  const workers = new Map();
  const add = (family, field, wanted = () => true) => {
    for (const { labels, value } of families.get(family) ?? []) {
      if (!labels.has("worker") || !wanted(labels)) continue;
      const name = labels.get("worker");
      if (!workers.has(name)) {
        workers.set(name, { name, role: labels.get("role") ?? "", running: 0, waiting: 0, used: 0, blocks: 0, tokens: 0 });
      }
      if (field !== null) workers.get(name)[field] += value;
    }
  };
  add("pdserve_engine_steps_total", null);
  add("pdserve_num_requests_running", "running");
  add("pdserve_num_requests_waiting", "waiting");
  add("pdserve_kv_blocks", "blocks");
  add("pdserve_kv_blocks", "used", (labels) => labels.get("state") === "owned");
  add("pdserve_engine_generation_tokens_total", "tokens");
  return workers;
}

// What happened between two states: rates per second; null where that cannot be known. A counter
// that fell is another router's or a restarted worker's.
export function between(before, now) {
  const seconds = now.time - before.time;
  const count = now.ttftCount - before.ttftCount;
  const sum = now.ttftSum - before.ttftSum;
  const rates = new Map();
  let total = 0;
  for (const worker of now.workers.values()) {
    const earlier = before.workers.get(worker.name);
    const made = earlier === undefined ? -1 : worker.tokens - earlier.tokens;
    const rate = made >= 0 && seconds > 0 ? made / seconds : null;
    rates.set(worker.name, rate);
    total += rate ?? 0;
  }
  return { ttftMs: count > 0 && sum >= 0 ? (1000 * sum) / count : null, tokensPerS: total, rates };
}
